"""What the driver has an actor do: it lays and takes down channels. Never queued behind calls."""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.channel import encode_error
from conveyor.exceptions import GraphTornDownError
from conveyor.runtime.actor.calls import Mailbox
from conveyor.runtime.actor.hello import Caller
from conveyor.runtime.actor.program import make_program
from conveyor.runtime.calls.last_steps import try_each
from conveyor.runtime.process import close_all
from conveyor.runtime.protocol import MAX_FDS, TICKET_BYTES
from conveyor.runtime.waiting.works import steps_of
from conveyor.system_limits import explained

if TYPE_CHECKING:
    from conveyor.runtime.actor.producers import Producers
    from conveyor.runtime.actor.worker import Worker
    from conveyor.runtime.graph.layout import Assignment


#: Processes that come with their descriptors: slot and incarnation.
NewPeers = tuple[tuple[int, int], ...]

#: How often it is tried to read a wish that there is no memory for, and the seconds in between.
_ATTEMPTS, _PAUSE = 4, 0.01


class Control:
    """The actor's end of the control link, and of the socket on which its descriptors come."""

    def __init__(self, worker: Worker, link: _core.Segment, sock: socket.socket) -> None:
        hello = worker.hello
        self._worker = worker
        self._process = worker.process
        self._name = hello.name
        self._socket = sock
        driver = hello.driver_slot, worker.process.board.incarnation(hello.driver_slot)
        self._link = Mailbox(worker.process, link, driver, hello.control_bit)
        self._programs: dict[int, tuple[_core.Program, Producers, dict[int, str]]] = {}
        #: A method runs that has to end before anything is done but to accept callers, up to the first
        #: wish that is another: it is done first thing then.
        self.only_accept = False
        # That wish, with its number.
        self._next: tuple[int, Any] | None = None
        self._loads: dict[int, tuple[int, Assignment, _core.Segment]] = {}

    def label(self, graph: int, node: int) -> str | None:
        """What that task is called, if this actor has a part in the graph."""
        _, _, labels = self._programs.get(graph, (None, None, {}))
        return labels.get(node)

    def serve(self) -> None:
        reader, replies = self._link.reader, self._link.replies
        while True:
            operation = "control"
            try:
                if self._next is None:
                    call = self._receive()
                    if call is _core.EMPTY:
                        return
                    self._next = reader.tag, call
                tag, call = self._next
                operation, args = call[0], call[1]
                if self.only_accept and operation != "accept":
                    return
                self._next = None
                if operation == "load":
                    self._load(tag, *args)
                    continue
                getattr(self, f"_{operation}")(*args)
            except Exception as error:
                self._fail(reader.tag, error, operation)
                if operation in ("accept", "control"):
                    # Nobody waits for that answer: who calls waits for the call's, which never comes.
                    self._worker.runtime.refuse(reader.tag, error)
            else:
                replies.send(None, tag)

    def _receive(self) -> Any:
        """The next wish, or ``EMPTY``. Nobody would repeat one that cannot be read: so it is tried more than
        once before it is lost."""
        reader = self._link.reader
        for _ in range(_ATTEMPTS):
            try:
                return reader.receive_or_leave()
            except (MemoryError, OSError):
                time.sleep(_PAUSE)
            except Exception:  # as it will be the next time
                break
        return reader.receive()

    @property
    def asked(self) -> bool:
        """Whether there is something to serve."""
        return self._next is not None or not self._link.reader.empty

    def close(self) -> None:
        """The actor ends: take down all programs, which refer to its methods."""
        while self._programs:
            _, (program, producers, _) = self._programs.popitem()
            try_each(program.close, producers.close)

    def _fail(self, tag: int, error: Exception, operation: str) -> None:
        self._link.replies.send_error(encode_error(error, self._name, operation), tag)

    def _receive_fds(self, count: int, ticket: int) -> list[int]:
        """The descriptors that were sent with ``ticket``, just before the frame that tells of it.
        Others are of a frame that never came: whoever should have sent it was interrupted."""
        fds: list[int] = []
        while len(fds) < count:
            data, more, flags, _ = socket.recv_fds(self._socket, TICKET_BYTES, MAX_FDS)
            if flags & socket.MSG_CTRUNC:  # the rest is gone: no descriptor was left for it
                close_all([*more, *fds])
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not more:
                raise ConnectionError("the driver's control socket has ended")
            if int.from_bytes(data, "little") == ticket:
                fds.extend(more)
            else:
                close_all(more)
        return fds

    def _receive_segment(self, new_peers: NewPeers, ticket: int) -> _core.Segment:
        """The segment that was sent with ``ticket``, and the peers that came with it, adopted."""
        fds = self._receive_fds(1 + 2 * len(new_peers), ticket)
        try:
            for i, (slot, incarnation) in enumerate(new_peers):
                self._process.adopt(slot, incarnation, fds[1 + 2 * i], fds[2 + 2 * i])
            return _core.Segment.attach(fds[0])
        finally:
            for fd in fds:
                os.close(fd)

    def _load(self, tag: int, assignment: Assignment, new_peers: NewPeers, ticket: int) -> None:
        with explained(f"receive its part of {assignment.name}"):
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
                with explained(f"take its part in {assignment.name}"):
                    program, producers, labels = make_program(self._worker, assignment, segment)
            except Exception as error:
                self._fail(tag, error, "load")
                continue
            self._programs[graph] = program, producers, labels
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
        program, producers, _ = self._programs.pop(graph, (None, None, {}))
        if program is not None and producers is not None:
            if self._worker.coroutines is not None:
                self._worker.coroutines.disown(steps_of(graph))
            del self._worker.handlers[program.bit]
            program.close()
            producers.close()
            self._process.arena.give_back_soon()

    def _accept(self, caller: Caller, new_peers: NewPeers, bit: int, ticket: int) -> None:
        name = self._process.board.name(caller.slot)
        with explained(f"take calls of {name}"):
            segment = self._receive_segment(new_peers, ticket)
        self._worker.handlers[bit] = self._worker.calls.open(
            segment, (caller.slot, caller.incarnation), bit
        )

    def _hang_up(self, bit: int) -> None:
        # First: while what the caller has asked for is served, the bit may become another caller's.
        if self._worker.handlers.pop(bit, None) is not None:  # else it was never accepted
            self._worker.calls.hang_up(bit)

    def _stop(self) -> None:
        self._worker.stop()

    def _end(self) -> None:
        self._worker.end()
