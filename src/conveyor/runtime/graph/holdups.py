"""Who holds up executions of a graph whose actors are on several hosts.

How far an actor has come is known on its own host: there its cursors and heads are what they are, and of what
others have sent it what has arrived. So each actor is looked at as its host knows it; and where a frame is on
its way between two of them, nobody holds anything up.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from conveyor.plan.model import EXECUTOR
from conveyor.runtime.graph.afar import Afar
from conveyor.runtime.graph.epoch import Epoch
from conveyor.runtime.graph.executor import Executor
from conveyor.runtime.graph.status import RingProgress, replace_rings
from conveyor.runtime.waiting.reports import OLD

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
    """Those of one graph, for the waits of the process that executes it."""

    def __init__(self, executor: Executor, number: int) -> None:
        self._executor = executor
        self._number = number
        # When somebody has first asked about an execution.
        self._since: dict[int, float] = {}
        # The last questions for which hosts were asked, and have answered; what they said, of which epoch.
        self._asked = self._answered = -1
        self._epoch: Epoch | None = None
        self._afar: Afar | None = None

    def holder(
        self, epoch: Epoch, progress: RingProgress, number: int, edges: Sequence[int], question: int
    ) -> tuple[Holder | None, bool]:
        """Who holds up execution ``number``, and whether that is known already. A young one is held up by
        nobody: hosts are not asked for what will be over soon."""
        edge = next((e for e in edges if progress.rings[e][0] <= number - progress.first), None)
        if edge is None or question < 0 or not self._is_old(number, epoch):
            return None, True
        if self._answered < question or self._epoch is not epoch:
            if self._asked < question:
                self._ask(question, epoch)
            return None, False
        if self._afar is None:
            return None, True
        own = epoch.hosts[EXECUTOR]
        return holder_among(progress, self._afar, own, dict(epoch.hosts), number, edge), True

    def _is_old(self, number: int, epoch: Epoch) -> bool:
        now = monotonic()
        if number not in self._since:
            completed = epoch.gate.completed
            self._since = {n: at for n, at in list(self._since.items()) if n >= completed}
        return now - self._since.setdefault(number, now) >= OLD

    def _ask(self, question: int, epoch: Epoch) -> None:
        self._asked = question
        process = self._executor.process

        def answered(afar: Afar | Exception) -> None:
            if question > self._answered:
                self._afar = afar if isinstance(afar, Afar) else None
                self._epoch, self._answered = epoch, question
            process.ring()

        try:
            self._executor.afar_later(self._number, answered)
        except Exception as error:  # the session ends, or the system refuses a thread
            answered(error)
