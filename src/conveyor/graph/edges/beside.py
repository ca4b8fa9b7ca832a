"""The ends of an edge's out-of-band parts: an endpoint of the edge's transport, and its wire."""

from __future__ import annotations

from msgspec import Struct

from conveyor import _core
from conveyor.exceptions import GraphError
from conveyor.graph.edges.ends import ReadEnd, WriteEnd
from conveyor.plan.model import Edge, Plan
from conveyor.runtime.blueprint import RingPlan
from conveyor.runtime.process import Place, slots_of
from conveyor.transport import registry
from conveyor.transport.base import Host, Transport

#: Seconds, within a node; see :class:`conveyor.transport.Wire`. It takes milliseconds, unless the machine is
#: busy.
KNOWN_DEAD_WITHIN = 1.0


class Whereabouts(Struct, frozen=True):
    """Nodes of some processes, for out-of-band parts: those of the ends of an edge, or of all actors of a
    graph.

    hosts: the node of each; empty if there is only one.
    known_dead_within, laid: see :class:`conveyor.transport.Wire`.
    """

    hosts: tuple[Host, ...] = ()
    known_dead_within: float = KNOWN_DEAD_WITHIN
    laid: int = 0

    def of(self, edge: Edge) -> Whereabouts:
        """Return the whereabouts of the ends of an edge, by rank. This one has to be that of all actors of
        the edge's graph."""
        hosts = tuple([self.hosts[actor] for actor in (edge.writer, *edge.readers) if self.hosts])
        if len({host.number for host in hosts}) < 2:
            return Whereabouts(laid=self.laid)
        return Whereabouts(hosts, self.known_dead_within, self.laid)


class ConduitEnd(Struct, frozen=True):
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
    """Add the rings of an edge's wire: one from the writer to the readers, one for the writer's last message,
    and one back from each reader. Return each actor with its end."""
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
