"""Values that stay in the process that made them.

The frame of a :class:`Direct` says where the value is: whoever decodes it fetches the memory from there. What
is kept as long as anybody has the frame is the value itself, so nobody finds it gone who could still ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conveyor import _core
from conveyor.codec.direct.holder import Holder, Unfetched, fetched, holder, itself, keep_beside
from conveyor.codec.direct.located import File, Located, names_of, packed
from conveyor.codec.direct.receiving import Receiving, receiving
from conveyor.codec.direct.routes import Beside, Route
from conveyor.codec.direct.value import Direct
from conveyor.codec.encoded import (
    DIRECT,
    FINAL,
    FLAG_DEFINITIONS,
    FLAG_REFS,
    SENT,
    Encoded,
    Reducer,
    ReducerFactory,
)
from conveyor.codec.pickling import pickler
from conveyor.codec.pickling.definitions import SentDefinitions
from conveyor.codec.tensors.beside import Collected

__all__ = [
    "DIRECT",
    "Beside",
    "Direct",
    "File",
    "Holder",
    "Located",
    "Receiving",
    "Route",
    "Unfetched",
    "decode",
    "encode",
    "fetched",
    "holder",
    "keep",
    "keep_beside",
    "names_of",
    "packed",
    "receiving",
    "reducers",
]

EncodeAny = Callable[[Any, "SentDefinitions | None"], Encoded]
"""As :func:`conveyor.codec.frames.encode`."""


def keep(value: Direct, encode_any: EncodeAny, afar: bool = False) -> tuple[bytes, Any] | None:
    """Keep a value in this process. Returns the meta bytes that say where the value is, and the object that
    keeps it. ``None``: the value has no memory that could stay, refers to refs, or could not be fetched by
    others; it travels as any other. ``afar``: some readers are on other nodes, where memory is fetched and
    no other route leads."""
    route = None if afar else holder().route(value)
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
    sent.stays = True
    try:
        encoded = encode_any(value.value, sent)
    finally:
        sent.collected = None  # a pickler may keep ``sent`` until it gets another value
    codec, flags, meta, buffers = encoded[:4]
    tensors = [] if collected is None else collected.tensors
    stays = None
    if (buffers or tensors) and len(encoded) == 4 and not flags & FLAG_REFS:
        stays = holder().keep(value, codec, meta, buffers or [], route, tensors)
    if stays is None and flags & FLAG_DEFINITIONS:
        SentDefinitions().undo(meta)  # its claims: it was encoded for no channel
    return stays


def encode(value: Direct, sent: SentDefinitions | None, encode_any: EncodeAny) -> Encoded:
    """Encode a value that stays in this process; see :func:`conveyor.codec.frames.encode`, which is
    ``encode_any``."""
    made = keep(value, encode_any, sent is not None and bool(sent.elsewhere()))
    if made is None:
        return encode_any(value.value, sent)
    meta, kept = made
    return DIRECT, 0, meta, None, kept


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
    return keeps.fetch(where, decode_any, _core.sure_lease(where.number) if where.lying else None)


def reducers(encode_any: EncodeAny, decode_any: Callable[..., Any]) -> ReducerFactory:
    """Make reducers for direct values inside of other values, such as the elements of a result that has
    several."""

    def make_reducers(notes: dict[Any, Any]) -> dict[type, Reducer]:
        def reduce(direct: Direct) -> Any:
            sent = notes.get(SENT)
            try:
                made = None
                if sent is not None and not sent.in_band:
                    made = keep(direct, encode_any, bool(sent.elsewhere()))
            except Exception as error:
                # A route has refused it. That is told as it is.
                notes[FINAL] = error
                raise
            if made is None:
                return itself, (direct.value,)
            meta, kept = made
            keep_beside(notes, kept)
            return decode_any, (DIRECT, meta)

        return {Direct: reduce, Unfetched: lambda value: value.reduced(notes)}

    return make_reducers
