"""Waits that lead to processes of other hosts: the driver follows them, which can ask all hosts.

It is told of a wait that has lasted some time, and again when the process's waits are others than they were
then: whoever notes the last wait of a cycle, and tells of it, has the driver find all of them. Nobody is told
of waits that end soon, and of a process's at most once in some time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from conveyor import _core
from conveyor.runtime.waiting.inquiry import Waiting

if TYPE_CHECKING:
    from conveyor.runtime.waiting.deadlock import Wait
    from conveyor.runtime.waiting.lanes import Lanes

#: A wait that is as old leads to questions to other hosts.
OLD = 0.1
#: Seconds from one report to the next, which grow while there are more and more.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0


class Found(Struct, frozen=True):
    """Cycle that the wait with that work and stamp is part of. chain: each wait of it, in words. names: its
    actors. kinds: see :class:`conveyor.runtime.waiting.inquiry.Verdict`."""

    work: int
    stamp: int
    chain: tuple[str, ...]
    names: tuple[str, ...]
    kinds: frozenset[tuple[int, int]]


#: Has the driver look, and calls what it is given once it has: with what has come of it; an error: nothing.
Ask = Callable[[Sequence[Waiting], Callable[["Found | Exception | None"], object]], object]


class Reports:
    """Reports of one process's waits to the driver. None is sent before there is somebody to tell
    (``open``)."""

    def __init__(self, lanes: Lanes, ring: Callable[[], object]) -> None:
        self._lanes = lanes
        self._ring = ring
        self._ask: Ask | None = None
        # Guarded by the lanes' lock, as all that follows.
        self._asking = self._failed = False
        self._not_before = 0.0
        self._pause = _FIRST_PAUSE
        #: How often the driver has answered.
        self.answers = 0

    def open(self, ask: Ask) -> None:
        """Have ``ask`` tell the driver, from now on."""
        self._ask = ask

    def tell(self, wait: Wait, now: float) -> float | None:
        """Have the driver look at ``wait``, which leads to another node, unless it has looked since the
        process's waits last changed. Returns seconds after which to call again; ``None``: when the doorbell
        rings."""
        lanes = self._lanes
        with lanes.lock:
            if self._ask is None or self._asking or wait.told == lanes.version:
                return None
            at = max(wait.since + OLD, self._not_before)
            if now < at:
                return at - now
            noted = [each for each in lanes.noted_waits() if now >= each.since + OLD]
            if wait not in noted:
                return None
            for each in noted:
                each.told = lanes.version
            quiet = now - self._not_before > 2 * _LONGEST_PAUSE
            self._pause = _FIRST_PAUSE if quiet else min(2 * self._pause, _LONGEST_PAUSE)
            self._not_before = now + self._pause
            self._asking = True
        told = [
            Waiting(each.work, -1 if each.lane is None else each.lane, each.stamp) for each in noted
        ]
        try:
            self._ask(told, self._answered)
        except Exception as error:  # the session ends, or the system refuses a thread
            self._answered(error)
        return None

    def _answered(self, found: Found | Exception | None) -> None:
        failed = False
        with self._lanes.lock:
            self._asking = False
            self.answers += 1
            if isinstance(found, Exception):
                for wait in self._lanes.noted_waits():
                    wait.told = -1
                self._not_before = _core.monotonic() + _LONGEST_PAUSE
                failed, self._failed = not self._failed, True
            elif found is not None:
                for wait in self._lanes.noted_waits():
                    if (wait.work, wait.stamp) == (found.work, found.stamp):
                        wait.found = found
        self._ring()
        if failed:
            import logging  # slow to import, and rarely needed

            logging.getLogger("conveyor").warning(
                "whether a wait for another node would never end cannot be found out: %s", found
            )
