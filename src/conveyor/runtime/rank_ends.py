"""A process's ends of a group: its place in the operations, and the rings by which values are exchanged."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor import _core
from conveyor.runtime.process import RESULT_BIT, Place, Process
from conveyor.runtime.ranks import Joined, Membership


def enter(
    process: Process,
    segment: _core.Segment,
    membership: Membership,
    arenas: Sequence[_core.ArenaView],
) -> Joined:
    """Take the place that ``process`` has. ``arenas``: of all ranks, its own included."""
    rank, ranks = membership.rank, len(membership.members)
    places = [Place(*member, RESULT_BIT) for member in membership.members]
    rings = [_core.CollectiveGroup.ring_at(ranks, r) for r in range(ranks)]
    carries = "a collective group"
    return Joined(
        _core.CollectiveGroup(segment, process.inbox, rank, membership.members),
        membership,
        process.writer(segment, rings[rank], places, carries),
        tuple(
            [
                process.reader(segment, ring, rank, place, arena, carries, shared=True)
                for ring, place, arena in zip(rings, places, arenas, strict=True)
            ]
        ),
    )
