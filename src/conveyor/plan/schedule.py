"""A row of passes decides the order in which things happen."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor.plan.channels import Channels
from conveyor.plan.flow import Flow
from conveyor.plan.hoist import hoist
from conveyor.plan.model import EXECUTOR, Edge, Program, Task
from conveyor.plan.overlap import place_tries
from conveyor.plan.prove import prove
from conveyor.plan.reading import task_of_each_step
from conveyor.plan.steps import Event
from conveyor.plan.transfers import place_transfers


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


def prove_programs(
    programs: Sequence[Program], tasks: Sequence[Task], edges: Sequence[Edge]
) -> None:
    """Prove that the programs, whatever made them, can always be followed to their end.

    Raises:
        GraphError: they wait for each other; the message tells the cycle.
    """
    inputs: list[Event] = [("frame", edge.id) for edge in edges if edge.writer == EXECUTOR]
    prove([program.steps for program in programs], inputs, _Words(programs, tasks, edges))


class _Words:
    """What the steps of a graph's programs are called."""

    def __init__(
        self, programs: Sequence[Program], tasks: Sequence[Task], edges: Sequence[Edge]
    ) -> None:
        self.programs = programs
        self.tasks = tasks
        self.edges = edges

    def step(self, program: int, place: int) -> str:
        """Name the task on whose behalf a program has the step at ``place``."""
        task = task_of_each_step(self.programs[program])[place]
        return f"actor {program}" if task is None else self.tasks[task].label

    def event(self, event: Event) -> str:
        """Name what somebody waits for."""
        match event:
            case ("frame", edge):
                return self.edges[edge].source
            case ("tensors", edge):
                return f"the tensors of {self.edges[edge].source}"
            case ("call", task):
                return self.tasks[task].label
