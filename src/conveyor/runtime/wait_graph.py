"""Works of actors, for which others wait, and who has to do them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

#: A work, by the slot of the process that has to do it.
Node: TypeAlias = "tuple[int, int]"


class Note(Struct, frozen=True):
    """Note of the waits that keep a work from being done."""

    stamp: int
    answered: int
    mode: int
    #: Works that are waited for (slot, work), each with its description.
    waits: Sequence[tuple[int, int, str]]


def path_back(
    notes: Mapping[Node, Note], start: Node, is_mine: Callable[[Node], bool]
) -> list[tuple[int, str]] | None:
    """Return the shortest way from ``start`` to a work of the process that asks: each process with a
    description of its wait."""
    paths: dict[Node, list[tuple[int, str]]] = {start: []}
    ahead = [start]
    for node in ahead:
        if is_mine(node):
            return paths[node]
        for slot, work, text in notes[node].waits:
            if (slot, work) not in paths:
                paths[slot, work] = [*paths[node], (node[0], text)]
                ahead.append((slot, work))
    return None


#: Works: whatever is a step of a graph or else the main thread's, whatever is a call. The last bit of any
#: work says which of these lanes does it.
STEPS, CALLS = 0, 1
#: The next one of those that run side by side, where the coroutines of calls are limited.
CONCURRENCY = 3


def steps_of(graph: int) -> int:
    """Return the work that stands for the steps of one graph."""
    return graph << 1 | STEPS


def call_of(slot: int, incarnation: int, number: int) -> int:
    """Return the work that stands for one call: the caller's slot in the process table, which of the
    processes there it is, and the number of the call on its link."""
    caller = (incarnation & 0xFFFF) << 16 | (slot & 0xFFFF)
    return ((number & 0x7FFFFFFF) << 32 | caller) << 1 | CALLS


def lane_of(work: int) -> int:
    return work & 1


#: How a work is run: one thing at a time; calls in threads; on an event loop, which is blocked; not yet;
#: beside others, as a coroutine or in a thread; when one of those has ended, of which there are as many as
#: there may be. Or how it is kept: by a wait that has a deadline, so no cycle of waits leads through it.
ONE, THREADS, LOOP, STARTING, CONCURRENT, FULL, BOUNDED = range(7)

#: Works that have to be done before a wait ends: (slot, work, description). Any of them may end it. Empty: it
#: is not known which, so it counts as nobody that waits.
Blockers: TypeAlias = "tuple[tuple[int, int, str], ...]"

#: Start of the description where the driver has to answer, which is said to do so by them.
FOR_THE_DRIVER = "the driver, "

#: Asks for the blockers of a wait. ``None``: the answer comes from another process, and the doorbell rings
#: when it is there. The number tells one question from the next: a later one has a greater number.
Ask: TypeAlias = "Callable[[int], Blockers | None]"
#: Is called, on any thread, when such an answer is there, or it is worth asking again: for who does not wait
#: for the doorbell.
Again: TypeAlias = "Callable[[], object]"


def any_of(found: Sequence[Blockers | None]) -> Blockers | None:
    """Merge the blockers of each of several things, for a wait that goes on once one of them has come."""
    known = [blockers for blockers in found if blockers is not None]
    if len(known) < len(found):
        return None
    return tuple(itertools.chain(*known)) if all(known) else ()


class _Look:
    """Look at the question of another process. It is an object, since a function that passes itself on
    refers to itself: only garbage collection would end what it asks about."""

    __slots__ = ("_ask", "_question", "_tell")

    def __init__(
        self,
        ask: Callable[[int, Again], Blockers | None],
        question: int,
        tell: Callable[[Blockers], object],
    ) -> None:
        self._ask, self._question, self._tell = ask, question, tell

    def __call__(self) -> None:
        blockers = self._ask(self._question, self)
        if blockers is not None:
            self._tell(blockers)


def tell_another(
    ask: Callable[[int, Again], Blockers | None], question: int, tell: Callable[[Blockers], object]
) -> None:
    """Answer the question of another process, whose wait this is one of. ``tell`` is called, now or later,
    on any thread."""
    _Look(ask, question, tell)()
