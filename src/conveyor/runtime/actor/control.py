"""What the driver has an actor do: it lays and takes down channels. Never queued behind calls."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from conveyor import _core
from conveyor.channel import encode_error
from conveyor.exceptions import GraphTornDownError
from conveyor.runtime.actor.calls import Mailbox
from conveyor.runtime.actor.hello import Caller
from conveyor.runtime.actor.program import make_program
from conveyor.runtime.process import close_all
from conveyor.runtime.protocol import MAX_FDS, TICKET_BYTES

if TYPE_CHECKING:
    from conveyor.runtime.actor.producers import Producers
    from conveyor.runtime.actor.worker import Worker
    from conveyor.runtime.graph.layout import Assignment


class Control:
    """The actor's end of the control link, and of the socket on which its descriptors come."""

    def __init__(self, worker: Worker, link: _core.Segment, sock: socket.socket) -> None:
        hello = worker.hello
        self._worker = worker
        self._process = worker.process
        self._name = hello.name
        self._socket = sock
        self._link = Mailbox(worker.process, link, hello.driver_slot, hello.control_bit)
        self._programs: dict[int, tuple[_core.Program, Producers]] = {}
        self._loads: dict[int, tuple[int, Assignment, _core.Segment]] = {}

    def serve(self) -> None:
        reader, replies = self._link.reader, self._link.replies
        while True:
            call = reader.receive()
            if call is _core.EMPTY:
                return
            tag = reader.tag
            operation, args = call[0], call[1]
            if operation == "load":
                self._load(tag, *args)
                continue
            try:
                getattr(self, f"_{operation}")(*args)
            except Exception as error:
                self._fail(tag, error, operation)
            else:
                replies.send(None, tag)

    def _fail(self, tag: int, error: Exception, operation: str) -> None:
        self._link.replies.send_error(encode_error(error, self._name, operation), tag)

    def _receive_fds(self, count: int, ticket: int) -> list[int]:
        """The descriptors that were sent with ``ticket``, just before the frame that tells of it.
        Others are of a frame that never came: whoever should have sent it was interrupted."""
        fds: list[int] = []
        while len(fds) < count:
            data, more, _, _ = socket.recv_fds(self._socket, TICKET_BYTES, MAX_FDS)
            if not more:
                raise ConnectionError("the driver's control socket has ended")
            if int.from_bytes(data, "little") == ticket:
                fds.extend(more)
            else:
                close_all(more)
        return fds

    def _receive_segment(self, new_peers: tuple[int, ...], ticket: int) -> _core.Segment:
        """The segment that was sent with ``ticket``, and the peers that came with it, adopted."""
        fds = self._receive_fds(1 + 2 * len(new_peers), ticket)
        try:
            for i, slot in enumerate(new_peers):
                self._process.adopt(slot, fds[1 + 2 * i], fds[2 + 2 * i])
            return _core.Segment.attach(fds[0])
        finally:
            for fd in fds:
                os.close(fd)

    def _load(
        self, tag: int, assignment: Assignment, new_peers: tuple[int, ...], ticket: int
    ) -> None:
        segment = self._receive_segment(new_peers, ticket)
        self._loads[assignment.graph] = (tag, assignment, segment)
        if self._worker.instance.started:
            self.finish_loads()

    def finish_loads(self) -> None:
        """Make the programs that were loaded: the methods are known once the actor has been started,
        and whoever made it may be slower to start it than the driver is to lay a graph."""
        while self._loads:
            graph = next(iter(self._loads))
            tag, assignment, segment = self._loads.pop(graph)
            try:
                program, producers = make_program(self._worker, assignment, segment)
            except Exception as error:
                self._fail(tag, error, "load")
                continue
            self._programs[graph] = program, producers
            self._process.limit_spin(graph, assignment.spin_us)
            self._worker.handlers[assignment.bit] = producers.handler(program)
            self._process.board.ring(self._process.slot, assignment.bit)
            self._link.replies.send(None, tag)

    def _unload(self, graph: int) -> None:
        never, *_ = self._loads.pop(graph, (None,))
        if never is not None:
            gone = "the graph was torn down before the actor had been started"
            self._fail(never, GraphTornDownError(gone), "load")
        self._process.limit_spin(graph, None)
        program, producers = self._programs.pop(graph, (None, None))
        if program is not None and producers is not None:
            program.close()
            producers.close()
            del self._worker.handlers[program.bit]

    def _accept(self, caller: Caller, new_peers: tuple[int, ...], bit: int, ticket: int) -> None:
        segment = self._receive_segment(new_peers, ticket)
        self._worker.handlers[bit] = self._worker.calls.open(segment, caller.slot, bit)

    def _hang_up(self, bit: int) -> None:
        self._worker.calls.hang_up(bit)
        del self._worker.handlers[bit]

    def _stop(self) -> None:
        self._worker.stop()
