"""What both ends of a transfer say to each other, over a socket of one transfer."""

from __future__ import annotations

import math
import os
import pickle
import select
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from conveyor.exceptions import ActorDiedError
from conveyor.runtime import context
from conveyor.runtime.protocol import ActorId

_length = struct.Struct("<I")
_credentials = struct.Struct("iII")
_timeval = struct.Struct("@ll")
_T = TypeVar("_T")

#: From the consumer: it has all, and asks for nothing more.
DONE = b"d"


class Source(NamedTuple):
    """Who has a value.

    name, actor: what it is called, and its identity (``None``: the driver).
    slot, incarnation: its process on the board.
    address: of the socket where it is asked to send; empty where it need not.
    """

    name: str
    actor: ActorId | None
    slot: int
    incarnation: int
    address: bytes

    @classmethod
    def here(cls, address: bytes) -> Source:
        """This process."""
        runtime = context.current()
        process = runtime.process
        name = process.board.name(process.slot)
        return cls(name, runtime.own_actor, *process.identity, address)

    def gone(self) -> bool:
        """Whether its process has died."""
        return context.current().process.board.gone(self.slot, self.incarnation)

    def check(self, cause: BaseException | None = None) -> None:
        """Raise if its process has died.

        Raises:
            ActorDiedError: it has.
        """
        if self.gone():
            text = f"{self.name} has died, and with it a value that it kept"
            raise ActorDiedError(text, self.name) from cause


class Ask(NamedTuple):
    """What the consumer says.

    number: of the value.
    communicator: pickled.
    """

    number: int
    communicator: bytes


class Answer(NamedTuple):
    """What the producer says when it is done.

    error: why it could not send, in words.
    """

    error: str | None


def send_one(sock: socket.socket, what: Ask | Answer) -> None:
    """Send a message."""
    sock.sendall(_packed(what))


def ask(sock: socket.socket, address: bytes, what: Ask, look: Callable[[], float]) -> None:
    """Connect, and send a message. A process that is stopped reads nothing, and takes no connection once
    enough of them wait: ``look`` gives the seconds until it wants to be called again, and raises what ends
    the wait.

    Raises:
        OSError: nobody is there.
    """
    _retried(sock, look, lambda: sock.connect(address))
    rest = memoryview(_packed(what))
    while rest:
        rest = rest[_retried(sock, look, lambda: sock.send(rest)) :]  # noqa: B023 - called at once


def _retried(sock: socket.socket, look: Callable[[], float], step: Callable[[], _T]) -> _T:
    while True:
        microseconds = max(int(look() * 1e6), 1000)
        # The kernel's: it holds for connections that wait, too, of which poll tells nothing.
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval.pack(*divmod(microseconds, 10**6))
        )
        with suppress(BlockingIOError):
            return step()


def _packed(what: Ask | Answer) -> bytes:
    data = pickle.dumps(tuple(what), 5)
    return _length.pack(len(data)) + data


def receive_one(sock: socket.socket) -> tuple[object, ...] | None:
    """The fields of a message; ``None``: the other end is gone."""
    head = _exactly(sock, _length.size)
    data = None if head is None else _exactly(sock, _length.unpack(head)[0])
    return None if data is None else tuple(pickle.loads(data))


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = sock.recv(size - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


def of_this_user(sock: socket.socket) -> bool:
    """Whether the process at the other end runs as this one's user."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size)
    _, uid, _ = _credentials.unpack(packed)
    return bool(uid == os.geteuid())


def readable(some: Sequence[Any], seconds: float | None = None) -> list[Any]:
    """Wait until some of these sockets and descriptors have something to be read, and say which. (``select``
    takes no descriptors from 1024 on.)"""
    poll = select.poll()
    by_number = {one if isinstance(one, int) else one.fileno(): one for one in some}
    for number in by_number:
        poll.register(number, select.POLLIN)
    found = poll.poll(None if seconds is None else math.ceil(seconds * 1000))
    return [by_number[number] for number, _ in found]
