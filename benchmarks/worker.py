"""The user code that every system runs: one small class, the same for all of them."""

from __future__ import annotations

import os
import time
from typing import Any

PAGE = 4096


def sweep(block: Any) -> int:
    """Read one byte of every page of ``block`` (numpy or torch, uint8) and add them up."""
    view = block.numpy() if hasattr(block, "numpy") else block
    return int(view[::PAGE].sum())


class Worker:
    """An actor, or the handler in a plain process. Imports nothing, so that it starts bare."""

    def echo(self, value: Any) -> Any:
        return value

    def first_of(self, *values: Any) -> Any:
        return values[0]

    def sweep(self, block: Any) -> int:
        return sweep(block)

    def sweep_back(self, block: Any) -> Any:
        sweep(block)
        return block

    def peek(self, block: Any) -> int:
        return int(block[0])

    def hold(self, mebibytes: int) -> None:
        """Make ``mebibytes`` resident, then never return."""
        resident = b"\1" * (mebibytes << 20)
        while resident is not None:
            time.sleep(3600)

    def pid(self) -> int:
        return os.getpid()


class TorchWorker:
    """An actor that imports torch, as most real ones do."""

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def pid(self) -> int:
        return os.getpid()
