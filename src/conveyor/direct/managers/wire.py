"""Messages between both ends of a transfer, over a socket of one transfer.

Both ends prove themselves first (:mod:`conveyor.local_sockets`). What they say is msgpack.
"""

from __future__ import annotations

import math
import select
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from conveyor.exceptions import ActorDiedError
from conveyor.local_sockets import prove
from conveyor.runtime import context
from conveyor.runtime.protocol import ActorId

_length = struct.Struct("<I")
_timeval = struct.Struct("@ll")
_T = TypeVar("_T")

#: From the consumer: it has all, and asks for nothing more.
DONE = b"d"


class Source(NamedTuple):
    """Process that keeps a value.

    name, actor: its name, and its identity (``None``: the driver).
    slot, incarnation: its place in the process table.
    address: the name of the socket where it is asked to send; empty where it need not.
    key: of that socket.
    """

    name: str
    actor: ActorId | None
    slot: int
    incarnation: int
    address: str = ""
    key: bytes = b""

    @classmethod
    def here(cls, address: str, key: bytes) -> Source:
        """Describe this process as a source."""
        runtime = context.current()
        process = runtime.process
        name = process.board.name(process.slot)
        return cls(name, runtime.own_actor, *process.identity, address, key)

    def gone(self) -> bool:
        """Whether the process that keeps the value has died."""
        return context.current().process.board.gone(self.slot, self.incarnation)

    def check(self, cause: BaseException | None = None) -> None:
        """Raise if its process has died.

        Raises:
            ActorDiedError: it has.
        """
        if self.gone():
            text = f"{self.name} has died, and with it a value that it kept"
            raise ActorDiedError(text, self.name) from cause


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Request of the consumer.

    number: of the value.
    communicator: pickled.
    """

    number: int
    communicator: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Response of the producer when it is done.

    error: why it could not send, in words.
    """

    error: str | None


_M = TypeVar("_M", Ask, Answer)


def send_one(sock: socket.socket, what: Ask | Answer) -> None:
    """Send a message."""
    sock.sendall(_packed(what))


def ask(sock: socket.socket, source: Source, what: Ask, look: Callable[[], float]) -> None:
    """Connect, prove both ends, and send a message. A process that is stopped reads nothing, and takes no
    connection once enough of them wait: ``look`` gives the seconds until it wants to be called again, and
    raises what ends the wait.

    Raises:
        OSError: nobody is there, or another process is.
    """
    attempt = partial(_retried, sock, look)
    attempt(lambda: sock.connect("\0" + source.address))
    prove(sock, source.key, attempt=attempt)
    rest = memoryview(_packed(what))
    while rest:
        rest = rest[attempt(lambda: sock.send(rest)) :]  # noqa: B023 - called at once


def _retried(sock: socket.socket, look: Callable[[], float], step: Callable[[], _T]) -> _T:
    while True:
        microseconds = max(int(look() * 1e6), 1000)
        # The kernel's: they hold for connections that wait, too, of which poll tells nothing.
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, limit, _timeval.pack(*divmod(microseconds, 10**6)))
        with suppress(BlockingIOError):
            return step()


def _packed(what: Ask | Answer) -> bytes:
    data = msgspec.msgpack.encode(what)
    return _length.pack(len(data)) + data


def receive_one(sock: socket.socket, kind: type[_M]) -> _M | None:
    """Receive a message; ``None``: the other end is gone."""
    head = _exactly(sock, _length.size)
    data = None if head is None else _exactly(sock, _length.unpack(head)[0])
    return None if data is None else msgspec.msgpack.decode(data, type=kind)


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


def readable(some: Sequence[Any], seconds: float | None = None) -> list[Any]:
    """Wait until some of these sockets and descriptors have something to be read, and say which. (``select``
    takes no descriptors from 1024 on.)"""
    poll = select.poll()
    by_number = {one if isinstance(one, int) else one.fileno(): one for one in some}
    for number in by_number:
        poll.register(number, select.POLLIN)
    found = poll.poll(None if seconds is None else math.ceil(seconds * 1000))
    return [by_number[number] for number, _ in found]
