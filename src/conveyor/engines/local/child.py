"""From a fork of the fork server to an actor's process: all that happens before its ``main``."""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from conveyor import _core
from conveyor.engines.local.spec import ChildSpec, read_spec
from conveyor.engines.program_end import leave, report
from conveyor.engines.surroundings import HUGE_TENSORS, import_from, main_module
from conveyor.worker.forked import exit_code

KEEP_CUDA = "CONVEYOR_KEEP_CUDA_VISIBLE_DEVICES"
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_PR_SET_PDEATHSIG = 1
_IOLBF = 1

_libc = ctypes.CDLL(None, use_errno=True)


def child_environ(spec: ChildSpec) -> dict[str, str]:
    """The actor's environment: the driver's, its own variables, and what follows from the rest."""
    environ = {**spec.environ, **spec.env_vars}
    threads = str(max(1, int(spec.num_cpus or 1)))
    for variable in THREAD_VARIABLES:
        environ.setdefault(variable, threads)
    environ.setdefault(HUGE_TENSORS, "1")
    if "CUDA_VISIBLE_DEVICES" not in spec.env_vars and (
        spec.gpu_ids or environ.get(KEEP_CUDA) != "1"
    ):
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpu_ids)
    return environ


def prepare_for_forks() -> None:
    """Prepare the fork server, once, for its children: this does what each child would otherwise do for
    itself."""
    # Output of C code (printf in an extension) is line buffered too; the C library would keep it back on a
    # pipe, and lose it when the process is killed.
    with suppress(ValueError, AttributeError):
        stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
        _libc.setvbuf(stdout, None, _IOLBF, ctypes.c_size_t(0))
    # By this process actors see whether they may read each other's memory.
    _core.let_read(os.getpid())


def set_process_title(title: str) -> None:
    """Show ``title`` in ``ps``, ``top`` and ``py-spy``, as far as the system allows it."""
    raw = title.encode("utf-8", "replace")
    with suppress(OSError), open("/proc/self/comm", "wb", buffering=0) as comm:
        comm.write(raw[:15])
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: see proc(5)
        # Through a file, not a pointer: should the addresses be wrong it is an error, not a crash.
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(raw[: end - start - 1].ljust(end - start, b"\0"))


def become_actor(
    server_pid: int, spec_fd: int, stdout: int, stderr: int, fds: Sequence[int]
) -> NoReturn:
    """Turn this process, just forked by the fork server, into the actor of the spec and run it.

    Never returns: the fork server's frames lie below on the stack and must not be unwound.
    """
    status = 1
    try:
        _die_with(server_pid)
        # A process group of the actor's own: processes that it starts (multiprocessing, subprocess) belong to
        # the group too, and the fork server kills the group when the actor has ended.
        os.setpgid(0, 0)
        _reset_signals()
        _set_up_stdio(stdout, stderr)
        spec = read_spec(spec_fd)
        _close_all_but({0, 1, 2, *fds})
        set_process_title(f"cv:{spec.name}")
        _set_up_python(spec)
        gc.enable()
        status = _run(spec, fds)
    except BaseException:
        report()
    finally:
        leave(status)


def _die_with(server_pid: int) -> None:
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"PR_SET_PDEATHSIG: {os.strerror(code)}")
    # The server may have died before the call above: then nobody would ever kill us.
    if os.getppid() != server_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _reset_signals() -> None:
    # Ignored is what the driver was started with (nohup) or what the fork server wants for itself.
    # SIGPIPE and SIGXFSZ are ignored by every Python; handlers of faulthandler stay.
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _set_up_stdio(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        # The driver reads lines of UTF-8, whatever the locale.
        with suppress(AttributeError):
            stream.reconfigure(  # type: ignore[union-attr]
                encoding="utf-8", errors=errors, line_buffering=True
            )


def _close_all_but(keep: Collection[int]) -> None:
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in keep:
            try:
                os.close(int(entry))
            except OSError as error:
                # The listing's own descriptor is gone already.
                if error.errno != errno.EBADF:
                    raise


def _set_up_python(spec: ChildSpec) -> None:
    os.chdir(spec.cwd)
    _replace_environ(child_environ(spec))
    _set_thread_count()
    import_from(spec.sys_path)
    sys.argv[:] = spec.argv
    # The server's __main__ is its bootstrap code.
    main_module(spec.main_file, spec.main_module)
    _seed_random_states()


def _seed_random_states() -> None:
    """Seed the global random states of modules that the server has imported; those of `random` are seeded at
    the fork."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        try:
            numpy_random.seed()
        except TypeError:  # a preloaded module has set a bit generator of another kind
            generator = numpy_random.get_bit_generator()
            generator.state = type(generator)().state
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _set_thread_count() -> None:
    """Set torch's number of threads, if the server has imported torch: it was imported without this actor's
    environment."""
    torch = sys.modules.get("torch")
    count = os.environ[THREAD_VARIABLES[0]]
    if torch is not None and count.isdecimal() and int(count) != torch.get_num_threads():
        torch.set_num_threads(int(count))


def _replace_environ(environ: Mapping[str, str]) -> None:
    time_zone = os.environ.get("TZ")
    for key in [key for key in os.environ if key not in environ]:
        del os.environ[key]
    for key, value in environ.items():
        if os.environ.get(key) != value:
            os.environ[key] = value
    if os.environ.get("TZ") != time_zone:
        time.tzset()


def _run(spec: ChildSpec, fds: Sequence[int]) -> int:
    try:
        module, _, function = spec.entry.partition(":")
        entry: Any = getattr(importlib.import_module(module), function)
        entry(spec.payload, list(fds))
    except SystemExit as error:
        return exit_code(error)
    return 0
