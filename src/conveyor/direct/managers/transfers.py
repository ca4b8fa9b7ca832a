"""Transfers in which both ends take part: their messages, and the producer's part.

Both ends prove themselves first (:mod:`conveyor.local_sockets`). What they say is msgpack.

A consumer connects to a socket of the producer's. Both prove themselves; then the consumer asks, and waits
there for the answer. Threads of the producer's send meanwhile, whatever its methods do. The connection says
who is still there: that it ends is how each side learns of the other's end.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from conveyor.codec import loads
from conveyor.direct.managers.manager import Ended, abort, in_words
from conveyor.direct.store import TABLE
from conveyor.exceptions import ActorDiedError, SystemLimitError
from conveyor.flag import Flag
from conveyor.local_sockets import LocalListener, new_key, new_name, prove
from conveyor.runtime import context, threads
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
        name = process.process_table.name(process.slot)
        return cls(name, runtime.own_actor, *process.identity, address, key)

    def gone(self) -> bool:
        """Whether the process that keeps the value has died."""
        return context.current().process.process_table.gone(self.slot, self.incarnation)

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
    retry = partial(_retried, sock, look)
    retry(lambda: sock.connect("\0" + source.address))
    prove(sock, source.key, retry=retry)
    rest = memoryview(_packed(what))
    while rest:
        rest = rest[retry(lambda: sock.send(rest)) :]  # noqa: B023 - called at once


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


#: Seconds that a consumer has to say what it asks for.
_TIME_LIMIT = 30.0


class Sender:
    """Listener for consumers, open as long as there is a value here that can be asked for."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        #: Reentrant: values end in finalizers.
        self._lock = threading.RLock()
        self._listener: LocalListener | None = None
        #: Key of the socket; whoever has a reference to a value here is given it.
        self._key = b""
        #: Set when nobody can ask at the listener any more.
        self._over: Flag | None = None
        self._values = 0

    def begin(self) -> tuple[str, bytes]:
        """Count one value more. Returns the address where it can be asked for, and the key of that socket."""
        with self._lock:
            if self._listener is None:
                key, over = new_key(), Flag()
                listener = LocalListener(new_name(), socket.SOCK_STREAM, lambda _: key, _admit)
                try:
                    threads.start(_listen, "sends", listener, over)
                except BaseException:
                    listener.close()
                    raise
                self._over, self._key, self._listener = over, key, listener
            self._values += 1
            return self._listener.name, self._key

    def end(self) -> None:
        """Count one value less; the listener stops after the last one."""
        with self._lock:
            self._values -= 1
            if self._values or self._listener is None:
                return
            listener, self._listener = self._listener, None
            assert self._over is not None
            self._over.set()
        listener.stop()  # the thread closes it

    def forget(self) -> None:
        """Forget the listener in a forked child: it is the parent's."""
        listener = self._listener
        self._clear()
        if listener is not None:
            listener.forget()


def _listen(listener: LocalListener, over: Flag) -> None:
    """Serve those who ask until it is ``over``, which the listener's :meth:`stop` tells as well."""
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    try:
        while not over.is_set():
            poll.poll()
            pause = listener.serve()
            if pause:
                over.wait(pause)
    finally:
        listener.close()


def _admit(connection: socket.socket, _number: int) -> None:
    try:
        threads.start(_serve, "send", connection)
    except SystemLimitError:
        connection.close()


def _serve(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        connection.settimeout(_TIME_LIMIT)
        ask = receive_one(connection, Ask)
        if ask is not None:
            connection.settimeout(None)
            _send_as_requested(connection, ask)


def _send_as_requested(connection: socket.socket, ask: Ask) -> None:
    stored = TABLE.find(ask.number)
    if stored is None or stored.out_of_band is None:
        send_one(connection, Answer("the value is kept no more"))
        return
    route: Any = stored.out_of_band.route
    route.send(connection, ask, stored)


def send_by_manager(connection: socket.socket, ask: Ask, stored: Any) -> None:
    """Have the manager of a value's route send it, while whoever has asked receives."""
    route = stored.out_of_band.route
    manager = route.manager
    try:
        communicator = loads(ask.communicator)
        sending = _Sending(stored, communicator)
    except Exception as error:
        send_one(connection, Answer(in_words(error)))
        return
    with sending:
        ready = readable([connection, sending.over])
        if sending.over in ready:
            send_one(connection, Answer(sending.error))
        elif connection.recv(1) != DONE:
            # Whoever has asked has died, or has given up.
            abort(manager, route.name, f"{ask.number:016x}", communicator)


class _Sending:
    """A thread that sends.

    error: why it could not, when it has ended.
    """

    def __init__(self, stored: Any, communicator: Any) -> None:
        self.error: str | None = None
        self._ended = Ended()
        threads.start(self._run, "sending", stored, communicator)

    @property
    def over(self) -> int:
        """A descriptor that is readable when it has ended."""
        return self._ended.over

    def __enter__(self) -> _Sending:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.close()

    def _run(self, stored: Any, communicator: Any) -> None:
        route, note, tensors = stored.out_of_band
        try:
            route.manager.send_multiple_tensors(list(tensors), loads(note).metadata, communicator)
        except BaseException as error:  # a thread of ours has nobody else to tell
            self.error = in_words(error)
        finally:
            self._ended.tell()


SENDER = Sender()
os.register_at_fork(after_in_child=SENDER.forget)
