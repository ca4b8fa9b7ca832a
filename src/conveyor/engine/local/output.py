"""What the processes of a session print: read from their pipes on a thread of its own, and passed on."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from conveyor.engine.events import EventLoop, guarded

READ_BYTES = 64 << 10
PIPE_BYTES = 1 << 20  # the most a pipe holds by default


class Output:
    """``on_output(pid, stream, data)`` gets bytes as they come and ``b""`` at the end of each stream
    (``"stdout"``, ``"stderr"``). It may block: that holds up the output of all."""

    def __init__(self, on_output: Callable[[int, str, bytes], None]) -> None:
        self._on_output = on_output
        self._loop = EventLoop("output")

    def on_thread(self) -> bool:
        """Whether the caller is called by this."""
        return self._loop.on_thread()

    def watch(self, pid: int, pipes: dict[int, str]) -> None:
        """Pass on what comes over ``pipes``, each with the name of its stream; those that have ended are
        taken out of it."""
        for fd, stream in list(pipes.items()):
            self._loop.add(fd, partial(self._read, pid, pipes, fd, stream))

    def say(self, pid: int, data: bytes) -> None:
        """Pass on what a process has written to stderr."""
        self._loop.call(partial(self._on_output, pid, "stderr", data))

    def finish(self, pid: int, pipes: dict[int, str], then: Callable[[], object]) -> None:
        """The process is dead: pass on what its pipes still hold, close them, and call ``then()``."""
        finish = partial(self._finish, pid, pipes, then)
        try:
            self._loop.call(finish)
        except (
            OSError
        ):  # there is no such thread, since none could be started: nobody has read them
            finish()

    def close(self, timeout: float) -> None:
        """Pass on what has come, and end. See :meth:`EventLoop.close`."""
        self._loop.close(timeout)

    def _read(self, pid: int, pipes: dict[int, str], fd: int, stream: str) -> None:
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end(pid, pipes, fd)
            return
        self._on_output(pid, stream, data)

    def _end(self, pid: int, pipes: dict[int, str], fd: int) -> None:
        stream = pipes.pop(fd)
        self._loop.remove(fd)
        os.close(fd)
        guarded(partial(self._on_output, pid, stream, b""))

    def _finish(self, pid: int, pipes: dict[int, str], then: Callable[[], object]) -> None:
        # Not until their end: a process that left the actor's group may hold them open and write on.
        # What it writes from here on is lost.
        for fd, stream in list(pipes.items()):
            for _ in range(PIPE_BYTES // READ_BYTES):
                try:
                    data = os.read(fd, READ_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    break
                guarded(partial(self._on_output, pid, stream, data))
            self._end(pid, pipes, fd)
        then()
