"""Ending actors in good order: they are asked to, have a grace period, and then are killed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from conveyor import _core
from conveyor.exceptions import ConveyorError
from conveyor.runtime.actor.orders import End
from conveyor.runtime.calls.exit_hook import EXIT_HOOK
from conveyor.runtime.driver.processes.record import ActorRecord
from conveyor.runtime.process import Process
from conveyor.runtime.protocol import PID_MASK
from conveyor.runtime.status import ActorStatus

logger = logging.getLogger("conveyor")

#: How long the end of a process that has been killed is waited for; the kernel may take its time to free
#: the memory.
_KILLED_PATIENCE = 10.0
#: The same of one on another host, which it may be that nothing reaches.
_FAR_PATIENCE = 2.0


class Goodbye:
    """The driver's. ``label`` names a (graph, node)."""

    def __init__(
        self,
        process: Process,
        grace: float,
        kill: Callable[[ActorRecord], None],
        label: Callable[[int, int], str | None],
    ) -> None:
        self._process = process
        self.grace = grace
        self._kill = kill
        self._label = label
        self._over = False

    def hurry(self) -> None:
        """Give nobody any grace from now on. Who has been asked to end is the caller's to kill."""
        self._over = True

    def say(
        self, records: Iterable[ActorRecord], half: Callable[[], object] = lambda: None
    ) -> list[ActorRecord]:
        """Ask all at once, and wait until they have ended; those that have not within the grace period
        are killed, and returned. ``half()`` is called if half of that is over.

        Whoever is still starting one sees that it is not wanted, and may be this very thread, whose signal
        handler has called us: its end is not waited for.
        """
        asked = [r for r in records if r.started and not r.exited.is_set()]
        if self.grace > 0 and not self._over:
            for record in asked:
                self.ask(record)
        return self.wait(asked, half)

    def ask(self, record: ActorRecord) -> None:
        with suppress(ConveyorError):  # dead already
            record.order(End())

    def wait(
        self, asked: list[ActorRecord], half: Callable[[], object] = lambda: None
    ) -> list[ActorRecord]:
        left: list[ActorRecord] = []
        grace = 0.0 if self._over else self.grace
        end = _core.monotonic() + grace
        over = False
        try:
            if not _wait_for(asked, end - grace / 2):
                half()
                _wait_for(asked, end)
            over = True
        finally:  # also if Ctrl-C ends the grace period, and whoever has pressed it needs no warning
            left = [record for record in asked if not record.exited.is_set()]
            if over and not self._over:
                self._warn([record for record in left if record.alive])
            for record in left:
                self._kill(record)
        killed = _core.monotonic()
        _wait_for([r for r in left if r.host is not None], killed + _FAR_PATIENCE)
        near = [r for r in left if r.host is None and not _stays(r)]
        if not _wait_for(near, killed + _KILLED_PATIENCE):
            names = ", ".join(r.id.name for r in near if not r.exited.is_set())
            logger.warning(
                "killed, and not known to have ended after %g s: %s", _KILLED_PATIENCE, names
            )
        return left

    def _warn(self, left: list[ActorRecord]) -> None:
        if self.grace == 0:
            return
        for stay, how in (
            (False, "not ended within the grace period of %g s, and killed:\n%s"),
            (True, "still at work after the grace period of %g s, and left there:\n%s"),
        ):
            actors = [record for record in left if _stays(record) is stay]
            if actors:
                logger.warning(how, self.grace, "\n".join(self._describe(actors)))

    def _describe(self, records: list[ActorRecord]) -> Iterator[str]:
        statuses = self._process.statuses([r.reader for r in records], self._label)
        for record, status in zip(records, statuses, strict=True):
            place = None if record.process is None else record.process.place
            known = replace(status, pid=record.pid & PID_MASK, host=place or None)
            yield f"  {known}{self._what_is_left(record, status)}"

    def _what_is_left(self, record: ActorRecord, status: ActorStatus) -> str:
        if status.state == "idle":
            if record.host is not None:
                return ": it runs no method, and its process has not ended"
            # The hook is what the page says last, also where the class has none.
            if self._process.board.status(record.slot)[-1] == EXIT_HOOK:
                return (
                    f": its methods and {EXIT_HOOK} are done, but its process was not: threads, atexit "
                    "handlers, finalizers, or what the interpreter does at its end"
                )
            return ": it runs no method, and has not begun its end"
        return ""


def _stays(record: ActorRecord) -> bool:
    return record.process is not None and record.process.stays


def _wait_for(records: list[ActorRecord], end: float) -> bool:
    """Wait until they have ended, at most until ``end`` on the monotonic clock. Whether they have."""
    return all(record.exited.wait(max(end - _core.monotonic(), 0.0)) for record in records)
