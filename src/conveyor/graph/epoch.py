"""The executor's ends of a graph's channels, from one deployment to the next."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable

from conveyor import _core
from conveyor.config import Config
from conveyor.exceptions import ConveyorError, SerializationError
from conveyor.graph.edges.layout import make_budget
from conveyor.graph.executor import Laid
from conveyor.graph.telemetry.recording import Recording, result_edges
from conveyor.plan.model import Plan
from conveyor.plan.reading import Outline
from conveyor.refs.items import Items
from conveyor.refs.ref import Ref
from conveyor.refs.streams import GraphStream, StreamRef
from conveyor.runtime.process import Process
from conveyor.runtime.waiting.works import Blockers, steps_of

logger = logging.getLogger("conveyor")


class Epoch:
    """Deployment of a graph: all of its state that a restart replaces."""

    def __init__(
        self,
        plan: Plan,
        config: Config,
        name: str,
        process: Process,
        moved_refs: int,
        laid: Laid,
        first: int,
    ) -> None:
        """Open the executor's ends. Raises the death of an actor that has died since the deployment.

        name: the graph's. moved_refs: see ``Writer.moved_refs``. first: the number of the first execution.
        """
        self._name = name
        self.members = laid.members
        channels = laid.channels
        self.bits = channels.bits
        self.segment = laid.segment
        self.offsets = channels.offsets
        self.hosts = channels.hosts
        self.first = first
        self.budget = budget = make_budget(config.memory_bytes)
        try:
            writers = {
                end.edge: end.open(
                    process,
                    laid.segment,
                    laid.number,
                    name,
                    plan.edges[end.edge].source,
                    budget=budget,
                )
                for end in channels.writes
            }
            readers = {
                end.edge: end.open(process, laid.segment, name, plan.edges[end.edge].source)
                for end in channels.reads
            }
            failures = channels.failures.open(process, laid.segment, name)
        except ConveyorError:
            for member in laid.members:
                if not member.alive:  # just now
                    raise member.death() from None
            raise
        for writer in writers.values():
            writer.moved_refs = moved_refs
        self.limits = channels.limits.open(laid.segment)
        self.recording = Recording(plan, name, channels.recorders, laid.segment)
        laid.segment.close_fd()
        task_of = {
            edge: task for program in plan.programs for task, edge in Outline(program).streams
        }
        self._items = {
            ended: Items(readers[edge], process, first, self.limits, task_of[edge])
            for ended, edge in plan.streams
        }
        #: For each output that is a generator's: the function that makes the reference to its items.
        self.streams: dict[int, Callable[[Ref, tuple[Ref, ...]], StreamRef]] = {
            ended: functools.partial(GraphStream, items) for ended, items in self._items.items()
        }
        self.gate = _core.Gate(
            [writers[bundle.edge] for bundle in plan.inputs],
            [readers[edge] for edge in result_edges(plan)],
            plan.depth,
            _core.KIND_VALUE,
            process.inbox,
            first,
        )
        self.gate.deaths = 0  # a submission after a death looks first whose it was
        self.gate.set_limits(self.limits)
        # Only the reader of a stream's items waits for its end.
        ended = {edge for edge, _ in plan.streams}
        siblings = [i for i, edge in enumerate(result_edges(plan)) if edge not in ended]
        self.gate.set_failures(failures, config.fail_fast, siblings)
        self.recording.watch(self.gate)
        self._process = process
        self._number = laid.number
        process.sweeper.start()
        process.reads(self)

    def under_way(self) -> Blockers:
        if self.gate.submitted == self.gate.completed or not all(m.alive for m in self.members):
            return ()
        text = f"executions of {self._name}, which hold memory that is needed"
        return tuple((member.slot, steps_of(self._number), text) for member in self.members)

    def leave(self) -> None:
        """Keep the results that have come, for those who still ask, and take no more: later ones are given
        back to their writers."""
        try:
            with contextlib.ExitStack() as each:
                for items in self._items.values():
                    each.callback(items.close)
                self.gate.leave()
        except SerializationError as error:
            # A broken ring gives nothing more. The others have been emptied, and all are closed.
            logger.warning("%s: %s", self._name, str(error))
        self._process.sources.look()
