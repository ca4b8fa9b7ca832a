"""Order of a Plan's steps, decided by a row of passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from conveyor.dag import DAGNode, MethodNode
from conveyor.dag.containers import find_nodes
from conveyor.dag.node import record_of
from conveyor.plan.channels import Channels
from conveyor.plan.flow import Flow
from conveyor.plan.model import EXECUTOR, Argument, Const, Edge, Nested, Program, Reg, Task
from conveyor.plan.overlap import place_tries
from conveyor.plan.prove import prove
from conveyor.plan.reading import task_of_each_step
from conveyor.plan.steps import Await, Call, Event, Recv, Send, Step, Try, assert_never
from conveyor.plan.template import template
from conveyor.plan.values import Done, Items, Made, Part, Value


def place_transfers(
    flow: Flow, order: Sequence[int], channels: Channels
) -> tuple[tuple[Task, ...], tuple[Program, ...]]:
    """Return the tasks with their registers, and each actor's program, with its tasks in ``order``.

    A value's transfer stands where it is needed: the steps of a reader before the first of its tasks
    that uses the value, those of the writer where the first of the readers does. The executor needs
    what it reads at the end. So every program has the transfers in one order, which is that of the
    tasks.
    """
    placing = _Placing(flow, channels)
    made = {index: placing.task(index) for index in order}
    placing.results()
    programs = tuple(
        Program(actor, len(registers), tuple(steps))
        for actor, (registers, steps) in enumerate(
            zip(placing.registers, placing.steps, strict=True)
        )
    )
    return tuple(made[index] for index in range(len(made))), programs


class _Placing:
    """The programs in the making. Every value has a register of its own at each actor that uses it."""

    def __init__(self, flow: Flow, channels: Channels) -> None:
        self.flow = flow
        self.channels = channels
        self.keys = {bundle.edge: bundle.keys for bundle in channels.inputs}
        #: By edge, what an actor has not been made to send yet.
        self.unsent = {
            edge: what
            for (what, _), edge in channels.edge_of.items()
            if isinstance(what, (Made, Done))
        }
        self.steps: list[list[Step]] = [[] for _ in flow.actors]
        self.registers: list[dict[Value, int]] = [{} for _ in flow.actors]

    def task(self, index: int) -> Task:
        """Place a task, and before it the transfers of what it needs."""
        flow, actor = self.flow, self.flow.actor_of[index]
        registers = self.registers[actor]
        missing = {
            self.channels.edge_of[value, actor]: value
            for value in flow.needs[index]
            if value not in registers
        }
        awaited: list[Await] = []
        # In the order of the edges' numbers, which is the order in which the values come to be.
        for edge in sorted(missing):
            if missing[edge] not in registers:  # nor has it come with another part of the input
                self.send(edge)
                self.receive(edge, missing[edge], actor)
                if self.channels.edges[edge].beside:
                    awaited.append(Await(edge, registers[missing[edge]]))
        # Behind all receives: what travels beside the frames does so side by side.
        self.steps[actor] += awaited
        node = flow.nodes[index]

        def held(needed: DAGNode) -> Reg:
            return Reg(registers[flow.value(needed)])

        task = Task(
            id=index,
            actor=actor,
            method=node.method,
            args=tuple([_argument(value, held) for value in node.args]),
            kwargs=tuple([(name, _argument(v, held)) for name, v in node.kwargs.items()]),
            num_returns=node.num_returns,
            label=flow.labels[index],
            function=None if node.function is None else node.function.call,
            collective=None if node.collective is None else flow.summary(node.collective),
        )
        self.steps[actor].append(self.call(index))
        return task

    def call(self, index: int) -> Call:
        """Make the step that runs a task, with registers for the results that somebody uses."""
        node, actor = self.flow.nodes[index], self.flow.actor_of[index]
        edge_of, readers = self.channels.edge_of, self.flow.readers
        whole = Made(index, None)
        made = (whole, *[Made(index, i) for i in range(node.num_returns or 0)])
        out, *outs = [self.register(m, actor) if m in readers else None for m in made]
        if out is None and (Done(whole), EXECUTOR) in edge_of:
            out = self.register(whole, actor)
        items = edge_of[Items(whole), EXECUTOR] if node.streams else None
        return Call(index, out, tuple(outs), items, self.met_by(node))

    def met_by(self, node: MethodNode) -> tuple[int, ...]:
        """Return the tasks that wait for each other with the one of ``node``, including that one."""
        if node.collective is None or not node.collective.meets:
            return ()
        ranks = {record.number for record in record_of(node).together}
        return tuple([task for task, each in enumerate(self.flow.nodes) if each.number in ranks])

    def results(self) -> None:
        """Place the sends of values that only the executor reads."""
        for edge in sorted(self.unsent):
            self.send(edge)

    def register(self, value: Value, actor: int) -> int:
        """Find the register of ``value`` at ``actor``; it gets a new one if it has none."""
        registers = self.registers[actor]
        return registers.setdefault(value, len(registers))

    # A transfer at its two ends: a frame in a ring, and what its route has beside it.

    def send(self, edge: int) -> None:
        """Place the writer's steps, unless they stand there already or the executor is the writer."""
        what = self.unsent.pop(edge, None)
        if what is None:
            return
        made = what.made if isinstance(what, Done) else what
        actor = self.flow.actor_of[made.task]
        only_done = isinstance(what, Done) or self.flow.nodes[made.task].streams
        self.steps[actor].append(Send(edge, self.registers[actor][made], only_done))

    def receive(self, edge: int, value: Value, actor: int) -> None:
        """Place the steps of ``actor``, which reads ``value`` from ``edge``."""
        keys = self.keys.get(edge)
        if keys is None or keys in ((None,), ()):
            step = Recv(edge, self.register(value, actor))
        else:
            # All readers of a bundle use all of it.
            spread = tuple([self.register(Part(key), actor) for key in keys])
            step = Recv(edge, None, spread)
        self.steps[actor].append(step)


