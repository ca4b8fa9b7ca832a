"""Memory of this host's processes, which another host reads where it lies, over connections of its own.

What is asked for is read by this process, as one of the host's processes would read it: its owner takes no
part, whatever it is doing. It is asked for in one message, with how much is there already, since a connection
that breaks costs only what was under way on it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator

from conveyor import _core
from conveyor.engine.net.depot import break_off, hear, wait_on
from conveyor.engine.net.handshake import hang_up
from conveyor.runtime import threads
from conveyor.runtime.far_memory import Wanted

_RANGE = struct.Struct("<QQ")
#: What is asked: slot, incarnation, number, anchor, where to begin, how (``_JOINED``, ``_DIGESTS``), the
#: ranges' bytes.
#: What is answered: an error, and how much follows; until nothing does.
_ASKED, _ANSWERED = struct.Struct("!IIQQQBQ"), struct.Struct("!iQ")
#: One range right behind the other; and of each piece only its digest.
_JOINED, _DIGESTS = 1, 2
#: What is sent of a piece then.
DIGEST = struct.Struct("<Q")
#: Bytes that are read at a time; a multiple of what buffers are aligned to.
_PIECE, _ALIGNED = 1 << 20, 64
#: Bytes of ranges that one value may have, and ranges that are read at a time.
_MOST_RANGES, _MOST_AT_ONCE = 1 << 28, 4096


def asked(wanted: Wanted, at: int, digests: bool = False) -> bytes:
    """The message that asks for all from ``at`` on, which is where a piece begins; or for digests of that."""
    how = _JOINED * wanted.joined | _DIGESTS * digests
    head = *wanted.process, wanted.number, wanted.anchor, at, how, len(wanted.ranges)
    return _ASKED.pack(*head) + wanted.ranges


def hear_answer(sock: socket.socket) -> tuple[int, int]:
    """An error of the system, or 0, and how many bytes follow."""
    error, size = _ANSWERED.unpack(hear(sock, _ANSWERED.size))
    return error, size


class Memories:
    """Of the processes of this host."""

    def __init__(self, board: _core.Board, own: int | None = None) -> None:
        """``own``: the slot of this process, if it has one."""
        self._board, self._own = board, own
        self._lock = threading.Lock()
        self._serving: set[socket.socket] = set()
        self._closed = False

    def serve(self, sock: socket.socket) -> None:
        """Answer another host, which is at the other end of ``sock``; that is this one's from now on."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._serving.add(sock)
        if closed:
            hang_up(sock)
        else:
            threads.start_or_run(self._serve, "memories", sock)

    def close(self) -> None:
        """The session is over."""
        with self._lock:
            self._closed = True
            serving = list(self._serving)
        for sock in serving:
            break_off(sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                wait_on(sock)
                while True:
                    self._answer(sock)
        finally:
            with self._lock:
                self._serving.discard(sock)
            hang_up(sock)

    def _answer(self, sock: socket.socket) -> None:
        slot, incarnation, number, anchor, at, how, size = _ASKED.unpack(hear(sock, _ASKED.size))
        if size > _MOST_RANGES or size % _RANGE.size:
            raise ConnectionError("it asks for what no value has")
        wanted = Wanted((slot, incarnation), number, anchor, hear(sock, size), bool(how & _JOINED))
        try:
            pid = self._pid(wanted)
        except OSError as error:
            sock.sendall(_ANSWERED.pack(error.errno or errno.EIO, 0))
            return
        room = _core.Buffer.own(_PIECE)
        for table, nbytes in pieces(wanted):
            if at >= nbytes > 0:  # it is there
                at -= nbytes
                continue
            if at:
                raise ConnectionError("it asks for a part of a piece")
            try:
                source = pid, table, anchor, number
                if wanted.joined:
                    _core.read_peer_joined(*source, room)
                else:
                    _core.read_peer(*source, room)
            except OSError as error:
                sock.sendall(_ANSWERED.pack(error.errno or errno.EIO, 0))
                return
            if not nbytes:
                continue
            with memoryview(room) as memory, memory[:nbytes] as piece:
                if how & _DIGESTS:
                    digest = DIGEST.pack(_core.checksum_of(_core.ranges_of([piece])))
                    sock.sendall(_ANSWERED.pack(0, len(digest)) + digest)
                else:
                    sock.sendall(_ANSWERED.pack(0, nbytes))
                    sock.sendall(piece)
        sock.sendall(_ANSWERED.pack(0, 0))

    def _pid(self, wanted: Wanted) -> int:
        slot, incarnation = wanted.process
        board = self._board
        if slot >= board.used or board.gone(slot, incarnation) or board.elsewhere(slot):
            raise ProcessLookupError(errno.ESRCH, "there is no such process")
        pid = os.getpid() if slot == self._own else board.pid(slot)
        if not pid:
            raise ProcessLookupError(errno.ESRCH, "it is not alive yet")
        return pid


def pieces(wanted: Wanted) -> Iterator[tuple[bytes, int]]:
    """What is read at a time: ranges, and how many bytes they take. At least one, if only to see whether the
    value is still there."""
    some: list[bytes] = []
    size = 0
    given = False
    for address, length in _RANGE.iter_unpack(wanted.ranges):
        at = 0
        while True:
            taken = min(length - at, _PIECE - size)
            some.append(_RANGE.pack(address + at, taken))
            at += taken
            size += taken if wanted.joined else -(-taken // _ALIGNED) * _ALIGNED
            if size >= _PIECE or len(some) >= _MOST_AT_ONCE:
                yield b"".join(some), size
                some, size, given = [], 0, True
            if at >= length:
                break
    if some or not given:
        yield b"".join(some), size
