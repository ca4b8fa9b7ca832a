"""Status of a graph: its actors, and how far each execution has come.

Read from shared memory (the processes' statuses, the rings' counters), like the rest of ``runtime.status``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from conveyor import _core
from conveyor.codec import summarize_error
from conveyor.graph.telemetry import RemoteStatus, Rings, stack_of
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.plan.reading import Outline
from conveyor.runtime.process import Process
from conveyor.runtime.protocol import PID_MASK
from conveyor.runtime.status import ActorStatus, EdgeWait, Label, actor_status, status_of, with_node

if TYPE_CHECKING:
    from conveyor.graph.executor import Epoch

GraphState = Literal["ready", "failed", "torn down"]
NOTHING_REMOTE = RemoteStatus()


@dataclass(frozen=True, slots=True)
class ExecutionStatus:
    """Status of one execution in flight.

    outstanding: the results that have not come out, as ``graph.explain()`` calls them.
    actors: those whose program is at this execution.
    errors: those that its tasks have raised so far, the first of each actor, on a line each.
    """

    number: int
    outstanding: tuple[str, ...]
    actors: tuple[str, ...]
    errors: tuple[str, ...] = ()

    def failure(self) -> str:
        """Return in words what has been raised."""
        return f"execution {self.number} has failed: {'; '.join(self.errors)}"

    def __str__(self) -> str:
        at = f"{', '.join(self.actors)} at it" if self.actors else "no actor at it"
        text = f"execution {self.number}: {', '.join(self.outstanding)} to come, {at}"
        return "\n    failed: ".join([text, *self.errors])


@dataclass(frozen=True, slots=True)
class GraphStatus:
    """Status of a compiled graph; made by ``graph.status()``, printable.

    submitted, completed: how many executions were, since the graph was compiled.
    executions: those in flight, oldest first.
    error: why the graph has failed.
    """

    name: str
    state: GraphState
    depth: int
    submitted: int
    completed: int
    executions: tuple[ExecutionStatus, ...]
    actors: tuple[ActorStatus, ...]
    error: str | None = None

    def summary(self) -> str:
        """Return the status on one line."""
        actors = "; ".join(f"{actor.name} is {actor.describe()}" for actor in self.actors)
        failures = [execution.failure() for execution in self.executions if execution.errors]
        return "; ".join([actors, _in_flight(self.executions), *failures])

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.state}, {_in_flight(self.executions)} (depth {self.depth})"]
        if self.error:
            lines += [f"  {line}" for line in self.error.splitlines()]
        lines += [f"  {execution}" for execution in self.executions]
        lines += [f"  {line}" for actor in self.actors for line in str(actor).splitlines()]
        return "\n".join(lines)


def _in_flight(executions: Sequence[ExecutionStatus]) -> str:
    if not executions:
        return "nothing in flight"
    first, last = executions[0].number, executions[-1].number
    if first == last:
        return f"execution {first} in flight"
    return f"executions {first} to {last} in flight"


class RingProgress(Struct, frozen=True):
    """Progress of a graph's rings: for each edge the frames published, and the frames taken by each of its
    readers."""

    plan: Plan
    rings: tuple[tuple[int, Mapping[int, int]], ...]
    first: int  # the number of the first frames' execution

    @staticmethod
    def read(
        plan: Plan, segment: _core.Segment, offsets: Sequence[int], first: int
    ) -> RingProgress:
        rings = []
        for edge, offset in zip(plan.edges, offsets, strict=True):
            head, taken = segment.progress(offset)
            rings.append((head, dict(zip(edge.readers, taken, strict=True))))
        return RingProgress(plan, tuple(rings), first)

    def outstanding(self, number: int, edges: Sequence[int]) -> tuple[str, ...]:
        """Return the sources of those ``edges`` that have not been published for this execution."""
        behind = [e for e in edges if self.rings[e][0] <= number - self.first]
        return tuple(self.plan.edges[e].source for e in behind)

    def holder(self, number: int, edges: Sequence[int]) -> tuple[int, str, int] | None:
        """Return the actor that has to do something before the first of ``edges`` that is behind is published
        for this execution: (actor, what it is about to make, of which execution). ``None``: all are
        published, or no actor has to do anything."""
        edge = next((e for e in edges if self.rings[e][0] <= number - self.first), None)
        for _ in self.plan.edges:  # a chain is no longer; heads move while it is followed
            if edge is None or self.plan.edges[edge].writer == EXECUTOR:
                return None
            writer = self.plan.edges[edge].writer
            at, wait = self.at(writer)
            if wait is None:
                return writer, self.plan.edges[edge].source, at
            edge = wait.edge
        return None

    def at(self, actor: int) -> tuple[int, EdgeWait | None]:
        """Return the execution that the actor is at, and what it needs for that; ``None``: it has all."""
        does = Outline(self.plan.programs[actor])
        received = [(edge, self.rings[edge][1][actor]) for edge in does.receives]
        sent = [self.rings[edge][0] for edge in does.sends]
        begun = min((taken for _, taken in received), default=0)
        if sent and min(sent) < begun:
            return min(sent) + self.first, None  # what it has taken is not all worked off
        for edge, taken in received:
            if taken == begun:
                info = self.plan.edges[edge]
                source = info.source
                if self.rings[edge][0] > taken:
                    if not info.out_of_band:
                        return begun + self.first, None
                    # The frame is taken when what goes beside it has come.
                    source = f"the tensors of {source}"
                writer = "driver" if info.writer == EXECUTOR else self.plan.actors[info.writer].name
                number = begun + self.first
                return number, EdgeWait(edge, source, writer, number)
        return begun + self.first, None


def executions_in_flight(
    progress: RingProgress,
    outputs: Sequence[int],
    completed: int,
    submitted: int,
    actors: Sequence[ActorStatus],
    failures: Mapping[int, Sequence[bytes]],
    remote_status: RemoteStatus = NOTHING_REMOTE,
) -> tuple[tuple[ExecutionStatus, ...], tuple[ActorStatus, ...]]:
    """Return the executions in flight, and the actors with what they wait for. ``failures``: the errors of
    executions, encoded. ``remote_status``: the report of other nodes about their actors."""
    at: dict[int, list[str]] = {}
    found: list[ActorStatus] = []
    for i, actor in enumerate(actors):
        if actor.state == "elsewhere":  # nor are its channels' counters known
            found.append(actor)
            continue
        number, wait = replace_rings(progress, remote_status.rings.get(i)).at(i)
        if actor.state == "idle" and number < submitted:
            actor = (
                replace(actor, state="waiting", waits_for=wait)
                if wait is not None
                else replace(actor, execution=number)
            )
        found.append(actor)
        if number < submitted:
            at.setdefault(number, []).append(actor.name)
    executions = tuple(
        ExecutionStatus(
            number,
            progress.outstanding(number, outputs),
            tuple(at.get(number, ())),
            tuple(summarize_error(meta) for meta in failures.get(number, ())),
        )
        for number in range(completed, submitted)
    )
    return executions, tuple(found)


def replace_rings(progress: RingProgress, rings: Rings | None) -> RingProgress:
    """Return ``progress`` as another node knows it; ``rings``: that node's report of the rings."""
    if rings is None:
        return progress
    edges = zip(progress.plan.edges, rings, strict=True)
    known = tuple((head, dict(zip(e.readers, taken, strict=True))) for e, (head, taken) in edges)
    return RingProgress(progress.plan, known, progress.first)


