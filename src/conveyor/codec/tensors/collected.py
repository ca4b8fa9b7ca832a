"""The tensors of a value that travel beside its frame: taken out while it is pickled, put in while it is
unpickled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from conveyor.codec.tensors.encoding import (
    alias,
    dense,
    dtype_name,
    is_dense,
    lies_within,
    plain_values,
    widest,
)
from conveyor.codec.tensors.staging import moved_to, target_device
from conveyor.device import Device
from conveyor.exceptions import SerializationError
from conveyor.storages import check_storage

if TYPE_CHECKING:
    import torch


class Collected:
    """The tensors of a value that travel beside its frame: contiguous, each once."""

    def __init__(
        self,
        accepts: Callable[[torch.Tensor], str | None],
        device: str | None = None,
        kinds: frozenset[str] | None = None,
    ) -> None:
        """``accepts`` says why a tensor cannot, in words that follow "a tensor"; ``None``: it can.
        ``device``: where the readers put them; ``None``: they stay where they come.
        ``kinds``: the kinds of device whose tensors travel so, those of others stay in the frame; ``None``:
        all do."""
        self._device = device
        self._kinds = kinds
        self.tensors: list[torch.Tensor] = []
        self._accepts = accepts
        #: By the tensor's identity. A value may be pickled twice before it is right.
        self._taken: dict[int, tuple[torch.Tensor, Any]] = {}
        #: By the address of its storage, the tensor that lies in it and has travelled with most of it.
        self._first: dict[Any, torch.Tensor] = {}

    def wants(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` travels beside the frame, or is refused."""
        return self._kinds is None or tensor.device.type in self._kinds

    def take(self, tensor: torch.Tensor) -> Any:
        """Reduce ``tensor`` to its position.

        Raises:
            SerializationError: it cannot travel this way.
        """
        if id(tensor) in self._taken:
            return self._taken[id(tensor)][1]
        why_not = self._accepts(tensor)
        if why_not is not None:
            raise SerializationError(
                f"a tensor ({dtype_name(tensor.dtype)}, shape {list(tensor.shape)}) {why_not}"
            )
        check_storage(tensor)
        reduced = self._alias_of(tensor) or self._placed(tensor)
        self._taken[id(tensor)] = tensor, reduced
        return reduced

    def _alias_of(self, tensor: torch.Tensor) -> Any:
        """Reduce a tensor that lies in one which travels already."""
        import torch

        if tensor.is_conj() or tensor.is_neg() or torch._is_zerotensor(tensor):
            return None
        storage = tensor.device, tensor.untyped_storage().data_ptr()
        first = self._first.setdefault(storage, tensor)
        offset = tensor.data_ptr() - first.data_ptr()
        if first is tensor:
            return None
        if not is_dense(first) or not lies_within(tensor, first, offset):
            if is_dense(tensor):
                self._first[storage] = widest(first, tensor)
            return None
        shape, strides = tuple(tensor.shape), tensor.stride()
        return alias, (first, tensor.dtype, offset, shape, strides, tensor.requires_grad)

    def _placed(self, tensor: torch.Tensor) -> Any:
        contiguous, strides = dense(plain_values(tensor))
        self.tensors.append(contiguous)
        position = len(self.tensors) - 1
        shape, requires_grad = tuple(tensor.shape), tensor.requires_grad
        if self._device is None:
            return _from_out_of_band, (position, shape, strides, requires_grad)
        device = "cpu" if self._device == "cpu" else target_device(tensor, self._device)
        return _from_out_of_band, (position, shape, strides, requires_grad, device)


class _OutOfBand(threading.local):
    tensors: Sequence[torch.Tensor] = ()


_out_of_band = _OutOfBand()


@contextmanager
def placing(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have values that are unpickled meanwhile, on this thread, get ``tensors`` by their positions."""
    before = _out_of_band.tensors
    _out_of_band.tensors = tensors
    try:
        yield
    finally:
        _out_of_band.tensors = before


def object_at(position: int) -> Any:
    """Return the object that has come for that position, as it is."""
    return _out_of_band.tensors[position]


def _from_out_of_band(
    position: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    requires_grad: bool,
    device: str | tuple[Device, str | None] | None = None,
) -> torch.Tensor:
    made = _out_of_band.tensors[position].detach()
    if isinstance(device, str):
        made = made.to(device)
    elif device is not None and made.device.type != device[0].kind:
        made = moved_to(made.cpu(), *device)
    made = made.view(shape) if strides is None else made.as_strided(shape, strides)
    return made.requires_grad_() if requires_grad else made
