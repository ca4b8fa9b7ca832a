"""The processes of a session as a host has them that its driver is not on: see
:mod:`conveyor.engine.net.station`."""

from __future__ import annotations

import socket
from contextlib import suppress

from msgspec import Struct

from conveyor import _core
from conveyor.codec import Reader


class Local(Struct, eq=False):
    """A process of this host. ``passed`` is what it gets last: its ends of both sockets."""

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
        """As others know it."""
        return self.slot, self.incarnation

    def cut(self) -> None:
        """Nothing more is said on its requests' socket: it hears that, and waits for no answer."""
        with suppress(OSError):  # it has gone, or has heard
            self.requests.shutdown(socket.SHUT_RDWR)

    def close_passed(self) -> None:
        """It has them, or never will."""
        for sock in self.passed:
            sock.close()
        self.passed.clear()


class Proxy(Struct, eq=False):
    """A process of another host."""

    incarnation: int
    host: int
    arena_fd: int
    arena: _core.Arena
