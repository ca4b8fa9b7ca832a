"""What can be told of a graph in the driver's process."""

from __future__ import annotations

import os

from conveyor.engine.inline.actor import Actor
from conveyor.engine.inline.graph import InlineGraph
from conveyor.plan.model import EXECUTOR
from conveyor.runtime.graph.recording import Progress, Recording, Track, result_edges
from conveyor.runtime.graph.stacks import stack_of
from conveyor.runtime.graph.status import ExecutionStatus, GraphState, GraphStatus
from conveyor.runtime.process import Process
from conveyor.runtime.status import ActorStatus


class InlineAccount:
    """Lasts as long as anybody holds the graph or one of its refs; see ``runtime.graph.parts.Account``."""

    def __init__(self, graph: InlineGraph, process: Process) -> None:
        self.graph = graph
        self.number = graph.number
        self.name = graph.name
        self.plan = graph.plan
        self.config = graph.config
        self._process = process

    @property
    def recording(self) -> Recording:
        return self.graph.notes.recording

    @property
    def state(self) -> GraphState:
        return self.graph.state

    @property
    def is_teardown(self) -> bool:
        return self.graph.is_teardown

    def check_open(self) -> None:
        self.graph.check_open()

    def progress(self) -> Progress:
        completed = sum(n for _, _, n in self.recording.own.task(0)[2][2])
        arena = self._process.arena.bytes_touched
        return Progress(self.graph.notes.submitted, completed, 0, 0, {EXECUTOR: arena})

    def tracks(self) -> list[Track]:
        pid = os.getpid()
        actors = (Track(a.index, a.name, pid, a.index + 1) for a in self.plan.actors)
        return [Track(EXECUTOR, "driver", pid, None), *actors]

    def status(self, stacks: bool = False) -> GraphStatus:
        graph = self.graph
        actors = tuple(_actor_status(actor, stacks) for actor in graph.actors)
        at = graph.at
        running: tuple[ExecutionStatus, ...] = ()
        if at is not None:
            outstanding = tuple(self.plan.edges[edge].source for edge in result_edges(self.plan))
            names = tuple(actor.name for actor in actors if actor.execution == at)
            running = (ExecutionStatus(at, outstanding, names),)
        error = graph.closed or graph.failure
        return GraphStatus(
            self.name,
            graph.state,
            self.plan.depth,
            graph.completed + len(running),
            graph.completed,
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
