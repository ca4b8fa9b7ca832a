"""A communicator of the user's as a transport: it moves tensors among a fixed set of actors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conveyor.codec.frames import Sealed
from conveyor.transport.base import Capabilities, Transport, Wire
from conveyor.transport.communicator.abstract import Communicator

if TYPE_CHECKING:
    from conveyor.transport.communicator.conduit import CommunicatorConduit
    from conveyor.transport.communicator.gathering import Gathering
    from conveyor.transport.communicator.line import Line

__all__ = [
    "CollectiveTransport",
    "Communicator",
    "CommunicatorTransport",
    "ForCollectives",
    "is_one",
]


class CommunicatorTransport(Transport):
    """Drives ``send`` and ``recv`` of a communicator. In each process all that names it shares one copy, and
    one order of operations: edges and collectives, of all graphs.

    ranks: of the actors that take part, by their names.
    """

    capabilities = Capabilities(devices=frozenset({"cpu", "cuda"}), between_hosts=True)

    def __init__(
        self, name: str, sealed: Sealed, ranks: dict[str, int] | None = None, domain: str = ""
    ) -> None:
        """``sealed``: the communicator; who passes it on may not know its class. ``domain``: what all graphs
        know it by."""
        self.name = name
        self.ranks: dict[str, int] = {} if ranks is None else ranks
        self._sealed = sealed
        self._domain = domain

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self._sealed, self.ranks, self._domain)

    def open(self, wire: Wire) -> CommunicatorConduit | Gathering:
        """Open this process's end of an edge, as a user of the process's copy of the communicator."""
        # Not needed to compile a graph.
        from conveyor.transport.communicator.conduit import CommunicatorConduit

        return CommunicatorConduit(wire, self._ranks(wire), self._line(wire))

    def _ranks(self, wire: Wire) -> tuple[int, ...]:
        return tuple([self.ranks[member] for member in wire.members])

    def _line(self, wire: Wire) -> Line:
        from conveyor.transport.communicator.line import line_of

        return line_of(self._domain, self.name, self._sealed, self._ranks(wire)[wire.rank], wire)


class ForCollectives:
    """Stand-in, in a transport hint, for a communicator that does collectives."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def get_transport_name(self) -> str:
        """Return the name of the communicator's transport, as :class:`Communicator` does."""
        return self.communicator.get_transport_name()


class CollectiveTransport(CommunicatorTransport):
    """Drives the collective operations of a communicator. On its edges the ranks only tell each other how far
    they are; no tensor goes over them."""

    def open(self, wire: Wire) -> Gathering:
        """Open this process's end of the edge on which one rank tells the others how far it is."""
        from conveyor.transport.communicator.gathering import Gathering

        return Gathering(wire, self._ranks(wire)[0], self._line(wire))


def is_one(value: Any) -> bool:
    """Whether ``value`` is a communicator, or stands for one in a hint."""
    return isinstance(value, (Communicator, ForCollectives))
