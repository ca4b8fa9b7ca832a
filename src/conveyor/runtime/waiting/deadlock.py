"""Finding actors that wait for each other in a cycle.

An actor has *lanes*: threads that run its methods. A lane that has waited for some time notes for whom.
Once no lane is left for one kind of work (the steps of graphs, or calls), the actor's status page says
what keeps it from doing that: any of the waits of its lanes. Whoever waits follows these notes. If
they lead to actors that all wait, and from each of them back to itself, it asks all of them to look
once more, and believes in the cycle only if all have looked in vain since and are in the same waits
still.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Protocol, TypeAlias

from conveyor import _core
from conveyor.exceptions import DeadlockError

#: Kinds of work: what somebody waits for is done in a step of a graph, or in a call.
STEPS, CALLS = 0, 1

#: How an actor runs its work: one thing at a time; calls in threads; on an event loop.
ONE, THREADS, LOOP, STARTING = range(4)

#: Who has to do something before a wait ends: (board slot, kind of work, what it is in words). Any of
#: them may do it. Empty: nobody knows who, so it counts as nobody that waits.
Blockers: TypeAlias = "tuple[tuple[int, int, str], ...]"

#: Asks for the blockers of a wait. ``None``: the answer comes from another process, and the bell rings
#: when it is there. The number tells one question from the next; negative: nobody else is to be asked.
Ask: TypeAlias = "Callable[[int], Blockers | None]"

_Node: TypeAlias = "tuple[int, int]"

#: A suspected cycle is looked at again after this time, then twice that, up to the longest.
_FIRST_RECHECK = 0.002
_LONGEST_RECHECK = 0.05
#: So are the blockers of a wait whose own may change while it waits (an execution goes from actor to
#: actor, and none of them knows who waits for it).
_FIRST_REFRESH = 0.005
_LONGEST_REFRESH = 1.0


@dataclass(frozen=True, slots=True)
class _Note:
    """What keeps an actor from doing one kind of work."""

    version: int
    answered: int
    mode: int
    waits: list[tuple[int, int, str]]


def _follow(board: _core.Board, first: Sequence[_Node]) -> dict[_Node, _Note] | None:
    """All notes that ``first`` lead to; ``None`` if one of the actors need not wait."""
    notes: dict[_Node, _Note] = {}
    ahead = list(first)
    while ahead:
        node = ahead.pop()
        if node in notes:
            continue
        read = board.waits(*node)
        if read is None or not read[3] or board.condition(node[0]) not in _LIVING:
            return None
        notes[node] = _Note(*read)
        ahead += [(slot, work) for slot, work, _ in read[3]]
    return notes


#: Conditions of a process that starts or is alive.
_LIVING = (1, 2)


def _way_back(notes: Mapping[_Node, _Note], start: _Node, me: int) -> list[tuple[int, str]] | None:
    """The shortest way from ``start`` to the process ``me``: each actor with what it waits for."""
    ways: dict[_Node, list[tuple[int, str]]] = {start: []}
    ahead = [start]
    for node in ahead:
        if node[0] == me:
            return ways[node]
        for slot, work, text in notes[node].waits:
            if (slot, work) not in ways:
                ways[slot, work] = [*ways[node], (node[0], text)]
                ahead.append((slot, work))
    return None


class Wait:
    """One lane's wait. :meth:`look` is asked whenever it has been looked at in vain."""

    def __init__(self, lanes: Lanes, pooled: bool, ask: Ask, changes: bool, text: str) -> None:
        self._lanes = lanes
        self.pooled = pooled
        self.thread = threading.get_ident()
        #: Called before each look.
        self.serve: Callable[[], object] | None = None
        self.blockers: Blockers = ()
        #: The last question that it has answered.
        self.answered = -1
        self.text = text
        self._ask = ask
        self._changes = changes
        # Others may have to be asked, so not before it has lasted some time.
        self._begins = monotonic() + _FIRST_REFRESH if changes else 0.0
        self._pending: tuple[int, int] | None = None
        self._refresh_at = 0.0
        self._refresh = _FIRST_REFRESH
        self._recheck = _FIRST_RECHECK
        # With their incarnations and the versions of their notes.
        self._suspects: dict[_Node, tuple[int, int]] = {}
        self._asked: dict[int, int] = {}

    def look(self, asked: int) -> float | None:
        """Look for a cycle, after what is waited for has been looked for in vain. Seconds after which
        to look again; ``None``: when the bell rings. ``asked``: of the inbox, before that was.

        Raises ``DeadlockError``."""
        now = monotonic()
        if now < self._begins:
            return self._begins - now
        if self._pending is not None or asked != self.answered or now >= self._refresh_at:
            self._resolve(asked, now)
        if self._suspicious():
            step = self._recheck
            self._recheck = min(2 * step, _LONGEST_RECHECK)
            return step
        self._recheck = _FIRST_RECHECK
        return max(self._refresh_at - now, 0.001) if self._changes else None

    def _resolve(self, asked: int, now: float) -> None:
        """See anew who is waited for."""
        if self._pending is None:
            self._pending = self._lanes.next_question(), asked
        question, asked = self._pending
        blockers = self._ask(question)
        if blockers is None:
            return
        self._pending = None
        self._refresh_at = now + self._refresh if self._changes else float("inf")
        self._refresh = min(2 * self._refresh, _LONGEST_REFRESH)
        self._lanes.update(self, blockers, asked)

    def _suspicious(self) -> bool:
        board = self._lanes.board
        with self._lanes.lock:
            first = [(slot, work) for slot, work, _ in self.blockers]
            notes = _follow(board, first) if first else None
            me = self._lanes.slot
            if notes is None or any(_way_back(notes, node, me) is None for node in notes):
                self._suspects = {}
                return False
            versions = {n: (board.incarnation(n[0]), note.version) for n, note in notes.items()}
            if versions == self._suspects:
                if all(_since(note.answered, self._asked[node[0]]) for node, note in notes.items()):
                    # Before anybody else looks: one error opens the cycle.
                    self._lanes.end(self)
                    raise self._deadlock(notes)
                return True
            self._suspects = versions
            self._asked = {slot: board.ask(slot) for slot in {slot for slot, _ in versions}}
            return True

    def _deadlock(self, notes: Mapping[_Node, _Note]) -> DeadlockError:
        board, me = self._lanes.board, self._lanes.slot
        slot, work, text = self.blockers[0]
        way = _way_back(notes, (slot, work), me)
        assert way is not None
        chain = [f"{self.text} waits for {text}", *(text for _, text in way)]
        names = (board.name(me), *(board.name(slot) for slot, _ in way))
        modes = {note.mode for note in notes.values()}
        return DeadlockError(
            f"waiting for {text} would never end: {', and '.join(chain)}. {_advice(modes, notes)}",
            names,
        )


