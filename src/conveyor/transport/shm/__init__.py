"""Shared memory of one node: tensors lie in the arena of the process that has sent them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conveyor.transport.base import Capabilities, Transport, Wire

if TYPE_CHECKING:
    from conveyor.transport.shm.conduit import ShmConduit


class ShmTransport(Transport):
    """Moves tensors of the CPU between processes of one node.

    In a graph the tensors lie in the frames themselves, so nothing is opened for an edge. The conduit is for
    transports that build upon it.
    """

    name = "shm"
    capabilities = Capabilities(devices=frozenset({"cpu"}), in_frame=True, between_hosts=True)

    def open(self, wire: Wire) -> ShmConduit:
        """Open this process's end of an edge."""
        from conveyor.transport.shm.conduit import ShmConduit  # graphs need none

        return ShmConduit(wire)


TRANSPORT = ShmTransport()
