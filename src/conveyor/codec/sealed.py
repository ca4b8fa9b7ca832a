"""A value as plain bytes, for paths that are no channel: whoever carries it need not know its classes."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from conveyor.codec.frames import decode, encode
from conveyor.codec.pickling.definitions import SentDefinitions


class Sealed(Struct, frozen=True):
    """Made by :func:`seal`; can be pickled, and opened any number of times."""

    codec: int
    meta: bytes
    buffers: tuple[bytes, ...]

    def open(self) -> Any:
        """A copy of the value."""
        return decode(self.codec, self.meta, [bytearray(buffer) for buffer in self.buffers])


def seal(value: Any) -> Sealed:
    """Encode ``value``, definitions included. Raises ``SerializationError``."""
    codec, _flags, meta, buffers, *_ = encode(value, SentDefinitions())
    return Sealed(codec, bytes(meta), tuple(bytes(buffer) for buffer in buffers or ()))
