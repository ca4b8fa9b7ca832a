"""Collective operations of actors, called in their methods; see ``conveyor.experimental.collective``."""

from __future__ import annotations

from conveyor.collective.membership import (
    CollectiveGroupHandle,
    create_collective_group,
    destroy_all_collective_groups,
    destroy_collective_group,
    get_collective_groups,
)
from conveyor.collective.operations import (
    all_to_all,
    allgather,
    allreduce,
    barrier,
    broadcast,
    gather,
    get_collective_group_size,
    get_rank,
    reduce,
    reducescatter,
    scatter,
)

__all__ = [
    "CollectiveGroupHandle",
    "all_to_all",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "create_collective_group",
    "destroy_all_collective_groups",
    "destroy_collective_group",
    "gather",
    "get_collective_group_size",
    "get_collective_groups",
    "get_rank",
    "reduce",
    "reducescatter",
    "scatter",
]
