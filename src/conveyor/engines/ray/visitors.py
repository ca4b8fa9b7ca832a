"""Processes of attached actors on this node: they leave the session, which does not end them, and go on."""

from __future__ import annotations

import os
from functools import partial

from conveyor import descriptors
from conveyor.engines.ray.courier import Courier
from conveyor.engines.ray.ends import exit_status, status_once_reaped
from conveyor.engines.ray.processes import WORD_TIMEOUT, Resident
from conveyor.runtime import threads
from conveyor.runtime.events import EventLoop, guarded


class Visitors:
    """All processes of attached actors on this node. Each ends here with its farewell, or with its death;
    :class:`Processes` waits for the end of the process in any case. All of it but :meth:`tell_to_leave`
    happens on the event loop's thread."""

    def __init__(self, events: EventLoop) -> None:
        self._events = events
        self.courier = Courier(events, self._left)
        self._present: dict[int, Resident] = {}

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, pid: int) -> bool:
        return pid in self._present

    def add(self, one: Resident, pid: int) -> None:
        """Add a process that has come. It waits for an answer, so its pid cannot be another's by now."""
        if pid in self._present:  # it has left, and its farewell is unread
            self.courier.last_words(pid)
        one.pidfd = descriptors.own(os.pidfd_open(pid))
        one.pid = pid
        self._present[pid] = one
        self._events.add(one.pidfd, partial(self._died, one))

    def forget(self, one: Resident) -> None:
        """Forget a process that has come, and could not be let in."""
        if self._present.get(one.pid) is one:
            del self._present[one.pid]
            self._close_pidfd(one)

    def tell_to_leave(self, pid: int) -> None:
        """Tell a process to leave the session, if it has not left yet. On any thread."""
        self._events.call(partial(self.courier.tell_to_leave, pid))

    def see_off(self) -> None:
        """Close all connections, as the session is over: processes that are left see that, and leave when
        their method has returned."""
        self.courier.close()
        while self._present:
            _, one = self._present.popitem()
            self._close_pidfd(one)

    def _left(self, pid: int, code: int) -> None:
        one = self._present.get(pid)
        if one is not None:
            one.code = code
            self._report(one)

    def _died(self, one: Resident) -> None:
        """Find out how a process has ended that is Ray's child, and report it, unless it had left before."""
        self._events.remove(one.pidfd)
        self.courier.last_words(one.pid)
        if self._present.get(one.pid) is not one:  # it has left just before
            return
        one.status = exit_status(one.pidfd)
        if one.status is not None:
            self._report(one)
        else:  # its parent has not reaped it yet
            threads.start_or_run(
                self._see_end, "how-it-ended", one, descriptors.duplicate(one.pidfd)
            )

    def _see_end(self, one: Resident, pidfd: int) -> None:
        try:
            one.status = status_once_reaped(pidfd, WORD_TIMEOUT)
        finally:
            os.close(pidfd)
        self._events.call(partial(self._report, one))

    def _report(self, one: Resident) -> None:
        if self._present.get(one.pid) is not one:
            return
        del self._present[one.pid]
        one.over = True
        self._close_pidfd(one)
        guarded(one.on_end)

    def _close_pidfd(self, one: Resident) -> None:
        self._events.remove(one.pidfd)
        os.close(one.pidfd)
        one.pidfd = -1
