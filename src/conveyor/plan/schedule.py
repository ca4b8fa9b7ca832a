"""Order of a Plan's steps, decided by a row of passes.

A transfer begins when both of its ends have come to it: the writer to its send, which stands right behind the
task that makes the value, and the reader to its receive. So what a schedule can do is to
receive early and to wait for the tensors late. To stand at a receive whose frame is late would keep the actor
from what it could compute meanwhile. So the receive stays where the value is needed, and a :class:`Try`
stands ahead of it, which takes the frame if it is there: no actor waits the longer for it. It goes ahead of
those tasks of its actor that were bound after the value's maker; those that were bound before it are done, as
a rule, before there can be a frame.

A value whose tensors travel in its frame is copied by its writer and read in place, so there is nothing to
receive early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from conveyor.dag import DAGNode, MethodNode
from conveyor.dag.containers import find_nodes
from conveyor.dag.node import record_of
from conveyor.exceptions import GraphError
from conveyor.plan.channels import Channels
from conveyor.plan.flow import Done, Flow, Items, Made, Part, Value
from conveyor.plan.model import (
    EXECUTOR,
    Argument,
    Await,
    Call,
    Const,
    Edge,
    Event,
    Nested,
    Plan,
    Program,
    Recv,
    Reg,
    Send,
    Step,
    Task,
    Try,
    assert_never,
)
from conveyor.plan.reading import stages, task_of_each_step
from conveyor.plan.template import template


def prove(
    programs: Sequence[Sequence[Step]],
    given: Iterable[Event],
    name_step: Callable[[int, int], str],
    name_event: Callable[[Event], str],
) -> None:
    """Prove that all programs come to their end, however fast each of them is. Of a step it asks only what it
    waits for and what it enables.

    What has happened stays so, and no step is the less able to go on for it. So it does not matter who
    is followed first: the programs fit together exactly if following them all, each as far as it comes,
    ends with all of them done.

    Args:
        given: the events that happen whatever the programs do.
        name_step: says what a program, by its number, does with its step at a position.
        name_event: says what a step waits for.

    Raises:
        GraphError: some wait for each other, or for what never happens; the message says who.
    """
    positions = [0] * len(programs)
    happened = set(given)
    waiting: dict[Event, list[int]] = {}
    ready = list(range(len(programs)))
    while ready:
        program = ready.pop()
        steps = programs[program]
        while positions[program] < len(steps):
            step = steps[positions[program]]
            for event in step.enables():
                happened.add(event)
                if event in waiting:
                    ready += waiting.pop(event)
            missing = _missing(step.waits_for(), happened)
            if missing is not None:
                waiting.setdefault(missing, []).append(program)
                break
            positions[program] += 1
    if waiting:
        raise GraphError(_why(programs, positions, happened, name_step, name_event))


def _missing(events: Iterable[Event], happened: set[Event]) -> Event | None:
    """Find the first of ``events`` that has not happened."""
    for event in events:
        if event not in happened:
            return event
    return None


def _why(
    programs: Sequence[Sequence[Step]],
    positions: Sequence[int],
    happened: set[Event],
    name_step: Callable[[int, int], str],
    name_event: Callable[[Event], str],
) -> str:
    """Say why the programs are stuck at ``positions``."""
    # A stuck program waits for another stuck one, so following them must come around.
    program = next(i for i, steps in enumerate(programs) if positions[i] < len(steps))
    trail: dict[
        int, tuple[Event, int]
    ] = {}  # what each waits for, and where the next one enables it
    while program not in trail:
        missing = _missing(programs[program][positions[program]].waits_for(), happened)
        assert missing is not None
        enabler = _enabler(programs, positions, missing)
        if enabler is None:
            doing = name_step(program, positions[program])
            return f"{doing} waits for {name_event(missing)}, which nothing makes"
        trail[program] = missing, enabler[1]
        program = enabler[0]
    cycle = list(trail)[list(trail).index(program) :]
    clauses = []
    for member, producer in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        missing, position = trail[member]
        clause = f"{name_step(member, positions[member])} waits for {name_event(missing)}"
        first = name_step(producer, positions[producer])
        if name_step(producer, position) != first:
            clause += f", which its actor makes after {first}"
        clauses.append(clause)
    return f"no order of the graph's tasks is possible: {'; '.join(clauses)}"


def _enabler(
    programs: Sequence[Sequence[Step]], positions: Sequence[int], event: Event
) -> tuple[int, int] | None:
    """Find the program that would still enable ``event``, and at which position."""
    for program, steps in enumerate(programs):
        for position in range(positions[program], len(steps)):
            if event in steps[position].enables():
                return program, position
    return None


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
    out_of_band = {edge.id for edge in edges if edge.out_of_band}
    if not out_of_band:
        return tuple(programs)
    order_of = {task: position for position, task in enumerate(order)}
    producer = {
        send.edge: order_of[part.call.task]
        for program in programs
        for part in stages(program)
        for send in part.sends
    }
    tried = out_of_band if on else set()
    return tuple([_placed(program, tried, producer, order_of) for program in programs])


def _placed(
    program: Program, tried: set[int], producer: Mapping[int, int], order_of: Mapping[int, int]
) -> Program:
    parts = stages(program)
    calls = [order_of[part.call.task] for part in parts]
    tries: list[list[int]] = [[] for _ in parts]
    for position, part in enumerate(parts):
        for edge in sorted(step.edge for step in part.receives if step.edge in tried):
            first = next(i for i, at in enumerate(calls) if at > producer[edge])
            if first < position:
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
                if self.channels.edges[edge].out_of_band:
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

    def name_step(program: int, position: int) -> str:
        """Name the task on whose behalf a program has the step at ``position``."""
        task = task_of_each_step(programs[program])[position]
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
