"""What goes beside the frames of an edge has ends too: a conduit of the edge's transport, and its wire."""

from __future__ import annotations

from msgspec import Struct

from conveyor import _core
from conveyor.exceptions import GraphError
from conveyor.plan.model import Edge, Plan
from conveyor.runtime.blueprint import RingPlan
from conveyor.runtime.graph.edges.ends import ReadEnd, WriteEnd
from conveyor.runtime.process import Place, slots_of
from conveyor.transport import registry
from conveyor.transport.base import Host, Transport

#: Within a host; see :class:`conveyor.transport.Wire`. It takes milliseconds, unless the machine is busy.
KNOWN_DEAD_WITHIN = 1.0


class Whereabouts(Struct, frozen=True):
    """Where some processes are, as what goes beside an edge has to know: the ends of one, or all actors of a
    graph.

    hosts: that of each; empty where there is but one.
    known_dead_within, laid: see :class:`conveyor.transport.Wire`.
    """

    hosts: tuple[Host, ...] = ()
    known_dead_within: float = KNOWN_DEAD_WITHIN
    laid: int = 0

    def of(self, edge: Edge) -> Whereabouts:
        """The whereabouts of the ends of an edge, by rank, if these are of all actors of its graph."""
        hosts = tuple([self.hosts[actor] for actor in (edge.writer, *edge.readers) if self.hosts])
        if len({host.number for host in hosts}) < 2:
            return Whereabouts(laid=self.laid)
        return Whereabouts(hosts, self.known_dead_within, self.laid)


class ConduitEnd(Struct, frozen=True):
    """One process's end of what goes beside the frames of an edge.

    transport: what opens it.
    edge: the edge's number.
    rank: which end it is: 0 is the writer's, the readers follow.
    members: the names of the actors at all ends, by rank.
    overlap: whether the graph was compiled with ``overlap=True``.
    where: all ends are, by rank.
    sends, receives: its ends of the rings of the wire, those that it reads in the order of the others' ranks.
    last: its end of the ring for what the writer says at its end, whatever waits for room then.
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
    """How much of a segment the wire beside ``edge`` takes; ``stride`` is that of the edge's ring."""
    slots = slots_of(edge.depth)
    up = len(edge.readers) * _core.Segment.ring_bytes(slots, stride, 1)
    last = _core.Segment.ring_bytes(1, stride, len(edge.readers))
    return _core.Segment.ring_bytes(slots, stride, len(edge.readers)) + last + up


def transports_of(plan: Plan) -> dict[str, Transport]:
    """Find the transports of a Plan, by their names. A graph keeps them, whatever becomes of the registry,
    and may have some of its own.

    Raises:
        GraphError: one is not known here.
    """
    found: dict[str, Transport] = {}
    for edge in plan.edges:
        if edge.beside and edge.route not in found:
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
    places: dict[int, Place],
    transport: Transport,
    where: Whereabouts,
) -> list[tuple[int, ConduitEnd]]:
    """Add the rings of the wire beside an edge: one from the writer to the readers, one for the last that it
    says, and one back from each of them. Return each actor with its end."""
    slots, readers = slots_of(edge.depth), len(edge.readers)
    members = tuple([plan.actors[actor].name for actor in (edge.writer, *edge.readers)])
    writer = places[edge.writer]
    down = WriteEnd(edge.id, offset, tuple([places[r] for r in edge.readers]))
    overlap, ends_where = plan.overlap, where.of(edge)
    may_wait = _core.RING_WRITER_MAY_WAIT
    rings.append(RingPlan(offset, slots, stride, writer, down.targets, may_wait))
    at = offset + _core.Segment.ring_bytes(slots, stride, readers)
    rings.append(RingPlan(at, 1, stride, writer, down.targets))
    last, last_at = WriteEnd(edge.id, at, down.targets), at
    at += _core.Segment.ring_bytes(1, stride, readers)
    ups: list[ReadEnd] = []
    ends: list[tuple[int, ConduitEnd]] = []
    for index, actor in enumerate(edge.readers):
        rings.append(RingPlan(at, slots, stride, places[actor], (writer,), may_wait))
        ups.append(ReadEnd(edge.id, at, 0, places[actor], shared=False))
        sends = WriteEnd(edge.id, at, (writer,))
        receives = ReadEnd(edge.id, offset, index, writer, shared=readers > 1)
        hears = ReadEnd(edge.id, last_at, index, writer, shared=readers > 1)
        end = ConduitEnd(
            transport, edge.id, index + 1, members, overlap, ends_where, sends, (receives,), hears
        )
        ends.append((actor, end))
        at += _core.Segment.ring_bytes(slots, stride, 1)
    end = ConduitEnd(transport, edge.id, 0, members, overlap, ends_where, down, tuple(ups), last)
    return [(edge.writer, end), *ends]
