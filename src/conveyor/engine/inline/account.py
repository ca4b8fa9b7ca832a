"""What can be told of a graph in the driver's process."""

from __future__ import annotations

import os

from conveyor.engine.inline.actor import Actor
from conveyor.engine.inline.graph import InlineGraph
from conveyor.plan.model import EXECUTOR
from conveyor.runtime.graph.account import ProcessAccount
from conveyor.runtime.graph.status import ExecutionStatus, GraphStatus
from conveyor.runtime.graph.supervision import Supervision
from conveyor.runtime.graph.telemetry.recording import Progress, Track, result_edges
from conveyor.runtime.graph.telemetry.stacks import stack_of
from conveyor.runtime.status import ActorStatus


class InlineUpkeep:
    """Restarts the graph between two executions; see ``runtime.graph.parts.Upkeep``."""

    def __init__(self, graph: InlineGraph, supervision: Supervision) -> None:
        self._graph = graph
        self._supervision = supervision
        self.teardown = supervision.teardown
        self.check_block = supervision.check_block

    @property
    def is_teardown(self) -> bool:
        return self._supervision.is_teardown

    def restart(self) -> None:
        self._graph.in_turn(self._supervision.restart)


class InlineAccount(ProcessAccount):
    """Tells of a graph whose actors have no status pages, no arenas and no processes of their own."""

    def __init__(self, graph: InlineGraph, supervision: Supervision) -> None:
        super().__init__(supervision)
        #: Lasts as long.
        self.upkeep = InlineUpkeep(graph, supervision)
        self._graph = graph

    def progress(self) -> Progress:
        gate, arena = self.supervision.epoch.gate, self.supervision.process.arena
        gate.count_completed()
        held = {EXECUTOR: arena.bytes_touched}
        return Progress(gate.submitted, gate.completed, gate.stashed, gate.stashed_bytes, held)

    def tracks(self) -> list[Track]:
        pid = os.getpid()
        actors = (Track(a.index, a.name, pid, a.index + 1) for a in self.plan.actors)
        return [Track(EXECUTOR, "driver", pid, None), *actors]

    def status(self, stacks: bool = False, patience: float = 0) -> GraphStatus:
        supervision, gate, at = self.supervision, self.supervision.epoch.gate, self._graph.at
        supervision.closed_or_failed()  # it may not have been noticed
        actors = tuple(_actor_status(actor, stacks) for actor in self._graph.actors)
        running: tuple[ExecutionStatus, ...] = ()
        if at is not None:
            outstanding = tuple(self.plan.edges[edge].source for edge in result_edges(self.plan))
            names = tuple(actor.name for actor in actors if actor.execution == at)
            running = (ExecutionStatus(at, outstanding, names),)
        error = supervision.closed or supervision.failure
        return GraphStatus(
            self.name,
            self.state,
            self.plan.depth,
            gate.submitted,
            gate.submitted - len(running),
            running,
            actors,
            None if error is None else str(error),
        )


def _actor_status(actor: Actor, stacks: bool) -> ActorStatus:
    pid = os.getpid()
    if not actor.alive:
        return ActorStatus(actor.name, pid, "dead", error=str(actor.death()))
    running = actor.host.running()
    if not running:
        return ActorStatus(actor.name, pid, "idle")
    job, since = running[0]
    return ActorStatus(
        actor.name,
        pid,
        "running",
        method=job.method,
        node=job.node,
        execution=job.execution,
        call=job.call,
        since=since,
        stack=stack_of(pid) if stacks else None,
    )
