"""One host of a session, without an engine: a process table, an arena for each process, and a pump.

For measurements and tests of what goes between hosts. A process has one of them, and is the one of its host.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from typing import Any

from conveyor import _core
from conveyor.codec import SentDefinitions, set_up_codec

RESULT_BIT = 1
STRIDE = 2048
SLOTS = 64
ARENA = 1 << 33
CAP = 1 << 31


class Node:
    """Host ``number`` of ``hosts``; its process has the slot of the same number."""

    def __init__(self, number: int, hosts: int = 2, window: float = 1.0) -> None:
        set_up_codec()
        self.number = number
        self.process_table = _core.ProcessTable.create(hosts)
        eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._files = [_core.Arena.create_fd(ARENA) for _ in range(hosts)]
        self._fds = [eventfd, *self._files]
        self.process_table.prepare(number, f"process {number}")
        self.process_table.alive_unwatched(number)
        self.process_table.set_eventfd(number, eventfd, 1)
        self.inbox = _core.Inbox(
            self.process_table, number, eventfd, threading.main_thread().ident or 0
        )
        self.arenas = [
            _core.Arena(self._files[i], ARENA, CAP, self.process_table, i) for i in range(hosts)
        ]
        self.pump = _core.HostPump(self.process_table, number, window)
        for other in range(hosts):
            if other != number:
                self.pump.add_proxy(other, 1, other, f"process {other}", self.arenas[other])
        self._segments: dict[int, _core.Segment] = {}

    def _view(self, slot: int) -> _core.ArenaView:
        return _core.ArenaView(self._files[slot], ARENA, self.process_table, slot)

    def mirror(self, number: int = 1) -> None:
        """A segment with a ring from host 0 to host 1, and one back."""
        ring = _core.Segment.ring_bytes(SLOTS, STRIDE, 1)
        segment = self._segments[number] = _core.Segment.create(2 * ring)
        rings = []
        for writer in (0, 1):
            offset = writer * ring
            segment.make_ring(offset, SLOTS, STRIDE, 1, _core.RING_WRITER_MAY_WAIT)
            view = self._view(writer) if writer == self.number else None
            rings.append(
                _core.MirroredRing(offset, (writer, RESULT_BIT), [(1 - writer, RESULT_BIT)], view)
            )
        self.pump.mirror(number, segment, rings)

    def ends(self, number: int = 1) -> tuple[_core.Writer, _core.Reader]:
        """This process's ends of a mirrored segment."""
        segment, me, other = self._segments[number], self.number, 1 - self.number
        ring = _core.Segment.ring_bytes(SLOTS, STRIDE, 1)
        writer = _core.Writer(
            segment,
            me * ring,
            self.process_table,
            [(other, RESULT_BIT)],
            self.arenas[me],
            SentDefinitions(((other, 1),)),
        )
        reader = _core.Reader(
            segment,
            other * ring,
            0,
            self.process_table,
            (other, RESULT_BIT),
            self._view(other),
            False,
        )
        return writer, reader

    def connect(self, sock: socket.socket) -> None:
        self.pump.connect(sock.fileno(), 1 - self.number)
        sock.close()

    def wait_event(self, kind: int, timeout: float = 30.0) -> str:
        """Wait for such an event of the pump; its reason."""
        while True:
            for found, _, reason in self.pump.events():
                if found == kind:
                    return str(reason)
            if not select.select([self.pump.notice_fd], [], [], timeout)[0]:
                raise TimeoutError(f"the pump has not told of event {kind} in {timeout} s")

    def send(self, writer: _core.Writer, value: Any, tag: int) -> None:
        while not writer.send(value, tag):
            seen = self.inbox.count
            if not writer.has_room:
                writer.wants_room()
                if not writer.has_room:
                    self._wait(seen)

    def receive(self, reader: _core.Reader) -> Any:
        while True:
            seen = self.inbox.count
            value = reader.receive()
            if value is not _core.EMPTY:
                return value
            self._wait(seen)

    def wait_lost(self) -> None:
        """Wait until the other host is dead."""
        while not self.process_table.gone(1 - self.number, 1):
            seen = self.inbox.count
            if not self.process_table.gone(1 - self.number, 1):
                self.inbox.wait(seen, 60)

    def _wait(self, seen: int) -> None:
        other = 1 - self.number
        if self.process_table.gone(other, 1):
            raise ConnectionError(f"host {other} is lost")
        self.inbox.wait(seen, 60)

    def stop(self) -> None:
        """Stop the pump, and close the descriptors, of which all that were made with them have copies."""
        self.pump.stop()
        while self._fds:
            os.close(self._fds.pop())
