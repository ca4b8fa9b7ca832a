"""Whether there still is another side, of a connection over which it may say nothing for long."""

from __future__ import annotations

import socket

#: Seconds of silence after which a connection is asked whether it lives, and of no answer, after which it
#: does not. What is sent over it may take as long as it likes.
_SECONDS = 3


def watch_life(sock: socket.socket) -> None:
    """Have the system find out, and end the connection. Of one within this host it knows; what stands for
    one over TLS is such a one, and the relay has the other asked about."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SECONDS)
