"""Tensors side by side in one stretch of bytes, for transports that move bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conveyor.transport.base import TensorSpec

#: Each tensor begins at a multiple of this, which is enough for every dtype and for vector instructions.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies. Both ends work it out for themselves, from what both know.

    specs: what they are.
    begins: where each begins, in bytes.
    size: of them all, in bytes.
    """

    specs: tuple[TensorSpec, ...]
    begins: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, specs: Sequence[TensorSpec]) -> Layout:
        """Lay out tensors, in their order."""
        import torch

        begins, end = [], 0
        for spec in specs:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            begins.append(begin)
            dtype = getattr(torch, spec.dtype)
            end = begin + torch.Size(spec.shape).numel() * dtype.itemsize
        return cls(tuple(specs), tuple(begins), end)

    def fill(self, memory: Any, tensors: Sequence[Any]) -> None:
        """Copy ``tensors`` to their places in ``memory``, a tensor of bytes."""
        import torch

        with torch.no_grad():
            for place, tensor in zip(self.open(memory), tensors, strict=True):
                place.copy_(tensor)

    def open(self, memory: Any) -> list[Any]:
        """Make the tensors that lie in ``memory``. They hold it."""
        import torch

        made = []
        for spec, begin in zip(self.specs, self.begins, strict=True):
            dtype = getattr(torch, spec.dtype)
            end = begin + torch.Size(spec.shape).numel() * dtype.itemsize
            made.append(memory[begin:end].view(dtype).view(spec.shape))
        return made
