"""Values that stay in the process that made them.

The frame of a :class:`Direct` says where the value is: whoever decodes it fetches the memory from there. What
is kept as long as anybody has the frame is the value itself, so nobody finds it gone who could still ask.
"""

from __future__ import annotations

import functools
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from conveyor import _core
from conveyor.codec.encoded import (
    DIRECT,
    FINAL,
    FLAG_DEFINITIONS,
    FLAG_REFS,
    HELD,
    SENT,
    Encoded,
    Reducer,
    ReducerFactory,
)
from conveyor.codec.out_of_band import TensorSpec
from conveyor.codec.pickling import pickler
from conveyor.codec.pickling.definitions import SentDefinitions
from conveyor.codec.tensors.collected import Collected
from conveyor.later import import_later


class Direct:
    """A value that is to stay here.

    transport: the name that was asked for, ``"auto"`` among them. One that a user has registered moves
    what it is for; any other is only told.
    snapshot: it stays as it is now, in a copy.
    """

    __slots__ = ("snapshot", "transport", "value")

    def __init__(self, value: Any, transport: str, snapshot: bool = False) -> None:
        self.value = value
        self.transport = transport
        self.snapshot = snapshot


_head = struct.Struct("<HHIIIIIIQQ")
_file = struct.Struct("<qQ")
_JOINED = 1 << 15


class Located(NamedTuple):
    """Place of a direct value, as its frame gives it.

    slot, incarnation: its process in the process table.
    pid: of that process.
    number: the value's, which no other one has, in any process.
    anchor: the address of a word there that holds the number for as long as the value is kept.
    names: :attr:`holder`, :attr:`transport` and :attr:`snapshot`.
    ranges: address and length of each of its buffers, as pairs of 64-bit numbers.
    codec, meta: of the value, which is decoded with the contents of the buffers.
    beside: a packed :class:`~conveyor.codec.direct.OutOfBand`, if some of the value's tensors are got in
    another way than by reading.
    arena_ranges: where the ranges lie in that process's arena, as ``_core.ranges_in_arena`` says it, with
    :class:`File` in front, if any does.
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
    out_of_band: bytes = b""
    arena_ranges: bytes = b""
    joined: bool = False

    @property
    def holder(self) -> str:
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
        out_of_band = ranges + aside
        arena_ranges = out_of_band + placed
        return cls(
            slot,
            incarnation,
            pid,
            number,
            anchor,
            packed[_head.size : names],
            packed[names:ranges],
            codec & ~_JOINED,
            packed[arena_ranges:],
            packed[ranges:out_of_band],
            packed[out_of_band:arena_ranges],
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
    out_of_band: bytes = b"",
    arena_ranges: bytes = b"",
    joined: bool = False,
) -> bytes:
    """Make the bytes of :meth:`Located.pack` without a ``Located``. ``native/python/decode.h`` reads them,
    too."""
    if joined:
        codec |= _JOINED
    sizes = len(names), slot, incarnation, pid, len(ranges), len(out_of_band), len(arena_ranges)
    head = _head.pack(codec, *sizes, number, anchor)
    return b"".join((head, names, ranges, out_of_band, arena_ranges, meta))


class File(NamedTuple):
    """The file of a process's arena.

    descriptor: its number there.
    inode: its own, which no other arena's file has.
    """

    descriptor: int
    inode: int

    def pack(self) -> bytes:
        """Pack this as the front of :attr:`Located.arena_ranges`."""
        return _file.pack(*self)

    @classmethod
    def split(cls, arena_ranges: bytes) -> tuple[File, bytes]:
        """Split the bytes of :attr:`Located.arena_ranges` into the file in front, and the rest."""
        return cls(*_file.unpack_from(arena_ranges)), arena_ranges[_file.size :]


def names_of(transport: str, holder: str, snapshot: bool) -> bytes:
    """Pack what ``Located.names`` holds."""
    return "\0".join([transport, holder, *["snapshot"] * snapshot]).encode()


class Receiving:
    """Values that are kept in this process and are arguments of the call that is being received. The method
    gets the objects themselves, and holds what keeps them until it is over."""

    __slots__ = ("on", "taken")

    def __init__(self) -> None:
        self.on = False
        self.taken: list[Any] = []

    def held_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` so that it keeps what the call has taken."""
        taken, self.taken = self.taken, []
        return functools.partial(_call_with, taken, function) if taken else function


