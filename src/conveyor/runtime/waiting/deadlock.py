"""Finding actors that wait for each other in a cycle.

What somebody waits for is a *work* of an actor (``waiting.works``): whatever one of its lanes does, the
steps of one graph, one call. An actor has lanes, threads that run its methods (``waiting.lanes``); and where
that is an event loop, coroutines (``waiting.awaits``). One that has waited for some time notes on the board
for whom. A work is kept from being done by the waits of its lane, once no thread is left for that lane, or
by its own. Whoever waits follows these notes. If they lead to works that all wait, and from each of them
back to its own, it asks all of those actors to look once more, and believes in the cycle only if all have
looked in vain since and are in the same waits still. Notes that lead to processes of other hosts are
followed by the driver (``waiting.reports``, ``waiting.inquiry``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from conveyor import _core
from conveyor.exceptions import DeadlockError
from conveyor.runtime.waiting.works import (
    BESIDE,
    BOUNDED,
    CALLS,
    FULL,
    LOOP,
    ONE,
    STARTING,
    STEPS,
    THREADS,
    Ask,
    Blockers,
    Node,
    lane_of,
    way_back,
)

if TYPE_CHECKING:
    from conveyor.runtime.waiting.lanes import Lanes
    from conveyor.runtime.waiting.reports import Found

#: A suspected cycle is looked at again after this time, then twice that, up to the longest.
_FIRST_RECHECK = 0.002
_LONGEST_RECHECK = 0.05
#: So are the blockers of a wait whose own may change while it waits (an execution goes from actor to
#: actor, and none of them knows who waits for it).
FIRST_REFRESH = 0.005
LONGEST_REFRESH = 1.0


class _Note(Struct, frozen=True):
    """Note of the waits that keep a work from being done."""

    stamp: int
    answered: int
    mode: int
    waits: list[tuple[int, int, str]]


class _BeingNoted(Exception):
    """Raised if a note cannot be read just now."""


class _Abroad(Exception):
    """Raised if the notes lead to processes of other nodes."""


def _follow(board: _core.Board, first: Sequence[Node]) -> dict[Node, _Note] | None:
    """Return all notes that ``first`` lead to; ``None`` if one of the works need not wait."""
    notes: dict[Node, _Note] = {}
    ahead = list(first)
    abroad = False
    while ahead:
        node = ahead.pop()
        if node in notes:
            continue
        if _is_abroad(board, node[0]):
            abroad = True
            continue
        if board.condition(node[0]) not in _LIVING:
            return None
        read = board.waits(*node)
        if read is None:
            raise _BeingNoted
        if not read[3] or read[2] == BOUNDED:
            return None
        notes[node] = _Note(*read)
        ahead += [(slot, work) for slot, work, _ in read[3]]
    if abroad:
        raise _Abroad
    return notes


#: Conditions: nobody has ever had that slot here; a process that starts or is alive.
_FREE, _LIVING = 0, (1, 2)
#: The driver's slot.
_DRIVER = 0


def _is_abroad(board: _core.Board, slot: int) -> bool:
    """Whether that process is on another node. A process without a proxy here is not on the driver's."""
    return board.elsewhere(slot) or (
        board.condition(slot) == _FREE and bool(board.elsewhere(_DRIVER))
    )


