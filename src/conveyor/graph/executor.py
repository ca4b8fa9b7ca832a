"""The process that executes a graph over processes, driver or actor, and its ends of the graph's channels."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from conveyor import _core
from conveyor.config import Config
from conveyor.exceptions import ActorDiedError, ConveyorError, GraphError, SerializationError
from conveyor.graph.edges import Layout, LimitsLayout, ReadEnd, WriteEnd, make_budget
from conveyor.graph.failures import FailureRings
from conveyor.graph.telemetry import Question, RecorderLayout, Recording, RemoteStatus, result_edges
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.plan.reading import Outline
from conveyor.refs.ref import Ref
from conveyor.refs.streams import GraphStream, StreamReader, StreamRef
from conveyor.runtime.process import Process
from conveyor.runtime.protocol import ActorId
from conveyor.runtime.wait_graph import Blockers, steps_of
from conveyor.runtime.waiting import TimeLimit

if TYPE_CHECKING:
    from conveyor.graph.results import Origins


class GraphWorker(Protocol):
    """An actor of a graph, as the graph's executor sees it."""

    @property
    def id(self) -> ActorId: ...

    @property
    def pid(self) -> int: ...

    @property
    def incarnation(self) -> int:
        """Incarnation of its process: which of the processes that have had this slot it is."""
        ...

    @property
    def slot(self) -> int:
        """Slot of its process in the process table."""
        ...

    @property
    def death_number(self) -> int:
        """Number of its death in the session; 0: it lives, or the death is not known yet."""
        ...

    @property
    def alive(self) -> bool: ...

    def death(self, label: Callable[[int, int], str | None] | None = None) -> ActorDiedError:
        """Return the error for users of this actor. ``label`` names a (graph, node)."""
        ...


class GraphWorkerSpec(Struct, frozen=True):
    """Description of an actor, sent to the executor of its graph."""

    id: ActorId
    pid: int
    slot: int
    incarnation: int


class ChannelsSpec(Struct, frozen=True):
    """Description of a graph's channels, sent to its executor. offsets: of the rings. reads, writes: the
    executor's ends of them. bits: the doorbell bits of the workers' programs. hosts: in words, the nodes of
    the actors and the executor, if there are several."""

    number: int
    workers: tuple[GraphWorkerSpec, ...]
    offsets: tuple[int, ...]
    reads: tuple[ReadEnd, ...]
    writes: tuple[WriteEnd, ...]
    limits: LimitsLayout
    failures: FailureRings
    recorders: dict[int, RecorderLayout]
    bits: tuple[int, ...]
    hosts: dict[int, str]

    @staticmethod
    def of(
        number: int,
        workers: Sequence[GraphWorker],
        layout: Layout,
        bits: tuple[int, ...],
        hosts: dict[int, str] | None = None,
    ) -> ChannelsSpec:
        """Return the description of graph ``number``, which is laid out as in ``layout``."""
        return ChannelsSpec(
            number,
            tuple(GraphWorkerSpec(m.id, m.pid, m.slot, m.incarnation) for m in workers),
            layout.offsets,
            layout.reads.get(EXECUTOR, ()),
            layout.writes.get(EXECUTOR, ()),
            layout.limits,
            layout.failures,
            layout.recorders,
            bits,
            hosts or {},
        )


class DeployedChannels(Struct, frozen=True):
    """A graph whose channels are deployed, in the process that executes it."""

    channels: ChannelsSpec
    workers: Sequence[GraphWorker]
    segment: _core.Segment

    @property
    def number(self) -> int:
        """Number of the graph in the session."""
        return self.channels.number


class Executor(Protocol):
    """The runtime of the executing process."""

    process: Process

    def deploy(
        self, plan: Plan, config: Config, begun: Callable[[int], object]
    ) -> DeployedChannels:
        """Deploy the graph's channels and load every actor's program. All or nothing. ``begun`` is told the
        number as soon as there is one: a caller that is interrupted before it has the result drops the
        graph."""
        ...

    def redeploy(self, number: int, first: int, time_limit: TimeLimit) -> DeployedChannels:
        """Bring dead actors of graph ``number`` back and deploy the graph anew; ``first``: the number of the
        next execution. All or nothing. Raises ``WaitTimeoutError`` if ``time_limit`` ends before they are
        back."""
        ...

    def comes_back(self, number: int) -> bool:
        """Return whether the dead actors of graph ``number`` are restarted without being asked."""
        ...

    def end_unmade(self, number: int) -> None:
        """End the processes of graph ``number`` whose constructor has raised: they can do nothing, and others
        may replace them."""
        ...

    def undeploy(self, number: int) -> list[tuple[GraphWorker, Ref]]:
        """Take graph ``number`` down; return the acknowledgements that are still to come."""
        ...

    def drop(self, number: int) -> None:
        """Note that graph ``number`` became garbage. Called by a finalizer, so it only notes it."""
        ...

    def keep(self, value: Any) -> Ref:
        """Return a reference to ``value`` as it is now."""
        ...

    def label(self, graph: int, node: int) -> str | None:
        """Return the name of task ``node`` of graph ``graph``, if it is known here."""
        ...

    def remote_status(self, number: int, question: Question, time_limit: float) -> RemoteStatus:
        """Return the status of graph ``number``'s actors on other nodes, as these report it within
        ``time_limit`` seconds."""
        ...

    def remote_later(self, number: int, then: Callable[[RemoteStatus | Exception], object]) -> None:
        """Have ``then`` called, on any thread, with the report of the other nodes from now on, or with the
        error that keeps them from it."""
        ...

    def origins(self) -> Origins:
        """Return the locations where results were got; for graphs in debug mode."""
        ...

    def kill(self, actor: ActorId) -> None:
        """Kill ``actor`` at once."""
        ...


