"""Collective operations: actors that reduce, gather and distribute tensors among them.

In a graph, ``bind`` makes them tasks::

    from conveyor.experimental import collective

    summed = collective.allreduce.bind([a.grad.bind(x), b.grad.bind(x)], op=collective.ReduceOp.SUM)

In methods, the actors of a group call them. The names are those of ``ray.experimental.collective`` and
``ray.util.collective``.
"""

from __future__ import annotations

from conveyor.collective import (
    CollectiveGroupHandle,
    all_to_all,
    allgather,
    allreduce,
    barrier,
    broadcast,
    create_collective_group,
    destroy_all_collective_groups,
    destroy_collective_group,
    gather,
    get_collective_group_size,
    get_collective_groups,
    get_rank,
    reduce,
    reducescatter,
    scatter,
)
from conveyor.dag.collective.binding import CollectiveOutputNode
from conveyor.dag.collective.kernels import ReduceOp

__all__ = [
    "CollectiveGroupHandle",
    "CollectiveOutputNode",
    "ReduceOp",
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
