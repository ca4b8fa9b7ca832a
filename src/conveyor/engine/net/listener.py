"""Where other hosts connect: one address, few handshakes at a time, and strangers that are counted."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from conveyor.engine.net.handshake import HandshakeError, Identity, let_in, secured
from conveyor.engine.net.relay import relayed
from conveyor.engine.net.tls import Tls

#: Seconds for one handshake, from the connection to the end.
PATIENCE = 5.0
#: Handshakes that go on at once; who comes beyond that is dropped, and tries again if he belongs here.
MOST_PENDING = 16


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
        """``address``: one of this machine; all of them at once (``""``, ``0.0.0.0``, ``::``) are refused."""
        if address[0] in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"hosts are let in at one address, not at all that this machine has ({address[0]!r}): name "
                f"the one that the other hosts can reach"
            )
        self._token, self._own, self._on_host = token, own, on_host
        self._wanted, self._tls, self._patience = wanted, tls, patience
        self._most_pending = most_pending
        self._lock = threading.Lock()
        self._pending: set[socket.socket] = set()
        self._closed = False
        #: How many were let in, were no part of the session, and came while too many were under way.
        self.let_in = self.strangers = self.dropped = 0
        #: Of the strangers that came last, what was wrong with them.
        self.reasons: deque[str] = deque(maxlen=32)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family, backlog=64)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._spare = open(os.devnull, "rb")  # noqa: SIM115
        self._thread = threading.Thread(target=self._listen, name="conveyor-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more; handshakes under way are broken off."""
        with self._lock:
            self._closed = True
            for sock in self._pending:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        self._spare.close()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                self._turn_away(error)
                continue
            with self._lock:
                full = self._closed or len(self._pending) >= self._most_pending
                if full:
                    self.dropped += 1
                else:
                    self._pending.add(sock)
            if full:
                sock.close()
                continue
            try:
                threading.Thread(
                    target=self._greet, args=(sock,), name="conveyor-handshake", daemon=True
                ).start()
            except RuntimeError:  # the system has no more threads
                with self._lock:
                    self._pending.discard(sock)
                    self.dropped += 1
                sock.close()

    def _turn_away(self, error: OSError) -> None:
        """Without a descriptor nobody can be accepted, nor refused: the spare one serves for that."""
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return self._note(f"a connection could not be accepted: {error}")
        self._spare.close()
        with contextlib.suppress(OSError):
            self._socket.accept()[0].close()
            with self._lock:
                self.dropped += 1
        with contextlib.suppress(OSError):
            self._spare = open(os.devnull, "rb")  # noqa: SIM115

    def _greet(self, sock: socket.socket) -> None:
        deadline = time.monotonic() + self._patience
        speaks: socket.socket = sock
        try:
            binding = b""
            if self._tls is not None:
                speaks = secure = secured(sock, self._tls.server, deadline, server=True)
                with self._lock:
                    self._pending.discard(sock)
                    self._pending.add(speaks)
                binding = self._tls.binding(secure, listens=True)
            other = let_in(speaks, self._token, self._own, deadline, self._wanted, binding)
            came = relayed(secure) if self._tls is not None else sock
        except (HandshakeError, OSError) as error:
            self._note(str(error))
            speaks.close()
            return
        finally:
            with self._lock:
                self._pending -= {sock, speaks}
        with self._lock:
            self.let_in += 1
        self._on_host(came, other)

    def _note(self, reason: str) -> None:
        with self._lock:
            self.strangers += 1
            self.reasons.append(reason)
