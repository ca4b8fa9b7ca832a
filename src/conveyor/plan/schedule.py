"""The order in which things happen: one program for each actor, and the proof that they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conveyor.dag import DAGNode
from conveyor.dag.containers import find_nodes
from conveyor.exceptions import GraphError
from conveyor.plan.flow import Done, Flow, Items, Made, Part, Source
from conveyor.plan.model import (
    DRIVER,
    Argument,
    Call,
    Const,
    Edge,
    InputBundle,
    Nested,
    Program,
    Recv,
    Reg,
    Send,
    Step,
    Task,
)
from conveyor.plan.template import template


def write_programs(
    flow: Flow, inputs: Sequence[InputBundle], edge_of: Mapping[Source | Done | Items, int]
) -> tuple[tuple[Task, ...], tuple[Program, ...]]:
    """The tasks with their registers, and each actor's program.

    An actor runs its tasks in bind order. It receives a value just before the first task that
    needs it, and sends one right after the task that made it.
    """
    bundles = {bundle.edge: bundle for bundle in inputs}
    writers = [_Writer(flow, bundles, edge_of) for _ in flow.actors]
    tasks = tuple(writers[actor].write(index, actor) for index, actor in enumerate(flow.actor_of))
    programs = tuple(
        Program(actor, writer.registers, tuple(writer.steps))
        for actor, writer in enumerate(writers)
    )
    return tasks, programs


class _Writer:
    """One actor's program in the making. Every value has a register of its own."""

    def __init__(
        self,
        flow: Flow,
        bundles: Mapping[int, InputBundle],
        edge_of: Mapping[Source | Done | Items, int],
    ) -> None:
        self.flow = flow
        self.bundles = bundles
        self.edge_of = edge_of
        self.steps: list[Step] = []
        self.register_of: dict[Source, int] = {}

    @property
    def registers(self) -> int:
        return len(self.register_of)

    def write(self, index: int, actor: int) -> Task:
        node = self.flow.nodes[index]
        missing = {
            self.edge_of[source]: source
            for source in self.flow.needs[index]
            if source not in self.register_of
        }
        # In the order of the edges' numbers, which is the order in which the values come to be.
        for edge in sorted(missing):
            if missing[edge] not in self.register_of:
                self.steps.append(self.receive(edge, missing[edge]))
        task = Task(
            id=index,
            actor=actor,
            method=node.method,
            args=tuple(self.argument(value) for value in node.args),
            kwargs=tuple((name, self.argument(value)) for name, value in node.kwargs.items()),
            num_returns=node.num_returns,
            label=self.flow.labels[index],
            function=None if node.function is None else node.function.call,
        )
        made = [Made(index, None), *(Made(index, i) for i in range(node.num_returns or 0))]
        done = self.edge_of.get(Done(made[0]))
        whole, *elements = (self.new(m) if m in self.flow.readers else None for m in made)
        if whole is None and done is not None:
            whole = self.new(made[0])
        stream = self.edge_of.get(Items(made[0]))
        self.steps.append(Call(index, whole, tuple(elements), stream))
        self.steps += (
            Send(self.edge_of[m], self.register_of[m], only_done=node.streams)
            for m in made
            if m in self.edge_of
        )
        if done is not None:
            assert whole is not None
            self.steps.append(Send(done, whole, only_done=True))
        return task

    def receive(self, edge: int, source: Source) -> Recv:
        bundle = self.bundles.get(edge)
        if bundle is None or bundle.keys in ((None,), ()):
            return Recv(edge, self.new(source))
        # All of a bundle's readers use all of it.
        return Recv(edge, None, tuple(self.new(Part(key)) for key in bundle.keys))

    def new(self, source: Source) -> int:
        return self.register_of.setdefault(source, len(self.register_of))

    def argument(self, value: Any) -> Argument:
        if isinstance(value, DAGNode):
            return self.register(value)
        if find_nodes(value):
            return Nested(template(value, self.register))
        return Const(value)

    def register(self, node: DAGNode) -> Reg:
        return Reg(self.register_of[self.flow.source(node)])


def global_order(
    programs: Sequence[Program],
    tasks: Sequence[Task],
    edges: Sequence[Edge],
) -> tuple[int, ...]:
    """An order of all tasks in which every actor can follow its program to the end.

    Only a receive waits: depth is granted at submission, so a send always finds room. The programs
    fit together exactly if following them all, each as far as it comes, ends with all of them done.
    The proof does that, whatever made the programs.

    Raises:
        GraphError: the programs wait for each other; the message tells the cycle.
    """
    position = [0] * len(programs)
    published = {edge.id for edge in edges if edge.writer == DRIVER}
    waiting: dict[int, list[int]] = {}
    order: list[int] = []
    ready = list(range(len(programs)))
    while ready:
        index = ready.pop()
        steps = programs[index].steps
        while position[index] < len(steps):
            step = steps[position[index]]
            if isinstance(step, Recv) and step.edge not in published:
                waiting.setdefault(step.edge, []).append(index)
                break
            if isinstance(step, Call):
                order.append(step.task)
            elif isinstance(step, Send):
                published.add(step.edge)
                ready += waiting.pop(step.edge, ())
            position[index] += 1
    if waiting:
        raise GraphError(_cycle(programs, position, tasks, edges))
    return tuple(order)


def _cycle(
    programs: Sequence[Program],
    position: Sequence[int],
    tasks: Sequence[Task],
    edges: Sequence[Edge],
) -> str:
    """Why the programs are stuck, in the user's words."""
    program_of = {program.actor: index for index, program in enumerate(programs)}

    def waits_for(index: int) -> Edge:
        step = programs[index].steps[position[index]]
        assert isinstance(step, Recv)
        return edges[step.edge]

    # Whoever is stuck waits for someone who is stuck, so following them must come around.
    index = next(i for i, program in enumerate(programs) if position[i] < len(program.steps))
    trail: list[int] = []
    while index not in trail:
        trail.append(index)
        edge = waits_for(index)
        writer = program_of.get(edge.writer)
        if writer is None or _maker(programs[writer], position[writer], edge) is None:
            return (
                f"{_next(programs[index], position[index], tasks)} waits for {edge.source}, "
                f"which nothing makes"
            )
        index = writer
    cycle = trail[trail.index(index) :]
    clauses = []
    for member, writer in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        edge = waits_for(member)
        first = _next(programs[writer], position[writer], tasks)
        maker = _maker(programs[writer], position[writer], edge)
        clause = f"{_next(programs[member], position[member], tasks)} waits for {edge.source}"
        if maker is not None and tasks[maker].label != first:
            clause += f", which its actor makes after {first}"
        clauses.append(clause)
    return f"no order of the graph's tasks is possible: {'; '.join(clauses)}"


def _next(program: Program, position: int, tasks: Sequence[Task]) -> str:
    """The label of the task that ``program`` would run next."""
    calls = (step for step in program.steps[position:] if isinstance(step, Call))
    call = next(calls, None)
    return f"actor {program.actor}" if call is None else tasks[call.task].label


def _maker(program: Program, position: int, edge: Edge) -> int | None:
    """The task whose result ``program`` would still send on ``edge``."""
    task = None
    for step in program.steps[position:]:
        if isinstance(step, Call):
            task = step.task
        elif isinstance(step, Send) and step.edge == edge.id:
            return task
    return None
