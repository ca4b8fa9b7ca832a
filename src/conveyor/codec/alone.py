"""Whether a tensor's memory is nobody else's."""

from __future__ import annotations

import sys
from typing import Any


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
    return bool(count(value.untyped_storage()._cdata) <= _alone_count)


_alone_count = 0
