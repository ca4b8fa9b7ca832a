"""Putting a graph in the driver's process together."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

from conveyor.config import Config
from conveyor.engine.inline.account import InlineAccount
from conveyor.engine.inline.entry import InlineEntry, InlineWays
from conveyor.engine.inline.graph import InlineGraph, InlineHost
from conveyor.engine.inline.source import InlineSource
from conveyor.engine.inline.streams import InlineStream, Production
from conveyor.plan.model import Plan
from conveyor.runtime.graph.arguments import Options, reserved_inputs
from conveyor.runtime.graph.compiled import CompiledGraph, GraphParts
from conveyor.runtime.graph.results import Results
from conveyor.runtime.graph.sharing import reducer_of
from conveyor.runtime.graph.submitter import Submitter
from conveyor.runtime.graph.views import GraphView
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.refs.streams import StreamRef


def inline_graph(
    host: InlineHost,
    plan: Plan,
    config: Config,
    accounts: weakref.WeakSet[InlineAccount],
    on_close: Callable[[int], None],
) -> CompiledGraph:
    """The graph of ``plan``. Its account is entered among ``accounts``."""
    graph = InlineGraph(host, plan, config, on_close)
    results = Results(plan, host.keep)
    streams = {
        ended: functools.partial(_stream, graph.productions, items) for ended, items in plan.streams
    }
    account = InlineAccount(graph, host.process)
    entry = InlineEntry(graph, results, InlineSource(account, results), streams)
    # A timeout of the settings has no effect, like any other.
    options = Options(reserved_inputs(plan), None, config.deadline)
    submitter = Submitter(graph.name, entry, InlineWays(), options)
    accounts.add(account)
    view, reduce = GraphView(account, "inline"), reducer_of(plan, account)
    return CompiledGraph(GraphParts(graph.number, graph.name, submitter, graph, view, reduce))


def _stream(
    productions: dict[tuple[int, int], Production],
    edge: int,
    ended: Ref,
    effects: tuple[Ref, ...],
) -> StreamRef:
    return InlineStream(productions.pop((ended._number, edge), None), ended, effects)
