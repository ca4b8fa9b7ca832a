"""Places of values that have stayed in the process that made them."""

from __future__ import annotations

import struct
from typing import NamedTuple

_head = struct.Struct("<HHIIIIIIQQ")
_file = struct.Struct("<qQ")
_JOINED = 1 << 15


class Located(NamedTuple):
    """Place of a direct value, as its frame gives it.

    slot, incarnation: its process in the process table.
    pid: of that process.
    number: the value's, which no other one has, in any process.
    anchor: the address of a word there that holds the number for as long as the value is kept.
    names: :attr:`keeper`, :attr:`transport` and :attr:`snapshot`.
    ranges: address and length of each of its buffers, as pairs of 64-bit numbers.
    codec, meta: of the value, which is decoded with the contents of the buffers.
    beside: a packed :class:`~conveyor.codec.direct.routes.Beside`, if some of the value's tensors are got in
    another way than by reading.
    lying: where the ranges lie in that process's arena, as ``_core.lying_in`` says it, with :class:`File` in
    front, if any does.
    joined: the ranges are the runs of one buffer, as those of a part are. They are copied one behind the
    other.
    """

    slot: int
    incarnation: int
    pid: int
    number: int
    anchor: int
    names: bytes
    ranges: bytes
    codec: int
    meta: bytes
    beside: bytes = b""
    lying: bytes = b""
    joined: bool = False

    @property
    def keeper(self) -> str:
        """Name of the process that keeps the value."""
        return self.names.split(b"\0")[1].decode()

    @property
    def transport(self) -> str:
        """See :class:`Direct`."""
        return self.names.split(b"\0")[0].decode()

    @property
    def snapshot(self) -> bool:
        """Whether the value is a copy that nobody writes to."""
        return self.names.endswith(b"\0snapshot")

    def pack(self) -> bytes:
        """The meta bytes of the frame."""
        return packed(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> Located:
        """Rebuild a place from the bytes of :meth:`pack`."""
        codec, named, slot, incarnation, pid, ranging, aside, placed, number, anchor = (
            _head.unpack_from(packed)
        )
        names = _head.size + named
        ranges = names + ranging
        beside = ranges + aside
        lying = beside + placed
        return cls(
            slot,
            incarnation,
            pid,
            number,
            anchor,
            packed[_head.size : names],
            packed[names:ranges],
            codec & ~_JOINED,
            packed[lying:],
            packed[ranges:beside],
            packed[beside:lying],
            codec >= _JOINED,
        )


def packed(
    slot: int,
    incarnation: int,
    pid: int,
    number: int,
    anchor: int,
    names: bytes,
    ranges: bytes,
    codec: int,
    meta: bytes,
    beside: bytes = b"",
    lying: bytes = b"",
    joined: bool = False,
) -> bytes:
    """Make the bytes of :meth:`Located.pack` without a ``Located``. ``native/python/located.h`` reads them,
    too."""
    if joined:
        codec |= _JOINED
    sizes = len(names), slot, incarnation, pid, len(ranges), len(beside), len(lying)
    head = _head.pack(codec, *sizes, number, anchor)
    return b"".join((head, names, ranges, beside, lying, meta))


class File(NamedTuple):
    """The file of a process's arena.

    descriptor: its number there.
    inode: its own, which no other arena's file has.
    """

    descriptor: int
    inode: int

    def pack(self) -> bytes:
        """Pack this as the front of :attr:`Located.lying`."""
        return _file.pack(*self)

    @classmethod
    def split(cls, lying: bytes) -> tuple[File, bytes]:
        """Split the bytes of :attr:`Located.lying` into the file in front, and the rest."""
        return cls(*_file.unpack_from(lying)), lying[_file.size :]


def names_of(transport: str, keeper: str, snapshot: bool) -> bytes:
    """Pack what ``Located.names`` holds."""
    return "\0".join([transport, keeper, *["snapshot"] * snapshot]).encode()
