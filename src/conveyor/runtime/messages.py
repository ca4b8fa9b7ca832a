"""Messages between the processes of a session, the sockets that carry them, and connections over which both
ends send when they like.

Each connection has one family of messages for each direction, which is a class with a subclass for each
message. Whoever receives them has one table from these subclasses to what is to be done.
"""

from __future__ import annotations

import errno
import functools
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from conveyor import _core, descriptors
from conveyor.codec.direct import DIRECT, Located
from conveyor.exceptions import OutOfMemoryError, RuntimeStateError, SystemLimitError
from conveyor.pauses import Pauses
from conveyor.runtime import threads
from conveyor.runtime.process import close_all
from conveyor.system_limits import NO_MEMORY, PASSING, explained, hint

if TYPE_CHECKING:
    from conveyor.runtime.remote_memory import Closing, ReceiveBuffer

#: Version of the messages between processes. It changes with every change of a message's meaning or fields.
MESSAGES_VERSION = 9
#: Descriptors that one message on a socket may carry.
MAX_FDS = 250
#: The size of the number that comes with descriptors and tells which frame they belong to.
FDS_ID_BYTES = 8

M = TypeVar("M", bound="Message")


class Message(Struct, frozen=True):
    """A frozen value with the fields that its class is annotated with; picklable."""


def members(family: type[M]) -> frozenset[type[M]]:
    """Return the messages of a family: all that a receiver has to know."""
    return frozenset(family.__subclasses__())


def send_with_id(sock: socket.socket, fds_id: int, fds: list[int]) -> None:
    """Send descriptors that belong to the frame which has that id."""
    data = fds_id.to_bytes(FDS_ID_BYTES, "little")
    for start in range(0, len(fds), MAX_FDS):
        socket.send_fds(sock, [data], fds[start : start + MAX_FDS])


def version_line() -> bytes:
    """Return the first line that this process sends to a process that it has started."""
    from conveyor import __version__  # the package is whole by now

    return f"conveyor {__version__} protocol {MESSAGES_VERSION}\n".encode()


def after_version(said: bytes) -> bytes:
    """Return the bytes behind the version line that ``said`` begins with. ``RuntimeStateError`` if the line
    differs from this process's own."""
    own = version_line()
    if said.startswith(own):
        return said[len(own) :]
    first = said.partition(b"\n")[0][:100].decode(errors="replace")
    raise RuntimeStateError(
        f"this process is of {own.decode().strip()!r}, and the one that has started it of {first!r}: they "
        "do not understand each other. Most likely the package was changed while the program ran: start "
        "the program again"
    )


T = TypeVar("T")

#: A message is one datagram; what is larger comes in pieces, the last one marked. One whose files could not
#: be had has the reason ahead of it.
PIECE = 60_000
#: Seconds for which it is tried what the kernel refuses for the moment, and between two tries: at first, and
#: at most. Others of the system, or of this user, use up what there is, and do not tell when they stop.
_TIME_LIMIT, _FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 0.001, 0.1


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
    until, pauses = _core.monotonic() + _TIME_LIMIT, Pauses(_FIRST_PAUSE, _LONGEST_PAUSE)
    while True:
        try:
            return operation()
        except OSError as error:
            if error.errno not in PASSING or _core.monotonic() >= until:
                raise
        time.sleep(pauses.next())


#: Values from this size on travel as files.
SHARE_FROM = 32 * 1024

#: Messages that are sent as one.
_MOST = 256


#: Object that keeps the file that goes with a message, until then. Its ``fd`` is negative if there is none.
WithFile: TypeAlias = "_core.Snapshot | ReceiveBuffer | Closing"

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
        """Send a message in its turn. ``whose``: the snapshot whose parts it has, or the buffer that it
        names; its file goes with the message, if it has one. Nothing happens if the other side is gone:
        ``on_end`` tells."""
        self._outgoing.put((message, whose))
        if self._nobody_sends:
            self._let_go()

    def soon(self, work: Callable[[], object]) -> None:
        """Have ``work`` done on a thread of the connection, in the order of what is sent. Nothing happens if
        that has ended."""
        self._outgoing.put(work)
        if self._nobody_sends:
            self._let_go()

    def finalizer(self, work: Callable[[], object]) -> _core.Finalizer:
        """Return a finalizer that has ``work`` done as :meth:`soon` does, once nobody holds it. No finalizer
        in Python notes it."""
        return _core.Finalizer(self._outgoing.put, work, self._waker)

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
        snapshot.note_held(Located.unpack(snapshot.meta).number)
    return snapshot
