"""What a Plan's programs do, read without running them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from conveyor.plan.model import DRIVER, Plan, Program, Task
from conveyor.plan.steps import Call, Recv, Send, Step, assert_never
from conveyor.plan.template import registers
from conveyor.plan.values import Made, Part, Start, Value

# One step


def registers_read(step: Step, tasks: Mapping[int, Task] | Sequence[Task]) -> tuple[int, ...]:
    """The registers that ``step`` reads, in order; ``tasks`` are those of the Plan, by number."""
    match step:
        case Recv():
            return ()
        case Call():
            task = tasks[step.task]
            arguments = (*task.args, *(argument for _, argument in task.kwargs))
            return tuple(reg for argument in arguments for reg in registers(argument))
        case Send():
            return (step.reg,)
        case _:
            assert_never(step)


def registers_written(step: Step) -> tuple[int, ...]:
    """The registers that ``step`` fills."""
    match step:
        case Recv():
            filled = (step.reg,) if step.spread is None else step.spread
        case Call():
            filled = (step.out, *step.outs)
        case Send():
            return ()
        case _:
            assert_never(step)
    return tuple([reg for reg in filled if reg is not None])


# A program


@dataclass(frozen=True, slots=True)
class Outline:
    """What a program does, by kind; each in the program's order.

    tasks: the numbers of the tasks that it runs.
    receives: the edges that it takes a frame of each execution from.
    sends: the edges that it gives a frame of each execution to.
    streams: a generator's task, and the edge that it gives any number of frames to.
    """

    tasks: tuple[int, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    streams: tuple[tuple[int, int], ...]


def outline(program: Program) -> Outline:
    """What ``program`` does, by kind."""
    tasks: list[int] = []
    receives: list[int] = []
    sends: list[int] = []
    streams: list[tuple[int, int]] = []
    for step in program.steps:
        match step:
            case Recv():
                receives.append(step.edge)
            case Call():
                tasks.append(step.task)
                if step.stream is not None:
                    streams.append((step.task, step.stream))
            case Send():
                sends.append(step.edge)
            case _:
                assert_never(step)
    return Outline(tuple(tasks), tuple(receives), tuple(sends), tuple(streams))


@dataclass(frozen=True, slots=True)
class Stage:
    """One task, with what its actor's program has it receive before and send afterwards."""

    actor: int
    receives: tuple[Recv, ...]
    call: Call
    sends: tuple[Send, ...]


def stages(program: Program) -> tuple[Stage, ...]:
    """``program``, task by task."""
    made: list[tuple[list[Recv], Call, list[Send]]] = []
    receives: list[Recv] = []
    for step in program.steps:
        match step:
            case Recv():
                receives.append(step)
            case Call():
                made.append((receives, step, []))
                receives = []
            case Send():
                made[-1][2].append(step)
            case _:
                assert_never(step)
    return tuple(
        Stage(program.actor, tuple(before), call, tuple(after)) for before, call, after in made
    )


def task_of_each_step(program: Program) -> list[int | None]:
    """For each step the task on whose behalf it is there: a receive is for the task after it, a send for
    the task before it. ``None``: there is none."""
    found: list[int | None] = []
    received: list[int] = []
    task = None
    for place, step in enumerate(program.steps):
        match step:
            case Recv():
                received.append(place)
                found.append(None)
            case Call():
                task = step.task
                found.append(task)
                for before in received:
                    found[before] = task
                received.clear()
            case Send():
                found.append(task)
            case _:
                assert_never(step)
    return found


# A Plan


def in_order(plan: Plan) -> tuple[Stage, ...]:
    """The tasks of all actors, one after the other, with what their programs do around them."""
    stage_of = {stage.call.task: stage for program in plan.programs for stage in stages(program)}
    return tuple(stage_of[task] for task in plan.order)


class Move(NamedTuple):
    """Something that a process does in each execution, as people are shown it. ``number`` is that of the
    task that is called, or of the edge."""

    kind: Literal["recv", "call", "send"]
    number: int


def moves(plan: Plan, place: int) -> Iterator[Move]:
    """What the process at ``place`` (an actor's number, or ``DRIVER``) does, in order."""
    if place == DRIVER:
        yield from (Move("send", bundle.edge) for bundle in plan.inputs)
        streams = dict(plan.streams)
        for edge in dict.fromkeys((*plan.outputs, *plan.effects)):
            if edge in streams:
                yield Move("recv", streams[edge])
            yield Move("recv", edge)
        return
    for step in plan.programs[place].steps:
        match step:
            case Recv():
                yield Move("recv", step.edge)
            case Call():
                yield Move("call", step.task)
                if step.stream is not None:
                    yield Move("send", step.stream)
            case Send():
                yield Move("send", step.edge)
            case _:
                assert_never(step)


@dataclass(frozen=True, slots=True)
class Held:
    """What a register holds.

    value: a part of the input, or what a task has made.
    edge: the edge that it has come on; ``None``: its own actor has made it.
    """

    value: Value
    edge: int | None


@dataclass(frozen=True, slots=True)
class Values:
    """Where the values of a Plan are.

    carried: by edge, the values in a frame; none in one that only starts an execution.
    held: for each actor, what its registers hold.
    needs: for each task, what starts it where its actor waits for no value, and what its arguments hold,
        in order.
    """

    carried: Mapping[int, tuple[Value, ...]]
    held: tuple[Mapping[int, Held], ...]
    needs: tuple[tuple[Held, ...], ...]


def values(plan: Plan) -> Values:
    """Follow the values of ``plan`` through registers and edges."""
    carried: dict[int, tuple[Value, ...]] = {
        bundle.edge: tuple([Part(key) for key in bundle.keys]) for bundle in plan.inputs
    }
    held: list[dict[int, Held]] = [{} for _ in plan.programs]
    needs: list[tuple[Held, ...]] = [()] * len(plan.tasks)
    for stage in in_order(plan):
        here, task = held[stage.actor], stage.call.task
        starts = []
        for step in stage.receives:
            filled = (step.reg,) if step.spread is None else step.spread
            frame = carried[step.edge]
            if not frame:
                frame = (Start(stage.actor),)
                starts.append(Held(frame[0], step.edge))
            for value, reg in zip(frame, filled, strict=True):
                if reg is not None:
                    here[reg] = Held(value, step.edge)
        used = [here[reg] for reg in registers_read(stage.call, plan.tasks)]
        needs[task] = (*starts, *used)
        for element, reg in enumerate((stage.call.out, *stage.call.outs), -1):
            if reg is not None:
                here[reg] = Held(Made(task, element if element >= 0 else None), None)
        if stage.call.stream is not None:
            carried[stage.call.stream] = (Made(task, None),)
        for send in stage.sends:
            carried[send.edge] = (here[send.reg].value,)
    return Values(carried, tuple(held), tuple(needs))
