"""For the codec's tests: frames without the native core, within a process or between processes."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import subprocess
import sys
import textwrap
from typing import Any, BinaryIO

import conveyor
from conveyor.codec import frames as codec
from conveyor.codec.encoded import FLAG_DEFINITIONS
from conveyor.codec.pickling import unpickler
from conveyor.codec.pickling.definitions import KnownDefinitions, SentDefinitions


class Buffer(mmap.mmap):
    """What a reader gets: a window of shared memory, as ``_core.Buffer`` is one."""

    @property
    def nbytes(self) -> int:
        return len(self)

    @classmethod
    def of(cls, data: Any, shared: bool) -> Buffer:
        """``shared``: others read the same, and what is written is this one's own."""
        fd = os.memfd_create("frame")
        try:
            os.write(fd, data)
            return cls(fd, len(data), access=mmap.ACCESS_COPY if shared else mmap.ACCESS_WRITE)
        finally:
            os.close(fd)


def bytes_of(exported: Any) -> memoryview:
    """The exported memory as the native core takes it: contiguous in C's order, any format."""
    view = memoryview(exported)
    assert view.c_contiguous
    return view if view.ndim == 1 and view.itemsize == 1 else memoryview(bytes(view))


class Channel:
    """A writer and a reader in this process."""

    def __init__(self, shared: bool = False) -> None:
        self.sent = SentDefinitions()
        self.known = KnownDefinitions()
        self.shared = shared

    def carry(self, value: Any) -> Any:
        return self.receive(self.send(value))

    def send(self, value: Any) -> tuple[int, int, bytes, list[Any] | None]:
        frame_codec, flags, meta, buffers = codec.encode(value, self.sent)
        assert frame_codec >= 16
        assert type(meta) is bytes
        copied = None
        if buffers is not None:
            copied = [Buffer.of(bytes_of(b), self.shared) for b in buffers]
        return frame_codec, flags, meta, copied

    def receive(self, frame: tuple[int, int, bytes, list[Any] | None]) -> Any:
        frame_codec, _, meta, buffers = frame
        if self.shared and buffers is not None:  # each value has memory of its own
            buffers = [Buffer.of(buffer, shared=True) for buffer in buffers]
        return codec.decode(frame_codec, meta, buffers, self.known)


class Link:
    """One end of a pipe that carries frames both ways."""

    def __init__(self, reading: BinaryIO, writing: BinaryIO) -> None:
        self.reading = reading
        self.writing = writing
        self.sent = SentDefinitions()
        self.known = KnownDefinitions()
        self.definitions_sent = 0

    def send(self, value: Any) -> None:
        frame_codec, flags, meta, buffers = codec.encode(value, self.sent)
        self.definitions_sent += bool(flags & FLAG_DEFINITIONS)
        copied = None if buffers is None else [bytes(bytes_of(b)) for b in buffers]
        data = pickle.dumps((frame_codec, flags, meta, copied))
        self.writing.write(struct.pack("<Q", len(data)) + data)
        self.writing.flush()

    def receive(self) -> Any:
        frame_codec, _, meta, buffers = self.next_frame()
        if buffers is not None:
            buffers = [bytearray(b) for b in buffers]
        return codec.decode(frame_codec, meta, buffers, self.known)

    def skip(self) -> None:
        _, flags, meta, _ = self.next_frame()
        if flags & FLAG_DEFINITIONS:
            unpickler.learn(meta, self.known)

    def next_frame(self) -> Any:
        head = self.reading.read(8)
        if not head:
            raise EOFError
        return pickle.loads(self.reading.read(*struct.unpack("<Q", head)))


class Peer(Link):
    """A child process that serves requests until it is closed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import codec_transport; codec_transport.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        super().__init__(self.process.stdout, self.process.stdin)

    def ask(self, *request: Any) -> Any:
        self.send(request)
        kind, value = self.receive()
        if kind == "error":
            raise value
        return value

    def close(self) -> None:
        self.writing.close()
        self.process.wait(60)


def serve() -> None:
    link = Link(sys.stdin.buffer, os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what user code prints must not get in between
    state: dict[str, Any] = {}
    while True:
        try:
            request = link.receive()
        except EOFError:
            break
        except Exception as error:
            link.send(("error", error))
            continue
        try:
            answer = ("ok", _do(link, state, *request))
        except Exception as error:
            answer = ("error", error)
        link.send(answer)
    if "next" in state:
        state["next"].close()


def _do(link: Link, state: dict[str, Any], request: str, *args: Any) -> Any:
    if request == "echo":
        return args[0]
    if request == "relay":  # through a third process and back
        if "next" not in state:
            state["next"] = Peer()
        return state["next"].ask(*args)
    if request == "keep":
        state[args[0]] = args[1]
        return None
    if request == "same":  # whether two things are one and the same here
        return args[0] is args[1]
    if request == "is kept":
        return state[args[0]] is args[1]
    if request == "call":
        return args[0](*args[1:])
    if request == "start":
        state["actor"] = args[0](*args[1:])
        return None
    if request == "method":
        return getattr(state["actor"], args[0])(*args[1:])
    if request == "skip":
        link.skip()
        return None
    raise ValueError(request)


def run(script: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a script as ``__main__`` of a new process that can import this module."""
    return run_python("-c", textwrap.dedent(script), *arguments, **options)


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    paths = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(conveyor.__file__))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, *arguments], check=True, env=env, timeout=200, **options)
