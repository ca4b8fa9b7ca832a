"""Preparation of an actor's new process: its endpoints, and the driver's links to it."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from conveyor import _core, descriptors
from conveyor.calls.links import Link, link_blueprint, link_depth
from conveyor.calls.pending import Pump
from conveyor.driver.actors import DRIVER_SLOT, ActorRecord, Label
from conveyor.runtime.blueprint import Blueprint
from conveyor.runtime.messages import version_line
from conveyor.runtime.process import CALL_SLOTS, RESULT_BIT, ArenaSize, Process, RingEnd, close_all
from conveyor.worker.messages import WorkerBootstrap


class SharedState(Struct, frozen=True):
    """State of the driver that all actors' processes share.

    process: the driver's own.
    session: the session's name.
    arena_fd, eventfd: the driver's, for processes that write to it.
    label: names a (graph, node).
    pump: sends the calls that wait in a link, once they can be sent.
    places: whether the engine chooses a node for each process.
    """

    process: Process
    session: str
    arena_fd: int
    eventfd: int
    label: Label
    pump: Pump
    places: bool


class Startup:
    """Preparation of one process of an actor, before the process is there. The driver's own ends are in its
    record."""

    def __init__(
        self,
        shared_state: SharedState,
        record: ActorRecord,
        grace: float,
        on_request_socket: Callable[[ActorRecord, socket.socket], object],
    ) -> None:
        """``on_request_socket`` takes the driver's end of the socket for the process's requests."""
        self._shared_state = shared_state
        self._record = record
        self._grace = grace
        self._on_request_socket = on_request_socket
        self._bootstrap: WorkerBootstrap | None = None
        self._sockets: list[socket.socket] = []
        #: The driver's links to the process, of calls and of orders.
        self.links: list[tuple[Blueprint, _core.Segment]] = []

    def prepare(self) -> None:
        """Make all endpoints and links."""
        shared, record = self._shared_state, self._record
        process, actor, slot = shared.process, record.actor, record.slot
        made: list[int] = []
        try:
            made.append(descriptors.event())
            made.append(_core.Arena.create_fd(process.arena_size.file))
            record.arena = process.adopt(slot, record.incarnation, made[1], made[0])
        finally:
            close_all(made)
        record.arena_fd, record.eventfd = process.descriptors(slot)
        record.control_socket, control = descriptors.socket_pair()
        self._sockets.append(control)
        here, request = descriptors.socket_pair()
        self._sockets.append(request)
        self._on_request_socket(record, here)
        self._bootstrap = bootstrap = WorkerBootstrap(
            slot=slot,
            incarnation=record.incarnation,
            name=record.id.name,
            number=record.id.index,
            session=shared.session,
            arena=process.arena_size,
            driver_slot=DRIVER_SLOT,
            mailbox_bit=record.bits.take(),
            control_bit=record.bits.take(),
            max_concurrency=actor.max_concurrency,
            has_async=actor.has_async,
            grace=self._grace,
            places=shared.places,
        )
        depth = link_depth(actor.max_concurrency)
        record.calls = self._link(bootstrap.mailbox_bit, _core.KIND_CALL, depth)
        record.control_link = self._link(bootstrap.control_bit, _core.KIND_CONTROL)
        # Without itself: few actors call themselves, and these are introduced like any two others.
        record.known_peers = {DRIVER_SLOT: process.process_table.incarnation(DRIVER_SLOT)}

    def message(self, arena: ArenaSize | None = None) -> bytes:
        """Return the bootstrap message. ``arena``: the arena size of the process's node, if that is not the
        driver's."""
        assert self._bootstrap is not None
        bootstrap = self._bootstrap if arena is None else replace(self._bootstrap, arena=arena)
        return version_line() + pickle.dumps(bootstrap)

    def passed(self) -> list[int]:
        """Return the descriptors that the process gets duplicates of."""
        shared, record = self._shared_state, self._record
        return [
            shared.process.process_table.fd,
            record.arena_fd,
            record.eventfd,
            shared.arena_fd,
            shared.eventfd,
            *(sock.fileno() for sock in self._sockets),
            *(segment.fd for _, segment in self.links),
        ]

    def close(self) -> None:
        """Close the descriptors that were only made to be passed on."""
        for sock in self._sockets:
            sock.close()
        for _, segment in self.links:
            segment.close_fd()

    def _link(self, bit: int, kind: int, depth: int = CALL_SLOTS) -> Link:
        shared, record = self._shared_state, self._record
        assert record.arena is not None
        mailbox = RingEnd(record.slot, record.incarnation, bit)
        blueprint = link_blueprint(shared.process.ring_end(RESULT_BIT), mailbox, depth)
        segment = blueprint.make()
        self.links.append((blueprint, segment))
        return Link(
            shared.process,
            segment,
            mailbox,
            record.arena,
            record.id.name,
            record.death,
            shared.pump,
            kind,
            label=shared.label,
        )