def refuse_own(plan: Plan, executor: ActorId) -> None:
    """Raise ``GraphError`` if the actor that is to execute ``plan`` is a part of it."""
    if any(info.key.index == executor.index for info in plan.actors):
        raise GraphError(
            f"{executor.name} cannot execute a graph that it is itself a part of: it would wait for "
            f"itself. Compile the graph in the driver, or in an actor that is not in it"
        )


def first_death(workers: Sequence[GraphWorker]) -> GraphWorker | None:
    """Return the worker that died first, or None. Errors name it as the cause."""
    dead = [worker for worker in workers if not worker.alive]
    # A death without a number is being announced just now.
    return min(dead, key=lambda worker: worker.death_number or 1 << 32, default=None)


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
        deployed: DeployedChannels,
        first: int,
    ) -> None:
        """Open the executor's ends. Raises the death of an actor that has died since the deployment.

        name: the graph's. moved_refs: see ``Writer.moved_refs``. first: the number of the first execution.
        """
        self._name = name
        self.workers = deployed.workers
        channels = deployed.channels
        self.bits = channels.bits
        self.segment = deployed.segment
        self.offsets = channels.offsets
        self.hosts = channels.hosts
        self.first = first
        self.budget = budget = make_budget(config.memory_bytes)
        try:
            writers = {
                end.edge: end.open(
                    process,
                    deployed.segment,
                    deployed.number,
                    name,
                    plan.edges[end.edge].source,
                    budget=budget,
                )
                for end in channels.writes
            }
            readers = {
                end.edge: end.open(process, deployed.segment, name, plan.edges[end.edge].source)
                for end in channels.reads
            }
            failures = channels.failures.open(process, deployed.segment, name)
        except ConveyorError:
            for worker in deployed.workers:
                if not worker.alive:  # just now
                    raise worker.death() from None
            raise
        for writer in writers.values():
            writer.moved_refs = moved_refs
        self.limits = channels.limits.open(deployed.segment)
        self.recording = Recording(plan, name, channels.recorders, deployed.segment)
        deployed.segment.close_fd()
        task_of = {
            edge: task for program in plan.programs for task, edge in Outline(program).streams
        }
        self._stream_readers = {
            ended: StreamReader(readers[edge], process, first, self.limits, task_of[edge])
            for ended, edge in plan.streams
        }
        #: For each output that is a generator's: the function that makes the reference to its items.
        self.streams: dict[int, Callable[[Ref, tuple[Ref, ...]], StreamRef]] = {
            ended: functools.partial(GraphStream, reader)
            for ended, reader in self._stream_readers.items()
        }
        self.window = _core.InFlightWindow(
            [writers[bundle.edge] for bundle in plan.inputs],
            [readers[edge] for edge in result_edges(plan)],
            plan.depth,
            _core.KIND_VALUE,
            process.inbox,
            first,
        )
        self.window.deaths = 0  # a submission after a death looks first whose it was
        self.window.set_limits(self.limits)
        # Only the reader of a stream's items waits for its end.
        ended = {edge for edge, _ in plan.streams}
        siblings = [i for i, edge in enumerate(result_edges(plan)) if edge not in ended]
        self.window.set_failures(failures, config.fail_fast, siblings)
        self.recording.watch(self.window)
        self._process = process
        self._number = deployed.number
        process.sweeper.start()
        process.reads(self)

    def under_way(self) -> Blockers:
        if self.window.submitted == self.window.completed or not all(m.alive for m in self.workers):
            return ()
        text = f"executions of {self._name}, which hold memory that is needed"
        return tuple((worker.slot, steps_of(self._number), text) for worker in self.workers)

    def leave(self) -> None:
        """Keep the results that have come, for those who still ask, and take no more: later ones are given
        back to their writers."""
        try:
            with contextlib.ExitStack() as each:
                for reader in self._stream_readers.values():
                    each.callback(reader.close)
                self.window.leave()
        except SerializationError as error:
            # A broken ring gives nothing more. The others have been emptied, and all are closed.
            logger.warning("%s: %s", self._name, str(error))
        self._process.sources.look()
