"""Layout of a segment: each node that has members of it makes its own from the same blueprint."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from conveyor import _core
from conveyor.codec import Reader
from conveyor.runtime.process import RingEnd


class RingPlan(Struct, frozen=True):
    """A ring of a segment: where it lies, who writes and who reads it, and what is rung at each end."""

    offset: int
    slots: int
    stride: int
    writer: RingEnd
    readers: tuple[RingEnd, ...]
    flags: int = 0
    #: Where it is noted when frames have come from another node, of ``time_slots`` tags that follow each
    #: other; 0: nowhere.
    times: int = 0
    time_slots: int = 0

    @property
    def ends(self) -> tuple[RingEnd, ...]:
        """All of its ends, the writer's first."""
        return (self.writer, *self.readers)


class LimitsPlan(Struct, frozen=True):
    """Execution limits of a segment; ``submitter`` is the slot of the process that submits."""

    offset: int
    sets: int
    tasks: int
    submitter: int


class Blueprint(Struct, frozen=True):
    """A segment of ``size`` bytes. ``group``: it is a collective group's, whose ranks are on these nodes."""

    size: int
    rings: tuple[RingPlan, ...]
    limits: tuple[LimitsPlan, ...]
    group: tuple[int, ...] = ()

    def make(self) -> _core.Segment:
        """A new segment like this."""
        segment = _core.Segment.create(self.size)
        if self.group:  # its rings are among what it is laid out with
            _core.CollectiveGroup.prepare(segment, self.group)
            return segment
        for ring in self.rings:
            segment.make_ring(ring.offset, ring.slots, ring.stride, len(ring.readers), ring.flags)
        return segment

    @property
    def processes(self) -> frozenset[Reader]:
        """The processes that have an end of a ring here."""
        return frozenset(end.process for ring in self.rings for end in ring.ends)

    def mirror(
        self,
        pump: _core.HostPump,
        number: int,
        segment: _core.Segment,
        view_of: Callable[[int], _core.ArenaView | None],
        node_of: Callable[[int], int],
    ) -> None:
        """Have ``pump`` join ``segment`` to those that other nodes have under this number. ``view_of``: the
        arena of a process of this node, by its slot; ``node_of``: the node of a process."""
        rings = [
            _core.MirroredRing(
                ring.offset,
                ring.writer.doorbell,
                [reader.doorbell for reader in ring.readers],
                view_of(ring.writer.slot),
                ring.times,
                ring.time_slots,
            )
            for ring in self.rings
        ]
        limits = [
            _core.MirroredLimits(one.offset, one.sets, one.tasks, node_of(one.submitter))
            for one in self.limits
        ]
        pump.mirror(number, segment, rings, limits)


def nodes_among(processes: Iterable[Reader], node_of: Callable[[int], int]) -> list[int]:
    """The nodes of these processes, each once, the least number first."""
    return sorted({node_of(slot) for slot, _ in processes})
