"""Checks that a torch tensor's storage has its elements.

Torch lets storages be freed and shrunk below the tensors that lie in them (``untyped_storage().resize_``).
Reading such a tensor's elements reads foreign memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from conveyor.exceptions import SerializationError

if TYPE_CHECKING:
    import torch


def extent(tensor: torch.Tensor) -> int:
    """Return how many bytes lie between a tensor's first element and the end of its last."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int((1 + reach) * tensor.element_size())


def lacking(tensor: torch.Tensor) -> str | None:
    """Describe the storage of a strided tensor that does not have all its elements, in words that follow the
    tensor's name; ``None``: it has them."""
    has = tensor.untyped_storage().nbytes()
    # Nearly every tensor is like this, and the general rule takes three times as long.
    if tensor.nbytes <= has and tensor.is_contiguous() and not tensor.storage_offset():
        return None
    if not tensor.numel():
        return None
    needs = tensor.storage_offset() * tensor.element_size() + extent(tensor)
    if needs <= has:
        return None
    return (
        f"has lost its memory: its storage has {has} bytes and the tensor needs {needs}. The storage was "
        "freed or shrunk (untyped_storage().resize_, as sharding libraries do with parameters): give it its "
        "size and values again before this"
    )


def check_storage(tensor: torch.Tensor) -> None:
    """Refuse a strided tensor that is to be sent and whose storage does not have all its elements.

    Raises:
        SerializationError: it does not.
    """
    words = lacking(tensor)
    if words is not None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise SerializationError(f"a tensor ({dtype}, shape {list(tensor.shape)}) {words}")