def _argument(value: Any, held: Callable[[DAGNode], Reg]) -> Argument:
    """Write an argument as the Plan has it, with the registers that hold what it needs."""
    if isinstance(value, DAGNode):
        return held(value)
    if find_nodes(value):
        return Nested(template(value, held))
    return Const(value)


def make_schedule(
    flow: Flow, channels: Channels, overlap: bool = False
) -> tuple[tuple[int, ...], tuple[Task, ...], tuple[Program, ...]]:
    """Return the order of the tasks, the tasks with the registers of their arguments, and a program for
    each actor. ``overlap``: what travels beside the frames is received early if it is there.

    Raises:
        GraphError: the programs would wait for each other.
    """
    order = order_tasks(flow)
    tasks, programs = place_transfers(flow, order, channels)
    programs = tuple([hoist(program) for program in programs])
    if overlap:
        programs = place_tries(programs, channels.edges, order, True)
    prove_programs(programs, tasks, channels.edges)
    return order, tasks, programs


def order_tasks(flow: Flow) -> tuple[int, ...]:
    """Return the order in which the tasks were bound. Users expect it of each actor, and it fits them all,
    since nothing can be bound to a task that does not exist yet."""
    # Which is how `survey` has numbered them.
    return tuple(range(len(flow.nodes)))


def hoist(program: Program) -> Program:
    """Put every send of ``program`` right behind the step that gives it its value.

    A send does not wait, so this only makes values come sooner. Receives and calls stay: what they
    wait for, and how long they run, would keep others from what they could do first.
    """
    groups: list[tuple[Step, list[Send]]] = []
    sends_of: dict[
        int | None, list[Send]
    ] = {}  # by register: the sends behind the step that fills it
    filled: tuple[int | None, ...]
    for step in program.steps:
        match step:
            case Recv():
                filled = (step.reg,) if step.spread is None else step.spread
            case Await():
                filled = (step.reg,)
            case Try():
                filled = ()
            case Call():
                filled = (step.out, *step.outs)
            case Send():
                sends_of[step.reg].append(step)
                continue
            case _:
                assert_never(step)
        sends: list[Send] = []
        groups.append((step, sends))
        for reg in filled:
            sends_of[reg] = sends
    steps: list[Step] = []
    for first, sends in groups:
        steps.append(first)
        # In the order of the edges' numbers, which is the order in which the values come to be.
        sends.sort(key=lambda send: send.edge)
        steps += sends
    made = tuple(steps)
    return program if made == program.steps else Program(program.actor, program.registers, made)


def prove_programs(
    programs: Sequence[Program], tasks: Sequence[Task], edges: Sequence[Edge]
) -> None:
    """Prove that the programs, whatever made them, can always be followed to their end.

    Raises:
        GraphError: they wait for each other; the message tells the cycle.
    """
    inputs: list[Event] = [("frame", edge.id) for edge in edges if edge.writer == EXECUTOR]

    def name_step(program: int, place: int) -> str:
        """Name the task on whose behalf a program has the step at ``place``."""
        task = task_of_each_step(programs[program])[place]
        return f"actor {program}" if task is None else tasks[task].label

    def name_event(event: Event) -> str:
        match event:
            case ("frame", edge):
                return edges[edge].source
            case ("tensors", edge):
                return f"the tensors of {edges[edge].source}"
            case ("call", task):
                return tasks[task].label

    prove([program.steps for program in programs], inputs, name_step, name_event)
