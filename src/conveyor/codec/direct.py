"""Values that stay in the process that made them.

The frame of a :class:`Direct` says where the value is: whoever decodes it fetches the memory from there. What
is kept as long as anybody has the frame is the value itself, so nobody finds it gone who could still ask.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from conveyor import _core
from conveyor.codec.definitions import SentDefinitions
from conveyor.codec.encoded import (
    FLAG_DEFINITIONS,
    FLAG_REFS,
    KEPT,
    SENT,
    Encoded,
    Reducer,
    ReducerFactory,
)

DIRECT = 21
"""Codec: where a value is."""

_head = struct.Struct("<HHHIIIQQI")
_WHOLE = 1 << 15


class Direct:
    """A value that is to stay here.

    transport: how its users want it to be moved: ``"auto"``, or a transport's name.
    snapshot: it stays as it is now, in a copy.
    """

    __slots__ = ("snapshot", "transport", "value")

    def __init__(self, value: Any, transport: str, snapshot: bool = False) -> None:
        self.value = value
        self.transport = transport
        self.snapshot = snapshot


class Located(NamedTuple):
    """Where a value is, as its frame says it.

    slot, incarnation: its process on the board.
    pid: of that process.
    number: the value's, which no other one has, in any process.
    anchor: the address of a word there that holds the number for as long as the value is kept.
    holder: what that process is called.
    transport: see :class:`Direct`.
    ranges: address and length of each of its buffers, as pairs of 64-bit numbers.
    codec, meta: of the value, which is decoded with what the buffers hold.
    whole: what the ranges hold is one buffer together.
    """

    slot: int
    incarnation: int
    pid: int
    number: int
    anchor: int
    holder: str
    transport: str
    ranges: bytes
    codec: int
    meta: bytes
    whole: bool = False

    def pack(self) -> bytes:
        """The meta bytes of the frame."""
        holder, transport = self.holder.encode(), self.transport.encode()
        head = _head.pack(
            self.codec | (_WHOLE if self.whole else 0),
            len(holder),
            len(transport),
            self.slot,
            self.incarnation,
            self.pid,
            self.number,
            self.anchor,
            len(self.ranges),
        )
        return b"".join((head, holder, transport, self.ranges, self.meta))

    @classmethod
    def unpack(cls, meta: bytes) -> Located:
        """What :meth:`pack` has made."""
        codec, holder, transport, slot, incarnation, pid, number, anchor, ranges = (
            _head.unpack_from(meta)
        )
        end_of_holder = _head.size + holder
        end_of_transport = end_of_holder + transport
        end_of_ranges = end_of_transport + ranges
        return cls(
            slot,
            incarnation,
            pid,
            number,
            anchor,
            meta[_head.size : end_of_holder].decode(),
            meta[end_of_holder:end_of_transport].decode(),
            meta[end_of_transport:end_of_ranges],
            codec & ~_WHOLE,
            meta[end_of_ranges:],
            bool(codec & _WHOLE),
        )


class Holder(Protocol):
    """Who keeps values here, and fetches those of others."""

    def keep(
        self, direct: Direct, codec: int, meta: bytes, buffers: list[Any]
    ) -> tuple[Located, Any] | None:
        """Keep a value, of which that was encoded: where it is, and what it is kept by. It goes when the
        latter is garbage. ``None``: others could not fetch it."""
        ...

    def begin(self) -> None:
        """Something is about to be kept here as long as somebody has a frame."""
        ...

    def find(self, number: int) -> Any:
        """What keeps the value of that number here, with its ``value``; ``None``: it is elsewhere."""
        ...

    def part(self, where: Located, index: tuple[Any, ...]) -> Located | None:
        """Where a part of a value is; see :meth:`Unfetched.where_part`."""
        ...

    def fetch(self, where: Located, decode: Callable[..., Any]) -> Any:
        """Fetch a value, which is decoded with ``decode(codec, meta, buffers)``."""
        ...


_holder: Holder | None = None


def holder() -> Holder:
    """This process's, which is above and comes when it is first needed."""
    global _holder
    if _holder is None:
        _holder = importlib.import_module("conveyor.direct").HOLDER
    return _holder


def keep_beside(notes: dict[Any, Any], what: Any) -> None:
    """Keep ``what`` as long as anybody has the frame of the value that is being pickled, whose notes are
    these."""
    holder().begin()
    notes.setdefault(KEPT, []).append(what)