def sooner(one: float | None, other: float | None) -> float | None:
    """The shorter of two times to sleep; ``None``: for ever."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _since(answered: int, asked: int) -> bool:
    return (answered - asked) & 0xFFFFFFFF < 1 << 31


def _advice(modes: set[int], notes: Mapping[_Node, _Note]) -> str:
    """What would resolve it."""
    ways = []
    if STARTING in modes:
        ways.append("do not wait in a constructor for the actor itself")
    if ONE in modes:
        # Calls then run in threads, beside the steps of graphs.
        if not all(work == STEPS for _, work in notes):
            ways.append("give one of the actors max_concurrency > 1")
            ways.append("make the method that waits async and await there")
        else:
            # Not in an async step: that would wait as long for its own graph, and nobody would see it.
            ways.append("wait in an ordinary method of an actor with max_concurrency > 1")
            ways.append("call an async method, which is no step, and await there")
    if LOOP in modes:
        ways.append("await in an async method instead of blocking the event loop")
    if THREADS in modes and any(work == CALLS for _, work in notes):
        ways.append("raise max_concurrency: every thread waits")
    ways.append("return the ref instead of getting it")
    text = "; or ".join(ways)
    return text[0].upper() + text[1:]


class Serving(Protocol):
    """What the main thread does beside waiting."""

    def turn(self) -> object: ...

    def end(self) -> object:
        """The wait is over."""
        ...


class Lanes:
    """Those of this process, with what they wait for. The driver has none: nobody waits for it."""

    def __init__(self, inbox: _core.Inbox, board: _core.Board, slot: int) -> None:
        self.board = board
        self.slot = slot
        #: Held while notes are written, and from the last look at a cycle to the error.
        self.lock = threading.RLock()  # a signal handler may wait, too
        self._inbox = inbox
        self._mode = -1
        self._threads = 0
        self._pooled = threading.local()
        self._waits: list[Wait] = []
        self._questions = 0
        self._running: Callable[[], str] = lambda: ""
        self._serving: Callable[[], Serving] | None = None

    def open(
        self,
        mode: int,
        threads: int,
        running: Callable[[], str],
        serving: Callable[[], Serving] | None = None,
    ) -> None:
        """This process is an actor. ``threads``: how many run its calls, with ``THREADS``.
        ``running()``: what its main thread runs. ``serving()``: what else the main thread does while
        a method there waits."""
        with self.lock:
            self._mode, self._threads = mode, threads
            self._running, self._serving = running, serving
            self._publish()

    @contextmanager
    def running(self, method: str) -> Iterator[None]:
        """The thread is one of those for calls, and runs ``method``."""
        self._pooled.method = method
        try:
            yield
        finally:
            self._pooled.method = None

    @contextmanager
    def waiting(self, ask: Ask, changes: bool = False) -> Iterator[Wait | None]:
        """This thread waits for what ``ask`` tells (``changes``: not always the same). ``None``: it
        keeps the actor from nothing."""
        method = getattr(self._pooled, "method", None)
        pooled = method is not None
        if self._mode < 0 or not (pooled or threading.current_thread() is threading.main_thread()):
            yield None
            return
        wait = Wait(self, pooled, ask, changes, method if method is not None else self._running())
        serving = None if pooled or self._serving is None else self._serving()
        if serving is not None:
            wait.serve = serving.turn
        with self.lock:
            self._waits.append(wait)
        try:
            yield wait
        finally:
            with self.lock:
                self.end(wait)
            if serving is not None:
                serving.end()

    def next_question(self) -> int:
        with self.lock:
            self._questions += 1
            return self._questions

    def update(self, wait: Wait, blockers: Blockers, asked: int) -> None:
        """``wait`` waits for ``blockers``, and has looked in vain since question ``asked``."""
        with self.lock:
            changed = blockers != wait.blockers
            wait.blockers, wait.answered = blockers, asked
            if changed:
                self._publish()
            else:
                self._answer()

    def end(self, wait: Wait) -> None:
        """With the lock."""
        if wait in self._waits:
            self._waits.remove(wait)
            if wait.blockers:
                self._publish()

    def _of(self, work: int) -> list[Wait]:
        """The waits that keep this process from that work; none if there is a lane left."""
        if self._mode != THREADS:
            return self._waits[-1:]  # of waits inside each other only the innermost goes on
        pooled = work == CALLS
        waits = {wait.thread: wait for wait in self._waits if wait.pooled == pooled}
        return list(waits.values()) if len(waits) >= (self._threads if pooled else 1) else []

    def _publish(self) -> None:
        for work in (STEPS, CALLS):
            waits = self._of(work)
            noted: dict[_Node, tuple[int, int, str]] = {}
            for wait in waits:
                for slot, of, text in wait.blockers:
                    noted.setdefault((slot, of), (slot, of, f"{wait.text} waits for {text}"))
            known = all(wait.blockers for wait in waits) and len(noted) <= _core.WAIT_TARGETS
            self._inbox.note_waits(work, self._mode, list(noted.values()) if known else [])
        self._answer()

    def _answer(self) -> None:
        for work in (STEPS, CALLS):
            waits = self._of(work)
            if waits:
                # Questions are counted from the process's start: far from where the count wraps.
                self._inbox.answer(work, max(min(wait.answered for wait in waits), 0))
