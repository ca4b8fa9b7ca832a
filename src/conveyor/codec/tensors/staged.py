"""Tensors of devices travel in frames by way of the host, through memory that is pinned.

At the writer the copies of all tensors of a value are enqueued when it has been pickled, and waited for once.
They go to the block of the arena that the frame is sent with. At the reader the copies from there are
enqueued on the current stream, ahead of whatever the reader enqueues next: it does not wait. Where a block is
not pinned (``codec/tensors/pinned.py``) a copy goes by way of other memory that is.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor import device as devices
from conveyor.codec.tensors import pinned
from conveyor.codec.tensors.layouts import unexpanded
from conveyor.codec.tensors.pinned import Use
from conveyor.device import Device, Stream
from conveyor.exceptions import SerializationError

if TYPE_CHECKING:
    import torch

STAGED = "staged"
"""Among the notes: the :class:`Staged` of the value that is pickled."""

#: Buffers of a frame lie at multiples of this.
_ALIGN = 64
#: Most bytes of the host's buffers that are copied to the block with the GIL.
_BESIDE = 1 << 20


class Staged:
    """A value's tensors of devices, whose bytes are fetched when it has been pickled.

    framed: the value is sent in a frame, with a block of the arena.
    """

    def __init__(self, framed: bool) -> None:
        self._framed = framed
        #: With what stands for each, and the stream that its values come on.
        self._tensors: dict[int, tuple[bytearray, torch.Tensor, Stream]] = {}
        self._streams: list[Stream] = []

    def buffer(self, tensor: torch.Tensor) -> pickle.PickleBuffer:
        """Return a stand-in for the bytes of a contiguous tensor of a device until :meth:`finish`."""
        place = bytearray()  # writable, as a tensor is
        device = devices.of(tensor)
        assert device is not None
        self._tensors[id(place)] = place, tensor, device.current_stream(tensor.device.index)
        return pickle.PickleBuffer(place)

    def finish(self, buffers: list[Any]) -> None:
        """Put the tensors' bytes in the places of what stands for them. Wait until they are there.

        Raises:
            SerializationError: something has gone wrong on a device.
        """
        places = [place for place, buffer in enumerate(buffers) if id(buffer.obj) in self._tensors]
        if not places:
            return
        tensors = {place: self._tensors[id(buffers[place].obj)][1:] for place in places}
        sizes = [tensor.nbytes for tensor, _ in tensors.values()]
        block = self._block(sizes, [b for b in buffers if id(b.obj) not in self._tensors])
        if block is not None:
            return self._fill(block, buffers, tensors)
        here = [self._take(tensor, stream) for tensor, stream in tensors.values()]
        self._synchronize()
        for place, copied in zip(places, here, strict=True):
            buffers[place] = memoryview(copied.numpy())

    def _take(self, tensor: torch.Tensor, stream: Stream) -> torch.Tensor:
        here = stream.device.empty_pinned(tensor.nbytes)
        self._copy(here, tensor, stream)
        return here

    def _copy(self, target: torch.Tensor, tensor: torch.Tensor, stream: Stream) -> None:
        self._streams.append(stream)
        with stream.device.using(stream):
            stream.device.copy(target, _bytes_of(tensor))

    def _block(self, sizes: Sequence[int], others: Sequence[Any]) -> _core.Buffer | None:
        """Memory of the arena for all buffers of a frame. ``None``: it is to be copied there later."""
        process = pinned.current() if self._framed else None
        nbytes = sum(map(_aligned, sizes))
        if process is None or nbytes < pinned.LEAST:
            return None
        beside = sum(_aligned(other.nbytes) for other in others)
        if beside > min(nbytes, _BESIDE):
            return None
        return process.allocate(nbytes + beside)

    def _fill(
        self,
        block: _core.Buffer,
        buffers: list[Any],
        tensors: dict[int, tuple[torch.Tensor, Stream]],
    ) -> None:
        process = pinned.current()
        assert process is not None
        kinds: dict[str, Use | None] = {}
        by_the_way: list[tuple[torch.Tensor, torch.Tensor]] = []
        at = 0
        try:
            for place, buffer in enumerate(buffers):
                if place not in tensors:
                    part = buffers[place] = block.part(at, buffer.nbytes)
                    at += _aligned(buffer.nbytes)
                    memoryview(part)[:] = buffer
                    continue
                tensor, stream = tensors[place]
                part = buffers[place] = block.part(at, tensor.nbytes)
                at += _aligned(tensor.nbytes)
                device, target = stream.device, pinned.over(part.address, tensor.nbytes)
                if device.kind not in kinds:
                    kinds[device.kind] = process.take(block, device)
                if kinds[device.kind] is None:
                    by_the_way.append((target, self._take(tensor, stream)))
                else:
                    self._copy(target, tensor, stream)
            self._synchronize()
        except BaseException:
            # No device may write there any more when the block is another value's.
            self._calm()
            raise
        finally:
            for use in kinds.values():
                if use is not None:
                    process.give_back(use)
        for target, here in by_the_way:
            target.copy_(here)

    def _synchronize(self) -> None:
        for stream in self._streams:
            try:
                stream.synchronize()
            except Exception as error:  # a simulated kernel's may be any
                raise SerializationError(
                    f"the device {stream.device.kind}:{stream.index} has failed before a tensor of it could "
                    f"be sent: {type(error).__name__}: {error}"
                ) from error
        self._streams.clear()

    def _calm(self) -> None:
        for stream in self._streams:
            with suppress(Exception):  # one error is enough
                stream.synchronize()
        self._streams.clear()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, whatever its shape."""
    import torch

    storage = tensor.untyped_storage()
    begin = tensor.storage_offset() * tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, begin, (tensor.nbytes,), (1,))


