"""Fetching memory of processes on other nodes through an actor's own node; see ``runtime.remote_memory``."""

from __future__ import annotations

import errno
import itertools
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from conveyor import descriptors
from conveyor.codec import Reader
from conveyor.runtime.messages import Connection, Message, all_of
from conveyor.runtime.remote_memory import Brought, Closing, ReceiveBuffer, Wanted
from conveyor.runtime.stored_values import StoreSnapshot
from conveyor.system_limits import explained
from conveyor.worker.messages import Introduce, OpenRemoteMemory, RemoteStored, Request


class Lease:
    """The process's end of the lease of one connection. Raises ``OSError`` if there are no descriptors for
    it."""

    def __init__(self) -> None:
        self._socket, there = descriptors.socket_pair()
        self._there: Closing | None = Closing(there.detach())
        self._buffers: list[ReceiveBuffer] = []
        self._over = self._cut = False

    def handed(self) -> Closing | None:
        """Return the node's end, which is closed here together with its holder."""
        there, self._there = self._there, None
        return there

    def keep(self, buffer: ReceiveBuffer) -> None:
        """Keep a buffer until the node writes no more."""
        self._buffers.append(buffer)
        if self._over:  # maybe before it was there
            self._buffers.clear()

    def see_out(self) -> bool:
        """Wait until the node writes no more, or the process leaves its session; return whether it is the
        former. In the latter case the memory that the node may write to is kept as long as this object."""
        with self._socket:
            with suppress(ConnectionResetError):  # the node is no more
                self._socket.recv(1)
            if not self._cut:
                self._over = True
                self._buffers.clear()
            return self._over

    def close(self) -> None:
        """Close both ends: the lease's connection was never made."""
        self._there = None
        self._socket.close()

    def cut(self) -> None:
        """End the wait for the node: the process leaves its session."""
        self._cut = True
        with suppress(OSError):  # it has been seen out
            self._socket.shutdown(socket.SHUT_RDWR)


class LeaseThere:
    """The node's end of a lease: the writes that the node does on behalf of one connection."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self._writes: set[int] = set()
        self._ended = False

    def begin(self, sock: socket.socket) -> None:
        """Hold ``sock``, which has come over the connection."""
        self._held.append(sock)

    def writes(self, number: int) -> None:
        """Note that the node writes to the buffer of :class:`Want` ``number`` from now on."""
        self._writes.add(number)

    def written(self, number: int) -> None:
        """Note that the node has stopped writing to the buffer of :class:`Want` ``number``."""
        self._writes.discard(number)
        self._look()

    def end(self) -> None:
        """Note that nothing else is asked for over the connection."""
        self._ended = True
        self._look()

    def _look(self) -> None:
        # The last of the two callers sees both conditions; if both see them, one of the two takes the socket.
        if not self._ended or self._writes:
            return
        with suppress(IndexError), self._held.pop() as sock, suppress(OSError):
            # To close it is not enough where a forked child has a copy.
            sock.shutdown(socket.SHUT_RDWR)


class ToNode(Message, frozen=True):
    """A message of a process to its node."""


class Hold(ToNode, frozen=True):
    """The first message: the node's end of a :class:`Lease` comes with it."""


class Want(ToNode, frozen=True):
    """A request for memory, answered by :class:`Come` ``number``. slot: of the process that waits. at: where
    the memory is to be put in the file that comes with this; ``None``: it comes with the answer."""

    number: int
    slot: int
    wanted: Wanted
    at: int | None


class GiveUp(ToNode, frozen=True):
    """Notice that :class:`Want` ``number`` is wanted no more. It is answered all the same."""

    number: int


class FromNode(Message, frozen=True):
    """A message of a node to a process of its own."""


class Come(FromNode, frozen=True):
    """The outcome of :class:`Want` ``number``. Nothing is written to its buffer any more."""

    number: int
    brought: Brought


class _LeasedConnection(NamedTuple):
    """A connection to the node, and the lease that says when the node has stopped writing on its behalf."""

    connection: Connection
    lease: Lease


