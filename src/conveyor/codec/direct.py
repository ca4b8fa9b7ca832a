"""Values that stay in the process that made them.

The frame of a :class:`Direct` says where the value is: whoever decodes it fetches the memory from there. What
is kept as long as anybody has the frame is the value itself, so nobody finds it gone who could still ask.
"""

from __future__ import annotations

import functools
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
from conveyor.later import import_later

DIRECT = 21
"""Codec: where a value is."""

_head = struct.Struct("<HHIIIIQQ")
_JOINED = 1 << 15


class Direct:
    """A value that is to stay here.

    transport: the name that was asked for, ``"auto"`` among them. It is told to users, and moves nothing.
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
    names: :attr:`holder`, :attr:`transport` and :attr:`snapshot`.
    ranges: address and length of each of its buffers, as pairs of 64-bit numbers.
    codec, meta: of the value, which is decoded with what the buffers hold.
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
    joined: bool = False

    @property
    def holder(self) -> str:
        """What that process is called."""
        return self.names.split(b"\0")[1].decode()

    @property
    def transport(self) -> str:
        """See :class:`Direct`."""
        return self.names.split(b"\0")[0].decode()

    @property
    def snapshot(self) -> bool:
        """Whether it is a copy that nobody writes to."""
        return self.names.endswith(b"\0snapshot")

    def pack(self) -> bytes:
        """The meta bytes of the frame."""
        slot, incarnation, pid, number, anchor, names, ranges, codec, meta, joined = self
        if joined:
            codec |= _JOINED
        sizes = len(names), len(ranges)
        head = _head.pack(codec, sizes[0], slot, incarnation, pid, sizes[1], number, anchor)
        return b"".join((head, names, ranges, meta))

    @classmethod
    def unpack(cls, packed: bytes) -> Located:
        """What :meth:`pack` has made."""
        codec, length, slot, incarnation, pid, size, number, anchor = _head.unpack_from(packed)
        names = _head.size + length
        ranges = names + size
        return cls(
            slot,
            incarnation,
            pid,
            number,
            anchor,
            packed[_head.size : names],
            packed[names:ranges],
            codec & ~_JOINED,
            packed[ranges:],
            codec >= _JOINED,
        )


def names_of(transport: str, holder: str, snapshot: bool) -> bytes:
    """For :class:`Located`."""
    return "\0".join([transport, holder, *["snapshot"] * snapshot]).encode()


class Holder(Protocol):
    """Who keeps values here, and fetches those of others."""

    def keep(
        self, direct: Direct, codec: int, meta: bytes, buffers: list[Any]
    ) -> tuple[Located, Any] | None:
        """Keep ``direct.value``, which was encoded as ``codec``, ``meta`` and ``buffers``. Returns where
        it is, and what keeps it: the value goes when that is garbage. ``None``: no other process could
        read it."""
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
        _holder = import_later("conveyor.direct").HOLDER
    return _holder


def keep_beside(notes: dict[Any, Any], what: Any) -> None:
    """Keep ``what`` as long as anybody has the frame of the value that is being pickled, whose notes are
    these."""
    holder().begin()
    notes.setdefault(KEPT, []).append(what)


def keep(
    value: Direct, encode: Callable[[Any, SentDefinitions | None], Encoded]
) -> tuple[bytes, Any] | None:
    """Keep a value here: the meta bytes that say where it is, and what keeps it. ``None``: it has no memory
    that could stay, refers to refs, or could not be fetched by others, and travels as any other."""
    # It brings its own definitions, so that any channel can carry it.
    encoded = encode(value.value, None)
    codec, flags, meta, buffers = encoded[:4]
    stays = None
    if buffers and len(encoded) == 4 and not flags & FLAG_REFS:
        stays = holder().keep(value, codec, meta, buffers)
    if stays is None:
        if flags & FLAG_DEFINITIONS:
            SentDefinitions().undo(meta)  # its claims: it was encoded for no channel
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


class Receiving:
    """Values that are kept in this process and are arguments of the call that is being received. The method
    gets the objects themselves, and holds what keeps them until it is over."""

    __slots__ = ("on", "taken")

    def __init__(self) -> None:
        self.on = False
        self.taken: list[Any] = []

    def held_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which keeps what the call has taken."""
        taken, self.taken = self.taken, []
        return functools.partial(_holding, taken, function) if taken else function


def _holding(_taken: list[Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


#: An actor receives calls one after the other, on its main thread.
receiving = Receiving()


def fetched(value: Any) -> Any:
    """``value``, or what it stands for."""
    return value.fetch() if type(value) is Unfetched else value


def reducers(
    encode_any: Callable[[Any, SentDefinitions | None], Encoded], decode_any: Callable[..., Any]
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
