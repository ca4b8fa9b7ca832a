"""Tensors of devices travel in frames by way of the host, through memory that is pinned.

At the writer the copies of all tensors of a value are enqueued while it is pickled, and waited for once. At
the reader its bytes are copied to pinned memory, and from there on the current stream, ahead of whatever the
reader enqueues next: it does not wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conveyor import device as devices
from conveyor.codec.layouts import unexpanded
from conveyor.device import Device, Stream
from conveyor.exceptions import SerializationError

if TYPE_CHECKING:
    import torch

STAGED = "staged"
"""Among the notes: the :class:`Staged` of the value that is pickled."""


class Staged:
    """Copies of a value's tensors to the host, which are under way."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, int], Stream] = {}

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Enqueue a copy of a contiguous tensor of a device: a tensor of the host, whose values are there
        after :meth:`finish`."""
        device = devices.of(tensor)
        assert device is not None
        here = device.empty_pinned(tensor.numel() * tensor.element_size())
        here = here.view(tensor.dtype).view(tensor.shape)
        device.copy(here, tensor)
        index = tensor.device.index
        self._streams[device.kind, index] = device.current_stream(index)
        return here

    def finish(self) -> None:
        """Wait until the values are there.

        Raises:
            SerializationError: something has gone wrong on a device.
        """
        streams = list(self._streams.items())
        self._streams.clear()
        for (kind, index), stream in streams:
            try:
                stream.synchronize()
            except Exception as error:  # a simulated kernel's may be any
                raise SerializationError(
                    f"the device {kind}:{index} has failed before a tensor of it could be sent: "
                    f"{type(error).__name__}: {error}"
                ) from error


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


_usable: set[str] = set()


def bring(made: torch.Tensor, device: Device, identity: str | None) -> torch.Tensor:
    """Put a tensor of the host on the device of that identity, if this process has it; on its current one
    otherwise.

    Raises:
        SerializationError: this process has no device of the kind.
    """
    kind = device.kind
    if kind not in _usable:
        why_not = device.viable()
        if why_not is not None:
            raise SerializationError(
                f"a tensor that is to be on a device of the kind {kind!r} has come to a process that has "
                f"none ({why_not}): call .cpu() on it before it is sent, or mark its node with "
                f"with_tensor_transport(device='cpu')"
            )
        _usable.add(kind)
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


def _index_of(device: Device, identity: str | None) -> int:
    if identity is not None:
        for index in range(device.count()):
            if device.identity(index) == identity:
                return index
    return device.current_index()


def reduced(contiguous: Any, staged: Staged | None) -> torch.Tensor:
    """Make a tensor of the host of one that is anywhere: at once, if ``staged`` is none."""
    if contiguous.is_cpu:
        return contiguous
    if staged is not None:
        return staged.take(contiguous)
    alone = Staged()
    here = alone.take(contiguous)
    alone.finish()
    return here
