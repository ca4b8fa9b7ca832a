"""The tensors of a value that travel beside its frame: taken out while it is pickled, put in while it is
unpickled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from conveyor.codec.tensors import alias, dense, dtype_name, lies_within, plain_values
from conveyor.exceptions import SerializationError

if TYPE_CHECKING:
    import torch


class Collected:
    """The tensors of a value that travel beside its frame: contiguous, each once."""

    def __init__(self, accepts: Callable[[torch.Tensor], str | None]) -> None:
        """``accepts`` says why a tensor cannot, in words that follow "a tensor"; ``None``: it can."""
        self.tensors: list[torch.Tensor] = []
        self._accepts = accepts
        #: By the tensor's identity. A value may be pickled twice before it is right.
        self._taken: dict[int, tuple[torch.Tensor, Any]] = {}
        #: By the address of its storage, the first tensor that lies in it.
        self._first: dict[Any, torch.Tensor] = {}

    def take(self, tensor: torch.Tensor) -> Any:
        """Reduce ``tensor`` to its place.

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
        if first is tensor or not _is_dense(first) or not lies_within(tensor, first, offset):
            return None
        shape, strides = tuple(tensor.shape), tensor.stride()
        return alias, (first, tensor.dtype, offset, shape, strides, tensor.requires_grad)

    def _placed(self, tensor: torch.Tensor) -> Any:
        contiguous, strides = dense(plain_values(tensor))
        self.tensors.append(contiguous)
        place = len(self.tensors) - 1
        return _from_beside, (place, tuple(tensor.shape), strides, tensor.requires_grad)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether what travels for ``tensor`` is laid out as its own memory is."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda i: -strides[i])
    return bool(tensor.permute(order).is_contiguous())


class _Beside(threading.local):
    tensors: Sequence[torch.Tensor] = ()


_beside = _Beside()


@contextmanager
def placing(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have values that are unpickled meanwhile, on this thread, get ``tensors`` in their places."""
    before = _beside.tensors
    _beside.tensors = tensors
    try:
        yield
    finally:
        _beside.tensors = before


def _from_beside(
    place: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, requires_grad: bool
) -> torch.Tensor:
    made = _beside.tensors[place].detach()
    made = made.view(shape) if strides is None else made.as_strided(shape, strides)
    return made.requires_grad_() if requires_grad else made
