"""The lanes of an actor: the threads that run its methods, with what they wait for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from conveyor import _core
from conveyor.runtime.waiting.deadlock import Wait
from conveyor.runtime.waiting.reports import Reports
from conveyor.runtime.waiting.works import (
    BOUNDED,
    CALLS,
    PLACE,
    STEPS,
    THREADS,
    Ask,
    Blockers,
    lane_of,
)


class Serving(Protocol):
    """Work that the main thread does beside waiting."""

    def turn(self) -> object: ...

    def end(self) -> object:
        """End the work: the wait is over."""
        ...


class Lanes:
    """The lanes of this process, with what they wait for. The driver has none: nobody waits for it."""

    def __init__(self, inbox: _core.Inbox, board: _core.Board, slot: int) -> None:
        self.board = board
        self.slot = slot
        #: Held while notes are written, and from the last look at a cycle to the error.
        self.lock = threading.RLock()  # a signal handler may wait, too
        #: The waits of its coroutines that are noted (``waiting.awaits``).
        self.coroutines: list[Wait] = []
        #: Notes that are in the process table.
        self.noted: list[tuple[int, int, int, int, int, int, str]] = []
        #: Counts how often that has changed, but for the questions that are answered.
        self.version = 0
        #: Reports of the waits to the driver.
        self.reports = Reports(self, lambda: board.ring(slot, _core.ATTENTION_BIT))
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
        self._serving: Callable[[], Serving] | None = None

    def open(
        self,
        mode: int,
        threads: int,
        running: Callable[[], str],
        serving: Callable[[], Serving] | None = None,
    ) -> None:
        """Make this process an actor's, with the calling thread as its main one, which runs its loop.
        ``threads``: how many run its calls, with ``THREADS``. ``running()``: what its main thread runs.
        ``serving()``: what else the main thread does while a method there waits."""
        with self.lock:
            self._mode, self._threads, self._main = mode, threads, threading.get_ident()
            self._running, self._serving = running, serving
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

    def noted_waits(self) -> list[Wait]:
        """Return the waits that may be part of a cycle. Call it with the lock."""
        waits = (*self._waits, *self.coroutines)
        return [wait for wait in waits if wait.blockers and not wait.bounded]

    def next_question(self) -> int:
        with self.lock:
            self._questions += 1
            return self._questions

    def update(self, wait: Wait, blockers: Blockers, asked: int) -> None:
        """Note that ``wait`` waits for ``blockers``, and has looked in vain since question ``asked``."""
        with self.lock:
            if blockers != wait.blockers:
                wait.blockers, wait.stamp = blockers, next(self._stamps)
            wait.answered = asked
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
        works = [(lane, self._mode, self._of(lane)) for lane in (STEPS, CALLS)]
        # A thread's call waits also while others could do others.
        alone = [wait for wait in self._waits if wait.work > PLACE] + self.coroutines
        works += [(wait.work, wait.mode, [wait]) for wait in alone]
        noted: list[tuple[int, int, int, int, int, int, str]] = []
        for work, mode, waits in works:
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
