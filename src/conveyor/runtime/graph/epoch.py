"""The executing process's ends of a graph's channels, from one laying to the next."""

from __future__ import annotations

import functools
from collections.abc import Callable

from conveyor import _core
from conveyor.config import Config
from conveyor.exceptions import ConveyorError
from conveyor.plan.model import Plan
from conveyor.runtime.graph.hosting import Laid
from conveyor.runtime.graph.layout import make_budget
from conveyor.runtime.graph.recording import Recording, result_edges
from conveyor.runtime.process import Process
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.refs.streams import GraphStream, Items, StreamRef


class Epoch:
    """Everything that is new when a graph is restarted. ``first``: the number of its first execution."""

    def __init__(
        self,
        plan: Plan,
        config: Config,
        name: str,
        laid: Laid,
        process: Process,
        first: int,
        moved_refs: int,
    ) -> None:
        """Raises why an actor has died that has done so since it was laid."""
        self.members = laid.members
        self.bits = laid.bits
        self.segment = laid.segment
        self.offsets = laid.offsets
        self.first = first
        self.deaths_seen = -1  # the board's count when all members were seen alive
        self.sets = laid.limits.sets
        budget = make_budget(config.memory_bytes)
        try:
            writers = {
                end.edge: end.open(
                    process,
                    laid.segment,
                    laid.number,
                    name,
                    plan.edges[end.edge].source,
                    arguments=True,
                    budget=budget,
                )
                for end in laid.writes
            }
            readers = {end.edge: end.open(process, laid.segment) for end in laid.reads}
        except ConveyorError:
            for member in laid.members:
                if not member.alive:  # just now
                    raise member.death() from None
            raise
        for writer in writers.values():
            writer.moved_refs = moved_refs
        self.limits = laid.limits.open(laid.segment)
        self.recording = Recording(plan, laid.recorders, laid.segment)
        laid.segment.close_fd()
        #: For each output that is a generator's: what makes the reference to its items.
        self.streams: dict[int, Callable[[Ref, tuple[Ref, ...]], StreamRef]] = {
            ended: functools.partial(GraphStream, Items(readers[items], process, first))
            for ended, items in plan.streams
        }
        self.gate = _core.Gate(
            [writers[bundle.edge] for bundle in plan.inputs],
            [readers[edge] for edge in result_edges(plan)],
            plan.depth,
            _core.KIND_VALUE,
            process.inbox,
            first,
        )
        self.gate.set_limits(self.limits)
        self.recording.watch(self.gate)
