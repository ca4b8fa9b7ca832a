"""Views of a graph. Drawing and statistics are in ``conveyor.observe``, which is imported for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import conveyor
from conveyor.config import Config
from conveyor.graph.parts import Account
from conveyor.graph.status import GraphStatus
from conveyor.plan import explain
from conveyor.plan.explain import counted
from conveyor.plan.model import Plan


class View(Protocol):
    """Shows a graph; see the methods of the same names of ``CompiledGraph``."""

    @property
    def plan(self) -> Plan: ...

    @property
    def config(self) -> Config: ...

    def describe(self) -> str:
        """Return the graph's kind, size and state, for ``repr``. Asks no other process."""
        ...

    def explain(self) -> str: ...

    def draw(self, *args: Any) -> str:
        """Draw the graph, with the arguments of ``visualize``."""
        ...

    def status(self, stacks: bool = False) -> GraphStatus: ...

    def stats(self) -> conveyor.observe.GraphStats: ...

    def trace(self, path: str | os.PathLike[str], max_events: int) -> conveyor.observe.Trace: ...

    def simulate(self, durations: Any, options: dict[str, Any]) -> conveyor.observe.Simulation: ...

    def html(self, title: str) -> str:
        """Return the HTML that a notebook shows under ``title``."""
        ...


class GraphView:
    """Shows a graph that this process executes."""

    def __init__(self, account: Account, how: str = "") -> None:
        """``how``: how the actors run, if they are no processes."""
        self._account = account
        self._how = f", {how}" if how else ""

    @property
    def plan(self) -> Plan:
        return self._account.plan

    @property
    def config(self) -> Config:
        return self._account.config

    def describe(self) -> str:
        plan = self.plan
        size = f"{counted(len(plan.tasks), 'task')} on {counted(len(plan.actors), 'actor')}"
        return f"{size}{self._how}, {self._account.state}"

    def explain(self) -> str:
        return explain(self.plan, self._account.name, self._account.hosts)

    def draw(self, *args: Any) -> str:
        visualize: Callable[..., str] = conveyor.observe.visualize
        return visualize(self.plan, *args, self._account.name)

    def status(self, stacks: bool = False) -> GraphStatus:
        return self._account.status(stacks)

    def stats(self) -> conveyor.observe.GraphStats:
        return conveyor.observe.read_stats(self._account)

    def trace(self, path: str | os.PathLike[str], max_events: int) -> conveyor.observe.Trace:
        return conveyor.observe.Trace(self._account, path, max_events)

    def simulate(self, durations: Any, options: dict[str, Any]) -> conveyor.observe.Simulation:
        return conveyor.observe.simulate_graph(self._account, durations, **options)

    def html(self, title: str) -> str:
        return conveyor.observe.graph_html(self._account, title)
