"""Readings of a Plan's programs: what they will do, without being run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from conveyor.plan.flow import Made, Part, Start, Value
from conveyor.plan.model import (
    EXECUTOR,
    Await,
    Call,
    Plan,
    Program,
    Recv,
    Send,
    Step,
    Task,
    Try,
    assert_never,
)
from conveyor.plan.template import registers

# One step


def registers_read(step: Step, tasks: Mapping[int, Task] | Sequence[Task]) -> tuple[int, ...]:
    """List the registers that ``step`` reads, in order; ``tasks`` are those of the Plan, by number."""
    match step:
        case Recv() | Try():
            return ()
        case Call():
            task = tasks[step.task]
            arguments = (*task.args, *(argument for _, argument in task.kwargs))
            return tuple(reg for argument in arguments for reg in registers(argument))
        case Await() | Send():
            return (step.reg,)
        case _:
            assert_never(step)


# A program


def edges_only_read(program: Program, tasks: Mapping[int, Task] | Sequence[Task]) -> set[int]:
    """Find the edges whose values ``program`` neither writes to nor keeps: only ranks of collectives take
    them, and these make new tensors of their inputs."""
    edges_of: dict[int | None, list[int]] = {}
    found: set[int] = set()
    for step in program.steps:
        if isinstance(step, Recv):
            found.add(step.edge)
            for reg in (step.reg, *(step.spread or ())):
                edges_of.setdefault(reg, []).append(step.edge)
    for step in program.steps:
        task = tasks[step.task] if isinstance(step, Call) else None
        if (
            task is None
            or task.collective is None
            or not getattr(task.function, "only_reads", False)
        ):
            for reg in registers_read(step, tasks):
                found.difference_update(edges_of.pop(reg, ()))
    return found


class Outline:
    """Tasks and edges of a program, by kind; each list is in the program's order.

    tasks: the numbers of the tasks that the program runs.
    receives: the edges from which it takes a frame of each execution.
    sends: the edges to which it gives a frame of each execution.
    streams: pairs of a generator's task and the edge to which it gives any number of frames.
    """

    def __init__(self, program: Program) -> None:
        self.tasks: list[int] = []
        self.receives: list[int] = []
        self.sends: list[int] = []
        self.streams: list[tuple[int, int]] = []
        for step in program.steps:
            match step:
                case Recv():
                    self.receives.append(step.edge)
                case Call():
                    self.tasks.append(step.task)
                    if step.stream is not None:
                        self.streams.append((step.task, step.stream))
                case Send():
                    self.sends.append(step.edge)
                case Await() | Try():
                    pass
                case _:
                    assert_never(step)


class Stage(NamedTuple):
    """Task of a program, with the receives, tries and waits before it and the sends after it."""

    actor: int
    receives: list[Recv]
    tries: list[Try]
    awaits: list[Await]
    call: Call
    sends: list[Send]


def stages(program: Program) -> list[Stage]:
    """Split ``program`` into its tasks."""
    made: list[Stage] = []
    receives: list[Recv] = []
    tries: list[Try] = []
    awaits: list[Await] = []
    for step in program.steps:
        match step:
            case Recv():
                receives.append(step)
            case Try():
                tries.append(step)
            case Call():
                made.append(Stage(program.actor, receives, tries, awaits, step, []))
                receives, tries, awaits = [], [], []
            case Send():
                made[-1].sends.append(step)
            case Await():
                awaits.append(step)
            case _:
                assert_never(step)
    return made


def task_of_each_step(program: Program) -> list[int | None]:
    """Find for each step the task that it belongs to. A receive, a try or a wait for tensors belongs to the
    task after it, a send to the task before it. ``None``: there is no such task."""
    found: list[int | None] = []
    received: list[int] = []
    task = None
    for place, step in enumerate(program.steps):
        match step:
            case Recv() | Try() | Await():
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
    """List the tasks of all actors, in order, each with the steps of its actor's program around it."""
    stage_of = {stage.call.task: stage for program in plan.programs for stage in stages(program)}
    return tuple(stage_of[task] for task in plan.order)


Move = tuple[Literal["recv", "try", "wait", "call", "send"], int]
"""Something that a process does in each execution, as people are shown it: its kind, and the number of the
task that is called or of the edge. ``"try"`` opens a receive that comes later, ``"wait"`` is for what travels
beside the edge's frames."""


def moves(plan: Plan, participant: int) -> Iterator[Move]:
    """List what ``participant`` (an actor's number, or ``EXECUTOR``) does, in order."""
    if participant == EXECUTOR:
        for bundle in plan.inputs:
            yield "send", bundle.edge
        streams = dict(plan.streams)
        for edge in dict.fromkeys((*plan.outputs, *plan.effects)):
            if edge in streams:
                yield "recv", streams[edge]
            yield "recv", edge
        return
    for step in plan.programs[participant].steps:
        match step:
            case Recv():
                yield "recv", step.edge
            case Try():
                yield "try", step.edge
            case Await():
                yield "wait", step.edge
            case Call():
                yield "call", step.task
                if step.stream is not None:
                    yield "send", step.stream
            case Send():
                yield "send", step.edge
            case _:
                assert_never(step)


class Held(NamedTuple):
    """Content of a register.

    value: a part of the input, or a result of a task.
    edge: the edge that the value has come on; ``None``: the register's own actor has made it.
    """

    value: Value
    edge: int | None


class Values:
    """Places where the values of a Plan are: frames, registers, and arguments of tasks.

    carried: by edge, the values in a frame; none in one that only starts an execution.
    held: for each actor, what its registers hold.
    needs: for each task, what starts it where its actor waits for no value, and what its arguments hold,
        in order.
    """

    def __init__(self, plan: Plan) -> None:
        self.carried: dict[int, tuple[Value, ...]] = {
            bundle.edge: tuple([Part(key) for key in bundle.keys]) for bundle in plan.inputs
        }
        self.held: list[dict[int, Held]] = [{} for _ in plan.programs]
        self.needs: list[list[Held]] = [[] for _ in plan.tasks]
        for stage in in_order(plan):
            needs = self.needs[stage.call.task]
            for step in stage.receives:
                needs += self._receive(step, stage.actor)
            here = self.held[stage.actor]
            needs += [here[reg] for reg in registers_read(stage.call, plan.tasks)]
            self._call(stage.call, stage.actor)
            for send in stage.sends:
                self.carried[send.edge] = (here[send.reg].value,)

    def _receive(self, step: Recv, actor: int) -> list[Held]:
        """Fill registers with a frame. Return what starts the next task, if the frame only does that."""
        frame = self.carried[step.edge] or (Start(actor),)
        filled = (step.reg,) if step.spread is None else step.spread
        come = [Held(value, step.edge) for value in frame]
        for held, reg in zip(come, filled, strict=True):
            if reg is not None:
                self.held[actor][reg] = held
        return [held for held in come if isinstance(held.value, Start)]

    def _call(self, step: Call, actor: int) -> None:
        """Note that the registers of a call hold the task's results."""
        here = self.held[actor]
        if step.out is not None:
            here[step.out] = Held(Made(step.task, None), None)
        for element, reg in enumerate(step.outs):
            if reg is not None:
                here[reg] = Held(Made(step.task, element), None)
        if step.stream is not None:
            self.carried[step.stream] = (Made(step.task, None),)
