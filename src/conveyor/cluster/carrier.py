"""Connections between processes of two nodes. Each process believes to have one end of a pair of sockets.

Each process has the other end of a socket of its node. The node carries a message that comes there to the
other node; processes there fetch its files when they need them, since a message only names its files.
Messages of one connection stay in order, so a message whose files are on their way holds up the next ones.

The engine carries messages from node to node, and loses none while both nodes are there.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from msgspec import Struct

from conveyor.cluster.servers import SharedFiles, Supply
from conveyor.cluster.serving import break_off
from conveyor.exceptions import SystemLimitError
from conveyor.runtime import threads
from conveyor.runtime.messages import Files, Missing, receive_pickled, send_pickled
from conveyor.runtime.process import close_all
from conveyor.system_limits import explained

#: Limit of what is in flight over one connection, in bytes, and the bytes that each file counts as.
_MOST_UNTAKEN, _OF_A_FILE = 4 << 20, 64 << 10


class Body(Struct, frozen=True):
    """A file that goes with a message: its number in the shared files of the node that sends it.
    ``reusable``: more messages with it may come, until the node says that it is unwanted."""

    number: int
    size: int
    reusable: bool


class NodeMessage(Struct, frozen=True):
    """Message from node to node. It belongs to a connection of two processes."""


class Carried(NodeMessage, frozen=True):
    """A message. ``missing``: why its files do not go with it."""

    connection: int
    data: bytes
    bodies: tuple[Body, ...]
    missing: Missing | None = None

    @property
    def cost(self) -> int:
        """Cost of the message while it is in flight, in bytes."""
        return len(self.data) + _OF_A_FILE * len(self.bodies)


class Taken(NodeMessage, frozen=True):
    """Notice that the process has taken messages of that connection. ``cost``: theirs."""

    connection: int
    cost: int


class HungUp(NodeMessage, frozen=True):
    """Notice that nothing comes over that connection any more."""

    connection: int


class Dropped(NodeMessage, frozen=True):
    """Notice that no message with that file comes any more."""

    number: int


class Released(NodeMessage, frozen=True):
    """Notice to the node that has a file: nobody asks for that file any more."""

    number: int


class _Known:
    """A file of the other node, which messages on their way to processes here come with."""

    def __init__(self, size: int, reusable: bool) -> None:
        self.size = size
        #: Whether more may come with it.
        self.reusable = reusable
        #: Held by whoever fetches it.
        self.lock = threading.Lock()
        self.uses = 0
        self.fd = -1


class _Connection(Struct, eq=False):
    number: int
    sock: socket.socket
    incoming: queue.SimpleQueue[Carried | None]
    #: Cost of messages that were sent and not taken, and of those that were taken and not reported yet.
    untaken: int = 0
    taken: int = 0
    #: Whether nobody takes messages any more.
    over: bool = False


class Carrier:
    """Traffic over the connections between the processes of this node and those of one other node."""

    def __init__(
        self, shared_files: SharedFiles, supply: Supply, send: Callable[[NodeMessage], object]
    ) -> None:
        """``shared_files``: this node's; ``supply``: of the other one. ``send(node_message)`` has it come to
        the other node's :meth:`receive`, behind those before it."""
        self._shared_files, self._supply, self._send = shared_files, supply, send
        # Reentrant: a finalizer may drop what is held.
        self._lock = threading.RLock()
        self._untaken_changed = threading.Condition(self._lock)
        self._connections: dict[int, _Connection] = {}
        self._known: dict[int, _Known] = {}
        #: Held files by inode: the number in the shared files, and whether the other node has heard of the
        # file.
        self._held: dict[int, tuple[int, bool]] = {}
        # The numbers that the other node may still ask for.
        self._lent: set[int] = set()
        self._closed = False

    @property
    def trouble(self) -> str:
        """Why connecting to the other node currently fails; see :attr:`Supply.trouble`."""
        return self._supply.trouble

    def open(self, number: int, sock: socket.socket) -> None:
        """Have connection ``number`` end in ``sock``, which is the carrier's from now on."""
        connection = _Connection(number, sock, queue.SimpleQueue())
        with self._lock:
            closed = self._closed
            if not closed:
                self._connections[number] = connection
        if closed:
            sock.close()
            return
        try:
            reader = threads.start(self._read, "carrier-in", connection)
        except BaseException:
            self._send(HungUp(number))
            self._end(connection)
            raise
        try:
            threads.start(self._write, "carrier-out", connection, reader)
        except BaseException:
            break_off(sock)
            reader.join()
            self._end(connection)
            raise

    def receive(self, node_message: NodeMessage) -> None:
        """Handle a message of the other node. Waits for nothing."""
        self.handlers[type(node_message)](self, node_message)

    def hold(self, fd: int) -> None:
        """Messages with that file may be sent more than once: it is fetched with the first. Where no
        descriptor is left to keep it with, it goes with each of them."""
        inode = os.fstat(fd).st_ino
        with self._lock:
            if inode not in self._held and not self._closed:
                # A failure here must not keep the news of the value from others.
                with suppress(OSError):
                    self._held[inode] = self._put(fd), False

    def let_go(self, fd: int) -> None:
        """Let go of a file of which no process of the other node has anything any more."""
        with self._lock:
            number, announced = self._held.pop(os.fstat(fd).st_ino, (0, False))
            if announced:
                self._send(Dropped(number))
            elif number:
                self._drop(number)

    def close(self) -> None:
        """End all connections, since the other node is lost or the session over. Waits for no thread: one may
        be dialling."""
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
            for connection in connections:
                connection.over = True
            self._untaken_changed.notify_all()
            self._held.clear()
        self._supply.close()
        for connection in connections:
            break_off(connection.sock)
            connection.incoming.put(None)
        with self._lock:
            for known in list(self._known.values()):
                known.reusable = False
            for number, known in list(self._known.items()):
                self._look(number, known)  # others go with the message that they are used by
            lent = list(self._lent)
        for number in lent:
            self._drop(number)

    # Messages of processes of this node

    def _read(self, connection: _Connection) -> None:
        try:
            with suppress(OSError):
                while self._wait_to_send(connection):
                    data, fds = receive_pickled(connection.sock)
                    try:
                        self._pass_on(connection, data, fds)
                    finally:
                        close_all(fds)
        finally:
            self._send(HungUp(connection.number))
            connection.incoming.put(None)

    def _wait_to_send(self, connection: _Connection) -> bool:
        """Wait until the process at the other end has taken enough of what was sent, so that a sender that is
        faster than it waits, too. False: the other end takes nothing any more."""
        with self._lock:
            self._untaken_changed.wait_for(
                lambda: connection.untaken < _MOST_UNTAKEN or connection.over
            )
            return not connection.over

    def _pass_on(self, connection: _Connection, data: bytes, fds: Files) -> None:
        # With the lock until it has been sent: else a file that is let go of meanwhile would be told to be
        # unwanted ahead of a message with it, and then be waited for without end.
        with self._lock:
            bodies: list[Body] = []
            missing = fds.missing
            try:
                with explained("keep a value for another host"):
                    for fd in fds:
                        bodies.append(self._body(fd))
            except BaseException as error:  # nobody hears of them
                for body in bodies:
                    if not body.reusable:
                        self._drop(body.number)
                bodies.clear()
                if not isinstance(error, (SystemLimitError, MemoryError)):
                    raise
                missing = Missing.of(error)
            node_message = Carried(connection.number, data, tuple(bodies), missing)
            connection.untaken += node_message.cost
            self._send(node_message)

    def _body(self, fd: int) -> Body:
        """Describe a file that goes with a message, for the other node. Call with the lock."""
        stat = os.fstat(fd)
        held = self._held.get(stat.st_ino)
        if held is None:
            return Body(self._put(fd), stat.st_size, False)
        self._held[stat.st_ino] = held[0], True
        return Body(held[0], stat.st_size, True)

    def _put(self, fd: int) -> int:
        """Put a file into the shared files and return its number there. Call with the lock."""
        if self._closed:  # nobody would ever take it away
            raise ConnectionError("the other host is lost, or the session over")
        number = self._shared_files.put(fd)
        self._lent.add(number)
        return number

    def _drop(self, number: int) -> None:
        self._lent.discard(number)
        self._shared_files.drop(number)

    # Messages for them

    def _write(self, connection: _Connection, reader: threading.Thread) -> None:
        over = False
        while (node_message := connection.incoming.get()) is not None:
            if not over:
                over = not self._deliver(connection, node_message)
            self._used(node_message)
            connection.taken += node_message.cost
            if connection.taken >= _MOST_UNTAKEN // 4:
                self._send(Taken(connection.number, connection.taken))
                connection.taken = 0
        break_off(connection.sock)
        reader.join()
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        """Drop a connection that nobody reads from, or writes to, any more."""
        connection.sock.close()
        with self._lock:
            self._connections.pop(connection.number, None)  # and nothing is put there any more
        while not connection.incoming.empty():
            if (node_message := connection.incoming.get()) is not None:
                self._used(node_message)

    def _deliver(self, connection: _Connection, node_message: Carried) -> bool:
        """False: nobody is there, or what goes with it is nowhere, and so the connection ends. Where there is
        no space here for its files, the message comes without them, and with the reason."""
        missing, fds = node_message.missing, list[int]()
        try:
            try:
                fds = [self._file(body) for body in node_message.bodies]
            except (SystemLimitError, MemoryError) as error:
                missing = Missing.of(error)
            send_pickled(connection.sock, node_message.data, fds, missing)
        except (OSError, MemoryError):
            break_off(connection.sock)
            return False
        return True

    def _file(self, body: Body) -> int:
        with self._lock:
            known = self._known[body.number]
        with known.lock:
            if known.fd < 0:
                known.fd = self._supply.fetch(body.number, body.size)
        return known.fd

    def _used(self, node_message: Carried) -> None:
        for body in node_message.bodies:
            with self._lock:
                known = self._known.get(body.number)
                if known is not None:
                    known.uses -= 1
                    self._look(body.number, known)

    def _look(self, number: int, known: _Known) -> None:
        """Let go of a file that nobody needs. Call with the lock."""
        if known.uses or known.reusable:
            return
        del self._known[number]
        if known.fd >= 0:
            os.close(known.fd)
        self._send(Released(number))

    # Messages of the other node

    def _carried(self, node_message: Carried) -> None:
        with self._lock:
            for body in node_message.bodies:
                known = self._known.get(body.number)
                if known is None:
                    known = _Known(body.size, body.reusable)
                    self._known[body.number] = known
                known.uses += 1
            connection = self._connections.get(node_message.connection)
            if connection is not None:
                connection.incoming.put(node_message)
                return
        self._used(node_message)

    def _hung_up(self, node_message: HungUp) -> None:
        with self._lock:
            connection = self._connections.get(node_message.connection)
            if connection is not None:
                connection.over = True
                self._untaken_changed.notify_all()
        if connection is not None:
            connection.incoming.put(None)

    def _taken(self, node_message: Taken) -> None:
        with self._lock:
            connection = self._connections.get(node_message.connection)
            if connection is not None:
                connection.untaken -= node_message.cost
                self._untaken_changed.notify_all()

    def _abandoned(self, node_message: Dropped) -> None:
        with self._lock:
            known = self._known.get(node_message.number)
            if known is not None:
                known.reusable = False
                self._look(node_message.number, known)

    def _released(self, node_message: Released) -> None:
        self._drop(node_message.number)

    #: The handler of each kind of frame.
    handlers: ClassVar[Mapping[type[NodeMessage], Callable[[Carrier, Any], None]]] = {
        Carried: _carried,
        Taken: _taken,
        HungUp: _hung_up,
        Dropped: _abandoned,
        Released: _released,
    }