class Wait:
    """Wait of one lane, or of one coroutine. :meth:`look` is called whenever its result has been looked for
    in vain."""

    def __init__(
        self,
        lanes: Lanes,
        work: int,
        ask: Ask,
        changes: bool,
        text: str,
        lane: int | None = None,
        mode: int = BESIDE,
        refresh: float = FIRST_REFRESH,
        bounded: bool = False,
    ) -> None:
        """``work``: what it keeps from being done. ``lane``: whose thread waits, if any does. ``mode``: how
        the work is run. ``refresh``: after how long its blockers, if they may change, are seen anew for the
        first time. ``bounded``: it ends by itself, so it is part of no cycle."""
        self._lanes = lanes
        self.work = work
        self.lane = lane
        self.mode = mode
        self.bounded = bounded
        self.thread = threading.get_ident()
        #: Called before each look.
        self.serve: Callable[[], object] | None = None
        self.blockers: Blockers = ()
        #: Tells it, with these blockers, from all other waits of the process.
        self.stamp = 0
        #: The last question that it has answered.
        self.answered = -1
        self.text = text
        self._ask = ask
        self._changes = changes
        # Others may have to be asked, so not before it has lasted some time.
        self.since = _core.monotonic()
        self._begins = 0.0 if lane is None or not changes else self.since + FIRST_REFRESH
        #: Cycle that the driver has found: see ``waiting.reports``.
        self.found: Found | None = None
        self._heard: Found | None = None
        #: Version of the notes that the driver was told last.
        self.told = -1
        self._pending: tuple[int, int] | None = None
        self._refresh_at = 0.0
        self._refresh = refresh
        self._recheck = _FIRST_RECHECK
        # With their incarnations and the stamps of their notes.
        self._suspects: dict[Node, tuple[int, int]] = {}
        self._asked: dict[int, int] = {}

    @property
    def pending(self) -> bool:
        """Whether an answer is pending or new: another process has been asked who is waited for, and has not
        answered; or the driver has answered its question."""
        return self._pending is not None or self.found is not None

    def look(self, asked: int) -> float | None:
        """Look for a cycle, after the awaited result has been looked for in vain. Returns seconds after
        which to look again; ``None``: when the doorbell rings. ``asked``: the number of the inbox's last
        question before the result was looked for. Raises ``DeadlockError``."""
        now = _core.monotonic()
        if now < self._begins:
            return self._begins - now
        self.resolve(asked, now)
        return self._again(now) if self.bounded else self.judge(now)

    def resolve(self, asked: int, now: float) -> None:
        """Do the first half of a look: note who is waited for, seen anew where that is due."""
        while self._pending is not None or asked != self.answered or now >= self._refresh_at:
            if self._pending is None:
                self._pending = self._lanes.next_question(), asked
            question, then = self._pending
            blockers = self._ask(question)
            if blockers is None:
                return
            self._pending = None
            self._refresh_at = now + self._refresh if self._changes else float("inf")
            self._refresh = min(2 * self._refresh, LONGEST_REFRESH)
            self._lanes.update(self, blockers, then)

    def judge(self, now: float) -> float | None:
        """Do the second half of a look: follow the notes, with this wait's among them."""
        if self._heed():
            return _FIRST_RECHECK
        abroad = False
        try:
            suspicious = self._suspicious()
        except _BeingNoted:
            suspicious = True
        except _Abroad:
            suspicious, abroad = False, True
        if suspicious:
            step = self._recheck
            self._recheck = min(2 * step, _LONGEST_RECHECK)
            return step
        self._recheck = _FIRST_RECHECK
        again = self._again(now)
        return sooner(again, self._lanes.reports.tell(self, now)) if abroad else again

    def _again(self, now: float) -> float | None:
        return max(self._refresh_at - now, 0.001) if self._changes else None

    def _heed(self) -> bool:
        """Raise the cycle that the driver has found, if it concerns this wait as it is now. Returns true if
        that has to be left to the next look: the awaited result may have come, and the cycle have been
        found, since the result was looked for in vain."""
        with self._lanes.lock:
            found = self.found
            if found is None or found.stamp != self.stamp:
                self.found = self._heard = None
                return False
            if self._heard is not found:
                self._heard = found
                return True
            self.found = self._heard = None
            self._lanes.end(self)
        raise _error(self.blockers[0][2], found.chain, found.names, found.kinds)

    def _suspicious(self) -> bool:
        board = self._lanes.board
        with self._lanes.lock:
            first = [(slot, work) for slot, work, _ in self.blockers]
            try:
                notes = _follow(board, first) if first else None
            except _Abroad:
                self._suspects = {}
                raise
            if notes is None or any(way_back(notes, n, self._is_mine) is None for n in notes):
                self._suspects = {}
                return False
            stamps = {n: (board.incarnation(n[0]), note.stamp) for n, note in notes.items()}
            if stamps == self._suspects:
                if all(_since(note.answered, self._asked[node[0]]) for node, note in notes.items()):
                    error = self._deadlock(notes)
                    # Before anybody else looks: one error opens the cycle.
                    self._lanes.end(self)
                    raise error
                return True
            self._suspects = stamps
            self._asked = {slot: board.ask(slot) for slot in {slot for slot, _ in stamps}}
            return True

    def _is_mine(self, node: Node) -> bool:
        """Whether this wait is the one that keeps that work from being done."""
        slot, work = node
        if slot != self._lanes.slot:
            return False
        return work == self.work or (self.lane is not None and self._lanes.keeps(self.lane, work))

    def _deadlock(self, notes: Mapping[Node, _Note]) -> DeadlockError:
        board, me = self._lanes.board, self._lanes.slot
        slot, work, text = self.blockers[0]
        way = way_back(notes, (slot, work), self._is_mine)
        assert way is not None
        chain = [f"{self.text} waits for {text}", *(text for _, text in way)]
        names = (board.name(me), *(board.name(slot) for slot, _ in way))
        return _error(text, chain, names, {(note.mode, work) for (_, work), note in notes.items()})


def _error(
    text: str, chain: Sequence[str], names: tuple[str, ...], kinds: Collection[tuple[int, int]]
) -> DeadlockError:
    return DeadlockError(
        f"waiting for {text} would never end: {', and '.join(chain)}. {_advice(kinds)}", names
    )


def sooner(one: float | None, other: float | None) -> float | None:
    """Return the shorter of two times to sleep; ``None``: for ever."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _since(answered: int, asked: int) -> bool:
    return (answered - asked) & 0xFFFFFFFF < 1 << 31


def _advice(kinds: Collection[tuple[int, int]]) -> str:
    """Advise how to resolve the deadlock. ``kinds``: mode and work of all that take part."""
    modes = {mode for mode, _ in kinds}
    calls = any(lane_of(work) == CALLS for _, work in kinds)
    async_step = any(mode == BESIDE and lane_of(work) == STEPS for mode, work in kinds)
    ways = []
    if STARTING in modes:
        ways.append("do not wait in a constructor for the actor itself")
    if async_step:
        ways.append(
            "do not wait in a step for what needs a later execution of its graph: the steps of one graph "
            "on an actor run one after the other, also where they are async"
        )
    elif ONE in modes and calls:
        # Calls then run in threads, beside the steps of graphs.
        ways.append("give one of the actors max_concurrency > 1")
        ways.append("make the method that waits async and await there")
    elif ONE in modes:
        # Not in an async step: the steps of one graph do not run side by side on an actor.
        ways.append("wait in an ordinary method of an actor with max_concurrency > 1")
        ways.append("call an async method, which is no step, and await there")
    if LOOP in modes:
        ways.append("await in an async method instead of blocking the event loop")
    if THREADS in modes and calls:
        ways.append("raise max_concurrency: every thread waits")
    if FULL in modes:
        ways.append("raise max_concurrency: every coroutine waits")
    ways.append("return the ref instead of getting it")
    text = "; or ".join(ways)
    return text[0].upper() + text[1:]
