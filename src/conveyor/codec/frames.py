"""Contents of frames: values to bytes and back.

The native core encodes plain data: None, bool, int, float, str, bytes, and tuples, lists and dicts of
exactly these. Everything else comes here, and goes by its exact type to an encoder, or to the general
pickler:

===== ======== =================================================================================
codec name     meta
===== ======== =================================================================================
16    PICKLE   a pickle of protocol 5
17    DEFINING definitions by value and borrows to refs, then a pickle (FLAG_DEFINITIONS)
18    ARRAY    header of an ``numpy.ndarray``; one buffer, or none if it has no elements
19    TENSOR   header of a ``torch.Tensor`` on the CPU; one buffer, or none
20    PARCEL   a pickle whose tensors travel beside the frame, and what is known of them
21    DIRECT   where a value is that has stayed in the process that made it
22             none: the native core's, plain data with metas of DIRECT among it
===== ======== =================================================================================

NumPy and torch are never imported for a process that has not imported them, unless it receives
an array or a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from conveyor.codec import arrays, borrows, direct, out_of_band
from conveyor.codec.arrays import ARRAY
from conveyor.codec.direct import DIRECT, Direct
from conveyor.codec.encoded import DEFINING, PICKLE, Encoded
from conveyor.codec.out_of_band import OUTGOING, OutgoingValue
from conveyor.codec.pickling import pickler, unpickler
from conveyor.codec.pickling.definitions import KnownDefinitions, SentDefinitions
from conveyor.codec.promises import CheckedValue
from conveyor.codec.tensors import encoding as tensors
from conveyor.codec.tensors import reducers
from conveyor.codec.tensors.encoding import TENSOR
from conveyor.exceptions import SerializationError

_encoders: dict[type, Callable[[Any], Encoded | None]] = {}


def encode(value: Any, sent: SentDefinitions | None = None) -> Encoded:
    """``(codec, flags, meta, buffers)`` for a channel that has carried the definitions in ``sent``.

    The buffers are C-contiguous and the value's own memory: copy them before it can change.
    Raises ``SerializationError``, and leaves ``sent`` as it was, for a value that cannot be sent.
    """
    encoder = _encoders.get(type(value))
    if encoder is not None:
        encoded = encoder(value)
        if encoded is not None:
            return encoded
    if type(value) is OutgoingValue:
        return out_of_band.encode(value, sent)
    if type(value) is Direct:
        return direct.encode(value, sent, encode)
    if type(value) is CheckedValue:
        return out_of_band.encode_checked(value, sent)
    return pickler.dump(value, sent)


def decode(
    codec: int,
    meta: bytes,
    buffers: list[Any] | None = None,
    known: KnownDefinitions | None = None,
) -> Any:
    """The value. It refers to the buffers as long as it needs their memory.

    ``known`` belongs to the channel and keeps what its frames have defined. Without it the frame brings what
    it needs, or has been announced.
    """
    if codec in (PICKLE, DEFINING):
        return unpickler.load(codec, meta, buffers, known)
    if codec == ARRAY:
        return arrays.decode(meta, buffers)
    if codec == TENSOR:
        return tensors.decode(meta, buffers)
    if codec == OUTGOING:
        return out_of_band.decode(meta, buffers, known)
    if codec == DIRECT:
        return direct.decode(meta, decode)
    raise SerializationError(f"a frame has codec {codec}, which this process does not know")


def discard(meta: bytes, known: KnownDefinitions | None = None) -> None:
    """Take note of the definitions in a frame that nobody will ever decode, and give its borrows up."""
    try:
        if known is not None:
            unpickler.learn(meta, known)
    finally:  # also after Ctrl-C: this is not tried again
        borrows.give_up(meta)


def _numpy_is_here() -> None:
    import numpy as np

    _encoders[np.ndarray] = arrays.make_encoder()
    pickler.add_reducers(arrays.make_reducers)


def _torch_is_here() -> None:
    import torch

    _encoders[torch.Tensor] = tensors.make_encoder()
    pickler.add_reducers(reducers.make_reducers)


pickler.add_reducers(direct.reducers(encode, decode))
pickler.when_imported("numpy", _numpy_is_here)
pickler.when_imported("torch", _torch_is_here)


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
