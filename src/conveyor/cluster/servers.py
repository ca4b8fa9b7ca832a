"""Servers of a node's files, and of the memory of its processes, for other nodes.

A process that needs the rest of a file asks for it from where it has come to. So a connection that breaks
costs only what was under way on it, and the node that has the file remembers nothing.

The server of memory reads it as another process of the node would: its owner takes no part, whatever it is
doing. One message asks for a value and says how much of it is there already, for the same reason.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from conveyor import _core, descriptors
from conveyor.cluster.handshake import HandshakeError, NotHeardError
from conveyor.cluster.serving import RequestServer, break_off, hear, wait_on
from conveyor.exceptions import OutOfMemoryError, SystemLimitError
from conveyor.flag import Flag
from conveyor.local_sockets import hang_up
from conveyor.pauses import Pauses
from conveyor.runtime.remote_memory import Wanted
from conveyor.system_limits import NO_MEMORY, explained, hint

#: Request: the file's number, where to begin, and how much. Response: how much follows.
_REQUESTED, _ANSWERED = struct.Struct("!QQQ"), struct.Struct("!Q")
#: Seconds before the second try to have a connection, and at most between two. A node that can be reached
#: again does not tell, nor does a depot that can answer again.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
#: Tries in a row, and seconds, after which a node is told to be out of reach to which there is no connection:
#: others to it may be well, and dialled by the other side, so nobody else would find out.
_MOST_TRIES, _REACHED_WITHIN = 10, 30.0
#: Errors that mean a lack on this node when it dials: they do not show whether the other node is there.
_NONE_HERE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})


class _File:
    """File of this node. It is closed once it has been dropped and nobody is sending it."""

    __slots__ = ("dropped", "fd", "uses")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.uses = 0
        self.dropped = False


class SharedFiles(RequestServer):
    """Files of this node that others may fetch, by numbers."""

    def __init__(self) -> None:
        super().__init__()
        # Reentrant: a finalizer may take something away.
        self._having = threading.RLock()
        self._files: dict[int, _File] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._files)

    def put(self, fd: int) -> int:
        """Duplicate a file, which others may fetch until it is dropped, and return its number."""
        own = descriptors.duplicate(fd)
        with self._having:
            number = next(self._numbers)
            self._files[number] = _File(own)
        return number

    def drop(self, number: int) -> None:
        """Drop a file that nobody asks for any more."""
        with self._having:
            file = self._files.pop(number, None)
            if file is not None:
                file.dropped = True
                self._look(file)

    def _look(self, file: _File) -> None:
        """Close a file that was dropped and is not being sent. Call with the lock."""
        if file.dropped and not file.uses:
            os.close(file.fd)

    def close(self) -> None:
        """End all connections and drop all files, since the session is over. Waits for nobody."""
        super().close()
        with self._having:
            files = list(self._files)
        for number in files:
            self.drop(number)

    def answer(self, sock: socket.socket) -> None:
        """Send the part of a file that the other node asks for."""
        number, at, size = _REQUESTED.unpack(hear(sock, _REQUESTED.size))
        with self._having:
            file = self._files.get(number)
            if file is not None:
                file.uses += 1
        if file is None:
            sock.sendall(_ANSWERED.pack(0))
            return
        try:
            # Not a duplicate: where there is no descriptor for it, whoever asks would ask again for ever.
            with open(file.fd, "rb", buffering=0, closefd=False) as opened:
                there = min(size, max(os.fstat(file.fd).st_size - at, 0))
                sock.sendall(_ANSWERED.pack(there))
                if there and sock.sendfile(opened, at, there) < there:
                    # The other node would wait for the rest.
                    raise OSError("a file has become shorter")
        finally:
            with self._having:
                file.uses -= 1
                self._look(file)


class Supply:
    """Files of another node's depot, as this node fetches them."""

    def __init__(
        self,
        dial: Callable[[], socket.socket],
        unreachable: Callable[[str], object] = lambda why: None,
        most_idle: int = 2,
    ) -> None:
        """``dial()``: a new connection to that depot. ``unreachable(why)``: none comes about. It is tried on,
        until this is closed. ``most_idle``: connections that are kept for the next file."""
        self._dial, self._unreachable, self._most_idle = dial, unreachable, most_idle
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._closed = Flag()
        #: Since when no connection comes about that is tried for, how often it was, and why not.
        self._failing: tuple[float, int, str] | None = None

    @property
    def trouble(self) -> str:
        """Why connecting to the other node currently fails, or an empty string."""
        failing = self._failing
        if failing is None:
            return ""
        since, tries, why = failing
        return f"no connection comes about since {_core.monotonic() - since:.1f} s ({tries} tries; {why})"

    def fetch(self, number: int, size: int) -> int:
        """Fetch the file of that number and return it as a file of this node. ``SystemLimitError`` or
        ``OutOfMemoryError`` where there is no room for it, or nothing to fetch it with: the next file may
        succeed. ``OSError`` if no file can be had."""
        what = f"fetch a value of {size} bytes from another host"
        try:
            with explained(what):
                return self._fetched(number, size)
        except SystemLimitError as error:
            if error.errno in NO_MEMORY:
                raise OutOfMemoryError(str(error)) from error
            raise
        except MemoryError as error:
            raise OutOfMemoryError(f"cannot {what}: there is no memory left for it") from error

    def _fetched(self, number: int, size: int) -> int:
        fd = descriptors.memory_file("conveyor-value")
        try:
            os.posix_fallocate(fd, 0, size)
            with mmap.mmap(fd, size) as memory, memoryview(memory) as view:
                at = 0
                pauses = _pauses()
                while at < size:
                    at = self._more(number, view, at, pauses)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        """End all fetches; there will be no more."""
        with self._lock:
            self._closed.set()
            idle, self._idle = self._idle, []
            for sock in self._busy:
                break_off(sock)
        for sock in idle:
            hang_up(sock)

    @property
    def closed(self) -> bool:
        """Whether nothing is fetched any more."""
        return self._closed.is_set()

    def _more(self, number: int, view: memoryview, at: int, pauses: Pauses) -> int:
        """Fetch more of a file over one connection. Returns how far it has come: to its end, or as far as the
        connection has lasted."""
        sock, began = None, at
        try:
            sock = self._take()
            sock.sendall(_REQUESTED.pack(number, at, len(view) - at))
            (there,) = _ANSWERED.unpack(hear(sock, _ANSWERED.size))
            if there != len(view) - at:
                raise FileNotFoundError(f"the other host does not have value {number} any more")
            while at < len(view):
                some = sock.recv_into(view[at:])
                if not some:
                    raise ConnectionError("the other host has ended the connection")
                at += some
        except (OSError, HandshakeError) as error:
            self._end(sock)
            if isinstance(error, (FileNotFoundError, SystemLimitError)):
                raise
            if at > began:
                pauses.begin_anew()
            # Tries go on until this is closed, which says that there will be no other connection.
            if self._closed.wait(pauses.next()):
                raise ConnectionError(f"the other host is lost: {error}") from error
        except BaseException:
            self._end(sock)
            raise
        else:
            self._give_back(sock)
        return at

    def _take(self) -> socket.socket:
        with self._lock:
            if self._closed.is_set():
                raise ConnectionError("the other host is lost, or the session over")
            if self._idle:
                sock = self._idle.pop()
                self._busy.add(sock)
                return sock
        sock = self._dialled()
        with self._lock:
            if not self._closed.is_set():
                self._busy.add(sock)
                return sock
        hang_up(sock)
        raise ConnectionError("the session is over")

    def _dialled(self) -> socket.socket:
        try:
            return self._dialled_at_last()
        finally:
            self._failing = None

    def _dialled_at_last(self) -> socket.socket:
        began, tries, pauses = _core.monotonic(), 0, _pauses()
        while True:
            try:
                sock = self._dial()
                try:
                    wait_on(sock)
                except BaseException:
                    hang_up(sock)
                    raise
                return sock
            except (OSError, HandshakeError) as error:
                if isinstance(error, OSError) and error.errno in _NONE_HERE:
                    number = error.errno
                    text = f"cannot connect to another host: {error}; {hint(error)}"
                    raise SystemLimitError(number, text) from error
                tries += 1
                self._failing = began, tries, str(error) or type(error).__name__
                if tries >= _MOST_TRIES and _core.monotonic() - began >= _REACHED_WITHIN:
                    if isinstance(error, NotHeardError):  # it listens, and so it is there
                        raise _unheard(error) from error
                    self._unreachable(str(error))
                if self._closed.wait(pauses.next()):
                    raise ConnectionError(f"the other host is lost: {error}") from error

    def _give_back(self, sock: socket.socket) -> None:
        with self._lock:
            self._busy.discard(sock)
            if not self._closed.is_set() and len(self._idle) < self._most_idle:
                self._idle.append(sock)
                return
        hang_up(sock)

    def _end(self, sock: socket.socket | None) -> None:
        if sock is not None:
            with self._lock:
                self._busy.discard(sock)
            hang_up(sock)


