"""Messages between processes of a session, over sockets that keep records apart."""

from __future__ import annotations

import errno
import os
import pickle
import socket
from typing import Any

from conveyor.runtime.process import close_all
from conveyor.runtime.protocol import MAX_FDS

#: A message is one datagram; what is larger comes in pieces, the last one marked.
_PIECE = 60_000


def send_message(sock: socket.socket, message: Any, fds: list[int] | None = None) -> None:
    """Send a pickled message and its descriptors, in pieces."""
    data, fds = pickle.dumps(message), fds or []
    while len(data) > _PIECE or len(fds) > MAX_FDS:
        socket.send_fds(sock, [b"+" + data[:_PIECE]], fds[:MAX_FDS])
        data, fds = data[_PIECE:], fds[MAX_FDS:]
    socket.send_fds(sock, [b"." + data], fds)


def receive_message(sock: socket.socket) -> tuple[Any, list[int]]:
    """The next message with its descriptors. ``ConnectionError`` at the end."""
    parts: list[bytes] = []
    fds: list[int] = []
    while True:
        data, more, _, _ = socket.recv_fds(sock, _PIECE + 1, MAX_FDS)
        fds += more
        if not data:
            close_all(fds)
            raise ConnectionError("the other side is gone")
        parts.append(data[1:])
        if data[:1] == b".":
            # Both ends are this program: the actor's process was forked by our own fork server.
            return pickle.loads(b"".join(parts)), fds


def all_of(fds: list[int], count: int) -> list[int]:
    """``fds``, which came with a message that had ``count``. ``OSError`` if some are missing: the kernel
    drops those for which this process has no number left."""
    if len(fds) < count:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return fds
