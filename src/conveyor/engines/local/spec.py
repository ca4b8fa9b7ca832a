"""Bootstrap of a new actor process. It travels in a file, so that its size does not matter."""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec import Struct, field

from conveyor import descriptors
from conveyor.flag import Flag
from conveyor.system_limits import hint


def why(error: OSError) -> str:
    """Describe an error of the system, and what can be done about it."""
    return "; ".join(filter(None, (str(error), hint(error))))


class SpawnRequest(Struct, eq=False):
    """A spawn that is not answered yet. Owns the pipes until there is a child to own them."""

    number: int
    spec: ChildSpec
    #: The process gets duplicates of these.
    fds: Sequence[int]
    on_spawned: Callable[[int], None] | None
    #: Whether the fork server has been asked, or will not be.
    sent: bool = False
    #: Pipes, each with the name of its stream: "stdout" or "stderr".
    outputs: dict[int, str] = field(default_factory=dict)
    #: Set once ``pid`` or ``error`` is.
    done: Flag = field(default_factory=Flag)
    pid: int = 0
    error: str = ""
    cause: OSError | None = None

    def refuse(self, error: str | OSError, context: str = "") -> None:
        """End the request with an error: there will be no such process."""
        if isinstance(error, OSError):
            self.cause = error
            self.error = context + why(error)
        else:
            self.error = context + error
        self.done.set()

    def prepare(self, theirs: list[int]) -> None:
        """Make what the process gets, and add it to ``theirs``: its spec and its ends of the pipes."""
        theirs.append(write_spec(self.spec))
        for stream in ("stdout", "stderr"):
            reader, writer = map(descriptors.own, os.pipe())
            theirs.append(writer)
            os.set_blocking(reader, False)
            self.outputs[reader] = stream

    def close(self) -> None:
        """Close the pipes, which nobody will own."""
        with suppress(KeyError):  # of one that is empty, whoever has emptied it
            while True:
                os.close(self.outputs.popitem()[0])


_LENGTH_BYTES = 8


class ChildSpec(Struct, frozen=True):
    """Everything that makes an actor's process, apart from the descriptors it is handed.

    name: for people: in ``ps``, before its output, in errors.
    payload: handed to ``entry`` as it is.
    cwd, sys_path, argv, environ: the driver's, as the actor shall see them.
    env_vars: variables on top of ``environ``; they win over everything set here.
    num_cpus: how many threads numeric libraries use (``None``: one), unless the user has set
        ``OMP_NUM_THREADS`` and its kin. Nothing is reserved.
    gpu_ids: the actor's ``CUDA_VISIBLE_DEVICES``. Without any it is empty, so that no GPU is seen,
        unless ``CONVEYOR_KEEP_CUDA_VISIBLE_DEVICES=1``.
    entry: ``"module:function"``, called as ``function(payload, fds)``.
    main_file, main_module: where the driver's ``__main__`` comes from, as far as it has a file or was
        run as a module; processes that ``multiprocessing`` starts in the actor import it again.
    """

    name: str
    payload: bytes
    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    environ: dict[str, str]
    env_vars: dict[str, str]
    num_cpus: float | None
    gpu_ids: tuple[str, ...]
    entry: str = "conveyor.worker.worker:main"
    main_file: str = ""
    main_module: str = ""


def write_spec(spec: ChildSpec) -> int:
    """Write ``spec`` to a memory file and return the file's descriptor, which the caller closes."""
    for key in spec.env_vars:
        if not key or "=" in key or "\0" in key + spec.env_vars[key]:
            raise ValueError(f"{key!r} cannot be an environment variable")
    # marshal: both ends are the same interpreter, and it imports nothing at the reader. It takes
    # exact types only, and a subclass of str is found in such places now and then.
    head = marshal.dumps(
        (
            str(spec.name),
            str(spec.cwd),
            tuple(str(entry) for entry in spec.sys_path),
            tuple(str(argument) for argument in spec.argv),
            {str(key): str(value) for key, value in spec.environ.items()},
            {str(key): str(value) for key, value in spec.env_vars.items()},
            None if spec.num_cpus is None else float(spec.num_cpus),
            tuple(str(gpu) for gpu in spec.gpu_ids),
            str(spec.entry),
            str(spec.main_file),
            str(spec.main_module),
        )
    )
    fd = descriptors.memory_file("conveyor-spec")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(len(head).to_bytes(_LENGTH_BYTES, "little"))
            file.write(head)
            file.write(spec.payload)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_spec(fd: int) -> ChildSpec:
    """Read what ``write_spec`` wrote. Leaves ``fd`` open."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        fields = marshal.loads(file.read(length))
        payload = file.read()
    name, *others = fields
    return ChildSpec(name, payload, *others)
