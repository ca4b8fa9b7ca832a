"""What an actor's new process is given: its endpoints, and the driver's links to it."""

from __future__ import annotations

import os
import pickle
import socket
from typing import TYPE_CHECKING

from conveyor import _core
from conveyor.runtime.actor.hello import Hello
from conveyor.runtime.calls.links import Link, link_depth, link_segment
from conveyor.runtime.process import close_all

if TYPE_CHECKING:
    from conveyor.runtime.driver.driver import Driver
    from conveyor.runtime.driver.record import ActorRecord

DRIVER_SLOT = 0


class Birth:
    """One process of an actor, before there is one. What stays the driver's is in its record."""

    def __init__(self, driver: Driver, record: ActorRecord, grace: float) -> None:
        self._driver = driver
        self._record = record
        self._grace = grace
        #: What it is told, pickled.
        self.hello = b""
        self._sockets: list[socket.socket] = []
        self._segments: list[_core.Segment] = []

    def lay(self) -> None:
        """Make it all."""
        driver, record = self._driver, self._record
        process, actor, slot = driver.process, record.actor, record.slot
        made: list[int] = []
        try:
            made.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            made.append(_core.Arena.create_fd(process.arena_size.file))
            process.adopt(slot, record.incarnation, made[1], made[0])
        finally:
            close_all(made)
        record.arena_fd, record.eventfd = process.descriptors(slot)
        record.control_socket, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sockets.append(control)
        here, request = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sockets.append(request)
        driver.requests.add(record, here)
        calls, ctl = link_segment(link_depth(actor.max_concurrency)), link_segment()
        self._segments += calls, ctl
        hello = Hello(
            slot=slot,
            name=record.id.name,
            number=record.id.index,
            session=driver.exports.session,
            arena=process.arena_size,
            driver_slot=DRIVER_SLOT,
            mailbox_bit=record.bits.take(),
            control_bit=record.bits.take(),
            max_concurrency=actor.max_concurrency,
            has_async=any(m.is_async for m in actor.methods.values()),
            grace=self._grace,
        )
        self.hello = pickle.dumps(hello)
        record.calls = self._link(calls, hello.mailbox_bit, _core.KIND_CALL)
        record.control_link = self._link(ctl, hello.control_bit, _core.KIND_CONTROL)
        # Not itself: few actors call themselves, and those are introduced like any two others.
        record.known_peers = {DRIVER_SLOT: process.board.incarnation(DRIVER_SLOT)}

    def passed(self) -> list[int]:
        """The descriptors that it gets duplicates of."""
        board, record = self._driver.process.board, self._record
        return [
            board.fd,
            record.arena_fd,
            record.eventfd,
            *self._driver.descriptors,
            *(sock.fileno() for sock in self._sockets),
            *(segment.fd for segment in self._segments),
        ]

    def close(self) -> None:
        """Close what was only made to be passed."""
        for sock in self._sockets:
            sock.close()
        for segment in self._segments:
            segment.close_fd()

    def _link(self, segment: _core.Segment, bit: int, kind: int) -> Link:
        driver, record = self._driver, self._record
        return Link(
            driver.process,
            segment,
            record.slot,
            record.id.name,
            bit,
            lambda: record.death(driver.label),
            driver.pump.add,
            kind,
            label=driver.label,
        )
