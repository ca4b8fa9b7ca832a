"""Orders of the driver to an actor: deploy and undeploy graphs. They are never queued behind calls."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from conveyor import _core, descriptors
from conveyor.codec import Reader, encode_error
from conveyor.exceptions import GraphTornDownError
from conveyor.pauses import Pauses
from conveyor.runtime.messages import FDS_ID_BYTES, MAX_FDS
from conveyor.runtime.process import close_all
from conveyor.runtime.uninterrupted import try_each
from conveyor.runtime.wait_graph import steps_of
from conveyor.system_limits import explained
from conveyor.worker.calls import Calls, Mailbox
from conveyor.worker.instance import WorkerState, until
from conveyor.worker.messages import Accept, Drain, End, HangUp, Load, NewPeers, Order, Unload
from conveyor.worker.program import Part, make_part

if TYPE_CHECKING:
    from conveyor.graph.edges import Assignment


#: Attempts to read an order for which there is no memory: nothing tells when there is some.
_MAX_TRIES = 4


class Control:
    """The actor's end of the control link, and of the socket on which its descriptors come."""

    def __init__(
        self,
        worker_state: WorkerState,
        calls: Calls,
        link: _core.Segment,
        arena: _core.ArenaView,
        sock: socket.socket,
        refuse: Callable[[int, Exception], object],
        drain: Callable[[int, Sequence[Reader]], object],
        end: Callable[[], object],
    ) -> None:
        """``arena``: the driver's. ``refuse(order_id, error)`` tells the driver that the caller which came
        with
        order ``order_id`` could not be accepted. ``drain(question, writers)``: see :class:`Drain`. ``end()``
        has the actor end, see :class:`End`."""
        bootstrap = worker_state.bootstrap
        self._worker_state = worker_state
        self._calls = calls
        self._process = worker_state.process
        self._name = bootstrap.name
        self._socket = sock
        self._refuse = refuse
        self._drain = drain
        self._end = end
        driver = (
            bootstrap.driver_slot,
            self._process.process_table.incarnation(bootstrap.driver_slot),
        )
        self._link = Mailbox(self._process, link, driver, arena, bootstrap.control_bit)
        self._parts: dict[int, Part] = {}
        #: A method runs. Until it ends, callers are accepted, but no other order is carried out: the first
        #: one of another kind is carried out as soon as the method has ended.
        self.only_accept = False
        # The order that waits for the method's end, with its number.
        self._next: tuple[int, Order] | None = None
        self._loads: dict[int, tuple[int, Assignment, _core.Segment]] = {}

    def label(self, graph: int, node: int) -> str | None:
        """Return the name of a task, if this actor has a part in the graph."""
        part = self._parts.get(graph)
        return None if part is None else part.labels.get(node)

    def until(self, graph: int, execution: int) -> int:
        """Return when an execution is over at the latest, as ``instance.until`` does. Return -2 if the
        execution has failed: the step of a rank that an operation of a group lacks may have been skipped."""
        part = self._parts.get(graph)
        if part is None:
            return 0
        return -2 if part.limits.failed(execution) else until(part.limits, execution)

    def look_again(self) -> None:
        """Ring the programs that wait for inputs: inputs may have come."""
        for part in list(self._parts.values()):
            if part.inputs.awaited:
                self._process.process_table.notify(self._process.slot, part.program.bit)

    def serve_first(self) -> None:
        """Serve the orders that are there, between two things that the actor does."""
        if self._next is not None or not self._link.reader.empty:
            self.serve()

    def serve(self) -> None:
        """Do what the driver has ordered, in order."""
        reader, replies = self._link.reader, self._link.replies
        while True:
            order: Order | None = None
            try:
                if self._next is None:
                    call = self._receive()
                    if call is _core.EMPTY:
                        return
                    self._next = reader.tag, call[1][0]
                order_id, order = self._next
                if self.only_accept and not isinstance(order, Accept):
                    return
                self._next = None
                if not self.handlers[type(order)](self, order, order_id):
                    replies.send(None, order_id)
            except Exception as error:
                self._fail(reader.tag, error, None if order is None else type(order))
                if order is None or isinstance(order, Accept):
                    # Nobody waits for that answer: the caller waits for its call's result, which never comes.
                    self._refuse(reader.tag, error)

    def _receive(self) -> Any:
        """Return the next order, or ``EMPTY``. Nobody would repeat an unreadable order, so it is tried more
        than once before it is lost."""
        reader = self._link.reader
        pauses = Pauses()
        for _ in range(_MAX_TRIES):
            try:
                return reader.receive_or_leave()
            except (MemoryError, OSError):
                time.sleep(pauses.next())
            except Exception:  # as it will be the next time
                break
        return reader.receive()

    def close(self) -> None:
        """Take down all programs, which refer to the actor's methods: the actor ends."""
        while self._parts:
            _, part = self._parts.popitem()
            try_each(part.close)

    def hang_up(self) -> None:
        """Close the socket of descriptors: the process leaves its session."""
        self._socket.close()

    def _fail(self, order_id: int, error: Exception, order: type[Order] | None) -> None:
        what = "control" if order is None else order.__name__.lower()
        self._link.replies.send_error(encode_error(error, self._name, what), order_id)

    def _receive_fds(self, count: int, fds_id: int) -> list[int]:
        """Return the descriptors that were sent with ``fds_id``, just before the frame that tells of them.
        Descriptors with another id are closed: the sender was interrupted before it sent their frame."""
        fds: list[int] = []
        while len(fds) < count:
            data, more, flags, _ = socket.recv_fds(self._socket, FDS_ID_BYTES, MAX_FDS)
            if flags & socket.MSG_CTRUNC:  # the rest is gone: no descriptor was left for it
                close_all([*more, *fds])
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not more:
                raise ConnectionError("the driver's control socket has ended")
            if int.from_bytes(data, "little") == fds_id:
                fds.extend(descriptors.own(fd) for fd in more)
            else:
                close_all(more)
        return fds

    def _receive_segment(
        self, new_peers: NewPeers, fds_id: int
    ) -> tuple[_core.Segment, list[_core.ArenaView]]:
        """Return the segment that was sent with ``fds_id``, and the arenas of the peers that came with it,
        which are adopted."""
        fds = self._receive_fds(1 + 2 * len(new_peers), fds_id)
        try:
            arenas = [
                self._process.adopt(slot, incarnation, fds[1 + 2 * i], fds[2 + 2 * i])
                for i, (slot, incarnation) in enumerate(new_peers)
            ]
            return _core.Segment.attach(fds[0]), arenas
        finally:
            for fd in fds:
                os.close(fd)

    def _load(self, order: Load, order_id: int) -> bool:
        assignment = order.assignment
        with explained(f"receive its part of {assignment.name}"):
            segment, _ = self._receive_segment(order.new_peers, order.fds_id)
        self._loads[assignment.graph] = (order_id, assignment, segment)
        if self._worker_state.instance.started:
            self.finish_loads()
        return True

    def finish_loads(self) -> None:
        """Make the loaded programs. The methods are known once the actor has been started, and its creator
        may be slower to start it than the driver is to deploy a graph."""
        while self._loads:
            graph = next(iter(self._loads))
            order_id, assignment, segment = self._loads.pop(graph)
            try:
                with explained(f"take its part in {assignment.name}"):
                    part = make_part(self._worker_state, assignment, segment)
            except Exception as error:
                self._fail(order_id, error, Load)
                continue
            self._parts[graph] = part
            self._process.limit_spin(graph, assignment.spin_us)
            self._worker_state.handlers[assignment.bit] = part.producers.handler(part.program)
            self._process.process_table.notify(self._process.slot, assignment.bit)
            self._link.replies.send(None, order_id)

    def _unload(self, order: Unload, _order_id: int) -> None:
        graph = order.graph
        never, *_ = self._loads.pop(graph, (None,))
        if never is not None:
            gone = "the graph was torn down before the actor had been started"
            self._fail(never, GraphTornDownError(gone), Load)
        self._process.limit_spin(graph, None)
        part = self._parts.pop(graph, None)
        if part is not None:
            if self._worker_state.coroutines is not None:
                self._worker_state.coroutines.disown(steps_of(graph))
            del self._worker_state.handlers[part.program.bit]
            part.close()
            self._process.sources.look()
            self._process.arena.give_back_soon()

    def _accept(self, order: Accept, _order_id: int) -> None:
        name = self._process.process_table.name(order.slot)
        with explained(f"take calls of {name}"):
            caller = order.slot, order.incarnation
            segment, (arena,) = self._receive_segment((caller,), order.fds_id)
        self._worker_state.handlers[order.bit] = self._calls.open(segment, caller, arena, order.bit)

    def _hang_up(self, order: HangUp, _order_id: int) -> None:
        bit = order.bit
        # First: while what the caller has asked for is served, the bit may become another caller's.
        if self._worker_state.handlers.pop(bit, None) is not None:  # else it was never accepted
            self._calls.hang_up(bit)

    #: The function for each kind of order. It gets the order's number; if it returns true, it acknowledges
    #: the order later.
    handlers: ClassVar[Mapping[type[Order], Callable[[Control, Any, int], object]]] = {
        Load: _load,
        Unload: _unload,
        Accept: _accept,
        HangUp: _hang_up,
        Drain: lambda self, order, _order_id: self._drain(order.question, order.writers),
        End: lambda self, _order, _order_id: self._end(),
    }
