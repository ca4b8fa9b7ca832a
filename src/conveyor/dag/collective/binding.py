"""Collectives as tasks of a graph: binding them.

Over the memory of one host, a collective is data flow and nothing that blocks: what a rank gives is a value
that goes to the other ranks over an ordinary edge, and what a rank gets is an ordinary task on its actor,
which reads those values in place. So no order of executions or graphs can deadlock, and errors, deadlines,
deaths and restarts are those of every edge. That is bound here as if all ranks were on one host; where they
are known to be on several, the graph gets other tasks when it is compiled (``spreading.py``).

By a communicator of the user's the ranks do meet. What they put in is known to all before any comes there,
and no result is given before all have come back, over ordinary edges as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import conveyor  # what is above is known by its public name
from conveyor.dag.collective import calls
from conveyor.dag.collective.ranks import (
    check_lists,
    check_members,
    check_op,
    communicator_of,
    places_of,
    places_of_handles,
)
from conveyor.dag.collective.reduceop import ReduceOp
from conveyor.dag.collective.tasks import CollectiveOutputNode, Ranks
from conveyor.dag.methods import OutputElementNode
from conveyor.dag.node import DAGNode
from conveyor.exceptions import GraphError

#: From so many ranks on an allreduce has two rounds. In one round every rank reads all of what all others
#: have; in two it reads its part of that, then puts the parts together. Measured on two cores: with four
#: ranks two rounds take 10 to 20 % off from 1 MiB on, with eight 10 to 30 %, and small tensors wait 60 %
#: longer.
TWO_ROUNDS = 8


@overload
def allreduce(
    nodes: Sequence[Sequence[DAGNode[Any]]],
    op: ReduceOp = ...,
    transport: Any = ...,
    *,
    rounds: int | None = ...,
) -> list[list[OutputElementNode]]: ...
@overload
def allreduce(
    nodes: Sequence[DAGNode[Any]],
    op: ReduceOp = ...,
    transport: Any = ...,
    *,
    rounds: int | None = ...,
) -> list[CollectiveOutputNode]: ...


def allreduce(
    nodes: Sequence[Any],
    op: ReduceOp = ReduceOp.SUM,
    transport: Any = None,
    *,
    rounds: int | None = None,
) -> Any:
    """Bind a reduction whose result every rank gets. ::

        summed = allreduce.bind([a.grad.bind(x), b.grad.bind(x)])
        dag = MultiOutputNode([a.step.bind(summed[0]), b.step.bind(summed[1])])

    The tensors (or arrays) have one shape and one dtype; each rank gets a new one, with the same bits. They
    are reduced in the order of ranks, on several hosts first those of each host; 16-bit floats are summed in
    32 bits and rounded once.

    Args:
        nodes: one for each actor, in the order of ranks. Or several such lists, of the same actors in the
            same order: they are reduced in one operation, whose frames carry all of them.
        op: how. ``SUM``, ``PRODUCT`` and ``AVG`` are for numbers (``AVG`` for floats), ``MIN`` and ``MAX``
            also for bool.
        transport: ``None``, ``"auto"`` or ``"shm"``: host memory. Or a
            ``conveyor.experimental.channel.Communicator`` of exactly these actors, which then does the
            operation: with tensors, and every rank takes part, also one whose result nobody uses.
        rounds: 1: every rank reduces all inputs. 2: every rank reduces a part of them and gives it to the
            others, which is less work for large tensors, and one hop more for small ones. Left out, it is 2
            from 8 actors on, but for several lists; and of ranks that are on several hosts, those of each
            host reduce what they have before it is sent to others.

    Returns:
        A node for each actor, in order; for several lists, a list for each actor with a node for each of
        them.

    Raises:
        GraphError: the nodes are not one of each actor, or the lists do not fit each other; an argument that
            does not exist.
    """
    nested = isinstance(nodes, (list, tuple)) and any(isinstance(n, (list, tuple)) for n in nodes)
    check_op("allreduce", op)
    communicator = communicator_of("allreduce", transport)
    if rounds not in (None, 1, 2) or isinstance(rounds, bool):
        raise GraphError(f"allreduce: rounds is 1, 2 or None, not {rounds!r}")
    if communicator is not None:
        if rounds is not None:
            raise GraphError("allreduce: rounds is for host memory, and not for a communicator")
        places = check_lists("allreduce", nodes) if nested else places_of("allreduce", nodes)
        check_members("allreduce", communicator, places, in_order=False)
        lists = nodes if nested else [nodes]
        every = [node for each in lists for node in each]
        ranks = Ranks("allreduce", f"allreduce({op.name})", every, places)
        plain = [calls.AllReduce(*rank, op) for rank in ranks.each]
        return ranks.bind_together(lists, communicator, plain, several=nested, op=op)
    if nested:
        if rounds == 2:
            raise GraphError(
                "allreduce: several lists are reduced in one round; bind each by itself for rounds=2"
            )
        return _allreduce_fused(nodes, op, rounds == 1)
    ranks = Ranks("allreduce", f"allreduce({op.name})", nodes, places_of("allreduce", nodes))
    if rounds == 1 or (rounds is None and ranks.count < TWO_ROUNDS):
        return ranks.bind(nodes, lambda rank: calls.AllReduce(*rank, op, rounds == 1))
    halfway = ranks.before("part of allreduce", f"a part of {ranks.title}")
    parts = halfway.bind(nodes, lambda rank: calls.ReducePart(*rank, op))
    return ranks.bind_each([(own, *parts) for own in nodes], lambda rank: calls.JoinParts(*rank))


def _allreduce_fused(lists: Sequence[Sequence[DAGNode[Any]]], op: ReduceOp, at_once: bool) -> Any:
    """Reduce several tensors of each rank: ``lists`` has a list of nodes for each tensor."""
    places = check_lists("allreduce", lists)
    everything = [node for nodes in lists for node in nodes]
    ranks = Ranks("allreduce", f"allreduce({op.name})", everything, places)
    first = ranks.before("list for allreduce", f"the list for {ranks.title}")
    packs = first.bind_each(list(zip(*lists, strict=True)), lambda rank: calls.Pack(*rank))
    made = ranks.bind(packs, lambda rank: calls.FusedAllReduce(*rank, op, at_once), len(lists))
    return [[OutputElementNode(task, i) for i in range(len(lists))] for task in made]


def allgather(
    nodes: Sequence[DAGNode[Any]], transport: Any = None, *, join: bool = True
) -> list[CollectiveOutputNode]:
    """Bind an operation that gives every rank the tensors of all ranks.

    Args:
        nodes: one for each actor, in the order of ranks; their tensors have one shape and one dtype.
        transport: as for ``allreduce``.
        join: they are joined along dimension 0, into a new tensor. ``False``: each rank gets a list of them,
            which are read in place, so it costs the same whatever their size; who writes to them makes a
            copy.

    Returns:
        A node for each actor, in order.
    """
    communicator = communicator_of("allgather", transport)
    ranks = Ranks("allgather", "allgather", nodes, places_of("allgather", nodes))
    if communicator is not None:
        check_members("allgather", communicator, ranks.places, in_order=True)
        plain = [calls.AllGather(*rank, bool(join)) for rank in ranks.each]
        gathered: list[CollectiveOutputNode]
        gathered = ranks.bind_together([nodes], communicator, plain, join=bool(join))
        return gathered
    return ranks.bind(nodes, lambda rank: calls.AllGather(*rank, bool(join)))


def reducescatter(
    nodes: Sequence[DAGNode[Any]], op: ReduceOp = ReduceOp.SUM, transport: Any = None
) -> list[CollectiveOutputNode]:
    """Bind a reduction whose result is divided among the ranks along dimension 0, in their order.

    Args:
        nodes: as for ``allreduce``. Dimension 0 of the tensors is a multiple of the number of actors; if it
            is not, that is an error of the execution.
        op: as for ``allreduce``.
        transport: likewise.

    Returns:
        A node for each actor, in order.
    """
    check_op("reducescatter", op)
    communicator = communicator_of("reducescatter", transport)
    places = places_of("reducescatter", nodes)
    ranks = Ranks("reducescatter", f"reducescatter({op.name})", nodes, places)
    if communicator is not None:
        check_members("reducescatter", communicator, places, in_order=True)
        plain = [calls.ReduceScatter(*rank, op) for rank in ranks.each]
        scattered: list[CollectiveOutputNode]
        scattered = ranks.bind_together([nodes], communicator, plain, op=op)
        return scattered
    return ranks.bind(nodes, lambda rank: calls.ReduceScatter(*rank, op))


def reduce(
    nodes: Sequence[DAGNode[Any]], op: ReduceOp = ReduceOp.SUM, *, root: int = 0
) -> CollectiveOutputNode:
    """Bind a reduction whose result one rank gets.

    Args:
        nodes: as for ``allreduce``.
        op: likewise.
        root: the rank that gets it, by its place among ``nodes``.

    Returns:
        The node of the result, on the actor of ``nodes[root]``.
    """
    check_op("reduce", op)
    ranks = Ranks("reduce", f"reduce({op.name})", nodes, places_of("reduce", nodes))
    return ranks.bind_one(root, lambda rank: calls.AllReduce(*rank, op))


def gather(nodes: Sequence[DAGNode[Any]], *, root: int = 0) -> CollectiveOutputNode:
    """Bind an operation that gives one rank the tensors of all ranks, in a list, in order. They are read in
    place.

    Args:
        nodes: one for each actor, in the order of ranks; their tensors have one shape and one dtype.
        root: the rank that gets them, by its place among ``nodes``.

    Returns:
        The node of the list, on the actor of ``nodes[root]``.
    """
    ranks = Ranks("gather", "gather", nodes, places_of("gather", nodes))
    return ranks.bind_one(root, lambda rank: calls.AllGather(*rank, False))


def broadcast(
    node: DAGNode[Any], actors: Sequence[conveyor.ActorHandle[Any] | conveyor.ActorProxy[Any]]
) -> list[CollectiveOutputNode]:
    """Bind an operation that gives ``actors`` the value of ``node``, which they read in place.

    Args:
        node: any node, a part of the input included; its value need not be a tensor.
        actors: handles of the actors that get it, in order. Its own actor may be one of them.

    Returns:
        A node for each of ``actors``, in order.
    """
    ranks = Ranks("broadcast", "broadcast", [node], places_of_handles("broadcast", node, actors))
    return ranks.bind([node], lambda rank: calls.Pass(*rank))


def scatter(
    node: DAGNode[Any], actors: Sequence[conveyor.ActorHandle[Any] | conveyor.ActorProxy[Any]]
) -> list[CollectiveOutputNode]:
    """Bind an operation that gives each of ``actors`` its share of a tensor along dimension 0, in their
    order. A share is a view of what ``broadcast`` would give.

    Args:
        node: any node, a part of the input included. Dimension 0 of its tensor is a multiple of the number of
            actors; if it is not, that is an error of the execution.
        actors: handles of the actors that get a share, in order.

    Returns:
        A node for each of ``actors``, in order.
    """
    ranks = Ranks("scatter", "scatter", [node], places_of_handles("scatter", node, actors))
    return ranks.bind([node], lambda rank: calls.Scatter(*rank))


def all_to_all(nodes: Sequence[DAGNode[Any]]) -> list[CollectiveOutputNode]:
    """Bind an operation that gives every rank its share of the tensors of all ranks along dimension 0, joined
    along it in the order of ranks.

    Args:
        nodes: one for each actor, in the order of ranks; their tensors have one shape and one dtype, and
            dimension 0 is a multiple of the number of actors.

    Returns:
        A node for each actor, in order.
    """
    ranks = Ranks("all_to_all", "all_to_all", nodes, places_of("all_to_all", nodes))
    return ranks.bind(nodes, lambda rank: calls.AllToAll(*rank))


def barrier(nodes: Sequence[DAGNode[Any]]) -> list[CollectiveOutputNode]:
    """Bind an operation that gives each rank its own value once the values of all ranks are there. Only the
    news of them travels.

    Args:
        nodes: one for each actor, in order, with any values.

    Returns:
        A node for each actor, in order, with the value of its node.
    """
    ranks = Ranks("barrier", "barrier", nodes, places_of("barrier", nodes))
    first = ranks.before("arrival at barrier", "arrival at barrier")
    arrived = first.bind_each([(node,) for node in nodes], lambda rank: calls.Arrive(*rank))
    return ranks.bind_each([(own, *arrived) for own in nodes], lambda rank: calls.Pass(*rank))
