"""A user's communicator, as the edges of one graph use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conveyor.codec.sealed import Sealed
from conveyor.transport.base import Capabilities, Transport, Wire
from conveyor.transport.communicator.abstract import Communicator

if TYPE_CHECKING:
    from conveyor.transport.communicator.conduit import CommunicatorConduit
    from conveyor.transport.communicator.gathering import Gathering
    from conveyor.transport.communicator.line import Line


class CommunicatorTransport(Transport):
    """Drives ``send`` and ``recv`` of a communicator. One is sent to each actor with its part of the graph,
    so all edges of the graph in a process share one, and what it has open.

    ranks: of the actors that take part, by their names.
    """

    capabilities = Capabilities(devices=frozenset({"cpu", "cuda"}), between_hosts=True)

    def __init__(self, name: str, sealed: Sealed, ranks: dict[str, int] | None = None) -> None:
        """``sealed``: the communicator; who passes it on may not know its class."""
        self.name = name
        self.ranks: dict[str, int] = {} if ranks is None else ranks
        self._sealed = sealed
        self._line: Line | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return CommunicatorTransport, (self.name, self._sealed, self.ranks)

    def open(self, wire: Wire) -> CommunicatorConduit:
        """As for :class:`Transport`."""
        # Who compiles a graph opens nothing.
        from conveyor.transport.communicator.conduit import CommunicatorConduit
        from conveyor.transport.communicator.line import Line

        ranks = tuple([self.ranks[member] for member in wire.members])
        if self._line is None or self._line.closed:
            self._line = Line(self.name, self._sealed, ranks[wire.rank], wire.start_thread)
        return CommunicatorConduit(wire, ranks, self._line)


class ForCollectives:
    """What stands in a transport hint for a communicator that does collectives."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def get_transport_name(self) -> str:
        """As for :class:`Communicator`."""
        return self.communicator.get_transport_name()


class CollectiveTransport(Transport):
    """Drives the collective operations of a communicator. Its edges are those on which the ranks tell each
    other what they put in; no tensor goes over them. All graphs that name one communicator share a copy of it
    in each process, and one order of operations.

    ranks: of the actors that take part, by their names.
    """

    capabilities = Capabilities(devices=frozenset({"cpu", "cuda"}), between_hosts=True)

    def __init__(
        self, name: str, sealed: Sealed, ranks: dict[str, int] | None = None, domain: str = ""
    ) -> None:
        """``sealed``: the communicator; ``domain``: what all graphs know it by."""
        self.name = name
        self.ranks: dict[str, int] = {} if ranks is None else ranks
        self._sealed = sealed
        self._domain = domain

    def __reduce__(self) -> tuple[Any, ...]:
        return CollectiveTransport, (self.name, self._sealed, self.ranks, self._domain)

    def open(self, wire: Wire) -> Gathering:
        """As for :class:`Transport`."""
        from conveyor.transport.communicator.gathering import Gathering, line_of

        ranks = tuple([self.ranks[member] for member in wire.members])
        line = line_of(self._domain, self.name, self._sealed, ranks[wire.rank], wire)
        return Gathering(wire, ranks[0], line)
