"""Edges of a graph in memory: the place of each edge's ring, its readers, the ends that a process opens, and
what travels out of band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from conveyor import _core
from conveyor.codec.frames import Sealed
from conveyor.codec.promises import PromiseChecker
from conveyor.config import Config
from conveyor.exceptions import GraphError
from conveyor.graph.failures import FailureRings
from conveyor.graph.telemetry import RecorderLayout, lay_out_recorders
from conveyor.plan.model import EXECUTOR, Edge, Plan, Program, Promise, Task
from conveyor.runtime.blueprint import Blueprint, LimitsPlan, RingPlan
from conveyor.runtime.process import Process, RingEnd, slots_of
from conveyor.transport import registry
from conveyor.transport.base import Host, Transport


class ReadEnd(Struct, frozen=True):
    edge: int
    offset: int
    index: int
    writer: RingEnd
    shared: bool

    def open(
        self,
        process: Process,
        segment: _core.Segment,
        name: str,
        source: str,
        *,
        alone: bool = False,
    ) -> _core.Reader:
        """Open the reading end. ``name`` is the graph's, ``source`` says what the edge carries. ``alone``:
        frames are treated as if nobody else read them, since they are not written to here."""
        carries = carried(name, self.edge, source)
        arena = process.arena_of(*self.writer.process)
        return process.reader(
            segment,
            self.offset,
            self.index,
            self.writer,
            arena,
            carries,
            shared=self.shared and not alone,
        )


class WriteEnd(Struct, frozen=True):
    edge: int
    offset: int
    targets: tuple[RingEnd, ...]

    def open(
        self,
        process: Process,
        segment: _core.Segment,
        graph: int,
        name: str,
        source: str,
        *,
        budget: _core.MemoryBudget | None = None,
    ) -> _core.Writer:
        """Open the writing end. ``graph``, ``name`` and ``budget`` are the graph's, ``source`` says what the
        edge carries."""
        carries = carried(name, self.edge, source)
        return process.writer(
            segment,
            self.offset,
            self.targets,
            carries,
            graph,
            self.edge,
            budget=budget,
        )


def carried(name: str, edge: int, source: str) -> str:
    """Describe the values on an edge of the graph ``name``, in words."""
    return f"{name}, edge #{edge} ({source})"


#: Seconds, within a node; see :class:`conveyor.transport.Wire`. It takes milliseconds, unless the machine is
#: busy.
KNOWN_DEAD_WITHIN = 1.0


class Whereabouts(Struct, frozen=True):
    """Nodes of some processes, for out-of-band parts: those of the ends of an edge, or of all actors of a
    graph.

    hosts: the node of each; empty if there is only one.
    known_dead_within, deployed: see :class:`conveyor.transport.Wire`.
    """

    hosts: tuple[Host, ...] = ()
    known_dead_within: float = KNOWN_DEAD_WITHIN
    deployed: int = 0

    def of(self, edge: Edge) -> Whereabouts:
        """Return the whereabouts of the ends of an edge, by rank. This one has to be that of all actors of
        the edge's graph."""
        hosts = tuple([self.hosts[actor] for actor in (edge.writer, *edge.readers) if self.hosts])
        if len({host.number for host in hosts}) < 2:
            return Whereabouts(deployed=self.deployed)
        return Whereabouts(hosts, self.known_dead_within, self.deployed)


class EdgeEndpoint(Struct, frozen=True):
    """The end of an edge's out-of-band parts in one process.

    transport: opens the end.
    edge: the edge's number.
    rank: of the end: 0 is the writer's, the readers follow.
    members: the names of the actors at all ends, by rank.
    overlap: whether the graph was compiled with ``overlap=True``.
    where: nodes of all ends, by rank.
    sends, receives: its ends of the rings of the wire; those that it reads are in the order of the others'
        ranks.
    last: its end of the ring for the writer's last message, which finds room whatever waits for some then.
    """

    transport: Transport
    edge: int
    rank: int
    members: tuple[str, ...]
    overlap: bool
    where: Whereabouts
    sends: WriteEnd
    receives: tuple[ReadEnd, ...]
    last: WriteEnd | ReadEnd


def wire_bytes(edge: Edge, stride: int) -> int:
    """Return the size of the wire of ``edge`` in a segment; ``stride`` is that of the edge's ring."""
    slots = slots_of(edge.depth)
    up = len(edge.readers) * _core.Segment.ring_bytes(slots, stride, 1)
    last = _core.Segment.ring_bytes(1, stride, len(edge.readers))
    return _core.Segment.ring_bytes(slots, stride, len(edge.readers)) + last + up


