"""A process's ends of a group: its place in the operations, and the rings by which values are exchanged."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor import _core
from conveyor.runtime.blueprint import Blueprint, RingPlan
from conveyor.runtime.process import RESULT_BIT, Place, Process
from conveyor.runtime.ranks import Joined, Membership


def group_blueprint(members: Sequence[tuple[int, int]], hosts: tuple[int, ...]) -> Blueprint:
    """Memory for a group of these processes, which are on these hosts, counted from 0 on."""
    places = [Place(*member, RESULT_BIT) for member in members]
    rings = [
        RingPlan(at, slots, stride, places[writer], tuple([places[r] for r in readers]))
        for writer, at, slots, stride, readers in _core.CollectiveGroup.rings(hosts)
    ]
    return Blueprint(_core.CollectiveGroup.bytes(hosts), tuple(rings), (), hosts)


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
    group = _core.CollectiveGroup(
        segment,
        process.inbox,
        rank,
        membership.members,
        membership.hosts,
        process.arena,
        arenas,
        RESULT_BIT,
    )
    carries = "a collective group"
    return Joined(
        group,
        membership,
        process.writer(segment, rings[rank], places, carries),
        tuple(
            [
                process.reader(segment, ring, rank, place, arena, carries, shared=True)
                for ring, place, arena in zip(rings, places, arenas, strict=True)
            ]
        ),
    )
