"""Deadlock detection: finding actors that wait for each other in a cycle.

What somebody waits for is a *work* of an actor (``runtime.wait_graph``): whatever one of its lanes does, the
steps of one graph, one call. An actor has lanes (:class:`WaitRegistry`), threads that run its methods; and
where that is an event loop, coroutines (``runtime.aio``). One that has waited for some time notes on the
process table for whom. A work is kept from being done by the waits of its lane, once no thread is left for
that lane, or by its own. Whoever waits follows these notes. If they lead to works that all wait, and from
each of them back to its own, it asks all of those actors to look once more, and believes in the cycle only
if all have looked in vain since and are in the same waits still.

Notes that lead to processes of other nodes are followed by the driver (:class:`Reports`,
``runtime.deadlock_detector``). The driver is told of a wait that has lasted some time, and again when the
process's waits are others than they were then: whoever notes the last wait of a cycle, and tells of it, has
the driver find all of them. Nobody is told of waits that end soon, and of a process's at most once in some
time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from msgspec import Struct

from conveyor import _core
from conveyor.exceptions import DeadlockError
from conveyor.runtime.deadlock_detector import Waiting
from conveyor.runtime.wait_graph import (
    BOUNDED,
    CALLS,
    CONCURRENCY,
    CONCURRENT,
    FULL,
    LOOP,
    ONE,
    STARTING,
    STEPS,
    THREADS,
    Ask,
    Blockers,
    Node,
    Note,
    lane_of,
    path_back,
)

#: A wait that is as old leads to questions to other nodes.
OLD = 0.1
#: Seconds from one report to the next, which grow while there are more and more.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0


class Found(Struct, frozen=True):
    """Cycle that the wait with that work and stamp is part of. chain: each wait of it, in words. names: its
    actors. kinds: see :class:`conveyor.runtime.deadlock_detector.Verdict`."""

    work: int
    stamp: int
    chain: tuple[str, ...]
    names: tuple[str, ...]
    kinds: frozenset[tuple[int, int]]


#: Has the driver look, and calls what it is given once it has: with what has come of it; an error: nothing.
AskDriver = Callable[[Sequence[Waiting], Callable[["Found | Exception | None"], object]], object]


class Reports:
    """Reports of one process's waits to the driver. None is sent before there is somebody to tell
    (``open``)."""

    def __init__(self, wait_registry: WaitRegistry, ring: Callable[[], object]) -> None:
        self._wait_registry = wait_registry
        self._notify = ring
        self._ask: AskDriver | None = None
        # Guarded by the lanes' lock, as all that follows.
        self._asking = self._failed = False
        self._not_before = 0.0
        self._pause = _FIRST_PAUSE
        #: How often the driver has answered.
        self.answers = 0

    def open(self, ask: AskDriver) -> None:
        """Have ``ask`` tell the driver, from now on."""
        self._ask = ask

    def tell(self, wait: Wait, now: float) -> float | None:
        """Have the driver look at ``wait``, which leads to another node, unless it has looked since the
        process's waits last changed. Returns seconds after which to call again; ``None``: when the doorbell
        rings."""
        wait_registry = self._wait_registry
        with wait_registry.lock:
            if self._ask is None or self._asking or wait.reported_version == wait_registry.version:
                return None
            at = max(wait.since + OLD, self._not_before)
            if now < at:
                return at - now
            noted = [each for each in wait_registry.noted_waits() if now >= each.since + OLD]
            if wait not in noted:
                return None
            for each in noted:
                each.reported_version = wait_registry.version
            quiet = now - self._not_before > 2 * _LONGEST_PAUSE
            self._pause = _FIRST_PAUSE if quiet else min(2 * self._pause, _LONGEST_PAUSE)
            self._not_before = now + self._pause
            self._asking = True
        waits = [
            Waiting(each.work, -1 if each.lane is None else each.lane, each.stamp) for each in noted
        ]
        try:
            self._ask(waits, self._answered)
        except Exception as error:  # the session ends, or the system refuses a thread
            self._answered(error)
        return None

    def _answered(self, found: Found | Exception | None) -> None:
        failed = False
        with self._wait_registry.lock:
            self._asking = False
            self.answers += 1
            if isinstance(found, Exception):
                for wait in self._wait_registry.noted_waits():
                    wait.reported_version = -1
                self._not_before = _core.monotonic() + _LONGEST_PAUSE
                failed, self._failed = not self._failed, True
            elif found is not None:
                for wait in self._wait_registry.noted_waits():
                    if (wait.work, wait.stamp) == (found.work, found.stamp):
                        wait.found = found
        self._notify()
        if failed:
            import logging  # slow to import, and rarely needed

            logging.getLogger("conveyor").warning(
                "whether a wait for another node would never end cannot be found out: %s", found
            )


#: A suspected cycle is looked at again after this time, then twice that, up to the longest.
_FIRST_RECHECK = 0.002
_LONGEST_RECHECK = 0.05
#: So are the blockers of a wait whose own may change while it waits (an execution goes from actor to
#: actor, and none of them knows who waits for it).
FIRST_REFRESH = 0.005
LONGEST_REFRESH = 1.0


class _BeingNoted(Exception):
    """Raised if a note cannot be read just now."""


class _LeadsToOtherNodes(Exception):
    """Raised if the notes lead to processes of other nodes."""


def _follow(process_table: _core.ProcessTable, first: Sequence[Node]) -> dict[Node, Note] | None:
    """Return all notes that ``first`` lead to; ``None`` if one of the works need not wait."""
    notes: dict[Node, Note] = {}
    ahead = list(first)
    remote_nodes = False
    while ahead:
        node = ahead.pop()
        if node in notes:
            continue
        if _is_on_other_node(process_table, node[0]):
            remote_nodes = True
            continue
        if process_table.condition(node[0]) not in _LIVING:
            return None
        read = process_table.waits(*node)
        if read is None:
            raise _BeingNoted
        if not read[3] or read[2] == BOUNDED:
            return None
        notes[node] = Note(*read)
        ahead += [(slot, work) for slot, work, _ in read[3]]
    if remote_nodes:
        raise _LeadsToOtherNodes
    return notes


#: Conditions: nobody has ever had that slot here; a process that starts or is alive.
_FREE, _LIVING = 0, (1, 2)
#: The driver's slot.
_DRIVER = 0


def _is_on_other_node(process_table: _core.ProcessTable, slot: int) -> bool:
    """Whether that process is on another node. A process without a proxy here is not on the driver's."""
    return process_table.is_remote(slot) or (
        process_table.condition(slot) == _FREE and bool(process_table.is_remote(_DRIVER))
    )