def transports_of(plan: Plan) -> dict[str, Transport]:
    """Find the transports of a Plan, by their names. A graph keeps them, whatever becomes of the registry,
    and may have some of its own.

    Raises:
        GraphError: a transport is not known here.
    """
    found: dict[str, Transport] = {}
    for edge in plan.edges:
        if edge.out_of_band and edge.route not in found:
            transport = edge.transport or registry.get(edge.route)
            if transport is None:
                raise GraphError(
                    f"{edge.source} goes by the transport {edge.route!r}, which is not known in the process "
                    f"that began the session: call conveyor.transport.register there"
                )
            found[edge.route] = transport
    return found


def make_wire(
    rings: list[RingPlan],
    plan: Plan,
    edge: Edge,
    offset: int,
    stride: int,
    ring_ends: dict[int, RingEnd],
    transport: Transport,
    where: Whereabouts,
) -> list[tuple[int, EdgeEndpoint]]:
    """Add the rings of an edge's wire: one from the writer to the readers, one for the writer's last message,
    and one back from each reader. Return each actor with its end."""
    slots, readers = slots_of(edge.depth), len(edge.readers)
    members = tuple([plan.actors[actor].name for actor in (edge.writer, *edge.readers)])
    writer = ring_ends[edge.writer]
    down = WriteEnd(edge.id, offset, tuple([ring_ends[r] for r in edge.readers]))
    overlap, ends_where = plan.overlap, where.of(edge)
    may_wait = _core.RING_WRITER_MAY_WAIT
    rings.append(RingPlan(offset, slots, stride, writer, down.targets, may_wait))
    at = offset + _core.Segment.ring_bytes(slots, stride, readers)
    rings.append(RingPlan(at, 1, stride, writer, down.targets))
    last, last_at = WriteEnd(edge.id, at, down.targets), at
    at += _core.Segment.ring_bytes(1, stride, readers)
    ups: list[ReadEnd] = []
    ends: list[tuple[int, EdgeEndpoint]] = []
    for index, actor in enumerate(edge.readers):
        rings.append(RingPlan(at, slots, stride, ring_ends[actor], (writer,), may_wait))
        ups.append(ReadEnd(edge.id, at, 0, ring_ends[actor], shared=False))
        sends = WriteEnd(edge.id, at, (writer,))
        receives = ReadEnd(edge.id, offset, index, writer, shared=readers > 1)
        hears = ReadEnd(edge.id, last_at, index, writer, shared=readers > 1)
        end = EdgeEndpoint(
            transport, edge.id, index + 1, members, overlap, ends_where, sends, (receives,), hears
        )
        ends.append((actor, end))
        at += _core.Segment.ring_bytes(slots, stride, 1)
    end = EdgeEndpoint(transport, edge.id, 0, members, overlap, ends_where, down, tuple(ups), last)
    return [(edge.writer, end), *ends]


