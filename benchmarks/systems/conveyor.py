"""Conveyor: compiled graphs and eager calls."""

from __future__ import annotations

from typing import Any

import conveyor
from benchmarks.systems.actors import GraphSystem


class ConveyorSystem(GraphSystem):
    name = "conveyor"
    package = "conveyor"
    api = conveyor

    def close(self) -> None:
        conveyor.shutdown()

    def compile(self, bound: Any, asyncio: bool = False) -> Any:
        del asyncio  # every graph serves get and await
        return bound.compile()

    def empty(self, device: str, size: int) -> Any:
        if device == "torch":
            import torch

            return conveyor.empty_tensor((size,), torch.uint8)
        import numpy as np

        return conveyor.empty((size,), np.uint8)