class Wait:
    """Wait of one lane, or of one coroutine. :meth:`look` is called whenever its result has been looked for
    in vain."""

    def __init__(
        self,
        wait_registry: WaitRegistry,
        work: int,
        ask: Ask,
        changes: bool,
        text: str,
        lane: int | None = None,
        mode: int = CONCURRENT,
        refresh: float = FIRST_REFRESH,
        bounded: bool = False,
    ) -> None:
        """``work``: what it keeps from being done. ``lane``: whose thread waits, if any does. ``mode``: how
        the work is run. ``refresh``: after how long its blockers, if they may change, are seen anew for the
        first time. ``bounded``: it ends by itself, so it is part of no cycle."""
        self._wait_registry = wait_registry
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
        #: Cycle that the driver has found: see ``Reports``.
        self.found: Found | None = None
        self._heard: Found | None = None
        #: Version of the notes that the driver was told last.
        self.reported_version = -1
        self._pending: tuple[int, int] | None = None
        self._refresh_at = 0.0
        self._refresh = refresh
        self._recheck = _FIRST_RECHECK
        # With their incarnations and the stamps of their notes.
        self._suspects: dict[Node, tuple[int, int]] = {}
        self._requested: dict[int, int] = {}

    @property
    def pending(self) -> bool:
        """Whether an answer is pending or new: another process has been asked who is waited for, and has not
        answered; or the driver has answered its question."""
        return self._pending is not None or self.found is not None

    def look(self, requested: int) -> float | None:
        """Look for a cycle, after the awaited result has been looked for in vain. Returns seconds after
        which to look again; ``None``: when the doorbell rings. ``requested``: the number of the inbox's last
        question before the result was looked for. Raises ``DeadlockError``."""
        now = _core.monotonic()
        if now < self._begins:
            return self._begins - now
        self.resolve(requested, now)
        return self._again(now) if self.bounded else self.judge(now)

    def resolve(self, requested: int, now: float) -> None:
        """Do the first half of a look: note who is waited for, seen anew where that is due."""
        while self._pending is not None or requested != self.answered or now >= self._refresh_at:
            if self._pending is None:
                self._pending = self._wait_registry.next_question(), requested
            question, then = self._pending
            blockers = self._ask(question)
            if blockers is None:
                return
            self._pending = None
            self._refresh_at = now + self._refresh if self._changes else float("inf")
            self._refresh = min(2 * self._refresh, LONGEST_REFRESH)
            self._wait_registry.update(self, blockers, then)

    def judge(self, now: float) -> float | None:
        """Do the second half of a look: follow the notes, with this wait's among them."""
        if self._heed():
            return _FIRST_RECHECK
        remote_nodes = False
        try:
            suspicious = self._suspicious()
        except _BeingNoted:
            suspicious = True
        except _LeadsToOtherNodes:
            suspicious, remote_nodes = False, True
        if suspicious:
            step = self._recheck
            self._recheck = min(2 * step, _LONGEST_RECHECK)
            return step
        self._recheck = _FIRST_RECHECK
        again = self._again(now)
        return sooner(again, self._wait_registry.reports.tell(self, now)) if remote_nodes else again

    def _again(self, now: float) -> float | None:
        return max(self._refresh_at - now, 0.001) if self._changes else None

    def _heed(self) -> bool:
        """Raise the cycle that the driver has found, if it concerns this wait as it is now. Returns true if
        that has to be left to the next look: the awaited result may have come, and the cycle have been
        found, since the result was looked for in vain."""
        with self._wait_registry.lock:
            found = self.found
            if found is None or found.stamp != self.stamp:
                self.found = self._heard = None
                return False
            if self._heard is not found:
                self._heard = found
                return True
            self.found = self._heard = None
            self._wait_registry.end(self)
        raise _error(self.blockers[0][2], found.chain, found.names, found.kinds)

    def _suspicious(self) -> bool:
        process_table = self._wait_registry.process_table
        with self._wait_registry.lock:
            first = [(slot, work) for slot, work, _ in self.blockers]
            try:
                notes = _follow(process_table, first) if first else None
            except _LeadsToOtherNodes:
                self._suspects = {}
                raise
            if notes is None or any(path_back(notes, n, self._is_mine) is None for n in notes):
                self._suspects = {}
                return False
            stamps = {n: (process_table.incarnation(n[0]), note.stamp) for n, note in notes.items()}
            if stamps == self._suspects:
                if all(
                    _since(note.answered, self._requested[node[0]]) for node, note in notes.items()
                ):
                    error = self._deadlock(notes)
                    # Before anybody else looks: one error opens the cycle.
                    self._wait_registry.end(self)
                    raise error
                return True
            self._suspects = stamps
            self._requested = {
                slot: process_table.ask(slot) for slot in {slot for slot, _ in stamps}
            }
            return True

    def _is_mine(self, node: Node) -> bool:
        """Whether this wait is the one that keeps that work from being done."""
        slot, work = node
        if slot != self._wait_registry.slot:
            return False
        return work == self.work or (
            self.lane is not None and self._wait_registry.keeps(self.lane, work)
        )

    def _deadlock(self, notes: Mapping[Node, Note]) -> DeadlockError:
        process_table, me = self._wait_registry.process_table, self._wait_registry.slot
        slot, work, text = self.blockers[0]
        path = path_back(notes, (slot, work), self._is_mine)
        assert path is not None
        chain = [f"{self.text} waits for {text}", *(text for _, text in path)]
        names = (process_table.name(me), *(process_table.name(slot) for slot, _ in path))
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