def assign(
    plan: Plan,
    config: Config,
    number: int,
    name: str,
    ring_ends: Mapping[int, RingEnd],
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
            ring_ends[actor].bit,
            program,
            tasks[actor],
            reads,
            writes,
            layout.peers_of(actor, dict(ring_ends)),
            {edge: plan.edges[edge].source for edge in edges},
            layout.limits,
            layout.failures,
            layout.recorders[actor],
            first,
            config.memory_bytes,
            config.spin_us,
            layout.endpoints.get(actor, ()),
            {
                end.edge: promise
                for end in writes
                if (promise := plan.edges[end.edge].promise) is not None
            },
            {
                end.edge: by_reference
                for end in writes
                if (by_reference := plan.edges[end.edge].by_reference) is not None
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


class LimitsLayout(Struct, frozen=True):
    """Layout of the deadlines and cancellations of the executions under way."""

    offset: int
    sets: int
    tasks: int

    def open(self, segment: _core.Segment) -> _core.Limits:
        return _core.Limits(segment, self.offset, self.sets, self.tasks)


class Assignment(Struct, frozen=True):
    """The part of one actor in a graph, as its process gets it: its program, and its ends of the rings.

    sources: by edge, what it carries, for errors.
    endpoints: its ends of the out-of-band parts.
    promises: by edge, what holds for the tensors that it sends.
    by_reference: by edge, the values that stay and are fetched later.
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
    limits: LimitsLayout
    failures: FailureRings
    recorder: RecorderLayout
    first: int
    memory_bytes: int | None
    spin_us: float | None
    endpoints: tuple[EdgeEndpoint, ...] = ()
    promises: dict[int, Promise] = field(default_factory=dict)
    by_reference: dict[int, tuple[str, bool]] = field(default_factory=dict)


class Layout(Struct, frozen=True):
    segment: _core.Segment
    blueprint: Blueprint
    offsets: tuple[int, ...]
    limits: LimitsLayout
    failures: FailureRings
    reads: dict[int, tuple[ReadEnd, ...]]
    writes: dict[int, tuple[WriteEnd, ...]]
    recorders: dict[int, RecorderLayout]
    endpoints: dict[int, tuple[EdgeEndpoint, ...]]

    def peers_of(self, actor: int, ring_ends: dict[int, RingEnd]) -> tuple[tuple[int, int], ...]:
        """Return the processes that this actor must be able to read from or to wake."""
        peers = {end.writer.process for end in self.reads.get(actor, ())}
        peers |= {to.process for end in self.writes.get(actor, ()) for to in end.targets}
        peers.discard(ring_ends[actor].process)
        return tuple(sorted(peers))


def lay_out(
    plan: Plan,
    ring_ends: dict[int, RingEnd],
    tasks: int,
    slot_bytes: int,
    fail_fast: bool,
    transports: Mapping[str, Transport],
    where: Whereabouts | None = None,
) -> Layout:
    """Make the graph's segment, and say which process has which end. ``ring_ends`` includes the executor's.
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
        if edge.out_of_band:
            wires[edge.id] = top
            top += wire_bytes(edge, stride)
    limits = LimitsLayout(top, slots_of(plan.depth), tasks)
    top += _core.Limits.bytes(limits.sets, limits.tasks)
    failures = FailureRings(
        top,
        _core.Segment.ring_bytes(limits.sets, stride, 1),
        tuple([ring_ends[info.index] for info in plan.actors]),
        ring_ends[EXECUTOR],
        fail_fast,
    )
    top += len(plan.actors) * failures.size
    recorders, top = lay_out_recorders(plan, top)
    rings: list[RingPlan] = []
    reads: dict[int, list[ReadEnd]] = {}
    writes: dict[int, list[WriteEnd]] = {}
    streams = {items for _, items in plan.streams}
    for edge, offset in zip(plan.edges, offsets, strict=True):
        # A generator waits for its items to be taken; nothing else in a graph waits for room.
        flags = _core.RING_WRITER_MAY_WAIT if edge.id in streams else 0
        writer = ring_ends[edge.writer]
        for index, reader in enumerate(edge.readers):
            # A result that can be got again is shared even if nobody else reads it.
            shared = len(edge.readers) > 1 or reader == EXECUTOR
            end = ReadEnd(edge.id, offset, index, writer, shared)
            reads.setdefault(reader, []).append(end)
        targets = tuple([ring_ends[r] for r in edge.readers])
        times = recorders[edge.writer].times_of(edge.id)
        rings.append(RingPlan(offset, slots_of(edge.depth), stride, writer, targets, flags, *times))
        writes.setdefault(edge.writer, []).append(WriteEnd(edge.id, offset, targets))
    endpoints: dict[int, list[EdgeEndpoint]] = {}
    for number, offset in wires.items():
        edge = plan.edges[number]
        transport, ends = transports[edge.route], where or Whereabouts()
        made = make_wire(rings, plan, edge, offset, stride, ring_ends, transport, ends)
        for actor, part in made:
            endpoints.setdefault(actor, []).append(part)
    rings += failures.rings(limits.sets, stride)
    shared_limits = LimitsPlan(limits.offset, limits.sets, limits.tasks, ring_ends[EXECUTOR].slot)
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
        {actor: tuple(ends) for actor, ends in endpoints.items()},
    )


def checker_of(source: str, promise: Promise, bundled: bool = False) -> PromiseChecker:
    """Make the keeper of ``promise`` at the writer of the edge that carries ``source``."""
    return PromiseChecker(
        source, promise.device, promise.static_shape, promise.direct_return, bundled
    )


class InputPromises:
    """Promises about the inputs of a graph, kept at its executor."""

    def __init__(self, plan: Plan) -> None:
        #: By the position of the input.
        self._checkers: dict[int, PromiseChecker] = {}
        for position, bundle in enumerate(plan.inputs):
            edge = plan.edges[bundle.edge]
            if edge.promise is not None:
                bundled = bundle.keys != (None,)
                self._checkers[position] = checker_of(edge.source, edge.promise, bundled)

    def __bool__(self) -> bool:
        return bool(self._checkers)

    def packed(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the values that are sent in place of ``inputs``, the frames of the plan's input edges.

        Raises:
            TransportError: an input is not what was promised.
        """
        packed = list(inputs)
        for position, checker in self._checkers.items():
            packed[position] = checker.pack(packed[position])
        return tuple(packed)

    def fresh(self) -> list[PromiseChecker]:
        """Return the keepers that have seen no execution yet."""
        return [checker for checker in self._checkers.values() if checker.fresh]

    @staticmethod
    def forget(fresh: list[PromiseChecker]) -> None:
        """Have these keepers forget the execution, which has not begun: it was not the first one."""
        for checker in fresh:
            checker.forget()
