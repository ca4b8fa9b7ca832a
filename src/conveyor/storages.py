"""Checks of a torch tensor's storage: that it has the tensor's elements, and that nothing else shares it.

Torch lets storages be freed and shrunk below the tensors that lie in them (``untyped_storage().resize_``).
Reading such a tensor's elements reads foreign memory.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

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


def storage_held_alone(value: Any) -> int:
    """Return the address of the storage of ``value``, a tensor that nothing else shares it with; else 0.

    Only the storage is judged. Its memory may be another object's: ``torch.from_numpy`` keeps the array,
    which others may have. The core moves memory only for the storage that it was made for.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor:
        return 0
    global _alone
    if not hasattr(torch._C, "_storage_Use_Count") or not hasattr(value, "_use_count"):
        return 0  # neither is public: without them, values are copied
    if _alone is None:
        _alone = _uses(torch.frombuffer(bytearray(8), dtype=torch.uint8).view(2, 4))
    uses = _uses(value)
    if any(now > alone for now, alone in zip(uses, _alone, strict=True)):
        return 0
    address: int = value.untyped_storage()._cdata
    return address


def _uses(tensor: Any) -> tuple[int, int, int]:
    """Count the uses of a tensor and of its storage in torch, and the references to the storage in Python.

    This look counts as well, so compare with a tensor that nobody shares.
    """
    storage = tensor.untyped_storage()
    count = sys.modules["torch"]._C._storage_Use_Count(storage._cdata)
    return tensor._use_count(), count, sys.getrefcount(storage)


_alone: tuple[int, int, int] | None = None
