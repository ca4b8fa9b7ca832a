"""Tensors side by side in one stretch of bytes, for transports that move bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conveyor.transport.base import TensorSpec

#: Each tensor begins at a multiple of this, which is enough for every dtype and for vector instructions.
_ALIGNMENT = 64


#: Layouts of up to this many tensors are cached: the next transfer mostly has the same specs.
_CACHED_UP_TO = 16


@dataclass(frozen=True)
class Layout:
    """Places of a transfer's tensors in one stretch of bytes. Both ends compute it from the specs that both
    know.

    specs: the tensors' specs.
    begins, ends: where each begins and ends, in bytes.
    size: of all tensors together, in bytes.
    """

    specs: tuple[TensorSpec, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    size: int

    @staticmethod
    def of(specs: Sequence[TensorSpec]) -> Layout:
        """Lay out tensors, in their order."""
        work_out = _cached if len(specs) <= _CACHED_UP_TO else _worked_out
        return work_out(tuple(specs))

    def fill(self, memory: Any, tensors: Sequence[Any]) -> None:
        """Copy ``tensors`` to their places in ``memory``, a tensor of bytes."""
        import torch

        with torch.no_grad():
            for target, tensor in zip(self.open(memory), tensors, strict=True):
                target.copy_(tensor)

    def open(self, memory: Any) -> list[Any]:
        """Make the tensors that lie in ``memory``. They hold it."""
        import torch

        return [
            memory[begin:end].view(getattr(torch, spec.dtype)).view(spec.shape)
            for spec, begin, end in zip(self.specs, self.begins, self.ends, strict=True)
        ]


def _worked_out(specs: tuple[TensorSpec, ...]) -> Layout:
    import torch

    begins, ends, end = [], [], 0
    for spec in specs:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
        begins.append(begin)
        ends.append(end)
    return Layout(specs, tuple(begins), tuple(ends), end)


_cached = functools.lru_cache(maxsize=64)(_worked_out)
