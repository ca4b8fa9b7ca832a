"""Tensors that travel beside the frames travel while the actor that they go to computes.

A transfer begins when both of its ends have come to it: the writer to its send, which stands right behind the
task that makes the value (``schedule.py``), and the reader to its receive. So what a schedule can do is to
receive early and to wait for the tensors late. To stand at a receive whose frame is late would keep the actor
from what it could compute meanwhile. So the receive stays where the value is needed, and a :class:`Try`
stands ahead of it, which takes the frame if it is there: no actor waits the longer for it. It goes ahead of
those tasks of its actor that were bound after the value's maker; those that were bound before it are done, as
a rule, before there can be a frame.

A value whose tensors travel in its frame is copied by its writer and read in place, so there is nothing to
receive early.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from conveyor.plan.model import Edge, Plan, Program
from conveyor.plan.reading import stages
from conveyor.plan.steps import Step, Try


class Early(Struct, frozen=True):
    """Receive that is tried ahead of tasks which do not need it.

    actor: the number of the actor that receives.
    edge: the number of the edge.
    ahead: the numbers of those tasks.
    user: the number of the task that needs the value.
    """

    actor: int
    edge: int
    ahead: tuple[int, ...]
    user: int


def overlapped(plan: Plan, on: bool) -> Plan:
    """Return ``plan`` with its receives tried early, or with none tried."""
    programs = place_tries(plan.programs, plan.edges, plan.order, on)
    return replace(plan, programs=programs, overlap=on)


def place_tries(
    programs: Sequence[Program], edges: Sequence[Edge], order: Sequence[int], on: bool
) -> tuple[Program, ...]:
    """Place the tries of receives. With ``on``, a receive whose tensors travel beside its frame is tried
    ahead of the tasks that were bound after its maker; else none is tried."""
    beside = {edge.id for edge in edges if edge.beside}
    if not beside:
        return tuple(programs)
    turn = {task: place for place, task in enumerate(order)}
    maker = {
        send.edge: turn[part.call.task]
        for program in programs
        for part in stages(program)
        for send in part.sends
    }
    tried = beside if on else set()
    return tuple([_placed(program, tried, maker, turn) for program in programs])


def _placed(
    program: Program, tried: set[int], maker: Mapping[int, int], turn: Mapping[int, int]
) -> Program:
    parts = stages(program)
    turns = [turn[part.call.task] for part in parts]
    tries: list[list[int]] = [[] for _ in parts]
    for place, part in enumerate(parts):
        for edge in sorted(step.edge for step in part.receives if step.edge in tried):
            first = next(i for i, at in enumerate(turns) if at > maker[edge])
            if first < place:
                tries[first].append(edge)
    steps: list[Step] = []
    for part, edges in zip(parts, tries, strict=True):
        # The task's own receives come first. Tries come before all waits for tensors, which travel side by
        # side.
        steps += [*part.receives, *map(Try, sorted(edges)), *part.awaits, part.call, *part.sends]
    return replace(program, steps=tuple(steps))


def early_receives(plan: Plan) -> Iterator[Early]:
    """Find the receives that are tried ahead of tasks which do not need them."""
    for program in plan.programs:
        pending: dict[int, list[int]] = {}
        for part in stages(program):
            for step in part.receives:
                if step.edge in pending:
                    ahead = tuple(pending.pop(step.edge))
                    yield Early(program.actor, step.edge, ahead, part.call.task)
            pending |= {step.edge: [] for step in part.tries}
            for passed in pending.values():
                passed.append(part.call.task)
