"""Whether a tensor's memory is nobody else's."""

from __future__ import annotations

import sys
from typing import Any

from conveyor import _core


def held_alone(value: Any) -> bool:
    """Whether ``value`` is a tensor and no other tensor or array refers to its memory."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor:
        return False
    global _alone_count
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:  # not a public function: without it, values are copied
        return False
    if not _alone_count:
        # What a tensor has that nobody shares: measured, because this look at it counts as well.
        fresh = torch.frombuffer(bytearray(8), dtype=torch.uint8).view(2, 4)
        _alone_count = count(fresh.untyped_storage()._cdata)
    # A gradient, say, has one reference of Python's, and others of torch's.
    held = getattr(value, "_use_count", None)
    if held is None or held() > 1:
        return False
    return bool(count(value.untyped_storage()._cdata) <= _alone_count)


_alone_count = 0


def _references_of_a_local() -> int:
    value = object()
    return _core.refcount(value)


#: What a native function counts of a value that only a local variable of its caller refers to: measured,
#: because it differs between versions of Python.
REFERENCES_OF_A_LOCAL = _references_of_a_local()
