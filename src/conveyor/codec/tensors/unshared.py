"""Test whether a value that was made in place may move: whether anything else can reach its memory."""

from __future__ import annotations

import sys
from typing import Any

from conveyor import _core


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


def _references_of_a_local() -> int:
    value = object()
    return _core.refcount(value)


#: Reference count that a native function sees of a value that only a local variable of its caller refers to.
#: It is measured, because it differs between versions of Python.
REFERENCES_OF_A_LOCAL = _references_of_a_local()
