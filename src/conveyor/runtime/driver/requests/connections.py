"""Connections that actors have opened to the driver: to its rendezvous of refs, and to its graphs; and to
their hosts, for memory of others."""

from __future__ import annotations

import socket

from conveyor import descriptors
from conveyor.exceptions import RuntimeStateError
from conveyor.runtime import ending
from conveyor.runtime.actor.requests.messages import OpenFarMemory, OpenGraph, Opening, OpenRefs
from conveyor.runtime.driver.graphs.service import GraphService
from conveyor.runtime.driver.hosts.far_host import Handed
from conveyor.runtime.driver.processes.record import ActorRecord
from conveyor.runtime.graph.handles.sharing import SharedGraphs
from conveyor.runtime.messages.connection import Connection
from conveyor.runtime.process import Process
from conveyor.runtime.refs.pickled.exports import Exports
from conveyor.runtime.refs.pickled.peer import Peer
from conveyor.weak import WeakSet


class Connections:
    """The connections of actors that there are, and what they lead to."""

    def __init__(self, exports: Exports, graphs: SharedGraphs, process: Process) -> None:
        """``process``: the driver's."""
        self._process = process
        self._exports = exports
        self._graphs = graphs
        self._open: WeakSet[Connection] = WeakSet()

    def open(self, caller: ActorRecord, request: Opening) -> list[int] | Handed:
        """Serve a connection of ``caller``'s own: its end of it, which is whoever's to close that asks, or
        what its host gives it."""
        if isinstance(request, OpenFarMemory):
            return self._open_far_memory(caller)
        here, there = descriptors.socket_pair()
        try:
            self._open.add(self._serve(caller, request, here))
        except BaseException:
            here.close()
            there.close()
            raise
        if caller.host is not None:
            return Handed(line=caller.host.carry(there))
        return [there.detach()]

    def _open_far_memory(self, caller: ActorRecord) -> list[int] | Handed:
        if caller.host is not None:
            return Handed(memory=True)
        memory = self._process.hosts_memory
        if memory is None:
            raise RuntimeStateError("all processes of the session are on one host")
        here, there = descriptors.socket_pair()
        try:
            memory.serve(here)
        except BaseException:
            there.close()
            raise
        return [there.detach()]

    def _serve(
        self, caller: ActorRecord, request: OpenRefs | OpenGraph, here: socket.socket
    ) -> Connection:
        if isinstance(request, OpenRefs):
            return Peer(
                self._exports,
                caller.id.index,
                caller.reader,
                here,
                caller.silence,
                caller.host,
            ).connection
        graph = self._graphs.load(request.number, request.name)
        return GraphService(graph, here, caller.reader).connection

    def close(self) -> None:
        """The session is over: nothing comes over them any more."""
        self._graphs.clear()
        for connection in list(self._open):
            connection.close()
        self._exports.close(ending.error())