def check(on: torch.Tensor | torch.UntypedStorage) -> None:
    """Refuse tensors of devices that have no values, or that nobody knows how to copy."""
    kind = on.device.type
    if kind == "meta":
        raise SerializationError(
            "a tensor on device 'meta' has no values that could be sent: send its shape and dtype, or "
            "make it on a real device (torch.empty_like(x, device='cpu'))"
        )
    if kind != "cpu" and devices.get(kind) is None:
        raise SerializationError(
            f"a tensor on device {str(on.device)!r} cannot be sent: nobody has registered devices of this "
            f"kind (conveyor.device.register); call .cpu() on it, or use a tensor transport for this edge"
        )


def place_for(on: torch.Tensor | torch.UntypedStorage, kind: str) -> tuple[Device, str | None]:
    """Say where the reader puts what is ``on`` a device here, if it is to be on one of this kind: on the same
    one, if that is of this kind."""
    device = devices.get(kind)
    if device is None:
        raise SerializationError(
            f"a tensor is to be on a device of the kind {kind!r}, which nobody has registered here "
            f"(conveyor.device.register)"
        )
    return device, device.identity(on.device.index) if on.device.type == kind else None


_found: set[str] = set()


def bring(made: torch.Tensor, device: Device, identity: str | None) -> torch.Tensor:
    """Put a tensor of the host on the device of that identity, if this process has it; on its current one
    otherwise. A tensor that was on such a device stays in memory of the host where there is none.

    Raises:
        SerializationError: this process has no device of the kind, where the tensor was asked to be.
    """
    if not _usable(device, identity):
        return made
    index = _index_of(device, identity)
    if not made.numel():
        return device.empty(0, index).view(made.dtype).as_strided(made.shape, made.stride())
    once = unexpanded(made)
    strides = once.stride()
    flat = once.permute(sorted(range(once.ndim), key=lambda i: -strides[i])).reshape(-1)
    pinned = device.empty_pinned(flat.numel() * flat.element_size())
    pinned.view(made.dtype).copy_(flat)
    there = device.empty(pinned.numel(), index)
    device.copy(there, pinned)
    return there.view(made.dtype).as_strided(once.shape, strides).expand(made.shape)


def bring_bytes(buffer: Any, device: Device, identity: str | None) -> torch.Tensor | None:
    """Copy what came in a frame to the device, from where it lies: a tensor of bytes there, for the current
    stream. ``None``: that memory is not pinned, or the tensor stays in memory of the host.

    Raises:
        SerializationError: this process has no device of the kind.
    """
    process = pinned.current()
    if process is None or not _usable(device, identity):
        return None
    use = process.take(buffer, device)
    if use is None:
        return None
    enqueued = False
    try:
        index = _index_of(device, identity)
        there = device.empty(buffer.nbytes, index)
        enqueued = True  # before: a handler may raise when it is, and has not returned
        device.copy(there, pinned.over(buffer.address, buffer.nbytes))
        process.hold(device.current_stream(index).record(), buffer, use)
        return there
    except BaseException:
        if enqueued:  # the block must not be another value's while the device reads it
            device.synchronize(index)
        process.give_back(use)
        raise


def _usable(device: Device, identity: str | None) -> bool:
    """Whether there is a device of the kind here. ``identity``: where the tensor was; ``None``: elsewhere,
    and it was asked to be on such a device."""
    kind = device.kind
    if kind not in _found:
        why_not = device.viable()
        if why_not is not None:
            if identity is not None:
                _tell_once(kind, why_not)
                return False
            raise SerializationError(
                f"a tensor that is to be on a device of the kind {kind!r} has come to a process that has "
                f"none ({why_not}): call .cpu() on it before it is sent, or mark its node with "
                f"with_tensor_transport(device='cpu')"
            )
        _found.add(kind)
    return True


@functools.cache
def _tell_once(kind: str, why: str) -> None:
    import logging  # slow to import, and rarely needed

    logging.getLogger("conveyor").warning(
        "tensors of devices of the kind %r that come to this process stay in memory of the host, since it "
        "has no such device: %s",
        kind,
        why,
    )


def _index_of(device: Device, identity: str | None) -> int:
    if identity is not None:
        for index in range(device.count()):
            if device.identity(index) == identity:
                return index
    return device.current_index()


def fetched(contiguous: torch.Tensor) -> pickle.PickleBuffer:
    """The bytes of a tensor of a device, at once."""
    alone = Staged(framed=False)
    buffers: list[Any] = [alone.buffer(contiguous).raw()]
    alone.finish(buffers)
    return pickle.PickleBuffer(buffers[0])
