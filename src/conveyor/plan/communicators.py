"""A user's communicator that a node names becomes a transport of the graph."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from conveyor.codec.sealed import seal
from conveyor.exceptions import GraphError, SerializationError
from conveyor.plan.model import ActorInfo
from conveyor.plan.route import Route
from conveyor.transport.communicator import (
    CollectiveTransport,
    Communicator,
    CommunicatorTransport,
    ForCollectives,
)

#: By identity, the communicators of graphs that were compiled here, and what all graphs know them by.
_domains: dict[int, tuple[weakref.ref[Communicator], str]] = {}


class _Known(Struct, frozen=True):
    """A communicator of the graph: what moves tensors by it, and the rank of each actor in it."""

    communicator: Communicator
    transport: CommunicatorTransport
    ranks: dict[Any, int]


class Communicators:
    """The communicators of one graph."""

    def __init__(self, graph: str) -> None:
        self._graph = graph
        #: By identity, and whether it is for collectives.
        self._known: dict[tuple[int, bool], _Known] = {}

    def transport(
        self, source: str, route: Route, members: Sequence[ActorInfo]
    ) -> CommunicatorTransport:
        """Make what moves tensors among ``members`` by the communicator of ``route``; the same for all edges
        that name it.

        Raises:
            GraphError: it is not one of these actors, or has no order of its own.
        """
        meets = isinstance(route.communicator, ForCollectives)
        communicator = route.communicator.communicator if meets else route.communicator
        known = self._known.get((id(communicator), meets))
        if known is None:
            known = self._open(source, route, communicator, meets)
            self._known[id(communicator), meets] = known
        for member in members:
            rank = known.ranks.get(member.key)
            if rank is None:
                names = ", ".join(key.name for key in known.ranks) or "none"
                raise GraphError(
                    f"{source}: {member.name} takes part, and is no member of the {route.name}, which has "
                    f"{names}: list it in get_actor_handles()"
                )
            known.transport.ranks[member.name] = rank
        return known.transport

    def _open(self, source: str, route: Route, communicator: Communicator, meets: bool) -> _Known:
        ranks: dict[Any, int] = {}
        try:
            handles = list(communicator.get_actor_handles())
            size = communicator.get_world_size()
            order = [communicator.get_rank(handle) for handle in handles]
        except Exception as error:
            raise GraphError(
                f"{source}: the {route.name} cannot say which actors it has: "
                f"{type(error).__name__}: {error}"
            ) from error
        for handle, rank in zip(handles, order, strict=True):
            key = getattr(handle, "_id", None)
            if key is None:
                raise GraphError(
                    f"{source}: get_actor_handles() of the {route.name} lists {handle!r}, which is no actor"
                )
            if key in ranks:
                raise GraphError(
                    f"{source}: get_actor_handles() of the {route.name} lists the actor {key.name} twice"
                )
            ranks[key] = rank
        if sorted(order, key=repr) != sorted(range(len(handles)), key=repr) or size != len(handles):
            raise GraphError(
                f"{source}: the {route.name} lists {len(handles)} actors, with the ranks {order} by "
                f"get_rank() and the size {size} by get_world_size(); ranks count from 0 without a gap"
            )
        same = sum(known.transport.name.startswith(route.name) for known in self._known.values())
        name = route.name if not same else f"{route.name} #{same + 1}"
        try:
            sealed = seal(communicator)
        except SerializationError as error:
            raise GraphError(
                f"{source}: the {route.name} cannot be sent to its actors: {error}"
            ) from error
        kind = CollectiveTransport if meets else CommunicatorTransport
        transport = kind(name, sealed, domain=_domain_of(communicator))
        return _Known(communicator, transport, ranks)


def _domain_of(communicator: Communicator) -> str:
    """Find what graphs know a communicator by: those that name the same object share what it does."""
    place = id(communicator)
    known = _domains.get(place)
    if known is None or known[0]() is not communicator:
        forget = weakref.ref(communicator, lambda _: _domains.pop(place, None))
        known = _domains[place] = forget, Communicator.generate_communicator_id()
    return known[1]
