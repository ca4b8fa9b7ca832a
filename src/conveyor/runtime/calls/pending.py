"""Calls that wait in their caller's process."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import TypeAlias

from conveyor.callers import Site
from conveyor.runtime.calls.arguments import Taken, lacked
from conveyor.runtime.calls.call import START, Call
from conveyor.runtime.refs.ref import Ref, Source

_orders = itertools.count()


class CallRef(Ref):
    """The result of an actor call."""

    __slots__ = ("method", "order", "passes_on")

    #: The place of one that waits at its caller, among all that do.
    order: int
    #: Whether its arguments have come by refs: it takes their place (``_core.Arena.note_given``).
    passes_on: bool

    def __init__(self, source: Source, number: int, method: str) -> None:
        super().__init__(source, number)
        self.method = method

    @classmethod
    def waiting(cls, source: Source, method: str) -> CallRef:
        """Return that of a call that waits at its caller."""
        ref = cls(source, -1, method)
        ref.order = next(_orders)
        ref.passes_on = False
        return ref


#: One call, with the arguments that were taken when it was made; and the line that has made it, as long as
#: refs among its arguments stand for their values.
Entry: TypeAlias = "tuple[CallRef, Call, Taken | None, Site | None]"


class Waiting(deque[Entry]):
    """The calls of one link, in the order in which they are to be sent."""

    #: So many at the front come before all that are called from now on.
    _first = 0

    def put(self, entry: Entry, again: bool) -> None:
        """``again``: it is made again, and comes before all that wait, but for others of its kind and the
        actor's constructor. Some of what waits may lack just that call's result."""
        if not again:
            self.append(entry)
            return
        if not self._first and self and self[0][1][4] == START:
            self._first = 1
        self.insert(self._first, entry)
        self._first += 1

    def take_out(self, place: int) -> None:
        """The call in that place waits no more."""
        del self[place]
        self._first -= place < self._first


def place_of(waiting: Waiting, ref: Ref) -> int | None:
    """Where the call of ``ref`` waits."""
    # By identity: arguments need not be comparable.
    return next((i for i, (r, *_) in enumerate(waiting) if r is ref), None)


def first_lacked(waiting: Waiting) -> Ref | None:
    """What the first call that waits lacks, if it is an argument."""
    _, call, _, site = waiting[0] if waiting else (None, None, None, None)
    return lacked(call) if call is not None and site is not None else None


def lacked_now(waiting: Waiting, lock: threading.RLock) -> Ref | None:
    """The same, without waiting for ``lock``: whoever has it may wait himself. ``None`` then."""
    if not lock.acquire(blocking=False):
        return None
    try:
        return first_lacked(waiting)
    finally:
        lock.release()


def withdraw(waiting: Waiting, ref: Ref) -> bool:
    """Whether the call of ``ref`` was waiting, and does no longer."""
    place = place_of(waiting, ref)
    if place is not None:
        waiting.take_out(place)
    return place is not None
