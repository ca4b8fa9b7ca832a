"""The processes that the fork server has started: each is known by its pidfd, and its end is reported."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from msgspec import Struct

from conveyor.engine.events import EventLoop, guarded
from conveyor.flag import Flag

READ_BYTES = 64 << 10
PIPE_BYTES = 1 << 20  # the most a pipe holds by default


class Output:
    """Output of actors' processes. ``on_output(pid, stream, data)`` gets bytes as they come and ``b""`` at
    the end of each stream (``"stdout"``, ``"stderr"``). If it blocks, the output of all processes is held
    up."""

    def __init__(self, on_output: Callable[[int, str, bytes], None]) -> None:
        self._on_output = on_output
        self._loop = EventLoop("output")

    def on_thread(self) -> bool:
        """Whether the caller is called by this."""
        return self._loop.on_thread()

    def watch(self, pid: int, pipes: dict[int, str]) -> None:
        """Pass on what comes over ``pipes``, each with the name of its stream. A pipe that has ended is taken
        out of ``pipes``."""
        for fd, stream in list(pipes.items()):
            self._loop.add(fd, partial(self._read, pid, pipes, fd, stream))

    def say(self, pid: int, data: bytes) -> None:
        """Pass on what a process has written to stderr."""
        self._loop.call(partial(self._on_output, pid, "stderr", data))

    def finish(self, pid: int, pipes: dict[int, str], then: Callable[[], object]) -> None:
        """Pass on what a dead process's pipes still hold, close them, and call ``then()``."""
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


class _Child(Struct, eq=False):
    pid: int
    pidfd: int
    #: The pipes of the process, each with the name of its stream.
    outputs: dict[int, str]


class Children:
    """Processes that the launcher has had forked. They share the launcher's lock. Their ends are told on the
    thread of ``events``."""

    def __init__(
        self,
        lock: threading.RLock,
        events: EventLoop,
        output: Output,
        on_exit: Callable[[int, int], None],
    ) -> None:
        self._lock = lock
        self._events = events
        self._output = output
        self._on_exit = on_exit
        self._living: dict[int, _Child] = {}
        #: Dead processes that went on without their main thread, and were killed for that.
        self.went_on: set[int] = set()
        self._unreported = 0  # those whose on_exit is still to be called
        self._orphaned = False
        #: Set once the fork server and all of them are gone.
        self.all_gone = Flag()
        #: Set once all of their ends are reported as well.
        self.all_reported = Flag()

    def add(self, pid: int, pidfd: int, outputs: dict[int, str]) -> None:
        """Add a process that has been started. Call with the lock."""
        self._living[pid] = _Child(pid, pidfd, outputs)
        self._unreported += 1

    def send_signal(self, pid: int, sig: int) -> None:
        """Send ``sig`` to ``pid``, unless it has ended."""
        with self._lock, suppress(KeyError, ProcessLookupError):
            signal.pidfd_send_signal(self._living[pid].pidfd, sig)

    def ended(self, pid: int, status: int, went_on: bool = False) -> None:
        """Handle the end of a child that is gone and reaped."""
        with self._lock:
            child = self._living.pop(pid, None)
            if child is None:
                return
            if went_on:
                self.went_on.add(pid)
            self._events.remove(child.pidfd)
            os.close(child.pidfd)
        # The end is reported after all output of the process.
        report = partial(self._events.call, partial(self._report, pid, status))
        self._output.finish(pid, child.outputs, report)

    def orphaned(self) -> None:
        """Kill the processes that are left, since the fork server is gone: the kernel has told them to die
        with it. All is over only when they have died. Their real status is lost with their parent; SIGKILL is
        what the kernel did to them."""
        with self._lock:
            self._orphaned = True
            orphans = list(self._living.values())
        for child in orphans:
            self.send_signal(child.pid, signal.SIGKILL)
            killed = int(signal.SIGKILL)
            self._events.add(child.pidfd, partial(self.ended, child.pid, killed))
        self._note_end()

    def _report(self, pid: int, status: int) -> None:
        guarded(partial(self._on_exit, pid, status))
        with self._lock:
            self._unreported -= 1
        self._note_end()

    def _note_end(self) -> None:
        with self._lock:
            if self._orphaned and not self._living:
                self.all_gone.set()
                if not self._unreported:
                    self.all_reported.set()
