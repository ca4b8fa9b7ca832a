"""What actors and graphs are doing: snapshots that people can read, and programs too.

All of it is read from shared memory (status pages, the rings' counters) and from ``/proc``: nobody is
asked, so it also works for an actor that is stuck, stopped or dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from conveyor import _core
from conveyor.plan.model import DRIVER, Plan, Recv, Send

ActorState = Literal["starting", "idle", "waiting", "running", "stopped", "dead"]
GraphState = Literal["ready", "failed", "torn down"]
Label = Callable[[int, int], str | None]

_RUNNING = 1


@dataclass(frozen=True, slots=True)
class EdgeWait:
    """What an actor's part of a graph needs next: ``source`` as ``graph.explain()`` calls it, of one
    execution, from ``writer`` (an actor's name or ``"driver"``)."""

    edge: int
    source: str
    writer: str
    execution: int


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """What one actor is doing.

    state: ``"stopped"`` by a signal or a debugger; ``"waiting"`` for the input in ``waits_for``.
    method: what it runs (or ran, when it was stopped): a graph's task by its label, or a method.
    node, execution: of that task; the execution alone where it is between two steps, or in a
        coroutine that waits. call: the number of the call, where it is none of a graph's.
    since: when that began (``time.time()``). blocked_on: the actor whose result the method waits for.
    error: how it died. stack: where its Python code is, if that was asked for.
    """

    name: str
    pid: int
    state: ActorState
    method: str | None = None
    node: int | None = None
    execution: int | None = None
    call: int | None = None
    since: float | None = None
    waits_for: EdgeWait | None = None
    blocked_on: str | None = None
    error: str | None = None
    stack: str | None = None

    def describe(self) -> str:
        """In words, to follow "the actor is"."""
        if self.state == "dead":
            return "dead" + (f": {self.error.splitlines()[0]}" if self.error else "")
        text = ""
        if self.method is not None and self.since is not None:
            number = (
                f"execution {self.execution}" if self.execution is not None else f"call {self.call}"
            )
            clock = time.strftime("%H:%M:%S", time.localtime(self.since))
            text = (
                f"running {self.method} ({number}) since {time.time() - self.since:.1f} s ({clock})"
            )
            if self.blocked_on is not None:
                text += f", which waits for {self.blocked_on}"
        if self.state == "stopped":
            # Not dead: SIGCONT, or the debugger's "continue", and nothing is lost.
            return "stopped (by a signal, or by a debugger)" + (f" while {text}" if text else "")
        if text:
            return text
        wait = self.waits_for
        if wait is not None:
            return (
                f"idle, waiting for {wait.source} of execution {wait.execution} from {wait.writer}"
            )
        if self.state == "idle" and self.execution is not None:
            return f"between two steps of execution {self.execution}"
        return self.state

    def __str__(self) -> str:
        text = f"{self.name} (pid {self.pid}): {self.describe()}"
        if self.stack:
            text += "\n" + "\n".join(f"    {line}" for line in self.stack.splitlines())
        return text


@dataclass(frozen=True, slots=True)
class ExecutionStatus:
    """One execution in flight.

    outstanding: the results that have not come out, as ``graph.explain()`` calls them.
    actors: those whose program is at this execution.
    """

    number: int
    outstanding: tuple[str, ...]
    actors: tuple[str, ...]

    def __str__(self) -> str:
        at = f"{', '.join(self.actors)} at it" if self.actors else "no actor at it"
        return f"execution {self.number}: {', '.join(self.outstanding)} to come, {at}"


@dataclass(frozen=True, slots=True)
class GraphStatus:
    """What a compiled graph is doing; made by ``graph.status()``, printable.

    submitted, completed: how many executions were, since the graph was compiled.
    executions: those in flight, oldest first. error: why the graph has failed.
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
        """On one line."""
        actors = "; ".join(f"{actor.name} is {actor.describe()}" for actor in self.actors)
        return f"{actors}; {_in_flight(self.executions)}"

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


def actor_status(
    board: _core.Board, slot: int, incarnation: int | None = None, label: Label | None = None
) -> ActorStatus:
    """What the process in ``slot`` is doing (``incarnation``: which of its processes is meant).
    ``label`` names a (graph, node)."""
    condition, pid, name = board.condition(slot), board.pid(slot), board.name(slot)
    if incarnation is not None and board.gone(slot, incarnation):
        return ActorStatus(name, pid, "dead")
    if condition not in (1, 2):
        return ActorStatus(name, pid, "dead")
    state, graph, node, execution, since_ns, _signal, what = board.status(slot)
    now: ActorState = "starting" if condition == 1 else "idle"
    status = ActorStatus(name, pid, now)
    if state == _RUNNING:
        method = (label(graph, node) if label is not None else None) if graph else what
        target, _, _ = board.waits(slot)
        status = ActorStatus(
            name,
            pid,
            "running",
            method or f"node {node} of graph {graph}",
            node if graph else None,
            execution if graph else None,
            None if graph else execution,
            time.time() - (_core.monotonic_ns() - since_ns) / 1e9,
            blocked_on=board.name(target) if target >= 0 else None,
        )
    return replace(status, state="stopped") if pid and _is_stopped(pid) else status


def describe_status(board: _core.Board, slot: int, label: Label | None = None) -> str:
    """What the process in ``slot`` is doing, in words."""
    return actor_status(board, slot, None, label).describe()


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The state follows the name, which may hold anything.
            return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a graph's rings have come: for each edge the frames published, and the frames taken by
    each of its readers."""

    plan: Plan
    rings: tuple[tuple[int, Mapping[int, int]], ...]
    first: int  # the number of the execution that the first frames are of

    @staticmethod
    def read(plan: Plan, segment: _core.Segment, offsets: Sequence[int], first: int) -> Progress:
        rings = []
        for edge, offset in zip(plan.edges, offsets, strict=True):
            head, taken = segment.progress(offset)
            rings.append((head, dict(zip(edge.readers, taken, strict=True))))
        return Progress(plan, tuple(rings), first)

    def outstanding(self, number: int, edges: Sequence[int]) -> tuple[str, ...]:
        """What of ``edges`` has not been published for this execution."""
        behind = [e for e in edges if self.rings[e][0] <= number - self.first]
        return tuple(self.plan.edges[e].source for e in behind)

    def at(self, actor: int) -> tuple[int, EdgeWait | None]:
        """The execution that the actor is at, and what it needs for that; ``None``: it has all."""
        received: list[tuple[int, int]] = []
        sent: list[int] = []
        for program in self.plan.programs:
            if program.actor == actor:
                for step in program.steps:
                    if isinstance(step, Recv):
                        received.append((step.edge, self.rings[step.edge][1][actor]))
                    elif isinstance(step, Send):
                        sent.append(self.rings[step.edge][0])
        begun = min((taken for _, taken in received), default=0)
        if sent and min(sent) < begun:
            return min(sent) + self.first, None  # what it has taken is not all worked off
        for edge, taken in received:
            if taken == begun:
                if self.rings[edge][0] > taken:
                    return begun + self.first, None
                info = self.plan.edges[edge]
                writer = "driver" if info.writer == DRIVER else self.plan.actors[info.writer].name
                number = begun + self.first
                return number, EdgeWait(edge, info.source, writer, number)
        return begun + self.first, None


def executions_in_flight(
    progress: Progress,
    outputs: Sequence[int],
    completed: int,
    submitted: int,
    actors: Sequence[ActorStatus],
) -> tuple[tuple[ExecutionStatus, ...], tuple[ActorStatus, ...]]:
    """The executions in flight, and the actors with what they wait for."""
    at: dict[int, list[str]] = {}
    found: list[ActorStatus] = []
    for i, actor in enumerate(actors):
        number, wait = progress.at(i)
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
        ExecutionStatus(number, progress.outstanding(number, outputs), tuple(at.get(number, ())))
        for number in range(completed, submitted)
    )
    return executions, tuple(found)