def _since(answered: int, requested: int) -> bool:
    return (answered - requested) & 0xFFFFFFFF < 1 << 31


def _advice(kinds: Collection[tuple[int, int]]) -> str:
    """Advise how to resolve the deadlock. ``kinds``: mode and work of all that take part."""
    modes = {mode for mode, _ in kinds}
    calls = any(lane_of(work) == CALLS for _, work in kinds)
    async_step = any(mode == CONCURRENT and lane_of(work) == STEPS for mode, work in kinds)
    advice = []
    if STARTING in modes:
        advice.append("do not wait in a constructor for the actor itself")
    if async_step:
        advice.append(
            "do not wait in a step for what needs a later execution of its graph: the steps of one graph "
            "on an actor run one after the other, also where they are async"
        )
    elif ONE in modes and calls:
        # Calls then run in threads, beside the steps of graphs.
        advice.append("give one of the actors max_concurrency > 1")
        advice.append("make the method that waits async and await there")
    elif ONE in modes:
        # Not in an async step: the steps of one graph do not run side by side on an actor.
        advice.append("wait in an ordinary method of an actor with max_concurrency > 1")
        advice.append("call an async method, which is no step, and await there")
    if LOOP in modes:
        advice.append("await in an async method instead of blocking the event loop")
    if THREADS in modes and calls:
        advice.append("raise max_concurrency: every thread waits")
    if FULL in modes:
        advice.append("raise max_concurrency: every coroutine waits")
    advice.append("return the ref instead of getting it")
    text = "; or ".join(advice)
    return text[0].upper() + text[1:]


