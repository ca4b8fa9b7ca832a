"""Layout of a Plan in memory: the place of each edge's ring, its readers, and the processes to wake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from conveyor import _core
from conveyor.codec.frames import Sealed
from conveyor.config import Config
from conveyor.graph.edges.beside import ConduitEnd, Whereabouts, make_wire, wire_bytes
from conveyor.graph.edges.ends import ReadEnd, WriteEnd
from conveyor.graph.edges.failures import FailureRings
from conveyor.graph.telemetry.recording import RecorderPlace, place_recorders
from conveyor.plan.model import EXECUTOR, Plan, Program, Promise, Task
from conveyor.runtime.blueprint import Blueprint, LimitsPlan, RingPlan
from conveyor.runtime.process import Place, slots_of
from conveyor.transport.base import Transport


def assign(
    plan: Plan,
    config: Config,
    number: int,
    name: str,
    places: Mapping[int, Place],
    layout: Layout,
    tasks: Sequence[Tasks],
    first: int,
) -> list[Assignment]:
    """Return the assignment of each actor. number, name: the graph's. tasks: those of each actor. first: the
    number of the next execution. Of the plan only the actors, the edges and the programs are read."""
    made = []
    for program in plan.programs:
        actor = program.actor
        reads, writes = layout.reads.get(actor, ()), layout.writes.get(actor, ())
        edges = [end.edge for end in reads] + [end.edge for end in writes]
        assignment = Assignment(
            number,
            name,
            plan.actors[actor].name,
            places[actor].bit,
            program,
            tasks[actor],
            reads,
            writes,
            layout.peers_of(actor, dict(places)),
            {edge: plan.edges[edge].source for edge in edges},
            layout.limits,
            layout.failures,
            layout.recorders[actor],
            first,
            config.memory_bytes,
            config.spin_us,
            layout.conduits.get(actor, ()),
            {
                end.edge: promise
                for end in writes
                if (promise := plan.edges[end.edge].promise) is not None
            },
            {
                end.edge: stays
                for end in writes
                if (stays := plan.edges[end.edge].stays) is not None
            },
        )
        made.append(assignment)
    return made


Tasks = dict[int, Task] | Sealed
"""The tasks of one actor, by their number; sealed where the driver may not know their constants."""


def tasks_by_actor(plan: Plan) -> list[dict[int, Task]]:
    """Return the tasks of each actor of ``plan``."""
    own: list[dict[int, Task]] = [{} for _ in plan.actors]
    for task in plan.tasks:
        own[task.actor][task.id] = task
    return own


def task_labels(plan: Plan) -> dict[int, str]:
    """Return the name of each task of ``plan``, by number."""
    return {task.id: task.label for task in plan.tasks}


def make_budget(memory_bytes: int | None) -> _core.MemoryBudget | None:
    """Return the memory that one process may use for one graph; see ``Config.memory_bytes``."""
    return None if memory_bytes is None else _core.MemoryBudget(memory_bytes)


class LimitsPlace(Struct, frozen=True):
    """Place of the deadlines and cancellations of the executions under way."""

    offset: int
    sets: int
    tasks: int

    def open(self, segment: _core.Segment) -> _core.Limits:
        return _core.Limits(segment, self.offset, self.sets, self.tasks)


class Assignment(Struct, frozen=True):
    """The part of one actor in a graph, as its process gets it: its program, and its ends of the rings.

    sources: by edge, what it carries, for errors.
    conduits: its ends of the out-of-band parts.
    promises: by edge, what holds for the tensors that it sends.
    stays: by edge, the values that stay and are fetched later.
    tasks: sealed if the driver, which passes them on, may not know the classes of their constants.
    first: the number of the first execution.
    peers: the processes that it reads from or wakes.
    memory_bytes, spin_us: see ``Config``.
    """

    graph: int
    name: str
    actor_name: str
    bit: int
    program: Program
    tasks: Tasks
    reads: tuple[ReadEnd, ...]
    writes: tuple[WriteEnd, ...]
    peers: tuple[tuple[int, int], ...]
    sources: dict[int, str]
    limits: LimitsPlace
    failures: FailureRings
    recorder: RecorderPlace
    first: int
    memory_bytes: int | None
    spin_us: float | None
    conduits: tuple[ConduitEnd, ...] = ()
    promises: dict[int, Promise] = field(default_factory=dict)
    stays: dict[int, tuple[str, bool]] = field(default_factory=dict)


class Layout(Struct, frozen=True):
    segment: _core.Segment
    blueprint: Blueprint
    offsets: tuple[int, ...]
    limits: LimitsPlace
    failures: FailureRings
    reads: dict[int, tuple[ReadEnd, ...]]
    writes: dict[int, tuple[WriteEnd, ...]]
    recorders: dict[int, RecorderPlace]
    conduits: dict[int, tuple[ConduitEnd, ...]]

    def peers_of(self, actor: int, places: dict[int, Place]) -> tuple[tuple[int, int], ...]:
        """Return the processes that this actor must be able to read from or to wake."""
        peers = {end.writer.process for end in self.reads.get(actor, ())}
        peers |= {to.process for end in self.writes.get(actor, ()) for to in end.targets}
        peers.discard(places[actor].process)
        return tuple(sorted(peers))


def lay_out(
    plan: Plan,
    places: dict[int, Place],
    tasks: int,
    slot_bytes: int,
    fail_fast: bool,
    transports: Mapping[str, Transport],
    where: Whereabouts | None = None,
) -> Layout:
    """Make the graph's segment, and say which process has which end. ``places`` includes the executor's.
    ``tasks``: how many the graph has; the driver does not see them if an actor executes the graph.
    ``transports``: those of the edges with out-of-band parts. ``where``: the nodes of the actors, if there
    are several."""
    stride = -(-slot_bytes // 64) * 64
    offsets: list[int] = []
    top = 0
    for edge in plan.edges:
        offsets.append(top)
        top += _core.Segment.ring_bytes(slots_of(edge.depth), stride, len(edge.readers))
    wires: dict[int, int] = {}
    for edge in plan.edges:
        if edge.beside:
            wires[edge.id] = top
            top += wire_bytes(edge, stride)
    limits = LimitsPlace(top, slots_of(plan.depth), tasks)
    top += _core.Limits.bytes(limits.sets, limits.tasks)
    failures = FailureRings(
        top,
        _core.Segment.ring_bytes(limits.sets, stride, 1),
        tuple([places[info.index] for info in plan.actors]),
        places[EXECUTOR],
        fail_fast,
    )
    top += len(plan.actors) * failures.size
    recorders, top = place_recorders(plan, top)
    rings: list[RingPlan] = []
    reads: dict[int, list[ReadEnd]] = {}
    writes: dict[int, list[WriteEnd]] = {}
    streams = {items for _, items in plan.streams}
    for edge, offset in zip(plan.edges, offsets, strict=True):
        # A generator waits for its items to be taken; nothing else in a graph waits for room.
        flags = _core.RING_WRITER_MAY_WAIT if edge.id in streams else 0
        writer = places[edge.writer]
        for index, reader in enumerate(edge.readers):
            # A result that can be got again is shared even if nobody else reads it.
            shared = len(edge.readers) > 1 or reader == EXECUTOR
            end = ReadEnd(edge.id, offset, index, writer, shared)
            reads.setdefault(reader, []).append(end)
        targets = tuple([places[r] for r in edge.readers])
        times = recorders[edge.writer].times_of(edge.id)
        rings.append(RingPlan(offset, slots_of(edge.depth), stride, writer, targets, flags, *times))
        writes.setdefault(edge.writer, []).append(WriteEnd(edge.id, offset, targets))
    conduits: dict[int, list[ConduitEnd]] = {}
    for number, offset in wires.items():
        edge = plan.edges[number]
        transport, ends = transports[edge.route], where or Whereabouts()
        made = make_wire(rings, plan, edge, offset, stride, places, transport, ends)
        for actor, part in made:
            conduits.setdefault(actor, []).append(part)
    rings += failures.rings(limits.sets, stride)
    shared_limits = LimitsPlan(limits.offset, limits.sets, limits.tasks, places[EXECUTOR].slot)
    blueprint = Blueprint(top, tuple(rings), (shared_limits,))
    return Layout(
        blueprint.make(),
        blueprint,
        tuple(offsets),
        limits,
        failures,
        {actor: tuple(ends) for actor, ends in reads.items()},
        {actor: tuple(ends) for actor, ends in writes.items()},
        recorders,
        {actor: tuple(ends) for actor, ends in conduits.items()},
    )
