"""The graphs of a session without other processes: laid, put together, taken down."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

from conveyor.config import Config
from conveyor.engine.inline.account import InlineAccount
from conveyor.engine.inline.entry import InlineEntry, InlineWays
from conveyor.engine.inline.graph import InlineGraph, InlineHost
from conveyor.plan.model import Plan
from conveyor.runtime.graph.assembly import Begun, assemble, supervise, whole
from conveyor.runtime.graph.compiled import CompiledGraph
from conveyor.runtime.graph.executor import Laid, Member
from conveyor.runtime.graph.handles.sharing import SharedGraphs
from conveyor.runtime.graph.origins import Origins
from conveyor.runtime.graph.results import Results
from conveyor.runtime.graph.submission.source import GraphSource
from conveyor.runtime.graph.telemetry.afar import Afar, Question
from conveyor.runtime.protocol import ActorId
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.waiting.patience import Patience
from conveyor.weak import WeakSet


class Session(InlineHost, Protocol):
    """The session, as it is needed here."""

    def kill(self, actor: ActorId) -> None:
        """Kill ``actor`` at once."""
        ...

    def keep(self, value: Any) -> Ref:
        """A reference to ``value`` as it is now."""
        ...

    def origins(self) -> Origins:
        """Where results were got; of graphs in debug mode."""
        ...


class Layer:
    """Lays graphs as their executor: see ``runtime.graph.executor.Executor``."""

    def __init__(self, session: Session) -> None:
        self.process = session.process
        self.kill = session.kill
        self.keep = session.keep
        self.origins = session.origins
        #: Of all graphs that somebody holds.
        self.accounts: WeakSet[InlineAccount] = WeakSet()
        self.shared = SharedGraphs(self.accounts)
        self._session = session
        self._numbers = itertools.count(1)
        self._graphs: dict[int, InlineGraph] = {}

    def compile(self, plan: Plan, config: Config) -> CompiledGraph:
        """Lay the graph of ``plan``."""
        return whole(self, lambda begun: self._compiled(plan, config, begun))

    def _compiled(self, plan: Plan, config: Config, begun: Begun) -> CompiledGraph:
        results = Results(plan, self.keep)
        supervision = supervise(self, plan, config, begun)
        graph = self._graphs[supervision.number]
        account = InlineAccount(graph, supervision)
        entry = InlineEntry(graph, supervision, results, GraphSource(account, results, self))
        self.accounts.add(account)
        return assemble(account, entry, InlineWays(self.process), account.upkeep, "inline")

    def lay(self, plan: Plan, config: Config, begun: Begun) -> Laid:
        number = next(self._numbers)
        begun(number)
        graph = InlineGraph(self._session, plan, config, number)
        laid = graph.lay()
        self._graphs[graph.number] = graph
        return laid

    def lay_again(self, number: int, first: int, patience: Patience) -> Laid:
        return self._graphs[number].lay_again(first)

    def comes_back(self, number: int) -> bool:
        return self._graphs[number].comes_back()

    def end_unmade(self, number: int) -> None:
        self._graphs[number].end_unmade()

    def unlay(self, number: int) -> list[tuple[Member, Ref]]:
        self.process.limit_spin(number, None)
        self.shared.forget(number)
        graph = self._graphs.pop(number, None)
        if graph is not None:
            graph.unload()
        return []

    def drop(self, number: int) -> None:
        # At once: nothing of it runs, or somebody would hold it. A forked child has no part in it.
        if not self.process.inbox.inherited:
            self.unlay(number)

    def afar(self, number: int, question: Question, patience: float) -> Afar:
        return Afar()  # there is one host

    def afar_later(self, number: int, then: Callable[[Afar | Exception], object]) -> None:
        then(Afar())

    def label(self, graph: int, node: int) -> None:
        """A graph knows its own tasks, and no actor tells of others'."""

    def close(self) -> None:
        """The session has ended."""
        self.shared.clear()
        for number in list(self._graphs):
            self.unlay(number)
