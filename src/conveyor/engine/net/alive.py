"""Whether there still is another side, of a connection over which it may say nothing for long."""

from __future__ import annotations

import socket

#: Seconds of silence after which a connection is asked whether it lives, and of no answer, after which it
#: does not.
_SECONDS = 3
#: Seconds after which it does not live, either, where the other side has taken nothing of what was sent. The
#: system would send it again for a quarter of an hour, and meanwhile ask nothing.
_UNTAKEN = 6


def watch_life(sock: socket.socket) -> None:
    """Have the system find out, and end the connection. Of one within this host it knows; what stands for
    one over TLS is such a one, and the relay has the other asked about."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNTAKEN * 1000)