def _pauses() -> Pauses:
    return Pauses(_FIRST_PAUSE, _LONGEST_PAUSE)


def _unheard(error: NotHeardError) -> SystemLimitError:
    return SystemLimitError(
        errno.EMFILE,
        f"the host where the value lies takes no more connections ({error}): it may have no descriptors left "
        f"(ulimit -n there)",
    )


_RANGE = struct.Struct("<QQ")
#: What is asked: slot, incarnation, number, anchor, where to begin, how (``_JOINED``, ``_DIGESTS``), the
#: ranges' bytes.
#: What is answered: an error, and how much follows; until nothing does.
_VALUE_REQUESTED, _VALUE_ANSWERED = struct.Struct("!IIQQQBQ"), struct.Struct("!iQ")
_END = _VALUE_ANSWERED.pack(0, 0)
#: Whether the ranges are joined without gaps; and whether only the digest of each piece is wanted.
_JOINED, _DIGESTS = 1, 2
#: The digest that is sent of a piece then.
DIGEST = struct.Struct("<Q")
#: Bytes that are read at a time; a multiple of what buffers are aligned to.
PIECE, _ALIGNED = 1 << 18, 64
#: Bytes of ranges that one value may have, and ranges that are read at a time.
_MOST_RANGES, _MOST_AT_ONCE = 1 << 28, 4096


