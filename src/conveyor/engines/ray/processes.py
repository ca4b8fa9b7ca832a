"""Processes of this node that Ray has started and that have come to the courier, and how they end."""

from __future__ import annotations

import os
import re
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from msgspec import Struct, field

from conveyor import descriptors
from conveyor.driver.hosts import UNKNOWN_END
from conveyor.engines.headless import SETTLED, goes_on
from conveyor.engines.ray.courier import Courier
from conveyor.engines.ray.ends import exit_status, status_once_reaped
from conveyor.runtime import threads
from conveyor.runtime.events import EventLoop, guarded
from conveyor.runtime.process import close_all

#: Timeout of the wait until Ray has reaped a process that has ended, in seconds.
WORD_TIMEOUT = 1.0
#: Exit code of a process in Ray's messages.
_EXIT_CODE = re.compile(r"exit code (\d+)")


class Resident(Struct, eq=False):
    """A process of this node that takes part in the session. ``killed``, ``went_on`` and ``status`` may
    change on any thread, the rest on the event loop's."""

    pid: int = 0
    pidfd: int = -1
    #: Descriptors for its welcome, until that is sent: see :func:`greeting.made_for`.
    fds: list[int] = field(default_factory=list)
    killed: bool = False
    went_on: bool = False
    #: How it has ended: exit code by its own farewell, wait status by the kernel, text by Ray.
    code: int | None = None
    status: int | None = None
    word: str | None = None
    over: bool = False
    #: Called on the event loop's thread when it has ended, and all is known of how.
    on_end: Callable[[], object] = lambda: None

    def close_fds(self) -> None:
        """Close the descriptors for the welcome: they were sent, or never will be."""
        close_all(self.fds)
        self.fds.clear()

    def wait_status(self) -> int:
        """Return the wait status, or ``UNKNOWN_END``: the process is Ray's child, so it may not be known."""
        if self.code is not None:
            return self.code << 8
        if self.status is not None:
            return self.status
        if self.killed:
            return int(signal.SIGKILL)
        told = _EXIT_CODE.search(self.word or "")
        return UNKNOWN_END if told is None else (int(told.group(1)) & 0xFF) << 8


class Processes:
    """All processes of this node that Ray has started for the session, while they live."""

    def __init__(self, events: EventLoop) -> None:
        self._events = events
        self.courier = Courier(events, self._on_farewell)
        self._living: dict[int, Resident] = {}
        #: Held to close a pidfd, and to use it off the event loop's thread: once closed, its number may be
        #: another descriptor's.
        self._pidfds = threading.Lock()

    def add(self, one: Resident, pid: int) -> None:
        """Add a process that has come. It waits for an answer, so its pid cannot be another's by now."""
        one.pidfd = descriptors.own(os.pidfd_open(pid))
        one.pid = pid
        self._living[pid] = one
        self._events.add(one.pidfd, partial(self._ended, one))

    def signal(self, one: Resident, number: int) -> None:
        """Send a signal to the process. On any thread."""
        one.killed = one.killed or number == signal.SIGKILL
        with self._pidfds, suppress(OSError):  # it has just ended
            signal.pidfd_send_signal(one.pidfd, number)

    def kill_all(self) -> None:
        """Kill all processes that are left."""
        for one in list(self._living.values()):
            self.signal(one, signal.SIGKILL)

    def end_headless(self, one: Resident) -> None:
        """Kill the process if it goes on without its main thread: see :meth:`Hosts.end_headless`."""
        if not one.over:
            threads.start_or_run(self._end_headless, "headless", one)

    def _end_headless(self, one: Resident) -> None:
        goes = goes_on(one.pid)
        if goes is None:
            with self._pidfds:
                pidfd = -1 if one.pidfd < 0 else descriptors.duplicate(one.pidfd)
            if pidfd < 0:
                return
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(SETTLED * 1000)
            finally:
                os.close(pidfd)
            goes = goes_on(one.pid) is not False
        if goes and not one.over:
            one.went_on = True
            self.signal(one, signal.SIGKILL)

    # On the thread of the events.

    def _on_farewell(self, pid: int, code: int) -> None:
        one = self._living.get(pid)
        if one is not None:
            one.code = code

    def _ended(self, one: Resident) -> None:
        """Find out how a process has ended, and report it."""
        self._events.remove(one.pidfd)
        self.courier.last_words(one.pid)
        one.over = True
        one.status = exit_status(one.pidfd)
        if one.killed or one.code is not None or one.status is not None:
            self._report(one)
        else:  # its parent has not reaped it yet
            threads.start_or_run(self._see_end, "how-it-ended", one)

    def _see_end(self, one: Resident) -> None:
        # Its pidfd stays open until the end is reported.
        one.status = status_once_reaped(one.pidfd, WORD_TIMEOUT)
        self._events.call(partial(self._report, one))

    def _report(self, one: Resident) -> None:
        if self._living.pop(one.pid, None) is None:
            return
        with self._pidfds:
            os.close(one.pidfd)
            one.pidfd = -1
        guarded(one.on_end)