def _call_with(
    _taken: list[Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return function(*args, **kwargs)


#: An actor receives calls one after the other, on its main thread.
receiving = Receiving()


class Route(ABC):
    """Way to get tensors of a value other than by reading. It is sent to whoever fetches, so it can be
    pickled.

    name: the name of the route.
    takes_all: it is asked of each tensor of the value; else only of those that are on no CPU.
    """

    name: str
    takes_all: bool = False

    @abstractmethod
    def collected(self) -> Collected:
        """Return the collection that takes the tensors of this route out of the value while the value is
        encoded."""

    def specs(self, tensors: list[Any]) -> Sequence[TensorSpec]:
        """Describe the tensors, for the frame, beside the note."""
        return [TensorSpec.of(one) for one in tensors]

    def copied(self, tensor: Any) -> Any:
        """Copy one of the tensors, for a snapshot."""
        return tensor.clone()

    @abstractmethod
    def offer(self, number: int, tensors: list[Any]) -> bytes | None:
        """Offer contiguous tensors to others; they are kept here until :meth:`forget`. Returns a note for
        the others; ``None``: they cannot have the tensors.

        number: of the value.
        """

    @abstractmethod
    def fetch(self, where: Located, specs: Sequence[TensorSpec], note: bytes) -> list[Any]:
        """Get copies of tensors of the value at ``where``, which another process has offered. Returns when
        they are made."""

    def route_name(self, note: bytes) -> str:
        """Name the way by which this process would get what ``note`` offers, as ``Ref.route`` tells it."""
        return self.name

    def forget(self, number: int, note: bytes, tensors: list[Any]) -> None:  # noqa: B027 - most have nothing
        """Let go of the tensors: the value is kept no more."""


class OutOfBand(NamedTuple):
    """Description, in a frame, of the tensors that are got by a route.

    route: how they are got.
    specs: shape, dtype and device of each; none if the note says them.
    note: of the route.
    """

    route: Route
    specs: Sequence[TensorSpec]
    note: bytes

    def pack(self) -> bytes:
        """Pack this for ``Located.out_of_band``."""
        return pickle.dumps(tuple(self), 5)

    @classmethod
    def unpack(cls, packed: bytes) -> OutOfBand:
        """Rebuild a description from the bytes of :meth:`pack`."""
        return cls(*pickle.loads(packed))


class Unfetched:
    """Stand-in for a value that has not been fetched."""

    __slots__ = ("_decode_any", "_holder", "meta")

    def __init__(self, meta: bytes, decode_any: Callable[..., Any], holder: Any = None) -> None:
        self.meta = meta
        self._decode_any = decode_any
        self._holder = holder

    @property
    def where(self) -> Located:
        """Place of the value."""
        return Located.unpack(self.meta)

    def here(self) -> Any:
        """Return the object that keeps the value, if this process keeps it, else ``None``."""
        return holder().find(self.where.number)

    def fetch(self) -> Any:
        """Fetch the value."""
        return holder().fetch(self.where, self._decode_any)

    def decode_with(self, buffers: list[Any]) -> Any:
        """Decode the value over ``buffers``, whose memory may be filled later."""
        where = self.where
        return self._decode_any(where.codec, where.meta, buffers)

    def where_part(self, index: tuple[Any, ...]) -> Located | None:
        """Return the place of a part of the value; ``None``: only the whole can be fetched.

        Raises:
            IndexError: there is no such part.
        """
        return holder().part(self.where, index)

    def part(self, index: tuple[Any, ...]) -> Any:
        """Return a part of the value, fetched alone where possible."""
        part = self.where_part(index) if self.here() is None else None
        if part is not None:
            return holder().fetch(part, self._decode_any)
        return self.fetch()[index[0] if len(index) == 1 else index]

    def moved(self, where: Located) -> Unfetched:
        """Return the same stand-in with another place."""
        return Unfetched(where.pack(), self._decode_any, self._holder)

    def with_holder(self, holder: Any) -> Unfetched:
        """Return the same stand-in, to be sent. The value is kept as long as ``holder``, so that whoever
        receives the stand-in can fetch it."""
        return Unfetched(self.meta, self._decode_any, holder)

    def reduced(self, notes: dict[Any, Any]) -> Any:
        """Reduce this for a pickle."""
        sent = notes.get(SENT)
        if sent is None or sent.in_band or (sent.is_remote() and self.where.out_of_band):
            return itself, (
                self.fetch(),
            )  # nobody would keep it, or its readers cannot get all of it
        keep_out_of_band(notes, self._holder)
        return self._decode_any, (DIRECT, self.meta)


def fetched(value: Any) -> Any:
    """Return ``value``, or the value that it stands for, fetched."""
    return value.fetch() if type(value) is Unfetched else value


def itself(value: Any) -> Any:
    return value


class Holder(Protocol):
    """Interface to this process's store of direct values, which is in a higher layer."""

    def route(self, direct: Direct) -> Route | None:
        """Return the route by which others get those tensors of the value that they cannot read; ``None``:
        there is none."""
        ...

    def keep(
        self,
        direct: Direct,
        codec: int,
        meta: bytes,
        buffers: list[Any],
        route: Route | None,
        tensors: list[Any],
    ) -> tuple[bytes, Any] | None:
        """Keep ``direct.value``, which was encoded as ``codec``, ``meta`` and ``buffers``, except for
        ``tensors``, which others get by ``route``. Returns the packed place of the value, and the object
        that keeps it: the value goes when that object is garbage. ``None``: no other process could get it."""
        ...

    def begin(self) -> None:
        """Prepare for keeping something here as long as somebody has a frame."""
        ...

    def find(self, number: int) -> Any:
        """Return the object that keeps the value of that number here, with its ``value``; ``None``: it is
        elsewhere."""
        ...

    def part(self, where: Located, index: tuple[Any, ...]) -> Located | None:
        """Return the place of a part of a value; see :meth:`Unfetched.where_part`."""
        ...

    def fetch_small(self, meta: bytes) -> tuple[int, bytes, list[Any]] | None:
        """Fetch a small value of another process, found by the meta bytes of its frame. Returns the codec,
        meta bytes and buffers to be decoded; ``None``: :meth:`fetch` may get it all the same."""
        ...

    def fetch(
        self, where: Located, decode: Callable[..., Any], sure: _core.InPlace | None = None
    ) -> Any:
        """Fetch a value, which is decoded with ``decode(codec, meta, buffers)``. ``sure``: a lease that
        keeps the value in place."""
        ...


_holder: Holder | None = None


def holder() -> Holder:
    """Return this process's holder, which is imported from above at the first need."""
    global _holder
    if _holder is None:
        _holder = import_later("conveyor.direct").HOLDER
    return _holder


def keep_out_of_band(notes: dict[Any, Any], what: Any) -> None:
    """Keep ``what`` as long as anybody has the frame of the value that is being pickled with these notes."""
    holder().begin()
    notes.setdefault(HELD, []).append(what)


__all__ = [
    "DIRECT",
    "Direct",
    "File",
    "Holder",
    "Located",
    "OutOfBand",
    "Receiving",
    "Route",
    "Unfetched",
    "decode",
    "encode",
    "fetched",
    "holder",
    "keep",
    "keep_out_of_band",
    "names_of",
    "packed",
    "receiving",
    "reducers",
]

EncodeAny = Callable[[Any, "SentDefinitions | None"], Encoded]
"""Signature of :func:`conveyor.codec.frames.encode`."""


def keep(
    value: Direct, encode_any: EncodeAny, on_other_node: bool = False
) -> tuple[bytes, Any] | None:
    """Keep a value in this process. Returns the meta bytes that say where the value is, and the object that
    keeps it. ``None``: the value has no memory that could stay, refers to refs, or could not be fetched by
    others; it travels as any other. ``on_other_node``: some readers are on other nodes, where memory is
    fetched and no other route leads."""
    route = None if on_other_node else holder().route(value)
    if route is not None:
        collected = route.collected()
        made = _keep(value, pickler.dump if route.takes_all else encode_any, route, collected)
        if made is not None or not collected.tensors:
            return made
    return _keep(value, encode_any)


def _keep(
    value: Direct,
    encode_any: EncodeAny,
    route: Route | None = None,
    collected: Collected | None = None,
) -> tuple[bytes, Any] | None:
    # It brings its own definitions, so that any channel can carry it.
    sent = SentDefinitions()
    sent.collected = collected
    sent.by_reference = True
    try:
        encoded = encode_any(value.value, sent)
    finally:
        sent.collected = None  # a pickler may keep ``sent`` until it gets another value
    codec, flags, meta, buffers = encoded[:4]
    tensors = [] if collected is None else collected.tensors
    stored = None
    if (buffers or tensors) and len(encoded) == 4 and not flags & FLAG_REFS:
        stored = holder().keep(value, codec, meta, buffers or [], route, tensors)
    if stored is None and flags & FLAG_DEFINITIONS:
        SentDefinitions().undo(meta)  # its borrows: it was encoded for no channel
    return stored


def encode(value: Direct, sent: SentDefinitions | None, encode_any: EncodeAny) -> Encoded:
    """Encode a value that stays in this process; see :func:`conveyor.codec.frames.encode`, which is
    ``encode_any``."""
    made = keep(value, encode_any, sent is not None and bool(sent.is_remote()))
    if made is None:
        return encode_any(value.value, sent)
    meta, held = made
    return DIRECT, 0, meta, None, held


def decode(meta: bytes, decode_any: Callable[..., Any]) -> Any:
    """Return the value, fetched; where fetching is off, an ``Unfetched`` in its place. ``decode_any``:
    :func:`conveyor.codec.frames.decode`."""
    if not _core.fetches():
        return Unfetched(meta, decode_any)
    keeps = holder()
    small = keeps.fetch_small(meta)
    if small is not None:
        return decode_any(*small)
    where = Located.unpack(meta)
    return keeps.fetch(
        where, decode_any, _core.sure_lease(where.number) if where.arena_ranges else None
    )


def reducers(encode_any: EncodeAny, decode_any: Callable[..., Any]) -> ReducerFactory:
    """Make reducers for direct values inside of other values, such as the elements of a result that has
    several."""

    def make_reducers(notes: dict[Any, Any]) -> dict[type, Reducer]:
        def reduce(direct: Direct) -> Any:
            sent = notes.get(SENT)
            try:
                made = None
                if sent is not None and not sent.in_band:
                    made = keep(direct, encode_any, bool(sent.is_remote()))
            except Exception as error:
                # A route has refused it. That is told as it is.
                notes[FINAL] = error
                raise
            if made is None:
                return itself, (direct.value,)
            meta, held = made
            keep_out_of_band(notes, held)
            return decode_any, (DIRECT, meta)

        return {Direct: reduce, Unfetched: lambda value: value.reduced(notes)}

    return make_reducers
