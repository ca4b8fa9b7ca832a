"""Node agent: the part of a session on a node without the driver. It has a process table and a pump, and
introduces processes to each other.

It does what the driver orders (:mod:`conveyor.driver.process_engine`), one order after the other. It
starts no process: it makes what a process is to be given, and watches whether the process lives. It knows
nothing of values.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, ClassVar

from msgspec import Struct

from conveyor import _core, descriptors
from conveyor.calls.links import Refusal
from conveyor.codec import Reader
from conveyor.driver.actors import PROCESS_TABLE_SLOTS, DeathWatches
from conveyor.driver.process_engine import (
    Adopt,
    Answer,
    BreakGroup,
    CountDue,
    Cut,
    Forget,
    GiveUp,
    Locate,
    MarkClosed,
    MarkRefused,
    NodeOrder,
    Reach,
    Remove,
    SendDescriptors,
    Spread,
    Stand,
    TellWhenCome,
)
from conveyor.driver.process_engine import ProcessSnapshot as LastSnapshot
from conveyor.graph.telemetry import Look, LookAtAll, Seen, StatusResponder
from conveyor.runtime.broker import ClosedWord
from conveyor.runtime.deadlock_detector import (
    Frames,
    LookAtWaits,
    WaitsThere,
    due_to,
    look_at_waits,
)
from conveyor.runtime.events import EventLoop
from conveyor.runtime.messages import receive_pickled, send_pickled, send_with_id
from conveyor.runtime.process import ArenaSize, close_all
from conveyor.runtime.status import ProcessSnapshot


class Local(Struct, eq=False):
    """A process of this node. ``passed`` is what it gets last: its ends of both sockets."""

    slot: int
    incarnation: int
    arena_fd: int
    eventfd: int
    view: _core.ArenaView
    control: socket.socket
    requests: socket.socket
    passed: list[socket.socket]

    @property
    def process(self) -> Reader:
        """Slot and incarnation, by which others know the process."""
        return self.slot, self.incarnation

    def cut(self) -> None:
        """Close the socket for the process's requests in both directions: the process notices, and waits for
        no response."""
        with suppress(OSError):  # it has gone, or has heard
            self.requests.shutdown(socket.SHUT_RDWR)

    def close_passed(self) -> None:
        """Close the sockets that the process has by now, or will never get."""
        for sock in self.passed:
            sock.close()
        self.passed.clear()


class Proxy(Struct, eq=False):
    """A process of another node."""

    incarnation: int
    node: int
    arena_fd: int
    arena: _core.Arena


#: Seconds that a process may take to read what is sent to it before the next answer, and for the rest of what
#: it has begun to say.
_TIME_LIMIT = 1.0


class AgentCallbacks(Struct):
    """Callbacks of a node agent. All run on the events' thread but ``reach`` and ``connection``.

    asked: a process has asked the driver for something. headless: the main thread of a process is gone.
    reach: connect to that node, at that address, from now on. locate: that node is at that address.
    connection: open the connection of that number, whose other end a process of another node has; this node's
    process gets the returned socket. memory: serve the other end of the returned socket, over which a process
    fetches memory of other nodes.
    """

    requested: Callable[[int, int, bytes], object]
    headless: Callable[[int], object]
    reach: Callable[[int, tuple[str, int]], object]
    locate: Callable[[int, tuple[str, int]], object]
    connection: Callable[[int], socket.socket]
    memory: Callable[[], socket.socket]


class NodeAgent:
    """Node agent: the part of a session on a node without the driver, in a process of its own."""

    def __init__(
        self,
        number: int,
        driver: Reader,
        arena: ArenaSize,
        events: EventLoop,
        callbacks: AgentCallbacks,
        window: float,
        session: int,
    ) -> None:
        """``driver``: its process. ``window``: seconds without a connection, after which a node is lost.
        ``session``: the number on the driver's process table."""
        self.arena = arena
        self._driver, self._events, self._callbacks = driver, events, callbacks
        self.process_table = _core.ProcessTable.create(PROCESS_TABLE_SLOTS)
        self.process_table.session = session
        self.pump = _core.HostPump(self.process_table, number, window)
        self._fired = descriptors.event()
        self._status_responder = StatusResponder(self.process_table)
        self._watches = DeathWatches(self.process_table, self._fired)
        self._locals: dict[int, Local] = {}
        self._proxies: dict[int, Proxy] = {}
        self._segments: dict[int, _core.Segment] = {}
        events.add(self._fired, self._on_liveness_futexes)
        self._stand(Stand(*driver, 0, "driver"))

    def do(self, order: NodeOrder) -> Any:
        """Do what the driver orders, and return the result."""
        return self.orders[type(order)](self, order)

    def look(self, look: Look) -> Seen:
        """Report what the actors of this node are doing. May be called by any thread."""
        segment = self._segments.get(look.segment)
        if segment is None:
            raise LookupError("the graph is laid anew just now, or has been torn down")
        return self._status_responder.look(look, segment)

    def look_at_all(self, look: LookAtAll) -> list[ProcessSnapshot]:
        """Report what all processes of this node are doing. May be called by any thread."""
        processes = [one.process for one in list(self._locals.values())]
        return [
            self._status_responder.snapshot(*process, stack=look.stacks) for process in processes
        ]

    def look_at_waits(self, look: LookAtWaits) -> WaitsThere:
        """Report what the processes of this node wait for. May be called by any thread."""
        return look_at_waits(self.process_table, self.pump, look)

    def local(self, slot: int) -> Local:
        """Return the process of this node in that slot."""
        return self._locals[slot]

    def has(self, slot: int, incarnation: int) -> bool:
        """Whether the process of this node in that slot has that incarnation."""
        one = self._locals.get(slot)
        return one is not None and one.incarnation == incarnation

    def node_of(self, slot: int) -> int | None:
        """Return the number of the node of the process in that slot, if that is another node."""
        proxy = self._proxies.get(slot)
        return None if proxy is None else proxy.node

    def given_at_start(self, slot: int, segments: list[int]) -> list[int]:
        """Return the descriptors that a new process gets duplicates of."""
        one, driver = self._locals[slot], self._proxies[self._driver[0]]
        return [
            self.process_table.fd,
            one.arena_fd,
            one.eventfd,
            driver.arena_fd,
            self.pump.eventfd,
            *(sock.fileno() for sock in one.passed),
            *(self._segments[number].fd for number in segments),
        ]

    def last_snapshot(self, slot: int) -> tuple[LastSnapshot, bool]:
        """Announce the death of the process in that slot. Return its last status, and whether it was left by
        ``sys.exit``."""
        self.process_table.announce_death(slot)
        return self.process_table.status(slot), self.process_table.is_exiting(slot)

    # Orders

    def _adopt(self, order: Adopt) -> None:
        slot, process_table = order.slot, self.process_table
        process_table.prepare(slot, order.name, order.incarnation)
        made: list[int] = []
        pairs: list[socket.socket] = []
        try:
            made.append(_core.Arena.create_fd(self.arena.file))
            made.append(descriptors.event())
            process_table.set_eventfd(slot, made[1], order.incarnation)
            for _ in range(2):
                pairs += descriptors.socket_pair()
            view = _core.ArenaView(made[0], self.arena.file, process_table, slot)
        except BaseException:
            close_all(made)
            for sock in pairs:
                sock.close()
            process_table.announce_death(slot)
            process_table.forget_eventfd(slot)
            raise
        control, control_there, requests, requests_there = pairs
        one = Local(
            slot,
            order.incarnation,
            made[0],
            made[1],
            view,
            control,
            requests,
            [control_there, requests_there],
        )
        requests.settimeout(_TIME_LIMIT)
        self._locals[slot] = one  # what fails from here on is buried
        self._watches.add(slot)
        self._events.add(requests.fileno(), partial(self._hear, one))

    def _stand(self, order: Stand) -> None:
        slot = order.slot
        arena_fd = _core.Arena.create_fd(self.arena.file)
        size = self.arena
        try:
            arena = _core.Arena(arena_fd, size.file, size.cap, self.process_table, slot, size.idle)
            self.pump.add_proxy(slot, order.incarnation, order.node, order.name, arena)
        except BaseException:
            os.close(arena_fd)
            raise
        self._proxies[slot] = Proxy(order.incarnation, order.node, arena_fd, arena)
        try:
            self._watches.add(slot)
        except BaseException:  # it may be ordered again
            self._stand_no_more(slot)
            raise

    def _stand_no_more(self, slot: int) -> None:
        proxy = self._proxies.pop(slot)
        self.pump.remove_proxy(slot)
        proxy.arena.close()
        proxy.arena.leave_slot()
        os.close(proxy.arena_fd)

    def _remove(self, order: Remove) -> None:
        proxy, one = self._proxies.get(order.slot), self._locals.get(order.slot)
        self._watches.remove(order.slot)
        if proxy is not None and proxy.incarnation == order.incarnation:
            self._stand_no_more(order.slot)
        if one is not None and one.incarnation == order.incarnation:
            del self._locals[order.slot]
            self.process_table.announce_death(order.slot)
            self.process_table.forget_eventfd(order.slot)
            self.process_table.forget_memory(order.slot)
            self._events.call(partial(self._close, one))
            close_all([one.arena_fd, one.eventfd])

    def _close(self, one: Local) -> None:
        if one.requests.fileno() >= 0:
            self._events.remove(one.requests.fileno())
        for sock in (one.requests, one.control):
            sock.close()
        one.close_passed()

    def _reach(self, order: Reach) -> None:
        self._callbacks.reach(order.node, order.address)

    def _locate(self, order: Locate) -> None:
        self._callbacks.locate(order.node, order.address)

    def _give_up(self, order: GiveUp) -> None:
        self.pump.give_up(order.node, "the driver has lost it")

    def _count_due(self, order: CountDue) -> Frames:
        return due_to(self.pump, order.to)

    def _tell_when_come(self, order: TellWhenCome) -> None:
        self.pump.tell_when_come(order.node, order.frames, order.number)

    def _spread(self, order: Spread) -> None:
        segment = self._segments[order.number] = order.blueprint.make()
        if not order.joined:
            return
        order.blueprint.mirror(
            self.pump,
            order.number,
            segment,
            self._view_of,
            lambda slot: order.submitter_hosts[slot],
        )

    def _view_of(self, slot: int) -> _core.ArenaView | None:
        one = self._locals.get(slot)
        return None if one is None else one.view

    def _break_group(self, order: BreakGroup) -> None:
        segment = self._segments.get(order.number)
        if segment is not None:
            _core.CollectiveGroup.destroy(segment, self.process_table, order.members, order.session)

    def _forget(self, order: Forget) -> None:
        self._segments.pop(order.number, None)
        self._status_responder.forget(order.number)
        self.pump.unmirror(order.number)

    def _given(self, segment: int, processes: tuple[Reader, ...]) -> list[int]:
        """Return the descriptors of a segment, and those by which processes reach each other."""
        if segment and segment not in self._segments:
            raise ProcessLookupError(f"segment {segment} has been given up")
        fds = [self._segments[segment].fd] if segment else []
        for slot, incarnation in processes:
            one, proxy = self._locals.get(slot), self._proxies.get(slot)
            if one is not None and one.incarnation == incarnation:
                fds += one.arena_fd, one.eventfd
            elif proxy is not None and proxy.incarnation == incarnation:
                fds += proxy.arena_fd, self.pump.eventfd
            else:
                raise _ended(slot)
        return fds

    def _send_descriptors(self, order: SendDescriptors) -> None:
        if not self.has(order.slot, order.incarnation):
            raise _ended(order.slot)
        fds = self._given(order.segment, order.processes)
        with suppress(BrokenPipeError, ConnectionResetError):  # its death is told on another way
            send_with_id(self._locals[order.slot].control, order.fds_id, fds)

    def _answer(self, order: Answer) -> None:
        # Opened in any case: where nobody gets it, the other end hears that it is over.
        connection = self._callbacks.connection(order.connection) if order.connection else None
        if order.memory:
            connection = self._callbacks.memory()
        with nullcontext() if connection is None else connection:
            if not self.has(order.slot, order.incarnation):
                return
            one, fds = self._locals[order.slot], self._given(order.segment, order.processes)
            fds += [connection.fileno()] if connection is not None else []
            try:
                send_pickled(one.requests, order.data, fds)
            except OSError:
                one.cut()  # what comes next would be taken for the rest of it
                raise

    def _cut(self, order: Cut) -> None:
        if self.has(order.slot, order.incarnation):
            self._locals[order.slot].cut()

    def _mark_refused(self, order: MarkRefused) -> None:
        segment = self._segments.get(order.segment)
        if segment is not None:
            Refusal(segment).mark()
            self.process_table.notify(order.slot, _core.ATTENTION_BIT)

    def _mark_closed(self, order: MarkClosed) -> None:
        segment = self._segments.get(order.segment)
        if segment is not None:
            ClosedWord(segment, order.side).mark()
            self.process_table.notify(order.slot, _core.ATTENTION_BIT)

    #: The method for each kind of order.
    orders: ClassVar[Mapping[type[NodeOrder], Callable[[NodeAgent, Any], Any]]] = {
        Adopt: _adopt,
        Stand: _stand,
        Remove: _remove,
        Reach: _reach,
        Locate: _locate,
        GiveUp: _give_up,
        CountDue: _count_due,
        TellWhenCome: _tell_when_come,
        Spread: _spread,
        BreakGroup: _break_group,
        Forget: _forget,
        SendDescriptors: _send_descriptors,
        Answer: _answer,
        Cut: _cut,
        MarkRefused: _mark_refused,
        MarkClosed: _mark_closed,
    }

    # Messages of processes of this node, on the events' thread

    def _hear(self, one: Local) -> None:
        try:
            data, fds = receive_pickled(one.requests)
        except OSError:
            self._events.remove(one.requests.fileno())
            one.cut()  # it may be there, and wait for an answer to what was lost
            return
        close_all(fds)
        self._callbacks.requested(*one.process, data)

    def _on_liveness_futexes(self) -> None:
        os.eventfd_read(self._fired)
        for one in list(self._locals.values()):
            if self.process_table.gone(one.slot, one.incarnation):
                self._callbacks.headless(one.slot)


def _ended(slot: int) -> ProcessLookupError:
    return ProcessLookupError(f"the process in slot {slot} has ended")
