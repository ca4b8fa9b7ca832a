"""Listener for other nodes: one address, few handshakes at a time, and a count of strangers."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from conveyor import _core
from conveyor.cluster.handshake import HandshakeError, Identity, let_in, secured, wrapped_in
from conveyor.cluster.relay import relayed
from conveyor.cluster.tls import Tls
from conveyor.exceptions import SystemLimitError
from conveyor.local_sockets import hang_up
from conveyor.runtime import threads

#: Seconds for one handshake, from the connection to the end.
PATIENCE = 5.0
#: Handshakes that go on at once. With one more, the oldest is dropped: its node tries again.
MOST_PENDING = 16
#: Connections that the kernel keeps until they are accepted.
_BACKLOG = 1024


class _Pending(Struct, eq=False):
    """Handshake that is under way. ``dropped``: it has made room for another one."""

    sock: socket.socket
    dropped: bool = False


class Listener:
    """Lets nodes of the session in, and hands their sockets over. ``on_host`` is called by a thread of the
    listener; the socket is its own from then on.

    A native thread accepts, and reads the first message of each connection. Only those that know the token
    come to Python, whatever else connects.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        own: Identity,
        on_host: Callable[[socket.socket, Identity], None],
        *,
        wanted: frozenset[int] | None = None,
        tls: Tls | None = None,
        patience: float = PATIENCE,
        most_pending: int = MOST_PENDING,
    ) -> None:
        """``address``: one of this machine; all of them at once (``""``, ``0.0.0.0``, ``::``) are refused.
        ``patience``: seconds for a handshake. ``most_pending``: handshakes at once."""
        if address[0] in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"hosts are let in at one address, not at all that this machine has ({address[0]!r}): name "
                f"the one that the other hosts can reach"
            )
        self._token, self._own, self._on_host = token, own, on_host
        self._wanted, self._tls, self._patience = wanted, tls, patience
        self._most_pending = most_pending
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._closed = False
        self._refused = self._pushed_out = 0
        self._reasons: deque[str] = deque(maxlen=32)
        #: How many were let in.
        self.let_in = 0
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.create_server(address, family=family, backlog=_BACKLOG) as server:
            self.address: tuple[str, int] = server.getsockname()[:2]
            self._acceptor = _core.Acceptor(server.fileno(), token, patience)
        try:
            self._thread = threads.start(self._listen, "listener")
        except BaseException:
            self._acceptor.stop()
            raise

    @property
    def strangers(self) -> int:
        """How many have come that are no part of the session."""
        return self._refused + self._acceptor.counts()[0]

    @property
    def dropped(self) -> int:
        """How many have come while too many others were under way."""
        return self._pushed_out + self._acceptor.counts()[1]

    @property
    def reasons(self) -> list[str]:
        """Reasons why the last strangers were refused."""
        with self._lock:
            self._reasons += self._acceptor.reasons()
            return list(self._reasons)

    def close(self) -> None:
        """Let nobody in any more, and break off handshakes that are under way."""
        with self._lock:
            self._closed = True
            for one in self._pending:
                _break_off(one.sock)
        self._acceptor.stop()
        self._thread.join()

    def _listen(self) -> None:
        poll = select.poll()  # not `select`, which takes no descriptor above 1023
        poll.register(self._acceptor.ready_fd, select.POLLIN)
        while not self._closed:
            poll.poll()
            for fd in self._acceptor.take():
                self._begin(socket.socket(fileno=fd))

    def _begin(self, sock: socket.socket) -> None:
        one = self._admit(sock)
        if one is None:
            hang_up(sock)
            return
        try:
            threads.start(self._greet, "handshake", one)
        except SystemLimitError:  # the system has no more threads
            with self._lock:
                self._pending.remove(one)
                self._pushed_out += 1
            hang_up(sock)

    def _admit(self, sock: socket.socket) -> _Pending | None:
        """Add a connection to those that are under way. If there are too many, the oldest is dropped: it has
        said nothing for longest."""
        with self._lock:
            if self._closed:
                self._pushed_out += 1
                return None
            one = _Pending(sock)
            alike = [o for o in self._pending if not o.dropped]
            if len(alike) >= self._most_pending:
                alike[0].dropped = True
                self._pushed_out += 1
                _break_off(alike[0].sock)
            self._pending.append(one)
            return one

    def _greet(self, one: _Pending) -> None:
        deadline = _core.monotonic() + self._patience
        other: Identity | None = None
        try:
            binding = b""
            if self._tls is not None:
                with self._lock:  # who breaks it off finds the one that has the connection
                    one.sock = secure = wrapped_in(one.sock, self._tls.server, server=True)
                secured(secure, deadline)
                binding = self._tls.binding(secure, listens=True)
            other = let_in(one.sock, self._token, self._own, deadline, self._wanted, binding)
        except (HandshakeError, OSError) as error:
            if not one.dropped:
                self._note(str(error))
        finally:
            with self._lock:
                self._pending.remove(one)
                good = other is not None and not one.dropped
                if good:
                    self.let_in += 1
            if not good:
                hang_up(one.sock)
        if good:
            assert other is not None
            self._hand_over(one, other)

    def _hand_over(self, one: _Pending, other: Identity) -> None:
        came = one.sock
        if isinstance(came, ssl.SSLSocket):
            try:
                came = relayed(came)
            except OSError as error:
                self._note(str(error))
                hang_up(one.sock)
                return
        self._on_host(came, other)

    def _note(self, reason: str) -> None:
        with self._lock:
            self._refused += 1
            self._reasons.append(reason)


def _break_off(sock: socket.socket) -> None:
    """Shut a socket down, so that its readers, and those who wait for a connection, hear of the end."""
    with contextlib.suppress(OSError):
        # Not the method of a TLS socket, which takes away what another thread is using.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
