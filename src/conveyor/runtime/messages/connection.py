"""A connection between two processes of a session over which both send messages when they like."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from conveyor import _core
from conveyor.codec.direct import DIRECT, Located
from conveyor.runtime import threads
from conveyor.runtime.messages.sockets import (
    all_of,
    pickled,
    receive_message,
    send_message,
    send_pickled,
)
from conveyor.system_limits import explained

#: Values from this size on travel as files.
SHARE_FROM = 32 * 1024

#: Messages that are sent as one.
_MOST = 256


class WithFile(Protocol):
    """Object with a file that goes with a message; the object keeps the file until then."""

    @property
    def fd(self) -> int:
        """Return the descriptor of the file; negative: there is none."""
        ...


_Item: TypeAlias = "tuple[Any, WithFile | None] | Callable[[], object] | None"


class Node(Protocol):
    """Node to which processes are connected: files that go with messages come there once."""

    #: In the session.
    number: int

    def hold(self, fd: int) -> None:
        """Note that processes there are sent messages with that file, maybe more than one."""
        ...

    def let_go(self, fd: int) -> None:
        """Note that no process there needs the file any more."""
        ...


class Connection:
    """End of a connection between two processes, with two threads. So sending never blocks its caller, who
    may be a finalizer; and messages are handled where nobody waits for anything else."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        on_message: Callable[[Any, list[int]], object],
        on_end: Callable[[], object],
    ) -> None:
        """``on_message(message, descriptors)`` is called for each message in turn, ``on_end()`` once
        after the last; the descriptors are closed afterwards."""
        self._socket = sock
        self._on_message = on_message
        self._on_end = on_end
        # Its `put` may be interrupted by a finalizer that calls it.
        self._outgoing: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        #: Items that the writer has taken from the queue and not sent.
        self._ahead: list[_Item] = []
        self._waker = _core.Waker()  # of nobody: who sends waits for the queue
        self.ended = False
        #: The writer has ended: what is to be sent from now on is let go of by whoever puts it there.
        self._nobody_sends = False
        #: Why it has ended, if that was not the other side's doing.
        self.broken = ""
        self._writer = threads.start(self._write, f"{name}-out")
        try:
            self._reader = threads.start(self._read, f"{name}-in")
        except BaseException:
            self._outgoing.put(None)
            raise

    def send(self, message: Any, whose: WithFile | None = None) -> None:
        """Send a message in its turn. ``whose``: the snapshot whose parts it has, or the room that it names;
        its file goes with the message, if it has one. Nothing happens if the other side is gone: ``on_end``
        tells."""
        self._outgoing.put((message, whose))
        if self._nobody_sends:
            self._let_go()

    def soon(self, work: Callable[[], object]) -> None:
        """Have ``work`` done on a thread of the connection, in the order of what is sent. Nothing happens if
        that has ended."""
        self._outgoing.put(work)
        if self._nobody_sends:
            self._let_go()

    def will(self, work: Callable[[], object]) -> _core.Will:
        """Return a will that has ``work`` done as :meth:`soon` does, once nobody holds it. No finalizer in
        Python notes it."""
        return _core.Will(self._outgoing.put, work, self._waker)

    def hang_up(self) -> None:
        """End the connection; both sides are told by ``on_end``. Does not wait."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and wait until its threads have ended (but for the caller's)."""
        self.hang_up()
        for thread in (self._reader, self._writer):
            if thread is not threading.current_thread():
                thread.join()

    def _write(self) -> None:
        over = False
        while (item := self._next()) is not None:
            try:
                if not isinstance(item, tuple):
                    item()
                elif not over:
                    self._say(*item)
            except Exception as error:
                # Without that message both sides would wait for each other.
                over = True
                self._break(error)
            del item
        self._nobody_sends = True  # before the look: who puts something there looks behind that
        self._let_go()

    def _next(self) -> _Item:
        return self._ahead.pop() if self._ahead else self._outgoing.get()

    def _say(self, message: Any, whose: WithFile | None) -> None:
        # It has no duplicate of the file: any number of messages may wait, and there may be no descriptor.
        fd = -1 if whose is None else whose.fd
        messages = [message]
        # What waits as well goes along, up to the next that has a file: a thousand refs that are passed on
        # are a thousand messages.
        while fd < 0 and not self._ahead and len(messages) < _MOST and not self._outgoing.empty():
            item = self._outgoing.get()
            if isinstance(item, tuple) and (item[1] is None or item[1].fd < 0):
                messages.append(item[0])
            else:
                self._ahead.append(item)
        try:
            data = pickled(messages)
        except Exception:
            if len(messages) == 1:
                raise
            for each in messages:  # those before the one that cannot be pickled are to be there
                send_message(self._socket, [each])
        else:
            send_pickled(self._socket, data, [fd] if fd >= 0 else [])

    def _let_go(self) -> None:
        """Drop what is left to be sent: its snapshots, and all that they keep, are let go of."""
        with suppress(queue.Empty):
            while True:
                self._outgoing.get_nowait()

    def _break(self, error: Exception) -> None:
        if not isinstance(
            error, (ConnectionError, ValueError)
        ):  # of a side that is gone, or has ended
            self.broken = self.broken or f"{type(error).__name__}: {error}"
        self.hang_up()

    def _read(self) -> None:
        try:
            while True:
                messages, fds = receive_message(self._socket)
                try:
                    for message in messages:
                        self._on_message(message, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
                del messages, message
        except Exception as error:
            self._break(error)
        finally:
            self.ended = True
            try:
                self._on_end()
            finally:
                self._outgoing.put(None)
                self._writer.join()
                self._socket.close()


def received(parts: tuple[int, int, int, bytes | None], fds: list[int]) -> _core.Snapshot:
    """The snapshot whose parts have come, with its descriptor if it has one."""
    in_file = parts[3] is None
    with explained("receive a value"):
        snapshot = _core.Snapshot.received(*parts, all_of(fds, 1)[0] if in_file else -1)
    if snapshot.codec == DIRECT:
        snapshot.note_kept(Located.unpack(snapshot.meta).number)
    return snapshot
