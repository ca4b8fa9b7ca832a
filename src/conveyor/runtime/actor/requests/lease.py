"""How a process hears that its host writes no more to memory of its, where the connection between the two has
ended.

What was asked for may be on its way when the connection ends, or even be read by the host behind that. So the
host gets one end of a pair of sockets with the connection, and ends that when nothing can be written any more
on behalf of that connection. The kernel ends it where the host is no more, or has never read so far.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from conveyor import descriptors
from conveyor.runtime.far_memory import Closing, Room


class Lease:
    """The process's end, of one connection. ``OSError`` if there are no descriptors for it."""

    def __init__(self) -> None:
        self._socket, there = descriptors.socket_pair()
        self._there: Closing | None = Closing(there.detach())
        self._rooms: list[Room] = []
        self._over = self._cut = False

    def handed(self) -> Closing | None:
        """The host's end, which is closed here with who has it."""
        there, self._there = self._there, None
        return there

    def keep(self, room: Room) -> None:
        """Keep a room until the host writes no more."""
        self._rooms.append(room)
        if self._over:  # maybe before it was there
            self._rooms.clear()

    def see_out(self) -> bool:
        """Wait until the host writes no more, or the process leaves its session; whether it is the former.
        Else what the host may write to is kept as long as this."""
        with self._socket:
            with suppress(ConnectionResetError):  # the host is no more
                self._socket.recv(1)
            if not self._cut:
                self._over = True
                self._rooms.clear()
            return self._over

    def close(self) -> None:
        """There is no connection that it is of."""
        self._there = None
        self._socket.close()

    def cut(self) -> None:
        """Nobody waits for the host any more."""
        self._cut = True
        with suppress(OSError):  # it has been seen out
            self._socket.shutdown(socket.SHUT_RDWR)


class LeaseThere:
    """The host's end: what it writes on behalf of one connection."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self._writes: set[int] = set()
        self._ended = False

    def begin(self, sock: socket.socket) -> None:
        """It has come."""
        self._held.append(sock)

    def writes(self, number: int) -> None:
        """What has that number is written to from now on."""
        self._writes.add(number)

    def written(self, number: int) -> None:
        """It is not any more."""
        self._writes.discard(number)
        self._look()

    def end(self) -> None:
        """Nothing else is asked for over the connection."""
        self._ended = True
        self._look()

    def _look(self) -> None:
        # Whoever comes last sees both, and one of those that see them takes it.
        if not self._ended or self._writes:
            return
        with suppress(IndexError), self._held.pop() as sock, suppress(OSError):
            # To close it is not enough where a forked child has a copy.
            sock.shutdown(socket.SHUT_RDWR)
