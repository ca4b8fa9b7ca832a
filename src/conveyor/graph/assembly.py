"""Assembly of a graph in the process that executes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from conveyor.config import Config
from conveyor.graph.compiled import CompiledGraph, GraphParts, OwnerControl
from conveyor.graph.entry import MOVED_REFS, OwnerEntry
from conveyor.graph.executor import Epoch, Executor
from conveyor.graph.handles import reducer_of
from conveyor.graph.lifecycle import GraphInfo, Lifecycle
from conveyor.graph.result_source import GraphSource
from conveyor.graph.results import DebugRef, GraphRef, Results
from conveyor.graph.submission import (
    Entry,
    FastPath,
    Options,
    SubmissionWaits,
    Submitter,
    reserved_inputs,
)
from conveyor.plan.model import Plan
from conveyor.weak import WeakSet

#: Called with the number of a graph before anything of it is deployed.
Begun: TypeAlias = Callable[[int], object]


def whole(executor: Executor, make: Callable[[Begun], CompiledGraph]) -> CompiledGraph:
    """Return the graph that ``make(begun)`` deploys and puts together. If it raises, nothing of the graph
    stays.

    A signal handler may raise, too, at any moment: nobody has the graph yet who would take it down. Dropping
    a graph twice does no harm.
    """
    numbers: list[int] = []
    try:
        return make(numbers.append)
    except BaseException:
        for number in numbers:
            executor.drop(number)
        raise


def compiled_graph(
    executor: Executor, plan: Plan, config: Config, graph_infos: WeakSet[GraphInfo]
) -> CompiledGraph:
    """Deploy the graph of ``plan``. Its ``GraphInfo`` is entered among ``graph_infos``."""
    return whole(executor, lambda begun: _compiled(executor, plan, config, graph_infos, begun))


def _compiled(
    executor: Executor,
    plan: Plan,
    config: Config,
    graph_infos: WeakSet[GraphInfo],
    begun: Begun,
) -> CompiledGraph:
    results = Results(plan, executor.keep)
    lifecycle = supervise(executor, plan, config, begun)
    graph_info = GraphInfo(lifecycle)
    source = GraphSource(graph_info, results, executor)
    entry = OwnerEntry(lifecycle, results, source, DebugRef if config.debug else GraphRef)
    graph_infos.add(graph_info)
    waits = SubmissionWaits(executor.process)
    return assemble(graph_info, entry, waits, fast_path=entry.fast_path)


def supervise(executor: Executor, plan: Plan, config: Config, begun: Begun) -> Lifecycle:
    """Deploy the graph of ``plan``, and return its lifecycle."""
    deployed = executor.deploy(plan, config, begun)
    number, process = deployed.number, executor.process
    name = config.name or f"graph {number}"
    make_epoch = functools.partial(Epoch, plan, config, name, process, MOVED_REFS)
    first = make_epoch(deployed, 0)
    process.limit_spin(number, config.spin_us)
    # From here on the graph is taken down when it is garbage.
    return Lifecycle(executor, plan, config, number, name, make_epoch, first)


def assemble(
    graph_info: GraphInfo,
    entry: Entry[Any],
    waits: SubmissionWaits,
    how: str = "",
    fast_path: FastPath | None = None,
) -> CompiledGraph:
    """Put the graph together from these parts. how: the way its actors run, if they are no processes.
    fast_path: see ``Submitter``."""
    plan, config = graph_info.plan, graph_info.config
    options = Options(reserved_inputs(plan), config.submit_timeout, config.deadline)
    return CompiledGraph(
        GraphParts(
            graph_info.number,
            graph_info.name,
            Submitter(graph_info.name, entry, waits, options, fast_path),
            OwnerControl(graph_info, how),
            reducer_of(plan, graph_info),
        )
    )
