"""Hands descriptors to processes that Ray has started: over a Unix socket, to who proves to be one of them.

Ray starts a process and tells it the socket's name and a secret, over its own authenticated connections. The
process connects and says the secret; the driver checks whose process it is, and gives it its descriptors. So
whoever gets here shares a kernel and a network namespace with the driver, and its memory can be shared.

The socket has no place in the file system, and is there as long as the session.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from msgspec import Struct

from conveyor.engine.events import EventLoop
from conveyor.engine.net.handshake import hang_up
from conveyor.engine.net.spare import NO_DESCRIPTOR, Spare
from conveyor.engine.ray.greeting import (
    KEY_BYTES,
    MESSAGE_BYTES,
    Farewell,
    Here,
    Leave,
    Welcome,
    read,
    version,
    write,
)
from conveyor.pauses import Pauses

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: see unix(7)
#: Connections that have not said who they are. With one more, the oldest of them is dropped.
_UNKNOWN_KEPT = 64


class Expected(Struct, eq=False):
    """A process that is to come. ``arrived`` is called with its pid and its stderr, and gives the descriptors
    for it, which stay the callee's; what it raises is told to the process. ``refused(why)``: it has come,
    and cannot be taken."""

    key: bytes
    arrived: Callable[[int, str], Sequence[int]]
    refused: Callable[[str], object]


class Courier:
    """The driver's. All of it but :meth:`start` and :meth:`expect` happens on the thread of ``events``."""

    def __init__(self, events: EventLoop, on_farewell: Callable[[int, int], object]) -> None:
        """``on_farewell(pid, code)``: a process that has arrived is about to end."""
        self._events = events
        self._on_farewell = on_farewell
        self._expected: dict[int, Expected] = {}
        self._unknown: OrderedDict[int, socket.socket] = OrderedDict()
        self._known: dict[int, tuple[socket.socket, int]] = {}
        self._listener: socket.socket | None = None
        self._spare = Spare()
        self._pauses = Pauses()
        self._name = f"conveyor-{secrets.token_hex(16)}"
        #: Connections that were dropped, since they were not by who was expected.
        self.strangers = 0

    @property
    def address(self) -> str:
        """The socket's name, in the abstract namespace."""
        return self._name

    def start(self) -> None:
        """Wait for them from now on."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind("\0" + self._name)
            listener.listen(_UNKNOWN_KEPT)
            self._listener = listener
            self._events.add(listener.fileno(), self._accept)
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
        """One process will come, as this number; the secret that it has to know. See :class:`Expected`."""
        key = secrets.token_bytes(KEY_BYTES)
        self._expected[number] = Expected(key, arrived, refused)
        return key

    def forget(self, number: int) -> None:
        """It is not to come any more."""
        self._expected.pop(number, None)

    def close(self) -> None:
        """Wait for nobody any more."""
        if self._listener is not None:
            self._events.remove(self._listener.fileno())
            hang_up(self._listener)
            self._listener = None
            self._spare.close()
        for known in list(self._known):
            self._hang_up(known)
        for unknown in list(self._unknown):
            self._drop(unknown)

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR:
                    raise
                # A process that comes without a descriptor for it hears the end of its connection.
                dropped = self._spare.turn_away(self._listener)
                self.strangers += dropped or 0
                if dropped:
                    continue
                if dropped is None:
                    # Another thread has taken the spare one. Nothing tells when there is one again, and the
                    # loop would come here at once.
                    self._events.rest(self._listener.fileno(), self._pauses.next())
                return
            self._pauses.begin_anew()
            self._spare.restore()
            connection.setblocking(False)
            fd = connection.fileno()
            if self._owner_of(connection)[1] not in (os.geteuid(), 0):
                self._unknown[fd] = connection
                self._drop(fd)
                continue
            if len(self._unknown) >= _UNKNOWN_KEPT:
                self._drop(next(iter(self._unknown)))
            self._unknown[fd] = connection
            self._events.add(fd, partial(self._hear, fd))

    def _hear(self, fd: int) -> None:
        connection = self._unknown.get(fd)
        if connection is None:
            return
        try:
            data = connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said = read(data, Here)
        expected = None if said is None else self._expected.get(said.number)
        if said is None or expected is None or not hmac.compare_digest(said.key, expected.key):
            self._drop(fd)
            return
        del self._expected[said.number]  # it comes once
        self._greet(fd, connection, said, expected)

    def _greet(self, fd: int, connection: socket.socket, said: Here, expected: Expected) -> None:
        pid = self._owner_of(connection)[0]
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
            self._drop(fd, stranger=False)
            expected.refused(why)
            return
        del self._unknown[fd]
        self._known[fd] = connection, pid
        self._events.remove(fd)
        self._events.add(fd, partial(self._hear_end, fd))

    def _hear_end(self, fd: int) -> bool:
        """Take what a process says when it ends. Whether there may be more."""
        known = self._known.get(fd)
        if known is None:
            return False
        connection, pid = known
        try:
            data = connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return False
        except (
            ConnectionResetError
        ):  # it is gone and has not read all: what it has said is still to be had
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
        """The process is gone: take what it has said before."""
        for fd, (_, known) in list(self._known.items()):
            if known == pid:
                while self._hear_end(fd):
                    pass
                if fd in self._known:  # a child of the process has its end of the connection
                    self._hang_up(fd)

    def tell_to_leave(self, pid: int) -> None:
        """Have that process leave the session, if it has not yet."""
        for connection, known in self._known.values():
            if known == pid:
                with suppress(OSError):  # it is gone, or has been told so often that it knows
                    connection.sendmsg([write(Leave())], [], socket.MSG_NOSIGNAL)

    def _hang_up(self, fd: int) -> None:
        self._events.remove(fd)
        hang_up(self._known.pop(fd)[0])

    def _drop(self, fd: int, stranger: bool = True) -> None:
        self.strangers += stranger
        self._events.remove(fd)
        hang_up(self._unknown.pop(fd))

    @staticmethod
    def _owner_of(connection: socket.socket) -> tuple[int, int]:
        """Its pid and its user, by the kernel."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return pid, uid