class RemoteMemoryClient:
    """An actor's :class:`RemoteMemory`, which asks its node."""

    def __init__(self, ask: Callable[[Request], tuple[Any, list[int]]], slot: int) -> None:
        """``ask(request)`` returns the driver's answer, and the descriptors that come with it. ``slot``: the
        actor's."""
        self._ask, self._slot = ask, slot
        # Reentrant: a signal handler may fetch something while its thread waits for the connection.
        self._lock = threading.RLock()
        self._leased: _LeasedConnection | None = None
        self._numbers = itertools.count(1)
        #: By number: the callback, the buffer that is written to until then, and the connection.
        self._waiting: dict[
            int, tuple[Callable[[Brought], object], ReceiveBuffer | None, _LeasedConnection]
        ] = {}
        #: Leases of the connections whose buffers the node may write to: ended ones, and the present one.
        self._leases: set[Lease] = set()

    def fetch(
        self, wanted: Wanted, buffer: ReceiveBuffer | None, tell: Callable[[Brought], object]
    ) -> Callable[[], object]:
        """See :class:`RemoteMemory`."""
        leased = self._open()
        connection = leased.connection
        number = next(self._numbers)
        self._waiting[number] = tell, buffer, leased
        connection.send(
            Want(number, self._slot, wanted, None if buffer is None else buffer.at), buffer
        )
        if connection.ended:  # maybe before that was noted
            self._fail(number)
        return lambda: connection.send(GiveUp(number))

    def introduce(self, process: Reader) -> bool:
        """See :class:`RemoteMemory`."""
        lives, _ = self._ask(Introduce(*process))
        return bool(lives)

    def stored(self) -> list[StoreSnapshot]:
        """See :class:`RemoteMemory`."""
        found: list[StoreSnapshot]
        found, _ = self._ask(RemoteStored())
        return found

    def close(self) -> None:
        """Close the connection and cut all leases: the process leaves its session."""
        if self._leased is not None:
            self._leased.connection.hang_up()
        for lease in list(self._leases):
            lease.cut()
        if self._leased is not None:
            self._leased.connection.close()

    def _open(self) -> _LeasedConnection:
        with self._lock:
            leased = self._leased
            if leased is None or leased.connection.ended:
                with explained("open a connection to this process's host"):
                    _, fds = self._ask(OpenRemoteMemory())
                    (fd,) = all_of(fds, 1)
                    sock = socket.socket(fileno=fd)
                    lease = Lease()
                self._leases.add(lease)
                try:
                    connection = Connection(
                        sock, "memory", self._on_message, lambda: self._on_end(lease)
                    )
                except BaseException:
                    self._leases.discard(lease)
                    lease.close()
                    raise
                connection.send(Hold(), lease.handed())
                self._leased = leased = _LeasedConnection(connection, lease)
            return leased

    def _on_message(self, message: FromNode, fds: list[int]) -> None:
        self.handlers[type(message)](self, message, fds)

    def _come(self, message: Come, _fds: list[int]) -> None:
        tell, _, _ = self._waiting.pop(message.number, (None, None, None))
        if tell is not None:
            tell(message.brought)

    def _on_end(self, lease: Lease) -> None:
        # Only requests of this connection fail: there may be another connection by now.
        for number, (_, _, leased) in list(self._waiting.items()):
            if leased.connection.ended:
                self._fail(number)
        if lease.see_out():
            self._leases.discard(lease)

    def _fail(self, number: int) -> None:
        tell, buffer, leased = self._waiting.pop(number, (None, None, None))
        if buffer is not None and leased is not None:
            leased.lease.keep(buffer)
        if tell is not None:
            tell(Brought(None, errno.ECONNRESET, "the connection to this process's host has ended"))

    #: What is done for each kind of message.
    handlers: ClassVar[
        Mapping[type[FromNode], Callable[[RemoteMemoryClient, Any, list[int]], None]]
    ] = {Come: _come}
