"""Where other hosts connect: one address, few handshakes at a time, and strangers that are counted."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from conveyor import _core
from conveyor.engine.net.handshake import (
    HandshakeError,
    Identity,
    let_in,
    secured,
    wrapped_in,
)
from conveyor.engine.net.relay import relayed
from conveyor.engine.net.spare import NO_DESCRIPTOR, Spare
from conveyor.engine.net.tls import Tls
from conveyor.exceptions import SystemLimitError
from conveyor.flag import Flag
from conveyor.local_sockets import hang_up
from conveyor.pauses import Pauses
from conveyor.runtime import threads

#: Seconds for one handshake, from the connection to the end.
PATIENCE = 5.0
#: Handshakes that go on at once. Who has waited longest is dropped for who comes beyond that, and tries again
#: if he belongs here: one that says nothing keeps nobody out.
MOST_PENDING = 16
#: Seconds after which somebody is accepted again, where the system has refused that: at first, and at most.
#: It tells nobody when there is a descriptor again, or memory.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
#: What keeps one connection from being accepted, and not the next; see accept(2).
_OF_ONE = frozenset(
    {
        errno.ECONNABORTED,
        errno.EPROTO,
        errno.ENETDOWN,
        errno.ENOPROTOOPT,
        errno.EHOSTDOWN,
        errno.ENONET,
        errno.EHOSTUNREACH,
        errno.EOPNOTSUPP,
        errno.ENETUNREACH,
    }
)


class _Pending(Struct, eq=False):
    """One handshake that is under way. ``address``: where it comes from. ``known``: it was let in from there
    before. ``dropped``: it has made room for another one."""

    sock: socket.socket
    address: str
    known: bool
    dropped: bool = False


class Listener:
    """Lets hosts of the session in, and hands their sockets over. ``on_host`` is called by a thread of the
    listener; the socket is its own from then on."""

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
        ``most_pending``: of those from where a host has been let in, and of all others."""
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
        #: Where hosts have come from: what goes on elsewhere does not keep them from coming back.
        self._homes: set[str] = set()
        self._closed = Flag()
        #: How many were let in, were no part of the session, and came while too many were under way.
        self.let_in = self.strangers = self.dropped = 0
        #: Of the strangers that came last, what was wrong with them.
        self.reasons: deque[str] = deque(maxlen=32)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._spare = Spare()
        try:
            self._socket = socket.create_server(address, family=family, backlog=64)
            try:
                self.address: tuple[str, int] = self._socket.getsockname()[:2]
                self._socket.setblocking(False)
                self._thread = threads.start(self._listen, "listener")
            except BaseException:
                self._socket.close()
                raise
        except BaseException:
            self._spare.close()
            raise

    def close(self) -> None:
        """Let nobody in any more; handshakes under way are broken off."""
        with self._lock:
            self._closed.set()
            for one in self._pending:
                _break_off(one.sock)
        _break_off(self._socket)
        self._thread.join()
        self._socket.close()
        self._spare.close()

    def _listen(self) -> None:
        poll = select.poll()  # not `select`, which takes no descriptor above 1023
        poll.register(self._socket, select.POLLIN)
        pauses = Pauses(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            poll.poll()
            try:
                sock, peer = self._socket.accept()
                sock.setblocking(True)
            except BlockingIOError:
                continue
            except OSError as error:
                if self._closed.is_set():
                    return
                if self._cannot_accept(error):
                    self._closed.wait(pauses.next())
                continue
            pauses.begin_anew()
            self._spare.restore()
            one = self._admit(sock, peer[0])
            if one is None:
                hang_up(sock)
                continue
            try:
                threads.start(self._greet, "handshake", one)
            except SystemLimitError:  # the system has no more threads
                with self._lock:
                    self._pending.remove(one)
                    self.dropped += 1
                hang_up(sock)

    def _cannot_accept(self, error: OSError) -> bool:
        """The system does not let somebody be accepted. Whether it would refuse at once again."""
        if error.errno in NO_DESCRIPTOR:
            with contextlib.suppress(OSError):  # as below, with another reason
                dropped = self._spare.turn_away(self._socket)
                if dropped is not None:
                    with self._lock:
                        self.dropped += dropped
                    return False
        self._note(f"a connection could not be accepted: {error}")
        return error.errno not in _OF_ONE

    def _admit(self, sock: socket.socket, address: str) -> _Pending | None:
        """Take it among those under way. Beyond so many the oldest goes: it has said nothing for longest. The
        two kinds do not push each other out."""
        with self._lock:
            if self._closed.is_set():
                self.dropped += 1
                return None
            one = _Pending(sock, address, address in self._homes)
            alike = [o for o in self._pending if o.known == one.known and not o.dropped]
            if len(alike) >= self._most_pending:
                alike[0].dropped = True
                self.dropped += 1
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
                    self._homes.add(one.address)
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
            self.strangers += 1
            self.reasons.append(reason)


def _break_off(sock: socket.socket) -> None:
    """Whoever reads from it, or waits for a connection, hears of its end."""
    with contextlib.suppress(OSError):
        # Not the method of a TLS socket, which takes away what another thread is using.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
