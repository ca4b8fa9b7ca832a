"""What a round shares with the run, and what it knows of its graphs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from chaos_actors import Clock, Exits
from chaos_elsewhere import Elsewhere
from chaos_faults import Fault
from chaos_graphs import Expected, Graph
from chaos_pool import Pool
from chaos_tally import Tally
from chaos_values import arrays, bulk, digest
from chaos_watch import DeathTimes, Hand, Hiccups, Watchdog

#: ms after a fault until which whoever waits must know.
REPORT_WITHIN = 100.0
#: s for what must happen soon and is nobody's wait (an actor's process goes, say).
SOON = 20.0


class Wrong(AssertionError):
    """Something that must not happen has happened."""


@dataclass
class Around:
    """What a round needs of the run."""

    pool: Pool
    clock: Clock
    hand: Hand
    hiccups: Hiccups
    deaths: DeathTimes
    watchdog: Watchdog
    tally: Tally
    holdings: Holdings
    elsewhere: Elsewhere
    exits: Exits
    #: Ours that this machine can run; none where torch is missing.
    transports: tuple[str, ...] = ()


class Holdings:
    """Results that are kept over rounds, and must not change."""

    CAP = 96 << 20

    def __init__(self) -> None:
        self._held: deque[tuple[Any, int, int, str]] = deque()
        self._bytes = 0

    def keep(self, value: Any, checksum: int, where: str) -> None:
        size = bulk(value)
        self._held.append((value, checksum, size, where))
        self._bytes += size

    def some_arrays(self) -> list[tuple[object, int]]:
        """With their checksums: for children that inherit them."""
        newest = list(self._held)[-20:]
        return [(a, digest(a)) for value, *_ in newest for a in arrays(value)]

    def let_go(self, rng: Random, everything: bool = False) -> None:
        """Check some of them, and let them go."""
        count = len(self._held) if everything else rng.randrange(len(self._held) + 1) // 2
        while self._held and (count > 0 or self._bytes > self.CAP):
            value, checksum, size, where = self._held.popleft()
            self._bytes -= size
            count -= 1
            if digest(value) != checksum:
                raise Wrong(f"a value that was held has changed: {where}")


@dataclass
class Failure:
    """An execution that has failed as one. ``first``: with what."""

    first: Fault
    refs: list[Any] | None = None


@dataclass
class Running:
    """A compiled graph of a round."""

    index: int
    spec: Graph
    graph: Any
    expected: list[list[Expected]]
    #: ``expected`` is what each result must be. Not exact: what it is if nothing fails in its
    #: execution, which fails as one.
    exact: bool = True
    #: Whether each execution fails as one.
    fail_fast: bool = True
    next: int = 0
    cancelled: set[int] = field(default_factory=set)
    #: Those that have a deadline.
    limited: set[int] = field(default_factory=set)
    #: Whether some execution was dropped before its end, so that nobody can tell what it came to.
    dropped: bool = False
    #: Of each execution that has failed the first fault, and its refs, if they are still there.
    failures: dict[int, Failure] = field(default_factory=dict)
    #: How many items of a stream (execution, place) have been taken; None: nobody knows.
    taken: dict[tuple[int, int], int | None] = field(default_factory=dict)
    #: After each restart the first execution, and the first fault that can have had to do with it.
    epochs: list[tuple[int, int]] = field(default_factory=list)
    interrupted: bool = False  # in ``execute``: more may have been begun than is known
    died: bool = False  # somebody was told
    #: Places of streams of which one ended with a death. Its generator may not have run, so which run
    #: those that come after it are is not known.
    uncounted: set[int] = field(default_factory=set)
    torn: bool = False
    pending: dict[int, list[Any]] = field(default_factory=dict)
