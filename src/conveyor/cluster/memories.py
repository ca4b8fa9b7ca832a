"""Memory of this node's processes, which another node reads in place, over connections of its own.

This process reads the memory as another process of the node would: its owner takes no part, whatever it is
doing. One message asks for a value and says how much of it is there already, since a connection that breaks
costs only what was under way on it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

from conveyor import _core
from conveyor.cluster.answering import Answering, hear
from conveyor.runtime.remote_memory import Wanted

_RANGE = struct.Struct("<QQ")
#: What is asked: slot, incarnation, number, anchor, where to begin, how (``_JOINED``, ``_DIGESTS``), the
#: ranges' bytes.
#: What is answered: an error, and how much follows; until nothing does.
_ASKED, _ANSWERED = struct.Struct("!IIQQQBQ"), struct.Struct("!iQ")
_END = _ANSWERED.pack(0, 0)
#: Whether the ranges are joined without gaps; and whether only the digest of each piece is wanted.
_JOINED, _DIGESTS = 1, 2
#: The digest that is sent of a piece then.
DIGEST = struct.Struct("<Q")
#: Bytes that are read at a time; a multiple of what buffers are aligned to.
PIECE, _ALIGNED = 1 << 18, 64
#: Bytes of ranges that one value may have, and ranges that are read at a time.
_MOST_RANGES, _MOST_AT_ONCE = 1 << 28, 4096


def asked(wanted: Wanted, at: int, digests: bool = False) -> bytes:
    """Return the message that asks for everything from ``at`` on, where a piece begins; or for digests of
    it."""
    how = _JOINED * wanted.joined | _DIGESTS * digests
    head = *wanted.process, wanted.number, wanted.anchor, at, how, len(wanted.ranges)
    return _ASKED.pack(*head) + wanted.ranges


def hear_answer(sock: socket.socket) -> tuple[int, int]:
    """Receive an error of the system, or 0, and how many bytes follow."""
    error, size = _ANSWERED.unpack(hear(sock, _ANSWERED.size))
    return error, size


class Memories(Answering):
    """Memory of the processes of this node, which other nodes read."""

    def __init__(self, board: _core.Board, own: int | None = None) -> None:
        """``own``: the slot of this process, if it has one."""
        super().__init__()
        self._board, self._own = board, own

    def answer(self, sock: socket.socket) -> None:
        """Send the part of a value that the other node asks for, or digests of that part."""
        slot, incarnation, number, anchor, at, how, size = _ASKED.unpack(hear(sock, _ASKED.size))
        if size > _MOST_RANGES or size % _RANGE.size:
            raise ConnectionError("it asks for what no value has")
        wanted = Wanted((slot, incarnation), number, anchor, hear(sock, size), bool(how & _JOINED))
        try:
            pid = self._pid(wanted)
        except OSError as error:
            sock.sendall(_ANSWERED.pack(error.errno or errno.EIO, 0))
            return
        room = _core.Buffer.own(PIECE)
        for table, nbytes, is_last in _with_last(pieces(wanted)):
            if at >= nbytes > 0:  # it is there
                at -= nbytes
                continue
            if at:
                raise ConnectionError("it asks for a part of a piece")
            if not wanted.joined and sum(_core.lengths_of(table)) < nbytes:
                # Between the ranges there would be anything, which digests would tell apart.
                with memoryview(room) as memory:
                    memory[:nbytes] = bytes(nbytes)
            try:
                source = pid, table, anchor, number
                if wanted.joined:
                    _core.read_peer_joined(*source, room)
                else:
                    _core.read_peer(*source, room)
            except OSError as error:
                sock.sendall(_ANSWERED.pack(error.errno or errno.EIO, 0))
                return
            end = _END if is_last else b""
            if not nbytes:
                sock.sendall(end)
                continue
            with memoryview(room) as memory, memory[:nbytes] as piece:
                if how & _DIGESTS:
                    digest = DIGEST.pack(_core.checksum_of(_core.ranges_of([piece])))
                    sock.sendall(_ANSWERED.pack(0, len(digest)) + digest + end)
                else:
                    _send(sock, _ANSWERED.pack(0, nbytes), piece, end)

    def _pid(self, wanted: Wanted) -> int:
        slot, incarnation = wanted.process
        board = self._board
        if slot >= board.used or board.gone(slot, incarnation) or board.elsewhere(slot):
            raise ProcessLookupError(errno.ESRCH, "there is no such process")
        pid = os.getpid() if slot == self._own else board.pid(slot)
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