def keep(
    value: Direct, encode: Callable[[Any, SentDefinitions], Encoded]
) -> tuple[bytes, Any] | None:
    """Keep a value here: the meta bytes that say where it is, and what keeps it. ``None``: it has no memory
    that could stay, refers to refs, or could not be fetched by others, and travels as any other."""
    sent = SentDefinitions()  # it brings its own, so that any channel can carry it
    codec, flags, meta, buffers, *others = encode(value.value, sent)
    stays = None
    if buffers and not others and not flags & FLAG_REFS:
        stays = holder().keep(value, codec, meta, buffers)
    if stays is None:
        if flags & FLAG_DEFINITIONS:
            sent.undo(meta)
        return None
    where, kept = stays
    return where.pack(), kept


def encode(
    value: Direct,
    sent: SentDefinitions | None,
    encode_any: Callable[[Any, SentDefinitions | None], Encoded],
) -> Encoded:
    """As :func:`conveyor.codec.frames.encode`, which is ``encode_any``."""
    made = keep(value, encode_any)
    if made is None:
        return encode_any(value.value, sent)
    meta, kept = made
    return DIRECT, 0, meta, None, kept


def decode(meta: bytes, decode_any: Callable[..., Any]) -> Any:
    """The value, fetched unless the frame is decoded without. ``decode_any``:
    :func:`conveyor.codec.frames.decode`."""
    if not _core.fetches():
        return Unfetched(meta, decode_any)
    return holder().fetch(Located.unpack(meta), decode_any)


class Unfetched:
    """In the place of a value that has not been fetched."""

    __slots__ = ("_decode_any", "_keeper", "meta")

    def __init__(self, meta: bytes, decode_any: Callable[..., Any], keeper: Any = None) -> None:
        self.meta = meta
        self._decode_any = decode_any
        self._keeper = keeper

    @property
    def where(self) -> Located:
        """Where the value is."""
        return Located.unpack(self.meta)

    def here(self) -> Any:
        """What keeps it, if that is this process."""
        return holder().find(self.where.number)

    def fetch(self) -> Any:
        """The value."""
        return holder().fetch(self.where, self._decode_any)

    def decode_with(self, buffers: list[Any]) -> Any:
        """The value, with memory that need not have come yet."""
        where = self.where
        return self._decode_any(where.codec, where.meta, buffers)

    def where_part(self, index: tuple[Any, ...]) -> Located | None:
        """Where a part of the value is; ``None``: only the whole can be fetched.

        Raises:
            IndexError: there is no such part.
        """
        return holder().part(self.where, index)

    def part(self, index: tuple[Any, ...]) -> Any:
        """A part of the value, fetched alone where that can be."""
        part = self.where_part(index) if self.here() is None else None
        if part is not None:
            return holder().fetch(part, self._decode_any)
        return self.fetch()[index[0] if len(index) == 1 else index]

    def moved(self, where: Located) -> Unfetched:
        """The same with another place."""
        return Unfetched(where.pack(), self._decode_any, self._keeper)

    def kept_by(self, keeper: Any) -> Unfetched:
        """The same, to be sent: whoever gets it fetches the value, which is kept as long as ``keeper`` is."""
        return Unfetched(self.meta, self._decode_any, keeper)

    def reduced(self, notes: dict[Any, Any]) -> Any:
        """For a pickle."""
        sent = notes.get(SENT)
        if sent is None or sent.in_band:  # nobody would keep it
            return _itself, (self.fetch(),)
        keep_beside(notes, self._keeper)
        return self._decode_any, (DIRECT, self.meta)


def fetched(value: Any) -> Any:
    """``value``, or what it stands for."""
    return value.fetch() if type(value) is Unfetched else value


def reducers(
    encode_any: Callable[[Any, SentDefinitions], Encoded], decode_any: Callable[..., Any]
) -> ReducerFactory:
    """For those inside of other values: the elements of a result that has several, say."""

    def make_reducers(notes: dict[Any, Any]) -> dict[type, Reducer]:
        def reduce(direct: Direct) -> Any:
            sent = notes.get(SENT)
            made = None if sent is None or sent.in_band else keep(direct, encode_any)
            if made is None:
                return _itself, (direct.value,)
            meta, kept = made
            keep_beside(notes, kept)
            return decode_any, (DIRECT, meta)

        return {Direct: reduce, Unfetched: lambda value: value.reduced(notes)}

    return make_reducers


def _itself(value: Any) -> Any:
    return value
