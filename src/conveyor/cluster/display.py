"""Reports of what processes on other nodes are doing, for ``conveyor status``.

Their process tables are in the memory of their nodes, so the driver has to ask. It answers at a Unix socket,
which is there once there is another node. The socket's name and key are in a memory file of the driver's: the
driver's user can open that, and root. A question is one byte, and changes nothing.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from conveyor import descriptors
from conveyor.exceptions import SystemLimitError
from conveyor.local_sockets import LocalListener, new_key, new_name
from conveyor.runtime import threads
from conveyor.runtime.events import EventLoop
from conveyor.runtime.status import ProcessSnapshot

if TYPE_CHECKING:
    from conveyor.futures import Future
    from conveyor.graph.telemetry import SeenAll

#: Name, among the driver's descriptors, of the file that holds the socket's key and then its name.
FILE = "conveyor-status"
#: The question: with Python's stacks, or without.
WITH_STACKS, PLAIN = b"s", b"-"

#: Name of the driver's own node.
OWN_NODE = "the driver's node"

#: Answers that are under way at once, and seconds for what goes over the socket.
_MOST, _SECONDS = 4, 5.0


class NodeSeen(Struct, frozen=True):
    """Report of one node. unknown: why nothing is known of its processes. troubles: what the node itself
    waits for, on behalf of its processes."""

    name: str
    snapshots: tuple[ProcessSnapshot, ...] = ()
    unknown: str = ""
    troubles: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, name: str, answer: Future[SeenAll], time_limit: float, names: Mapping[int, str]
    ) -> NodeSeen:
        """Make the report from a node's answer. ``time_limit``: the seconds that the node had to answer.
        ``names``: of all nodes, by their numbers."""
        if not answer.done():
            return cls(name, (), f"it has not answered for {time_limit:g} s")
        error = answer.exception()
        if error is not None:
            return cls(name, (), str(error) or type(error).__name__)
        seen = answer.result()
        return cls(name, tuple(seen.snapshots), "", in_words(seen.troubles, names))


def in_words(troubles: Mapping[int, str], names: Mapping[int, str]) -> tuple[str, ...]:
    """Describe what keeps one node from fetching values from others, which are given by their numbers."""
    return tuple(
        f"values that lie on {names[node]} are waited for, to which {trouble}"
        for node, trouble in troubles.items()
        if node in names and trouble
    )


class Display:
    """The driver's."""

    def __init__(self, events: EventLoop, gather: Callable[[bool], Sequence[NodeSeen]]) -> None:
        """``gather(stacks)`` asks the nodes; it is called on a thread of its own."""
        self._events, self._gather = events, gather
        self._free = threading.BoundedSemaphore(_MOST)
        key, name = new_key(), new_name()
        self._file = FileIO(FILE, "w", opener=lambda name, _flags: descriptors.memory_file(name))
        try:
            self._file.write(key + name.encode())
            self._listener = LocalListener(
                name, socket.SOCK_STREAM, lambda _: key, self._admit, root=True
            )
            try:
                events.add(self._listener.fileno(), self._serve)
            except BaseException:
                self._listener.close()
                raise
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the socket, since the session is over."""
        # On the loop's thread, which may be about to let somebody in.
        self._events.call(self._end)

    def _end(self) -> None:
        self._events.remove(self._listener.fileno())
        self._listener.close()
        self._file.close()

    def _serve(self) -> None:
        pause = self._listener.serve()
        if pause:
            self._events.rest(self._listener.fileno(), pause)

    def _admit(self, connection: socket.socket, _number: int) -> None:
        if not self._free.acquire(blocking=False):
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
            # The process that has asked may be gone by now.
            with connection, suppress(OSError):
                connection.settimeout(_SECONDS)
                question = connection.recv(1)
                if question:
                    connection.sendall(
                        msgspec.msgpack.encode(self._gather(question == WITH_STACKS))
                    )
        finally:
            self._free.release()
