"""Values whose tensors travel out of band: beside their frame.

The frame of a :class:`OutgoingValue` holds the value with a place for each tensor, what is to be known of the
tensors before they come, and a note of the transport. It is decoded to a :class:`Head`, which gives the
value once they are there.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from conveyor.codec import borrows
from conveyor.codec.encoded import DEFINING, FLAG_DEFINITIONS, Encoded
from conveyor.codec.pickling import pickler, unpickler
from conveyor.codec.pickling.definitions import KnownDefinitions, SentDefinitions
from conveyor.codec.promises import CheckedValue, PromiseChecker
from conveyor.codec.tensors.collected import Collected, placing
from conveyor.codec.tensors.encoding import dtype_name
from conveyor.later import LaterModule


def encode_checked(checked: CheckedValue, sent: SentDefinitions | None) -> Encoded:
    """Encode a value with promises; see :func:`conveyor.codec.frames.encode`."""
    sent = SentDefinitions() if sent is None else sent
    sent.checker = checked.checker
    try:
        encoded = pickler.dump(checked.value, sent)
    finally:
        sent.checker = None
    _, flags, meta, *_ = encoded
    end_of(checked.checker, sent, flags, meta)
    return encoded


def end_of(checker: PromiseChecker, sent: SentDefinitions, flags: int, meta: bytes) -> None:
    """Finish the pickling of a value with promises. If the value breaks a promise, its definitions are taken
    back."""
    try:
        checker.end()
    except BaseException:
        if flags & FLAG_DEFINITIONS:
            sent.undo(meta)
        raise


if TYPE_CHECKING:
    import torch
else:
    torch = LaterModule("torch")

OUTGOING = 20
"""Codec: a pickle with places for tensors, and behind it what is known of them."""

_length = struct.Struct("<I")


class TensorSpec(NamedTuple):
    """Description of a tensor before it comes; the tensor is contiguous.

    dtype: its name without ``torch.``: ``"float32"``.
    shape: its sizes.
    device: where the writer has it: ``"cpu"``, ``"cuda:0"``.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """Describe ``tensor``."""
        return TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape), str(tensor.device))


class OutgoingValue(NamedTuple):
    """A value to be sent.

    value: it may hold tensors anywhere.
    accepts: says why a tensor cannot go beside the frame, in words that follow "a tensor"; ``None``: it can.
    offer: gets the tensors, contiguous and each once, and returns the note. What it raises keeps the frame
        from being sent.
    keeper: keeps to what was promised of the tensors, if anything was.
    kinds: the kinds of device whose tensors go beside the frame; those of others go in it. ``None``: all do.
    """

    value: Any
    accepts: Callable[[torch.Tensor], str | None]
    offer: Callable[[list[torch.Tensor]], bytes]
    checker: PromiseChecker | None = None
    kinds: frozenset[str] | None = None


class Head(NamedTuple):
    """Contents of a frame's frame, as received.

    tensors: what comes beside it.
    note: of the transport.
    encoded: codec, meta bytes and buffers of the value.
    """

    tensors: tuple[TensorSpec, ...]
    note: bytes
    encoded: tuple[int, bytes, list[Any] | None]

    def mismatch(self, came: Any) -> str | None:
        """Say how what has come differs from the tensors that were announced; ``None``: it does not."""
        if not isinstance(came, (list, tuple)):
            return f"a list of tensors was announced, and {_kind(came)} came"
        if len(came) != len(self.tensors):
            return f"{len(self.tensors)} tensors were announced, and {len(came)} came"
        for spec, tensor in zip(self.tensors, came, strict=True):
            if type(tensor) is not torch.Tensor or tensor.is_inference():
                return f"{_described(spec)} was announced, and {_kind(tensor)} came"
            other = TensorSpec.of(tensor)
            if (spec.dtype, spec.shape) != (other.dtype, other.shape) or other.device == "meta":
                return f"{_described(spec)} was announced, and {_described(other)} came"
        return None

    def open(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Put the value together. There is no :meth:`mismatch`.

        Raises:
            SerializationError: the value cannot be rebuilt here.
        """
        codec, meta, buffers = self.encoded
        with placing([tensor.contiguous() for tensor in tensors]):
            return unpickler.load(codec, meta, buffers, None)

    def give_up(self) -> None:
        """Let go of what the value refers to: nobody will put it together."""
        codec, meta, _ = self.encoded
        if codec == DEFINING:
            borrows.give_up(meta)


def _described(spec: TensorSpec) -> str:
    where = "" if spec.device == "cpu" else f", on {spec.device}"
    return f"a tensor ({spec.dtype}, shape {list(spec.shape)}{where})"


def _kind(value: Any) -> str:
    return "an inference tensor" if type(value) is torch.Tensor else f"a {type(value).__name__}"


def encode(outgoing: OutgoingValue, sent: SentDefinitions | None) -> Encoded:
    """Encode a frame; see :func:`conveyor.codec.frames.encode`."""
    sent = SentDefinitions() if sent is None else sent
    checker = sent.checker = outgoing.checker
    device = None if checker is None else checker.device
    sent.collected = collected = Collected(outgoing.accepts, device, outgoing.kinds)
    try:
        codec, flags, meta, buffers, *held = pickler.dump(outgoing.value, sent)
    finally:
        sent.collected = sent.checker = None
    if checker is not None:
        end_of(checker, sent, flags, meta)
    try:
        note = outgoing.offer(collected.tensors)
        headers = [tuple(TensorSpec.of(tensor)) for tensor in collected.tensors]
        tail = pickle.dumps((codec, headers, note), 5)
    except BaseException:
        if flags & FLAG_DEFINITIONS:
            sent.undo(meta)
        raise
    # Behind the pickle, since the core looks for a frame's definitions in front of it.
    whole = b"".join([meta, tail, _length.pack(len(tail))])
    return (OUTGOING, flags, whole, buffers, held) if held else (OUTGOING, flags, whole, buffers)


def decode(meta: bytes, buffers: list[Any] | None, known: KnownDefinitions | None = None) -> Head:
    """Read the frame; the value's own pickle is left for :meth:`Head.open`."""
    end = len(meta) - _length.size
    (length,) = _length.unpack_from(meta, end)
    codec, headers, note = pickle.loads(meta[end - length : end])
    value = meta[: end - length]
    # Frames behind it may need the definitions, whatever becomes of this value.
    if codec == DEFINING and known is not None:
        unpickler.learn(value, known)
    tensors = tuple([TensorSpec(*header) for header in headers])
    return Head(tensors, note, (codec, value, buffers))
