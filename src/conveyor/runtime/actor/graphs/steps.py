"""The steps of an actor's program, as the native interpreter is given them: which end, which registers, and
what Python does at each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from conveyor import _core
from conveyor.codec import SentDefinitions
from conveyor.codec.direct import Direct
from conveyor.plan import fill
from conveyor.plan.fresh import immutable, with_fresh
from conveyor.plan.model import Argument, Const, Reg, Task
from conveyor.plan.reading import Outline, registers_read
from conveyor.plan.steps import (
    MOST_LEFT_OUT,
    MOST_PATIENCE,
    PATIENCE,
    VAIN,
    Await,
    Call,
    Recv,
    Send,
    Try,
    assert_never,
)
from conveyor.runtime.actor.graphs.conduits import Conduits
from conveyor.runtime.actor.graphs.meetings import Meetings
from conveyor.runtime.actor.graphs.producers import Outlet, Producer, Producers
from conveyor.runtime.graph.edges.layout import Assignment
from conveyor.runtime.messages.connection import SHARE_FROM

if TYPE_CHECKING:
    from conveyor.codec.promises import Keeper
    from conveyor.runtime.actor.ground import Ground


class Steps(Struct, frozen=True):
    """What the steps of a program are added with: the ends that were opened, and who starts coroutines.

    running: the task of the coroutine that the program waits for, if there is one.
    """

    ground: Ground
    assignment: Assignment
    tasks: Mapping[int, Task]
    recorder: _core.Recorder
    program: _core.Program
    limits: _core.Limits
    readers: Mapping[int, _core.Reader]
    writers: Mapping[int, _core.Writer]
    keepers: Mapping[int, Keeper]
    conduits: Conduits
    meetings: Meetings
    producers: Producers
    budget: _core.MemoryBudget | None
    start: Callable[[Coroutine[Any, Any, Any], int], None]
    running: list[Any]

    def add_all(self) -> None:
        """Add all of them, in order."""
        # By edge, which receive of the program takes its frames.
        receives = {edge: i for i, edge in enumerate(Outline(self.assignment.program).receives)}
        steps = self.assignment.program.steps
        last_read = {
            reg: i for i, step in enumerate(steps) for reg in registers_read(step, self.tasks)
        }
        for i, step in enumerate(steps):
            match step:
                case Recv():
                    self._add_receive(step)
                case Try():
                    self.program.add_try(
                        receives[step.edge], PATIENCE, MOST_PATIENCE, VAIN, MOST_LEFT_OUT
                    )
                case Await():
                    take = self.conduits.inbound[step.edge].take
                    self.program.add_await(receives[step.edge], take)
                case Call():
                    self._add_task(step)
                case Send():
                    self._add_send(step, last=last_read[step.reg] == i)
                case _:
                    assert_never(step)

    def _add_receive(self, step: Recv) -> None:
        reg = -1 if step.reg is None else step.reg
        spread = [] if step.spread is None else _places(step.spread)
        source = self.assignment.sources[step.edge]
        inbound = self.conduits.inbound.get(step.edge)
        arrived = None if inbound is None else inbound.arrived
        self.program.add_receive(self.readers[step.edge], reg, spread, source, arrived)

    def _add_task(self, step: Call) -> None:
        task = self.tasks[step.task]
        if step.stream is not None:
            self._add_generator(step, task, step.stream)
            return
        meeting = self.meetings.add(step, task)
        offer = self.meetings.offer(step, task)
        _add_call(
            self.ground,
            self.program,
            step,
            task if offer is None else replace(task, function=offer),
            self.assignment.program.registers,
            self.start,
            None if meeting is None else meeting.start,
        )

    def _add_generator(self, step: Call, task: Task, stream: int) -> None:
        index = self.assignment.recorder.sends.index(stream)
        outlet = Outlet(
            self.writers[stream],
            self.recorder,
            index,
            self.ground.process,
            self.program,
            task.label,
            self.budget,
        )
        method, _ = _method(self.ground, task)
        producer = Producer(
            self.ground,
            self.program,
            self.assignment.graph,
            outlet,
            task.label,
            _invoke(method, task, self.assignment.program.registers),
            self.start,
            self.running,
            self.limits,
            task.id,
        )
        uses = sorted(set(registers_read(step, {task.id: task})))
        out = -1 if step.out is None else step.out
        self.program.add_call(
            method, step.task, task.label, [], [], uses, None, producer.start, out, [], -1
        )
        self.producers.add(producer)

    def _add_send(self, step: Send, last: bool) -> None:
        """``last``: nothing behind it reads what it sends."""
        beside = self.conduits.outbound.get(step.edge)
        keeper = self.keepers.get(step.edge)
        pack = None if keeper is None else keeper.pack
        if step.edge in self.assignment.stays:
            pack = functools.partial(_staying, *self.assignment.stays[step.edge])
        self.program.add_send(
            self.writers[step.edge],
            step.reg,
            last,
            step.only_done,
            self.assignment.sources[step.edge],
            step.edge in self.assignment.recorder.outputs,
            pack if beside is None else beside.pack,
            None if beside is None else beside.posted,
        )


def _staying(transport: str, snapshot: bool, value: Any) -> Direct:
    return Direct(value, transport, snapshot)


def _method(ground: Ground, task: Task) -> tuple[Callable[..., Any], bool]:
    """What ``task`` calls, and whether it is a coroutine function."""
    if task.function is not None:
        return task.function, inspect.iscoroutinefunction(task.function)
    return ground.instance.method(task.method)


def _invoke(method: Callable[..., Any], task: Task, registers: int) -> Callable[[list[Any]], Any]:
    """The call of ``task``, given all registers, of which there are so many."""
    task, values = with_fresh(task, registers)
    # Encoded once; large memory is not copied for each execution, but has private pages.
    fresh = _core.Snapshot(values, SentDefinitions(), SHARE_FROM) if values else None

    def invoke(regs: list[Any]) -> Any:
        if fresh is not None:
            regs = regs + fresh.decode()
        kwargs = {name: _value(argument, regs) for name, argument in task.kwargs}
        return method(*[_value(argument, regs) for argument in task.args], **kwargs)

    return invoke


def _add_call(
    ground: Ground,
    program: _core.Program,
    step: Call,
    task: Task,
    registers: int,
    start_coroutine: Callable[[Coroutine[Any, Any, Any], int], None],
    meet: Callable[[list[Any]], None] | None,
) -> None:
    """Add the step of a task that gives one result. ``meet`` starts it, where it is no call but goes on while
    the program is suspended."""
    method, is_async = _method(ground, task)
    plain = not task.kwargs and all(
        isinstance(a, Reg) or (isinstance(a, Const) and immutable(a.value)) for a in task.args
    )
    args: list[int] = []
    constants: list[Any] = []
    if plain:
        for argument in task.args:
            if isinstance(argument, Reg):
                args.append(argument.index)
            elif isinstance(argument, Const):
                constants.append(argument.value)
                args.append(-len(constants))

    invoke = _invoke(method, task, registers)

    def start(regs: list[Any]) -> None:
        start_coroutine(invoke(regs), task.id)

    program.add_call(
        method,
        step.task,
        task.label,
        args,
        constants,
        sorted(set(registers_read(step, {task.id: task}))),
        None if plain or is_async else invoke,
        start if is_async else meet,
        -1 if step.out is None else step.out,
        _places(step.outs),
        -1 if task.num_returns is None else task.num_returns,
    )


def _places(regs: Sequence[int | None]) -> list[int]:
    return [-1 if reg is None else reg for reg in regs]


def _value(argument: Argument, regs: list[Any]) -> Any:
    if isinstance(argument, Reg):
        return regs[argument.index]
    if isinstance(argument, Const):
        return argument.value
    return fill(argument.template, regs)
