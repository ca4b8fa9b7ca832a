"""Messages between processes of a session, over sockets that keep records apart."""

from __future__ import annotations

import errno
import functools
import os
import pickle
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import Struct

from conveyor import _core, descriptors
from conveyor.exceptions import OutOfMemoryError, SystemLimitError
from conveyor.pauses import Pauses
from conveyor.runtime.messages.message import MAX_FDS
from conveyor.runtime.process import close_all
from conveyor.system_limits import NO_MEMORY, PASSING, hint

T = TypeVar("T")

#: A message is one datagram; what is larger comes in pieces, the last one marked. One whose files could not
#: be had has the reason ahead of it.
PIECE = 60_000
#: Seconds for which it is tried what the kernel refuses for the moment, and between two tries: at first, and
#: at most. Others of the system, or of this user, use up what there is, and do not tell when they stop.
_PATIENCE, _FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 0.001, 0.1


class Missing(Struct, frozen=True):
    """Reason why the files of a message are not there. ``errno``: the system's."""

    errno: int
    text: str

    @classmethod
    def of(cls, error: OSError | MemoryError) -> Missing:
        """Make a reason of an error, so that another process can raise an error like it."""
        number = error.errno if isinstance(error, OSError) else None
        return cls(number or errno.ENOMEM, str(error))

    def error(self) -> OutOfMemoryError | SystemLimitError:
        """Make the error for a process that needs the files."""
        if self.errno in NO_MEMORY:
            return OutOfMemoryError(self.text)
        return SystemLimitError(self.errno, self.text)


class Files(list[int]):
    """The descriptors that have come with a message."""

    #: Why there are none, where there should be.
    missing: Missing | None = None


def send_message(sock: socket.socket, message: Any, fds: list[int] | None = None) -> None:
    """Send a message and its descriptors."""
    send_pickled(sock, pickle.dumps(message), fds)


def pickled(message: Any) -> bytes:
    """A message as it is sent."""
    return pickle.dumps(message)


def send_pickled(
    sock: socket.socket,
    data: bytes,
    fds: list[int] | None = None,
    missing: Missing | None = None,
) -> None:
    """Send a pickled message and its descriptors, in pieces. ``missing``: why these are not sent."""
    fds = fds or []
    if missing is not None:
        why = f"!{missing.errno} {missing.text}".encode()[:PIECE]
        _patiently(lambda: sock.send(why))
    while len(data) > PIECE or len(fds) > MAX_FDS:
        piece = functools.partial(socket.send_fds, sock, [b"+" + data[:PIECE]], fds[:MAX_FDS])
        _patiently(piece)
        data, fds = data[PIECE:], fds[MAX_FDS:]
    _patiently(lambda: socket.send_fds(sock, [b"." + data], fds))


def receive_message(sock: socket.socket) -> tuple[Any, list[int]]:
    """Receive the next message with its descriptors, or fewer (see `all_of`). ``ConnectionError`` at the
    end."""
    data, fds = receive_pickled(sock)
    # Both ends are this program: the actor's process was forked by our own fork server, or has shown its
    # secret.
    return pickle.loads(data), fds


def receive_pickled(sock: socket.socket) -> tuple[bytes, Files]:
    """Receive the next message as bytes, for a process that passes it on."""
    parts: list[bytes] = []
    fds = Files()
    while True:
        try:
            data, more, flags, _ = _patiently(lambda: _receive(sock))
            fds += more
            if not data:
                raise ConnectionError("the other side is gone")
        except OSError:
            close_all(fds)
            raise
        if flags & socket.MSG_CTRUNC:
            fds.missing = _none_left()
        if data[:1] == b"!":
            number, _, text = data[1:].decode(errors="replace").partition(" ")
            fds.missing = Missing(int(number), text)
            continue
        parts.append(data[1:])
        if data[:1] == b".":
            return b"".join(parts), fds


def _receive(sock: socket.socket) -> tuple[bytes, list[int], int, Any]:
    try:
        data, fds, flags, address = socket.recv_fds(sock, PIECE + 1, MAX_FDS)
    except ConnectionResetError:
        # Linux says this once, and first, of a side that has died with something unread: what it has sent
        # before comes behind that, and then the end.
        data, fds, flags, address = socket.recv_fds(sock, PIECE + 1, MAX_FDS)
    return data, [descriptors.own(fd) for fd in fds], flags, address


def all_of(fds: list[int], count: int) -> list[int]:
    """Return ``fds``, which came with a message that had ``count``. ``OSError`` or ``MemoryError`` if some
    are missing. Either a process that has passed the message on says why, or the kernel has dropped those
    for which this process has no number left."""
    if len(fds) < count:
        if isinstance(fds, Files) and fds.missing is not None:
            raise fds.missing.error()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return fds


def _none_left() -> Missing:
    """Make the reason that the kernel has dropped descriptors: this process had no number left for them."""
    refused = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return Missing(errno.EMFILE, f"cannot receive a file: {refused.strerror}; {hint(refused)}")


def _patiently(operation: Callable[[], T]) -> T:
    """Repeat an operation on a socket for a while if the system has no memory for it. Half a message cannot
    be taken back, and a lost one is waited for in vain."""
    until, pauses = _core.monotonic() + _PATIENCE, Pauses(_FIRST_PAUSE, _LONGEST_PAUSE)
    while True:
        try:
            return operation()
        except OSError as error:
            if error.errno not in PASSING or _core.monotonic() >= until:
                raise
        time.sleep(pauses.next())