def requested(wanted: Wanted, at: int, digests: bool = False) -> bytes:
    """Return the message that asks for everything from ``at`` on, where a piece begins; or for digests of
    it."""
    how = _JOINED * wanted.joined | _DIGESTS * digests
    head = *wanted.process, wanted.number, wanted.anchor, at, how, len(wanted.ranges)
    return _VALUE_REQUESTED.pack(*head) + wanted.ranges


def hear_answer(sock: socket.socket) -> tuple[int, int]:
    """Receive an error of the system, or 0, and how many bytes follow."""
    error, size = _VALUE_ANSWERED.unpack(hear(sock, _VALUE_ANSWERED.size))
    return error, size


class Memories(RequestServer):
    """Memory of the processes of this node, which other nodes read."""

    def __init__(self, process_table: _core.ProcessTable, own: int | None = None) -> None:
        """``own``: the slot of this process, if it has one."""
        super().__init__()
        self._process_table, self._own = process_table, own

    def answer(self, sock: socket.socket) -> None:
        """Send the part of a value that the other node asks for, or digests of that part."""
        slot, incarnation, number, anchor, at, how, size = _VALUE_REQUESTED.unpack(
            hear(sock, _VALUE_REQUESTED.size)
        )
        if size > _MOST_RANGES or size % _RANGE.size:
            raise ConnectionError("it asks for what no value has")
        wanted = Wanted((slot, incarnation), number, anchor, hear(sock, size), bool(how & _JOINED))
        try:
            pid = self._pid(wanted)
        except OSError as error:
            sock.sendall(_VALUE_ANSWERED.pack(error.errno or errno.EIO, 0))
            return
        buffer = _core.Buffer.own(PIECE)
        for table, nbytes, is_last in _with_last(pieces(wanted)):
            if at >= nbytes > 0:  # it is there
                at -= nbytes
                continue
            if at:
                raise ConnectionError("it asks for a part of a piece")
            if not wanted.joined and sum(_core.lengths_of(table)) < nbytes:
                # Between the ranges there would be anything, which digests would tell apart.
                with memoryview(buffer) as memory:
                    memory[:nbytes] = bytes(nbytes)
            try:
                source = pid, table, anchor, number
                if wanted.joined:
                    _core.read_peer_joined(*source, buffer)
                else:
                    _core.read_peer(*source, buffer)
            except OSError as error:
                sock.sendall(_VALUE_ANSWERED.pack(error.errno or errno.EIO, 0))
                return
            end = _END if is_last else b""
            if not nbytes:
                sock.sendall(end)
                continue
            with memoryview(buffer) as memory, memory[:nbytes] as piece:
                if how & _DIGESTS:
                    digest = DIGEST.pack(_core.checksum_of(_core.ranges_of([piece])))
                    sock.sendall(_VALUE_ANSWERED.pack(0, len(digest)) + digest + end)
                else:
                    _send(sock, _VALUE_ANSWERED.pack(0, nbytes), piece, end)

    def _pid(self, wanted: Wanted) -> int:
        slot, incarnation = wanted.process
        process_table = self._process_table
        if (
            slot >= process_table.used
            or process_table.gone(slot, incarnation)
            or process_table.is_remote(slot)
        ):
            raise ProcessLookupError(errno.ESRCH, "there is no such process")
        pid = os.getpid() if slot == self._own else process_table.pid(slot)
        if not pid:
            raise ProcessLookupError(errno.ESRCH, "it is not alive yet")
        return pid


def _send(sock: socket.socket, *parts: bytes | memoryview) -> None:
    """Send all parts, as a rule in one system call, so that small ones share a packet."""
    sent = sock.sendmsg(parts)
    for part in parts:
        if sent < len(part):
            sock.sendall(part[sent:])
        sent = max(sent - len(part), 0)


def _with_last(parts: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int, bool]]:
    """Yield what :func:`pieces` yields, and with each piece whether it is the last."""
    before = next(parts)
    for part in parts:
        yield *before, False
        before = part
    yield *before, True


def pieces(wanted: Wanted) -> Iterator[tuple[bytes, int]]:
    """Yield what is read at a time: ranges, and how many bytes they take. There is at least one piece, if
    only to see whether the value is still there."""
    some: list[bytes] = []
    size = 0
    given = False
    for address, length in _RANGE.iter_unpack(wanted.ranges):
        at = 0
        while True:
            taken = min(length - at, PIECE - size)
            some.append(_RANGE.pack(address + at, taken))
            at += taken
            size += taken if wanted.joined else -(-taken // _ALIGNED) * _ALIGNED
            if size >= PIECE or len(some) >= _MOST_AT_ONCE:
                yield b"".join(some), size
                some, size, given = [], 0, True
            if at >= length:
                break
    if some or not given:
        yield b"".join(some), size