def _remote_status(
    actor: ActorStatus,
    remote_status: RemoteStatus,
    index: int,
    hosts: Mapping[int, str],
    label: Label,
) -> ActorStatus:
    """Return the status of a live remote actor, as its node reports it."""
    host = hosts.get(index, "another host")
    snapshot = remote_status.seen.get(index)
    if snapshot is None:
        return replace(actor, host=host, unknown=remote_status.why_unknown(host))
    if snapshot.process_snapshot.state == "dead":  # just now: here it lives, so far
        return replace(actor, host=host, unknown="it has just died")
    return replace(status_of(snapshot.process_snapshot, label), name=actor.name, host=host)


def graph_status(
    name: str,
    state: GraphState,
    error: BaseException | None,
    plan: Plan,
    epoch: Epoch,
    process: Process,
    outputs: Sequence[int],
    label: Label,
    stacks: bool,
    remote_status: RemoteStatus,
) -> GraphStatus:
    """Return the status of a graph over processes; see :meth:`CompiledGraph.status`."""
    process_table, host = process.process_table, process.name_node
    actors = []
    for index, worker in enumerate(epoch.workers):
        actor = actor_status(process_table, worker.slot, worker.incarnation, label)
        if actor.state == "dead":
            death = str(worker.death(label))
            actor = ActorStatus(worker.id.name, worker.pid & PID_MASK, "dead", error=death)
        elif actor.state == "elsewhere":
            actor = _remote_status(actor, remote_status, index, epoch.hosts, label)
            actor = replace(actor, pid=worker.pid & PID_MASK)
        elif stacks:
            actor = replace(actor, stack=stack_of(worker.pid))
        actors.append(actor if host is None else with_node(actor, host))
    progress = RingProgress.read(plan, epoch.segment, epoch.offsets, epoch.first)
    completed, submitted = epoch.window.completed, epoch.window.submitted
    failures = dict(epoch.window.failures())
    executions, now = executions_in_flight(
        progress, outputs, completed, submitted, actors, failures, remote_status
    )
    text = None if error is None else str(error)
    return GraphStatus(name, state, plan.depth, submitted, completed, executions, now, text)
