"""What an actor's new process is given: its endpoints, and the driver's links to it."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from conveyor import _core, descriptors
from conveyor.runtime.actor.orders import Hello
from conveyor.runtime.blueprint import Blueprint
from conveyor.runtime.calls.link_segment import link_blueprint, link_depth
from conveyor.runtime.calls.links import Link
from conveyor.runtime.calls.pump import Pump
from conveyor.runtime.driver.processes.record import ActorRecord, Label
from conveyor.runtime.driver.processes.table import DRIVER_SLOT
from conveyor.runtime.messages.message import greeting
from conveyor.runtime.process import CALL_SLOTS, RESULT_BIT, ArenaSize, Place, Process, close_all


class Household(Struct, frozen=True):
    """What all actors' processes have from the driver.

    process: the driver's own. session: its name. arena_fd, eventfd: what whoever writes to the driver
    needs. label: names a (graph, node). pump: sends what waits in a link once it can be sent. places:
    whether the hosts choose a place for each.
    """

    process: Process
    session: str
    arena_fd: int
    eventfd: int
    label: Label
    pump: Pump
    places: bool


class Birth:
    """One process of an actor, before there is one. What stays the driver's is in its record."""

    def __init__(
        self,
        household: Household,
        record: ActorRecord,
        grace: float,
        on_request_socket: Callable[[ActorRecord, socket.socket], object],
    ) -> None:
        """``on_request_socket`` takes the driver's end of the socket on which the process will ask."""
        self._household = household
        self._record = record
        self._grace = grace
        self._on_request_socket = on_request_socket
        self._hello: Hello | None = None
        self._sockets: list[socket.socket] = []
        #: The driver's links to it, of calls and of orders.
        self.links: list[tuple[Blueprint, _core.Segment]] = []

    def lay(self) -> None:
        """Make it all."""
        house, record = self._household, self._record
        process, actor, slot = house.process, record.actor, record.slot
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
        self._hello = hello = Hello(
            slot=slot,
            incarnation=record.incarnation,
            name=record.id.name,
            number=record.id.index,
            session=house.session,
            arena=process.arena_size,
            driver_slot=DRIVER_SLOT,
            mailbox_bit=record.bits.take(),
            control_bit=record.bits.take(),
            max_concurrency=actor.max_concurrency,
            has_async=actor.has_async,
            grace=self._grace,
            places=house.places,
        )
        depth = link_depth(actor.max_concurrency)
        record.calls = self._link(hello.mailbox_bit, _core.KIND_CALL, depth)
        record.control_link = self._link(hello.control_bit, _core.KIND_CONTROL)
        # Not itself: few actors call themselves, and those are introduced like any two others.
        record.known_peers = {DRIVER_SLOT: process.board.incarnation(DRIVER_SLOT)}

    def told(self, arena: ArenaSize | None = None) -> bytes:
        """What it is told. ``arena``: of its host, where that is not the driver's."""
        assert self._hello is not None
        hello = self._hello if arena is None else replace(self._hello, arena=arena)
        return greeting() + pickle.dumps(hello)

    def passed(self) -> list[int]:
        """The descriptors that it gets duplicates of."""
        house, record = self._household, self._record
        return [
            house.process.board.fd,
            record.arena_fd,
            record.eventfd,
            house.arena_fd,
            house.eventfd,
            *(sock.fileno() for sock in self._sockets),
            *(segment.fd for _, segment in self.links),
        ]

    def close(self) -> None:
        """Close what was only made to be passed."""
        for sock in self._sockets:
            sock.close()
        for _, segment in self.links:
            segment.close_fd()

    def _link(self, bit: int, kind: int, depth: int = CALL_SLOTS) -> Link:
        house, record = self._household, self._record
        assert record.arena is not None
        mailbox = Place(record.slot, record.incarnation, bit)
        blueprint = link_blueprint(house.process.place(RESULT_BIT), mailbox, depth)
        segment = blueprint.make()
        self.links.append((blueprint, segment))
        return Link(
            house.process,
            segment,
            mailbox,
            record.arena,
            record.id.name,
            record.death,
            house.pump,
            kind,
            label=house.label,
        )
