"""Unix sockets whose two ends prove themselves before they say anything else.

Such a socket has a name and no file. Every process of the network namespace can read the name, and take it
where it is free. So each end asks the kernel for the other process's user, and both prove by HMAC-SHA256 that
they know the listener's key. Their messages have a fixed size. Nothing else is read from a process that has
not proved itself, and no thread waits for it.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import select
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from conveyor import descriptors
from conveyor.pauses import Pauses
from conveyor.system_limits import hint

_log = logging.getLogger("conveyor")

#: Bytes of a listener's key.
KEY_BYTES = 32
_MAGIC = b"conveyor"
_SIGNED = struct.Struct("!8sQ16s")  # magic, number, nonce
_PROOF_BYTES = 32
_REQUEST_BYTES = _SIGNED.size + _PROOF_BYTES
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: see unix(7)
#: Connections that have sent no request. With one more, the oldest of them is dropped.
_MAX_UNPROVEN = 64
#: Connections that are let in at a time, before others are served.
_AT_ONCE = 16


class UnprovenPeerError(ConnectionError):
    """The process at the other end has not proved that it belongs there."""


def new_key() -> bytes:
    """Return a secret for the two ends of a socket."""
    return secrets.token_bytes(KEY_BYTES)


def new_name(prefix: str = "conveyor-") -> str:
    """Return a name for a socket that nobody can guess."""
    return prefix + secrets.token_hex(16)


def owner(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of the process at the other end, as the kernel knows them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def hang_up(connection: socket.socket) -> None:
    """Close a connection so that the other end hears of it, even if a forked child has a copy."""
    with suppress(OSError):  # it has been closed, or has ended
        # Not the method of a TLS socket, which takes away what another thread is using.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    connection.close()


def _at_once(step: Callable[[], Any]) -> Any:
    return step()


def prove(
    connection: socket.socket,
    key: bytes,
    number: int = 0,
    user: int | None = None,
    retry: Callable[[Callable[[], Any]], Any] = _at_once,
) -> None:
    """Prove this end of a connection to its listener, and have the listener prove itself.

    ``number``: whom the listener expects. ``user``: whose process the listener is (default: this user's).
    ``retry`` runs a step that may block, and may run it again.

    Raises:
        UnprovenPeerError: another process has the listener's name, or the listener refuses this one.
    """
    uid = owner(connection)[1]
    if uid != (os.geteuid() if user is None else user):
        raise UnprovenPeerError(f"the process that listens there is of another user ({uid})")
    signed = _SIGNED.pack(_MAGIC, number, secrets.token_bytes(16))
    request = signed + _proof(key, b"connects", signed)
    answer = b""
    with suppress(BrokenPipeError, ConnectionResetError):
        retry(lambda: connection.send(request, socket.MSG_NOSIGNAL))
        answer = retry(lambda: connection.recv(_PROOF_BYTES))
    if not answer:
        raise UnprovenPeerError("it has hung up")
    if not hmac.compare_digest(answer, _proof(key, b"listens", request)):
        raise UnprovenPeerError("the process that listens there does not know the key")


def _proof(key: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(key, b"conveyor local socket\0" + role + b"\0" + said, "sha256")


class LocalListener:
    """Listening socket that hands over connections of processes that have proved themselves.

    All but :meth:`stop` happens on one thread, which calls :meth:`serve` when :meth:`fileno` is readable.
    """

    def __init__(
        self,
        name: str,
        kind: socket.SocketKind,
        key_of: Callable[[int], bytes | None],
        on_peer: Callable[[socket.socket, int], object],
        *,
        root: bool = False,
    ) -> None:
        """``key_of(number)``: the key of an expected process; ``None`` if none of that number is expected.
        ``on_peer(connection, number)`` takes a connection, which does not block. ``root``: processes of root
        may come as well as those of this user."""
        self.name = name
        self._key_of, self._on_peer = key_of, on_peer
        self._root = root
        self._unproven: OrderedDict[int, socket.socket] = OrderedDict()
        self._pauses = Pauses()
        self._stopped = self._refused = False
        #: Connections that were dropped unproven.
        self.strangers = 0
        self._epoll = descriptors.epoll()
        try:
            self._socket = descriptors.own_socket(
                socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
            )
            try:
                self._socket.bind("\0" + name)
                self._socket.listen(_MAX_UNPROVEN)
                self._epoll.register(self._socket, select.EPOLLIN)
            except BaseException:
                self._socket.close()
                raise
        except BaseException:
            self._epoll.close()
            raise

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to serve."""
        return self._epoll.fileno()

    def serve(self) -> float:
        """Handle some of what has come: :meth:`fileno` stays readable where there is more, and others are
        served in between. Returns how many seconds to wait before the next call: more than 0 where the system
        lets nobody be accepted, and does not tell when it does again. New connections wait as well."""
        for fd, _ in self._epoll.poll(0):
            if fd in self._unproven:
                self._hear(fd)
        for _ in range(_AT_ONCE):
            try:
                connection = descriptors.own_socket(self._socket.accept()[0])
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return 0.0
            except OSError as error:
                if self._stopped:
                    return 0.0
                if not self._refused:
                    _log.warning(
                        "process %d cannot let others connect to it just now: %s; they wait until it can",
                        os.getpid(),
                        hint(error) or error,
                    )
                self._refused = True
                return self._pauses.next()
            self._refused = False
            self._pauses.begin_anew()
            self._admit(connection)
        return 0.0

    def _admit(self, connection: socket.socket) -> None:
        user = owner(connection)[1]
        if user != os.geteuid() and (user != 0 or not self._root):
            self.strangers += 1
            hang_up(connection)
            return
        if len(self._unproven) >= _MAX_UNPROVEN:
            self._drop(next(iter(self._unproven)))
        connection.setblocking(False)
        fd = connection.fileno()
        try:
            self._epoll.register(fd, select.EPOLLIN)
        except OSError:  # the user has no watches left (fs.epoll.max_user_watches)
            self.strangers += 1
            hang_up(connection)
            return
        self._unproven[fd] = connection
        self._hear(fd)  # one that belongs here has sent its request already

    def _hear(self, fd: int) -> None:
        connection = self._unproven[fd]
        try:
            request = connection.recv(_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            request = b""
        number, answer = self._proven(request)
        try:
            if not answer or connection.send(answer, socket.MSG_NOSIGNAL) != _PROOF_BYTES:
                self._drop(fd)
                return
        except OSError:  # it has ended meanwhile
            self._drop(fd)
            return
        self._epoll.unregister(fd)
        del self._unproven[fd]
        self._on_peer(connection, number)

    def _proven(self, request: bytes) -> tuple[int, bytes]:
        """Return the number that a request proves, and the answer to it. A stranger gets no answer."""
        if len(request) != _REQUEST_BYTES:
            return 0, b""
        signed, proof = request[: _SIGNED.size], request[_SIGNED.size :]
        magic, number, _ = _SIGNED.unpack(signed)
        key = self._key_of(number)
        if magic != _MAGIC or key is None:
            return 0, b""
        if not hmac.compare_digest(proof, _proof(key, b"connects", signed)):
            return 0, b""
        return number, _proof(key, b"listens", request)

    def _drop(self, fd: int) -> None:
        self.strangers += 1
        self._epoll.unregister(fd)
        hang_up(self._unproven.pop(fd))

    def stop(self) -> None:
        """Let nobody in any more; :meth:`fileno` becomes readable. On any thread."""
        self._stopped = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let nobody in any more, and drop who has not proved itself."""
        self.stop()
        for fd in list(self._unproven):
            self._drop(fd)
        self.forget()

    def forget(self) -> None:
        """Close the descriptors and nothing else: a forked child has them from its parent."""
        self._unproven.clear()
        self._socket.close()
        self._epoll.close()
