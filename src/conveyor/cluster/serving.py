"""Servers of other nodes' requests, over connections that carry nothing else."""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import ABC, abstractmethod

from conveyor.exceptions import SystemLimitError
from conveyor.local_sockets import hang_up
from conveyor.runtime import threads

#: Seconds of silence after which a connection is asked whether it lives, and of no answer, after which it
#: does not.
_SECONDS = 3
#: Seconds after which it does not live, either, where the other side has taken nothing of what was sent. The
#: system would send it again for a quarter of an hour, and meanwhile ask nothing.
_UNTAKEN = 6


def watch_liveness(sock: socket.socket) -> None:
    """Have the system find out, and end the connection. Of one within this node it knows; what stands for
    one over TLS is such a one, and the relay has the other asked about."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNTAKEN * 1000)


class RequestServer(ABC):
    """Server of other nodes' requests: each connection is served on a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serving: set[socket.socket] = set()
        self._closed = False

    def serve(self, sock: socket.socket) -> None:
        """Serve the other end of ``sock``, which belongs to this object from now on. If no thread can be had,
        the connection ends: the other side makes another one."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._serving.add(sock)
        if closed:
            hang_up(sock)
            return
        try:
            threads.start(self._serve, "request_server", sock)
        except SystemLimitError:
            self._end(sock)

    def close(self) -> None:
        """End all connections, since the session is over. Waits for nobody."""
        with self._lock:
            self._closed = True
            serving = list(self._serving)
        for sock in serving:
            break_off(sock)

    @abstractmethod
    def answer(self, sock: socket.socket) -> None:
        """Receive one request, and answer it. Raises ``OSError`` where the connection is to end."""

    def _serve(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                wait_on(sock)
                while True:
                    self.answer(sock)
        finally:
            self._end(sock)

    def _end(self, sock: socket.socket) -> None:
        with self._lock:
            self._serving.discard(sock)
        hang_up(sock)


def break_off(sock: socket.socket) -> None:
    """Shut a connection down, so that all who wait for something of it are woken."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def wait_on(sock: socket.socket) -> None:
    """Set a socket up for waits without a timeout, which last as long as the other side lives."""
    sock.settimeout(None)
    watch_liveness(sock)
    if sock.family != socket.AF_UNIX:
        # The other side waits for each message: it must not be held back for more (Nagle's algorithm).
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def hear(sock: socket.socket, size: int) -> bytes:
    """Receive exactly ``size`` bytes."""
    data = bytearray(size)
    with memoryview(data) as view:
        hear_into(sock, view)
    return bytes(data)


def hear_into(sock: socket.socket, view: memoryview) -> None:
    """Receive as many bytes as ``view`` holds."""
    at = 0
    while at < len(view):
        some = sock.recv_into(view[at:])
        if not some:
            raise ConnectionError("the other host has ended the connection")
        at += some
