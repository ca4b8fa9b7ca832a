"""How an actor has its host fetch memory of other hosts' processes; see ``runtime.far_memory``."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from conveyor import _core
from conveyor.codec import Reader
from conveyor.runtime.actor.requests import Introduce, KeptAfar, OpenFarMemory, Request
from conveyor.runtime.far_memory import Brought, Wanted
from conveyor.runtime.kept import KeptAt
from conveyor.runtime.message import Message
from conveyor.runtime.refs.connection import Connection
from conveyor.runtime.refs.messages import all_of
from conveyor.system_limits import explained


class ToHost(Message, frozen=True):
    """From a process to its host."""


class Want(ToHost, frozen=True):
    """Answered by :class:`Come` ``number``."""

    number: int
    wanted: Wanted


class FromHost(Message, frozen=True):
    """From a host to a process of its own."""


class Come(FromHost, frozen=True):
    """What has come of :class:`Want` ``number``: so many bytes, as ``data`` or in the file that comes with
    this; or an error. See :class:`Brought`."""

    number: int
    size: int
    data: bytes | None
    error: int
    why: str


class FarMemoryClient:
    """An actor's: it asks its host."""

    def __init__(self, ask: Callable[[Request], tuple[Any, list[int]]]) -> None:
        """``ask(request)``: the driver's answer, and the descriptors that come with it."""
        self._ask = ask
        # Reentrant: a signal handler may fetch something while its thread waits for the connection.
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Callable[[Brought], object]] = {}

    def fetch(self, wanted: Wanted, tell: Callable[[Brought], object]) -> None:
        """See :class:`FarMemory`."""
        connection = self._open()
        number = next(self._numbers)
        self._waiting[number] = tell
        connection.send(Want(number, wanted))
        if connection.ended:  # maybe before that was noted
            self._fail(number)

    def introduce(self, process: Reader) -> bool:
        """See :class:`FarMemory`."""
        lives, _ = self._ask(Introduce(*process))
        return bool(lives)

    def kept(self) -> list[KeptAt]:
        """See :class:`FarMemory`."""
        found: list[KeptAt]
        found, _ = self._ask(KeptAfar())
        return found

    def close(self) -> None:
        """The process leaves its session."""
        if self._connection is not None:
            self._connection.close()

    def _open(self) -> Connection:
        with self._lock:
            connection = self._connection
            if connection is None or connection.ended:
                with explained("open a connection to this process's host"):
                    _, fds = self._ask(OpenFarMemory())
                    (fd,) = all_of(fds, 1)
                    sock = socket.socket(fileno=fd)
                self._connection = connection = Connection(
                    sock, "memory", self._on_message, self._on_end
                )
            return connection

    def _on_message(self, message: FromHost, fds: list[int]) -> None:
        self.handlers[type(message)](self, message, fds)

    def _come(self, message: Come, fds: list[int]) -> None:
        tell = self._waiting.pop(message.number, None)
        if tell is not None:
            error = message.error
            fd = fds[0] if fds else -1
            tell(
                Brought(None, error, message.why)
                if error
                else brought(fd, message.size, message.data)
            )

    def _on_end(self) -> None:
        for number in list(self._waiting):
            self._fail(number)

    def _fail(self, number: int) -> None:
        tell = self._waiting.pop(number, None)
        if tell is not None:
            tell(Brought(None, errno.ECONNRESET, "the connection to this process's host has ended"))

    #: What is done for each kind of message.
    handlers: ClassVar[
        Mapping[type[FromHost], Callable[[FarMemoryClient, Any, list[int]], None]]
    ] = {Come: _come}


def brought(fd: int, size: int, data: bytes | None) -> Brought:
    """What is in that file, or in ``data``."""
    try:
        if data is None and size:
            return Brought(_core.Buffer.copy_of(fd, size))
        memory = _core.Buffer.own(size)
        memoryview(memory)[:] = data or b""
        return Brought(memory)
    except (OSError, MemoryError) as error:
        number = getattr(error, "errno", None) or errno.ENOMEM
        return Brought(None, number, os.strerror(number))
