"""What processes of other hosts are doing, for who looks at a session from outside (``conveyor status``).

Their boards are in the memory of their hosts, so somebody has to ask those: the driver, which answers at a
Unix socket without a place in the file system. It is there once there is another host, and answers whoever is
of the driver's user, or root. It takes one byte of a question, and changes nothing.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from conveyor.engine.events import EventLoop
from conveyor.exceptions import SystemLimitError
from conveyor.pauses import Pauses
from conveyor.runtime import threads
from conveyor.runtime.status import Page

if TYPE_CHECKING:
    from conveyor.futures import Future
    from conveyor.runtime.graph.telemetry.afar import SeenAll

#: What the socket's name begins with, in the abstract namespace.
PREFIX = "conveyor-status-"
#: The question: with Python's stacks, or without.
WITH_STACKS, PLAIN = b"s", b"-"

#: What the driver's own is called.
OWN_NODE = "the driver's node"

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: see unix(7)
#: Answers that are under way at once, and seconds for what goes over the socket.
_MOST, _SECONDS = 4, 5.0


class NodeSeen(Struct, frozen=True):
    """One host. unknown: why nothing is known of what is there. troubles: what it waits for itself, on behalf
    of its processes."""

    name: str
    pages: tuple[Page, ...] = ()
    unknown: str = ""
    troubles: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, name: str, answer: Future[SeenAll], patience: float, names: Mapping[int, str]
    ) -> NodeSeen:
        """What a host has answered within so many seconds. ``names``: of all hosts, by their numbers."""
        if not answer.done():
            return cls(name, (), f"it has not answered for {patience:g} s")
        error = answer.exception()
        if error is not None:
            return cls(name, (), str(error) or type(error).__name__)
        seen = answer.result()
        return cls(name, tuple(seen.pages), "", in_words(seen.troubles, names))


def in_words(troubles: Mapping[int, str], names: Mapping[int, str]) -> tuple[str, ...]:
    """What keeps one host from fetching values from others, by the numbers of these."""
    return tuple(
        f"values that lie on {names[host]} are waited for, to which {trouble}"
        for host, trouble in troubles.items()
        if host in names and trouble
    )


class Display:
    """The driver's."""

    def __init__(self, events: EventLoop, gather: Callable[[bool], Sequence[NodeSeen]]) -> None:
        """``gather(stacks)`` asks the hosts; it is called on a thread of its own."""
        # Not for the command, which would wait for TLS to be imported.
        from conveyor.engine.net.spare import NO_DESCRIPTOR, Spare

        self._events, self._gather = events, gather
        self._no_descriptor, self._spare = NO_DESCRIPTOR, Spare()
        self._pauses = Pauses()
        self._free = threading.BoundedSemaphore(_MOST)
        try:
            kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
            self._listener = socket.socket(socket.AF_UNIX, kind)
            try:
                self._listener.bind(f"\0{PREFIX}{secrets.token_hex(8)}")
                self._listener.listen(_MOST)
                events.add(self._listener.fileno(), self._accept)
            except BaseException:
                self._listener.close()
                raise
        except BaseException:
            self._spare.close()
            raise

    def close(self) -> None:
        """The session is over."""
        # On the loop's thread, which may be about to let somebody in.
        self._events.call(self._end)

    def _end(self) -> None:
        self._events.remove(self._listener.fileno())
        self._listener.close()
        self._spare.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # who has come has gone again
            return
        except OSError as error:
            if error.errno not in self._no_descriptor:
                raise
            # Who asks hears the end of its connection. The loop would come here again and again for it. Where
            # another thread has taken the spare descriptor nothing tells when there is one again.
            if self._spare.turn_away(self._listener) is None:
                self._events.rest(self._listener.fileno(), self._pauses.next())
            return
        self._pauses.begin_anew()
        self._spare.restore()
        if owner(connection)[1] not in (os.geteuid(), 0) or not self._free.acquire(blocking=False):
            connection.close()
            return
        try:
            threads.start(self._answer, "status", connection)
        except SystemLimitError:
            self._free.release()
            connection.close()
            raise

    def _answer(self, connection: socket.socket) -> None:
        try:
            # Whoever has asked may be gone by now.
            with connection, suppress(OSError):
                connection.settimeout(_SECONDS)
                question = connection.recv(1)
                if question:
                    connection.sendall(
                        msgspec.msgpack.encode(self._gather(question == WITH_STACKS))
                    )
        finally:
            self._free.release()


def owner(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end of a Unix socket, and its user, by the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
