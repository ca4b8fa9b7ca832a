"""Connections that actors have opened to the driver: to its rendezvous of refs, and to its graphs."""

from __future__ import annotations

import socket
import weakref

from conveyor.runtime import ending
from conveyor.runtime.actor.requests import OpenGraph, OpenRefs
from conveyor.runtime.driver.graph_service import GraphService
from conveyor.runtime.driver.record import ActorRecord
from conveyor.runtime.graph.sharing import SharedGraphs
from conveyor.runtime.refs.exports import Exports, Peer
from conveyor.runtime.refs.wire import Wire


class Connections:
    """Those that there are, and what they lead to."""

    def __init__(self, exports: Exports, graphs: SharedGraphs) -> None:
        self._exports = exports
        self._graphs = graphs
        self._wires: weakref.WeakSet[Wire] = weakref.WeakSet()

    def open(self, caller: ActorRecord, request: OpenRefs | OpenGraph) -> socket.socket:
        """Serve a connection of ``caller``'s own; its end of it, which is whoever's to close that asks."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._wires.add(self._serve(caller, request, here))
        except BaseException:
            here.close()
            there.close()
            raise
        return there

    def _serve(
        self, caller: ActorRecord, request: OpenRefs | OpenGraph, here: socket.socket
    ) -> Wire:
        if isinstance(request, OpenRefs):
            return Peer(self._exports, caller.id.index, caller.reader, here, caller.silence).wire
        graph = self._graphs.load(request.number, request.name)
        return GraphService(graph, here, caller.reader).wire

    def close(self) -> None:
        """The session is over: nothing comes over them any more."""
        self._graphs.clear()
        for wire in list(self._wires):
            wire.close()
        self._exports.close(ending.error())
