"""Waiting at a memory cap for what others are about to let go of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from conveyor import _core
from conveyor.exceptions import ArenaFullError, SystemLimitError
from conveyor.pauses import Pauses
from conveyor.runtime.waiting.alarm import Alarm
from conveyor.runtime.waiting.works import CALLS, STEPS, Blockers

#: How long those who hold memory are given to let go of it once they have nothing to do any more: a value may
#: be held a moment longer than its call takes.
_SETTLE_NS = 500_000_000

#: What has no room (``ArenaFullError._cap``): nothing that could have some, or a graph's cap.
_NONE, _GRAPH = 0, 1


def is_final(error: ArenaFullError) -> bool:
    """Whether the value is too large, whatever others let go of."""
    return error._cap == _NONE


class Shortage:
    """Values of one process that wait for memory.

    A value waits as long as somebody who holds others has calls or executions of this process to do, or runs
    anything at all: that may let go of them. Where nobody does, the cap is an error.
    """

    def __init__(
        self,
        board: _core.Board,
        inbox: _core.Inbox,
        arena: _core.Arena,
        alarm: Alarm,
        under_way: Callable[[], Sequence[tuple[int, int, str]]],
    ) -> None:
        """``under_way()``: the works that this process has given to actors."""
        self._board = board
        self._inbox = inbox
        self._arena = arena
        self._alarm = alarm
        self._under_way = under_way
        self._lock = threading.RLock()  # a signal handler may send, too
        self.waits: set[MemoryWait] = set()

    def begin(self, budget: _core.MemoryBudget | None = None) -> MemoryWait:
        """Begin to wait for memory. Until the wait has ended all processes give back what is free. The send
        is to be tried once more now. ``budget``: the graph's, if it is one's."""
        wait = MemoryWait(self, budget)
        with self._lock:
            self.waits.add(wait)
            self._board.starve(self._inbox.slot, True)
        return wait

    def end(self, wait: MemoryWait) -> None:
        with self._lock:
            self.waits.discard(wait)
            if not self.waits and not self._inbox.inherited:
                self._board.starve(self._inbox.slot, False)

    @property
    def news(self) -> int:
        """Count that changes when memory has been given back."""
        return self._arena.news

    def blockers(self, budget: _core.MemoryBudget | None) -> Blockers:
        """Return who may let go of memory, of that budget or of the session: any of them. Empty: nobody."""
        board, own = self._board, self._inbox.slot
        holders = set(self._arena.holders(budget))
        found = [one for one in self._under_way() if one[0] in holders] if holders else []
        if budget is None:
            for slot in range(board.used):
                if slot != own and board.memory(slot):
                    holders.update(board.holders(slot))
        for slot in holders - {slot for slot, _, _ in found} - {own}:
            if not board.is_idle(slot):
                text = f"{board.name(slot)}, which holds memory that is needed"
                found += [(slot, STEPS, text), (slot, CALLS, text)]
        return tuple(found)

    def ring_at(self, wait: MemoryWait) -> None:
        """Ring this process's bell at the deadline of ``wait``."""
        with suppress(SystemLimitError):  # no thread is to be had: then the next ring will do
            self._alarm.add(wait)


class MemoryWait:
    """Wait for memory of one value, or of several that are sent one after the other."""

    def __init__(self, shortage: Shortage, budget: _core.MemoryBudget | None) -> None:
        self._shortage = shortage
        self._budget = budget
        self._of_graph = False
        #: The error that it would be.
        self.why = ""
        self._hoped = False
        self._in_vain = False
        self._news = -1
        # A try that fails gives back what it had got by then, which is news as well.
        self._pauses = Pauses(0.002, 0.1)
        self._not_before = 0
        #: When the alarm rings, in nanoseconds of the monotonic clock; 0: not as things are.
        self.deadline = 0
        self._vain_at = 0  # when it is an error, by the same clock; 0: not as things are

    def ready(self) -> bool:
        """Whether to try again."""
        if self._news != self._shortage.news:
            if _core.monotonic_ns() >= self._not_before:
                return True
            self._ring_at(self._not_before)
        return self._is_in_vain()

    def tries(self) -> None:
        """Note that the send is about to be tried."""
        self._news = self._shortage.news
        self._in_vain = self._is_in_vain()

    def goes_on(self, error: ArenaFullError) -> bool:
        """Whether to wait on, after the send has been tried in vain."""
        self.why = str(error)
        self._of_graph = error._cap == _GRAPH
        self._not_before = _core.monotonic_ns() + int(self._pauses.next() * 1e9)
        return not is_final(error) and not self._in_vain

    def blockers(self) -> Blockers:
        """Return who may let go of the memory: any of them. Empty: nobody."""
        return self._shortage.blockers(self._budget if self._of_graph else None)

    def end(self) -> None:
        """End the wait."""
        self._shortage.end(self)

    def _is_in_vain(self) -> bool:
        if self.blockers():
            self._hoped = True
            self._vain_at = 0
            return False
        if self._hoped and not self._vain_at:
            self._vain_at = _core.monotonic_ns() + _SETTLE_NS
        if self._vain_at:
            self._ring_at(self._vain_at)
        return _core.monotonic_ns() >= self._vain_at

    def _ring_at(self, time: int) -> None:
        now = _core.monotonic_ns()
        if time > now and not now < self.deadline <= time:
            self.deadline = time
            self._shortage.ring_at(self)
