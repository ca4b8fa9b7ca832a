"""The processes of this machine that Ray has started and that have come to the courier: their ends."""

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
from conveyor.engine.events import EventLoop, guarded
from conveyor.engine.headless import SETTLED, goes_on
from conveyor.engine.ray.courier import Courier
from conveyor.engine.ray.ends import exit_status, status_once_reaped
from conveyor.runtime import threads
from conveyor.runtime.driver.hosts.protocol import UNKNOWN_END
from conveyor.runtime.process import close_all

#: Seconds that Ray's word about how a process has ended may take.
WORD_TIMEOUT = 1.0
#: How Ray says with which code a process has ended.
_EXIT_CODE = re.compile(r"exit code (\d+)")


class Resident(Struct, eq=False):
    """One of them. All of it changes on the thread of the events."""

    pid: int = 0
    pidfd: int = -1
    #: What it gets with its welcome, until that is sent: see :func:`greeting.made_for`.
    fds: list[int] = field(default_factory=list)
    killed: bool = False
    went_on: bool = False
    #: What it ends with, by what it has said itself, by the kernel, and by Ray.
    code: int | None = None
    status: int | None = None
    word: str | None = None
    over: bool = False
    #: Is told, on the thread of the events, that it has ended, and how as far as that can be known.
    on_end: Callable[[], object] = lambda: None

    def close_fds(self) -> None:
        """It has them, or never will."""
        close_all(self.fds)
        self.fds.clear()

    def wait_status(self) -> int:
        """As far as it can be known of a process that is Ray's child."""
        if self.code is not None:
            return self.code << 8
        if self.status is not None:
            return self.status
        if self.killed:
            return int(signal.SIGKILL)
        told = _EXIT_CODE.search(self.word or "")
        return UNKNOWN_END if told is None else (int(told.group(1)) & 0xFF) << 8


class Processes:
    """All of them."""

    def __init__(self, events: EventLoop) -> None:
        self._events = events
        self.courier = Courier(events, self._on_farewell)
        self._living: dict[int, Resident] = {}
        #: Held to use a pidfd off the events' thread, and to close it: its number may be another's
        #: afterwards.
        self._pidfds = threading.Lock()

    def add(self, one: Resident, pid: int) -> None:
        """It has come, and waits for an answer: so the number is still its own."""
        one.pidfd = descriptors.own(os.pidfd_open(pid))
        one.pid = pid
        self._living[pid] = one
        self._events.add(one.pidfd, partial(self._ended, one))

    def signal(self, one: Resident, number: int) -> None:
        """On any thread."""
        one.killed = one.killed or number == signal.SIGKILL
        with self._pidfds, suppress(OSError):  # it has just ended
            signal.pidfd_send_signal(one.pidfd, number)

    def kill_all(self) -> None:
        """Kill whoever is left."""
        for one in list(self._living.values()):
            self.signal(one, signal.SIGKILL)

    def end_headless(self, one: Resident) -> None:
        """See :meth:`Hosts.end_headless`."""
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
        """The process is gone."""
        self._events.remove(one.pidfd)
        self.courier.last_words(one.pid)
        one.over = True
        one.status = exit_status(one.pidfd)
        if one.killed or one.code is not None or one.status is not None:
            self._report(one)
        else:  # how it ended its parent knows, which has not looked yet
            threads.start_or_run(self._see_end, "how-it-ended", one)

    def _see_end(self, one: Resident) -> None:
        # Its pidfd is there until it is reported.
        one.status = status_once_reaped(one.pidfd, WORD_TIMEOUT)
        self._events.call(partial(self._report, one))

    def _report(self, one: Resident) -> None:
        if self._living.pop(one.pid, None) is None:
            return
        with self._pidfds:
            os.close(one.pidfd)
            one.pidfd = -1
        guarded(one.on_end)
