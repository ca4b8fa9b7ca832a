"""Who holds up executions of a graph whose actors are on several hosts.

How far an actor has come is known on its own host: there its cursors and heads are what they are, and of what
others have sent it what has arrived. So each actor is looked at as its host knows it; and where a frame is on
its way between two of them, nobody holds anything up.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from conveyor import _core
from conveyor.plan.model import EXECUTOR
from conveyor.runtime.graph.epoch import Epoch
from conveyor.runtime.graph.executor import Executor
from conveyor.runtime.graph.status import RingProgress, replace_rings
from conveyor.runtime.graph.telemetry.afar import Afar
from conveyor.runtime.waiting.reports import OLD
from conveyor.runtime.waiting.works import Again

#: (actor, what it is about to make, of which execution)
Holder = tuple[int, str, int]


def holder_among(
    progress: RingProgress, afar: Afar, own: str, hosts: dict[int, str], number: int, edge: int
) -> Holder | None:
    """Who has to do something before ``edge`` is published for that execution; ``None``: nobody, or it is
    not known. ``progress``: as the host of that name knows it; ``hosts``: of all actors."""
    for _ in progress.plan.edges:  # a chain is no longer
        writer = progress.plan.edges[edge].writer
        if writer == EXECUTOR:
            return None
        if hosts.get(writer, own) != own and writer not in afar.rings:
            return None
        there = replace_rings(progress, afar.rings.get(writer))
        if there.rings[edge][0] > number - progress.first:
            return None  # it is on its way
        at, wait = there.at(writer)
        if wait is None:
            return writer, progress.plan.edges[edge].source, at
        edge, number = wait.edge, wait.execution
    return None


class HoldUps:
    """What holds up executions of one graph, for the waits of the process that executes it, and of those
    that ask it."""

    def __init__(self, executor: Executor, number: int) -> None:
        self._executor = executor
        self._number = number
        # Any thread may ask; reentrant, since a signal handler may, too. It guards all that follows.
        self._lock = threading.RLock()
        # The last question that somebody has, with the epoch, and the one for which hosts are asked just now.
        self._wanted: tuple[int, Epoch] | None = None
        self._under_way: tuple[int, Epoch] | None = None
        # The last question for which they have answered, what they said, and of which epoch.
        self._answered = -1
        self._epoch: Epoch | None = None
        self._afar: Afar | None = None
        # When somebody has first asked about an execution.
        self._since: dict[int, float] = {}
        # Who is told of answers, with the question.
        self._told: list[tuple[int, Again]] = []

    def holder(
        self,
        epoch: Epoch,
        progress: RingProgress,
        number: int,
        edges: Sequence[int],
        question: int,
        again: Again | None = None,
    ) -> tuple[Holder | None, bool]:
        """Who holds up execution ``number``, and whether that is known already; else ``again`` is called. A
        young execution is held up by nobody: hosts are not asked for what will be over soon."""
        edge = next((e for e in edges if progress.rings[e][0] <= number - progress.first), None)
        if edge is None or not self._is_old(number, epoch):
            return None, True
        with self._lock:
            known = self._answered >= question and self._epoch is epoch
            afar = self._afar
            if not known:
                self._want(question, epoch)
                if again is not None:
                    self._told.append((question, again))
        if not known:
            self._ask()
            return None, False
        if afar is None:
            return None, True
        own = epoch.hosts[EXECUTOR]
        return holder_among(progress, afar, own, dict(epoch.hosts), number, edge), True

    def _is_old(self, number: int, epoch: Epoch) -> bool:
        now = _core.monotonic()
        with self._lock:
            if number not in self._since:
                completed = epoch.gate.completed
                self._since = {n: at for n, at in self._since.items() if n >= completed}
            return now - self._since.setdefault(number, now) >= OLD

    def _want(self, question: int, epoch: Epoch) -> None:
        """Have hosts asked after this. One look serves all who want one by then. With the lock."""
        for begun in (self._under_way, self._wanted):
            if begun is not None and begun[0] >= question and begun[1] is epoch:
                return
        self._wanted = question, epoch

    def _ask(self) -> None:
        """Begin the look that is wanted, if none is under way: its end begins the next one then."""
        with self._lock:
            if self._wanted is None or self._under_way is not None:
                return
            self._under_way, self._wanted = self._wanted, None
        try:
            self._executor.afar_later(self._number, self._looked)
        except Exception as error:  # the session ends, or the system refuses a thread
            self._looked(error)

    def _looked(self, afar: Afar | Exception) -> None:
        with self._lock:
            assert self._under_way is not None
            question, self._epoch = self._under_way
            self._under_way = None
            self._answered = max(question, self._answered)
            self._afar = afar if isinstance(afar, Afar) else None
            told = [again for of, again in self._told if of <= question]
            self._told = [(of, again) for of, again in self._told if of > question]
        for again in told:
            again()
        self._executor.process.ring()
        self._ask()