#: Begins what the main thread does beside one wait: a function for each turn of it, and one for its end.
Serve: TypeAlias = "Callable[[], tuple[Callable[[], object], Callable[[], object]]]"


class WaitRegistry:
    """The lanes of this process, with what they wait for. The driver has none: nobody waits for it."""

    def __init__(self, inbox: _core.Inbox, process_table: _core.ProcessTable, slot: int) -> None:
        self.process_table = process_table
        self.slot = slot
        #: Held while notes are written, and from the last look at a cycle to the error.
        self.lock = threading.RLock()  # a signal handler may wait, too
        #: The waits of its coroutines that are noted (``aio.Awaits``).
        self.coroutines: list[Wait] = []
        #: Notes that are in the process table.
        self.noted: list[tuple[int, int, int, int, int, int, str]] = []
        #: Counts how often that has changed, but for the questions that are answered.
        self.version = 0
        #: Reports of the waits to the driver.
        self.reports = Reports(self, lambda: process_table.notify(slot, _core.ATTENTION_BIT))
        self._inbox = inbox
        self._mode = -1
        #: The thread that runs the actor's loop.
        self._main = 0
        self._threads = 0
        self._pooled = threading.local()
        self._waits: list[Wait] = []
        self._questions = 0
        self._stamps = itertools.count(1)
        self._at_once = False
        self._running: Callable[[], str] = lambda: ""
        self._serve: Serve | None = None

    def open(
        self,
        mode: int,
        threads: int,
        running: Callable[[], str],
        serve: Serve | None = None,
    ) -> None:
        """Make this process an actor's, with the calling thread as its main one, which runs its loop.
        ``threads``: how many run its calls, with ``THREADS``. ``running()``: what its main thread runs.
        ``serve``: begins what else the main thread does while a method there waits."""
        with self.lock:
            self._mode, self._threads, self._main = mode, threads, threading.get_ident()
            self._running, self._serve = running, serve
            self._note()

    @contextmanager
    def running(self, method: str, work: int) -> Iterator[None]:
        """Note that the calling thread, one of those for calls, runs ``method`` for this work."""
        self._pooled.call = method, work
        try:
            yield
        finally:
            self._pooled.call = None

    @contextmanager
    def waiting(
        self, ask: Ask, changes: bool = False, bounded: bool = False
    ) -> Iterator[Wait | None]:
        """Register this thread's wait for what ``ask`` tells (``changes``: not always the same). ``None``:
        it keeps the actor from nothing. ``bounded``: the wait ends by itself, so it is part of no cycle."""
        call = getattr(self._pooled, "call", None)
        pooled = call is not None
        if self._mode < 0 or not (pooled or threading.get_ident() == self._main):
            if self._mode < 0 and threading.get_ident() == threading.main_thread().ident:
                self._inbox.count_waiting(1)
                try:
                    yield None
                finally:
                    if not self._inbox.inherited:
                        self._inbox.count_waiting(-1)
            else:
                yield None
            return
        text, work = call or (self._running(), STEPS)
        wait = Wait(self, work, ask, changes, text, lane_of(work), bounded=bounded)
        over = None
        if self._serve is not None and not pooled:
            wait.serve, over = self._serve()
        with self.lock:
            self._waits.append(wait)
        try:
            yield wait
        finally:
            with self.lock:
                self.end(wait)
            if over is not None:
                over()

    def noted_waits(self) -> list[Wait]:
        """Return the waits that may be part of a cycle. Call it with the lock."""
        waits = (*self._waits, *self.coroutines)
        return [wait for wait in waits if wait.blockers and not wait.bounded]

    def next_question(self) -> int:
        with self.lock:
            self._questions += 1
            return self._questions

    def update(self, wait: Wait, blockers: Blockers, requested: int) -> None:
        """Note that ``wait`` waits for ``blockers``, and has looked in vain since question ``requested``."""
        with self.lock:
            if blockers != wait.blockers:
                wait.blockers, wait.stamp = blockers, next(self._stamps)
            wait.answered = requested
            self._note()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Collect the changes made in the body, and note them when it ends."""
        with self.lock:
            self._at_once = True
            try:
                yield
            finally:
                self._at_once = False
                self._note()

    def end(self, wait: Wait) -> None:
        """Remove a wait. Call it with the lock."""
        for waits in (self._waits, self.coroutines):
            if wait in waits:
                waits.remove(wait)
                if wait.blockers:
                    self._note()

    def keeps(self, lane: int, work: int) -> bool:
        """Whether the waits of that lane keep that work from being done. Only with threads there is more
        than one."""
        return (self._mode != THREADS or lane_of(work) == lane) and bool(self._of(lane))

    def _of(self, lane: int) -> list[Wait]:
        """Return the waits that keep that lane from its work; none if there is a thread left."""
        if self._mode != THREADS:
            return self._waits[-1:]  # of waits inside each other only the innermost goes on
        waits = {wait.thread: wait for wait in self._waits if wait.lane == lane}
        return list(waits.values()) if len(waits) >= (self._threads if lane == CALLS else 1) else []

    def _note(self) -> None:
        """Note in the process table what keeps this process from its work."""
        if self._at_once:
            return
        rows = [(lane, self._mode, self._of(lane)) for lane in (STEPS, CALLS)]
        # A thread's call waits also while others could do others.
        alone = [wait for wait in self._waits if wait.work > CONCURRENCY] + self.coroutines
        rows += [(wait.work, wait.mode, [wait]) for wait in alone]
        noted: list[tuple[int, int, int, int, int, int, str]] = []
        for work, mode, waits in rows:
            texts: dict[tuple[int, int], str] = {}
            for wait in waits:
                for slot, of, text in wait.blockers:
                    texts.setdefault((slot, of), f"{wait.text} waits for {text}")
            known = all(wait.blockers for wait in waits)
            # One that is noted in part would tell of less than it takes to go on.
            if waits and known and len(noted) + len(texts) <= _core.WAIT_ROWS:
                stamp = max(wait.stamp for wait in waits)
                # Questions are counted from the process's start: far from where the count wraps.
                answered = max(min(wait.answered for wait in waits), 0)
                if any(wait.bounded for wait in waits):
                    mode = BOUNDED
                noted += [
                    (work, stamp, answered, mode, slot, of, text)
                    for (slot, of), text in texts.items()
                ]
        if noted != self.noted:
            if [_lasting(row) for row in noted] != [_lasting(row) for row in self.noted]:
                self.version += 1
            self._inbox.note_waits(noted)
            self.noted = noted


def _lasting(row: tuple[int, int, int, int, int, int, str]) -> tuple[int, int, int, int]:
    work, stamp, _, _, slot, target, _ = row
    return work, stamp, slot, target
