"""Hands descriptors to processes that Ray has started, over a Unix socket.

Ray starts a process and tells it the socket's name and a secret, over its own authenticated connections. The
process connects, both ends prove themselves (:mod:`conveyor.local_sockets`), and the driver gives the process
its descriptors.

The socket is in the abstract namespace, not in the file system, and lasts as long as the session.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from msgspec import Struct

from conveyor.engines.ray.greeting import (
    MESSAGE_BYTES,
    Farewell,
    Here,
    Leave,
    Welcome,
    read,
    version,
    write,
)
from conveyor.local_sockets import LocalListener, hang_up, new_key, new_name, owner
from conveyor.runtime.events import EventLoop


class Expected(Struct, eq=False):
    """A process that is to come. ``arrived(pid, stderr)`` returns the descriptors for the process, which stay
    the callee's; an ``OSError`` refuses the process, and its text is sent there. ``refused(why)`` is called
    if the process has come, and cannot be taken."""

    key: bytes
    arrived: Callable[[int, str], Sequence[int]]
    refused: Callable[[str], object]


class Courier:
    """Socket at which expected processes connect, for the driver or a node agent. All of it but
    :meth:`start` and :meth:`expect` happens on the thread of ``events``."""

    def __init__(self, events: EventLoop, on_farewell: Callable[[int, int], object]) -> None:
        """``on_farewell(pid, code)`` is called when an arrived process says that it ends or leaves."""
        self._events = events
        self._on_farewell = on_farewell
        self._expected: dict[int, Expected] = {}
        #: Connections of expected processes that have not said yet what they are.
        self._coming: dict[int, tuple[socket.socket, Expected]] = {}
        self._known: dict[int, tuple[socket.socket, int]] = {}
        self._listener: LocalListener | None = None
        self._name = new_name()

    @property
    def address(self) -> str:
        """The socket's name, in the abstract namespace."""
        return self._name

    def start(self) -> None:
        """Accept connections from now on."""
        listener = LocalListener(self._name, socket.SOCK_SEQPACKET, self._key_of, self._admit)
        try:
            self._listener = listener
            self._events.add(listener.fileno(), self._serve)
        except BaseException:
            self._listener = None
            listener.close()
            raise

    def expect(
        self,
        number: int,
        arrived: Callable[[int, str], Sequence[int]],
        refused: Callable[[str], object],
    ) -> bytes:
        """Expect one process under this number; return the secret that it has to prove. See
        :class:`Expected`."""
        key = new_key()
        self._expected[number] = Expected(key, arrived, refused)
        return key

    def forget(self, number: int) -> None:
        """Stop expecting the process of that number."""
        self._expected.pop(number, None)

    def close(self) -> None:
        """Accept nothing any more, and close all connections."""
        if self._listener is not None:
            self._events.remove(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for known in list(self._known):
            self._hang_up(known)
        for coming in list(self._coming):
            self._drop(coming)

    def _key_of(self, number: int) -> bytes | None:
        expected = self._expected.get(number)
        return None if expected is None else expected.key

    def _serve(self) -> None:
        listener = self._listener
        if listener is None:
            return
        pause = listener.serve()
        if pause:
            self._events.rest(listener.fileno(), pause)

    def _admit(self, connection: socket.socket, number: int) -> None:
        expected = self._expected.pop(number)  # each process comes once
        fd = connection.fileno()
        self._coming[fd] = connection, expected
        self._events.add(fd, partial(self._hear, fd))

    def _hear(self, fd: int) -> None:
        connection, expected = self._coming[fd]
        try:
            data = connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said = read(data, Here)
        if said is None:  # it has ended, which Ray tells
            self._drop(fd)
            return
        self._greet(fd, connection, said, expected)

    def _greet(self, fd: int, connection: socket.socket, said: Here, expected: Expected) -> None:
        pid, _ = owner(connection)
        why = ""
        fds: Sequence[int] = ()
        if said.version != version():
            why = f"it is {said.version}, and the driver {version()}"
        elif pid <= 0:
            why = "it is in another PID namespace than the driver, which could not see its end"
        else:
            try:
                fds = expected.arrived(pid, said.stderr)
            except OSError as error:
                why = str(error)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            connection.sendmsg([write(Welcome(why))], rights, socket.MSG_NOSIGNAL)
        except OSError as error:  # it has ended meanwhile, or its descriptors are used up
            why = why or f"its descriptors could not be sent: {error}"
        if why:
            self._drop(fd)
            expected.refused(why)
            return
        del self._coming[fd]
        self._known[fd] = connection, pid
        self._events.remove(fd)
        self._events.add(fd, partial(self._hear_end, fd))

    def _hear_end(self, fd: int) -> bool:
        """Receive one message of a process, such as its farewell. Return whether there may be more."""
        known = self._known.get(fd)
        if known is None:
            return False
        connection, pid = known
        try:
            data = connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it died with unread messages: its own can still be received
            return True
        except OSError:
            data = b""
        if not data:
            self._hang_up(fd)
            return False
        farewell = read(data, Farewell)
        if farewell is not None:
            self._on_farewell(pid, farewell.code)
        return True

    def last_words(self, pid: int) -> None:
        """Receive all that a process had sent before it ended."""
        for fd, (_, known) in list(self._known.items()):
            if known == pid:
                while self._hear_end(fd):
                    pass
                if fd in self._known:  # a child of the process has its end of the connection
                    self._hang_up(fd)

    def tell_to_leave(self, pid: int) -> None:
        """Tell a process to leave the session, if it has not left yet."""
        for connection, known in self._known.values():
            if known == pid:
                with suppress(OSError):  # it is gone, or its socket is full of such messages
                    connection.sendmsg([write(Leave())], [], socket.MSG_NOSIGNAL)

    def _hang_up(self, fd: int) -> None:
        self._events.remove(fd)
        hang_up(self._known.pop(fd)[0])

    def _drop(self, fd: int) -> None:
        self._events.remove(fd)
        hang_up(self._coming.pop(fd)[0])
