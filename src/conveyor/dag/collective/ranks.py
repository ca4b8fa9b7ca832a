"""Ranks of a collective: their actors, and the refusal of what cannot be bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import conveyor  # what is above is known by its public name
from conveyor.dag.collective.reduceop import ReduceOp
from conveyor.dag.inputs import InputAttributeNode, InputNode
from conveyor.dag.methods import UNPLACED, MethodNode, OutputElementNode
from conveyor.dag.node import ActorRef, DAGNode
from conveyor.exceptions import GraphError
from conveyor.later import import_later


class Place(NamedTuple):
    """Actor of a rank, and its owner.

    actor: its actor.
    owner: the handle that keeps it alive.
    """

    actor: ActorRef
    owner: object


def check_lists(operation: str, lists: Sequence[Any]) -> list[Place]:
    """Find the actors of ``lists``, each of which has a node of each of the same actors in the same order."""
    for position, nodes in enumerate(lists):
        if not isinstance(nodes, (list, tuple)):
            raise GraphError(
                f"{operation}: either all of what is bound are nodes, or all are lists of nodes; number "
                f"{position} is {nodes!r}"
            )
        if len(nodes) != len(lists[0]):
            raise GraphError(
                f"{operation}: the lists have a node for each actor, and so one length; list 0 has "
                f"{len(lists[0])}, list {position} has {len(nodes)}"
            )
    of_list = [places_of(operation, nodes, f"list {i}, ") for i, nodes in enumerate(lists)]
    seen: dict[DAGNode[Any], None] = {}
    places = of_list[0]
    for position, others in enumerate(of_list):
        here, there = [[p.actor.name for p in ranks] for ranks in (places, others)]
        if {p.actor for p in others} != {p.actor for p in places}:
            raise GraphError(
                f"{operation}: the lists are of the same actors; list 0 is of {', '.join(here)}, list "
                f"{position} of {', '.join(there)}"
            )
        if [p.actor for p in others] != [p.actor for p in places]:
            raise GraphError(
                f"{operation}: the lists have the actors in the same order; list 0 is of "
                f"{', '.join(here)}, list {position} of {', '.join(there)}"
            )
        for node in lists[position]:
            if node in seen:
                raise GraphError(f"{operation}: {node!r} is bound twice")
            seen[node] = None
    return places


def places_of(operation: str, nodes: Any, where: str = "") -> list[Place]:
    """Find the actor of each of ``nodes``, no two of which have the same actor."""
    _check_list(operation, nodes, "nodes", where)
    places: list[Place] = []
    seen: dict[ActorRef, Any] = {}
    for position, node in enumerate(nodes):
        if not isinstance(node, DAGNode):
            if isinstance(node, (list, tuple)):
                raise GraphError(
                    f"{operation}: {where}number {position} is a list; lists of nodes are for allreduce "
                    f"alone, as one list of them"
                )
            raise GraphError(
                f"{operation}: {where}number {position} is {node!r}, which is no node: bind takes what the "
                f"bind() of an actor's method gives"
            )
        if any(node is other for other in nodes[:position]):
            raise GraphError(f"{operation}: {where}{node!r} is bound twice")
        place = _place(operation, node, f"{where}number {position}")
        if place.actor in seen:
            raise GraphError(
                f"{operation}: {where}{seen[place.actor]!r} and {node!r} are both on the actor "
                f"{place.actor.name}: each actor takes part once, so reduce its values on it first"
            )
        seen[place.actor] = node
        places.append(place)
    return places


def _place(operation: str, node: DAGNode[Any], where: str) -> Place:
    task = node.task if isinstance(node, OutputElementNode) else node
    if isinstance(task, (InputNode, InputAttributeNode)):
        raise GraphError(
            f"{operation}: {where} is {node!r}, a part of the input, which is on no actor: pass it through "
            f"a method of each actor first"
        )
    if not isinstance(task, MethodNode):
        raise GraphError(f"{operation}: {where} is {node!r}, which is on no actor")
    if task.actor is UNPLACED:
        raise GraphError(
            f"{operation}: {where} is {node!r}, a function that was bound to no actor: say which with "
            f"options(on=actor)"
        )
    _check_no_stream(operation, task, where)
    return Place(task.actor, task.owner)


def places_of_handles(operation: str, node: Any, actors: Any) -> list[Place]:
    if not isinstance(node, DAGNode):
        raise GraphError(
            f"{operation}: it takes one node, whose value the actors get, not {node!r}"
        )
    task = node.task if isinstance(node, OutputElementNode) else node
    if node.ends_graph:
        raise GraphError(f"{operation}: {node!r} only ends a graph, and has no value")
    if isinstance(task, MethodNode):
        _check_no_stream(operation, task, "its node")
    _check_list(operation, actors, "handles of actors")
    places: list[Place] = []
    for position, handle in enumerate(actors):
        if not isinstance(handle, conveyor.ActorHandle):
            raise GraphError(
                f"{operation}: number {position} of the actors is {handle!r}, which is no actor's handle"
            )
        place = Place(handle._id, handle)
        if any(place.actor == other.actor for other in places):
            raise GraphError(
                f"{operation}: the actor {place.actor.name} is named twice; each gets the value once"
            )
        places.append(place)
    return places


def _check_list(operation: str, value: Any, of: str, where: str = "") -> None:
    if not isinstance(value, (list, tuple)):
        raise GraphError(f"{operation}: {where}it takes a list of {of}, not {value!r}")
    if not value:
        raise GraphError(f"{operation}: {where}the list of {of} is empty, so nobody takes part")


def _check_no_stream(operation: str, task: MethodNode[Any], where: str) -> None:
    if task.streams:
        raise GraphError(
            f"{operation}: {where} is what {task.label} yields, and the items of a generator go to the "
            f"driver only"
        )


def check_op(operation: str, op: Any) -> None:
    if not isinstance(op, ReduceOp):
        known = ", ".join(f"ReduceOp.{known.name}" for known in ReduceOp)
        raise GraphError(f"{operation}: op is {op!r}, and must be one of {known}")


def communicator_of(operation: str, transport: Any) -> Any:
    """Find the communicator that ``transport`` asks for; ``None``: it goes through host memory."""
    if transport is None or (isinstance(transport, str) and transport in ("auto", "shm")):
        return None
    # The module is of a higher layer, and is imported when it is needed.
    if import_later("conveyor.transport.communicator").is_one(transport):
        return transport
    raise GraphError(
        f"{operation}: transport is {transport!r}; collectives go through host memory: leave it out, say "
        f'"auto" or "shm", or give a Communicator of your own'
    )


def check_members(
    operation: str, communicator: Any, places: Sequence[Place], *, in_order: bool
) -> None:
    """Refuse a communicator whose actors are not those at ``places``. ``in_order``: its ranks must be in the
    order of the places, since the results depend on it."""
    kind = type(communicator).__name__
    try:
        handles = list(communicator.get_actor_handles())
        ranks = {getattr(h, "_id", None): communicator.get_rank(h) for h in handles}
    except Exception as error:
        raise GraphError(
            f"{operation}: the {kind} cannot say which actors it has: {type(error).__name__}: {error}"
        ) from error
    actors = [place.actor for place in places]
    if set(ranks) != set(actors):
        has = ", ".join(getattr(key, "name", "no actor") for key in ranks) or "none"
        raise GraphError(
            f"{operation}: all actors of a communicator take part, and no others: the {kind} has {has}, and "
            f"bound are nodes of {', '.join(actor.name for actor in actors)}"
        )
    if in_order and [ranks[actor] for actor in actors] != list(range(len(actors))):
        raise GraphError(
            f"{operation}: what a rank gets depends on its number, and the {kind} has given "
            f"{', '.join(actor.name for actor in actors)} the ranks {[ranks[a] for a in actors]}: bind the "
            f"nodes in the order of its ranks"
        )


def check_root(operation: str, root: Any, ranks: int) -> None:
    if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < ranks:
        raise GraphError(
            f"{operation}: root is {root!r}; it is the number of a rank, from 0 to {ranks - 1}"
        )


def names_of(places: Sequence[Place]) -> tuple[str, ...]:
    """Name the ranks for messages: by actor, with its number where two share a name."""
    names = [place.actor.name for place in places]
    return tuple(
        [
            name if names.count(name) == 1 else f"{name}[{place.actor.index}]"
            for name, place in zip(names, places, strict=True)
        ]
    )
