"""The graphs of a session as the driver has laid them, for itself and for actors that execute graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from conveyor.config import Config
from conveyor.exceptions import GraphTornDownError
from conveyor.plan.model import Plan
from conveyor.runtime import threads
from conveyor.runtime.chores import Chores
from conveyor.runtime.driver.graphs.laying import Laying
from conveyor.runtime.driver.graphs.roster import Roster
from conveyor.runtime.driver.network.network import Network
from conveyor.runtime.driver.processes.record import ActorRecord
from conveyor.runtime.driver.processes.supervisor import Supervisor
from conveyor.runtime.driver.processes.table import Table
from conveyor.runtime.graph.edges.layout import Tasks
from conveyor.runtime.graph.executor import Member
from conveyor.runtime.graph.telemetry.afar import PATIENCE, Afar, Question
from conveyor.runtime.process import Place, Process
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.uninterrupted import uninterrupted
from conveyor.runtime.waiting.patience import Patience


class Layer:
    """Lays graphs and takes them down. Each has a number in the session."""

    def __init__(
        self,
        process: Process,
        table: Table,
        supervisor: Supervisor,
        network: Network,
        chores: Chores,
    ) -> None:
        self._process = process
        self._table = table
        self._supervisor = supervisor
        self._network = network
        self._chores = chores
        self._numbers = itertools.count(1)
        self._layings: dict[int, Laying] = {}
        self._roster = Roster()

    def __len__(self) -> int:
        return len(self._layings)

    def lay(
        self,
        executor: Place,
        config: Config,
        plan: Plan,
        tasks: Sequence[Tasks],
        labels: Mapping[int, str],
        begun: Callable[[int], object] | None = None,
    ) -> Laying:
        """Lay a graph that the process at ``executor`` will execute. ``begun(number)`` is called first, for
        whoever may be interrupted before he has what this returns."""
        self._table.check_open()
        self._chores.do()
        number = next(self._numbers)
        if begun is not None:
            begun(number)
        laying = Laying(
            self._supervisor,
            self._table,
            self._network,
            self._chores,
            number,
            config,
            plan,
            tasks,
            labels,
            executor,
        )
        try:
            laying.begin()
            self._layings[number] = laying
            self._roster.note(number, laying.name, labels)
        except BaseException:
            self._layings.pop(number, None)
            self._roster.forget(number)
            uninterrupted(laying.unload)
            raise
        return laying

    def lay_again(self, number: int, first: int, patience: Patience) -> Laying:
        """Bring dead actors of graph ``number`` back, as long as ``patience`` lasts, and lay it anew, for
        executions from ``first`` on."""
        laying = self._layings.get(number)
        if laying is None:
            raise GraphTornDownError(f"graph {number} has been torn down")
        laying.again(first, patience)
        return laying

    def comes_back(self, number: int) -> bool:
        """Whether the dead actors of graph ``number`` are started again without being asked."""
        laying = self._layings.get(number)
        return laying is not None and laying.comes_back()

    def end_unmade(self, number: int) -> None:
        """End the actors of graph ``number`` whose constructor has raised."""
        laying = self._layings.get(number)
        for record in () if laying is None else laying.records:
            self._supervisor.end_unmade(record)

    def afar(self, number: int, question: Question, patience: float) -> Afar:
        """What other hosts than the executor's say of their actors of graph ``number``."""
        laying = self._layings.get(number)
        if laying is None:
            return Afar(why="the graph has been torn down")
        return laying.afar(question, 0 if self._table.on_hosts_thread() else patience)

    def afar_later(self, number: int, then: Callable[[Afar | Exception], object]) -> None:
        """The same, told to ``then`` on a thread of its own, as is what keeps others from saying it."""
        threads.start(self._look_afar, "looks", number, then)

    def _look_afar(self, number: int, then: Callable[[Afar | Exception], object]) -> None:
        try:
            found = self.afar(number, Question(), PATIENCE)
        except Exception as error:
            then(error)
        else:
            then(found)

    def unlay(self, number: int) -> list[tuple[Member, Ref]]:
        """Take graph ``number`` down; the acknowledgements that are still to come."""
        self._process.limit_spin(number, None)
        laying = self._layings.get(number)
        if laying is None:
            return []
        try:
            acks = laying.unload()
        except BaseException:
            uninterrupted(laying.unload)  # what is left of it
            raise
        self._roster.forget(number)
        self._layings.pop(number, None)  # last: whoever is interrupted before does it again
        return [*acks]

    def drop(self, number: int) -> None:
        """Have graph ``number`` taken down soon. Takes no lock."""
        self._chores.soon(lambda: self.unlay(number))

    def executor_ended(self, record: ActorRecord) -> None:
        """A process has ended, and with it the graphs that it has executed."""
        for number, laying in list(self._layings.items()):
            if laying.executor.slot == record.slot:
                self.drop(number)

    def label(self, graph: int, node: int) -> str | None:
        """What a graph's node is called, also while the graph is being laid."""
        laying = self._layings.get(graph)
        return None if laying is None else laying.labels.get(node)

    def clear(self) -> None:
        """The session is over."""
        self._layings.clear()
        self._roster.close()
