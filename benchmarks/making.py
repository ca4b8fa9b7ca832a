"""What makes values that stay, and what reads them: the same user code on every system."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.model import Direct

_ONES = 0x0101010101010101

FILLED = 64 << 20
"""Bytes that are filled before each value that is made in place, there or elsewhere."""


def read(value: Any) -> int:
    """Read all of a tensor, or of a list of them, once."""
    import numpy as np

    if not isinstance(value, list):
        value = [value]
    return sum(int(np.add.reduce(tensor.numpy().view(np.uint64))) for tensor in value) % (1 << 64)


def peek(value: Any) -> int:
    """Its first byte."""
    return int(value[0])


def answer(spec: Direct, number: int) -> int:
    """What a reader finds in a value made as ``number``."""
    return number if spec.peeks else spec.nbytes // 8 * number * _ONES % (1 << 64)


def tensors(spec: Direct) -> list[Any]:
    """What values are made of, used before."""
    import torch

    torch.set_num_threads(1)
    return [torch.ones(spec.size, dtype=torch.uint8) for _ in range(spec.count)]


def fill(made: list[Any], number: int) -> None:
    """What a maker does before each value."""
    for tensor in made:
        tensor.fill_(number)


def compute(until: float) -> None:
    """Be busy with Python until then, by ``time.monotonic()``."""
    clock = time.monotonic
    while clock() < until:
        for _ in range(1000):
            pass


class Maker:
    """An actor whose tensors stay with it."""

    def __init__(self, spec: Direct) -> None:
        self._tensors = tensors(spec)

    def give(self) -> Any:
        return self._tensors[0]

    def make(self, number: int) -> Any:
        fill(self._tensors, number)
        return self._tensors if len(self._tensors) > 1 else self._tensors[0]

    def compute(self, until: float) -> None:
        compute(until)

    def pid(self) -> int:
        return os.getpid()


class Reader:
    """An actor that reads what a maker has."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def peek(self, value: Any) -> int:
        return peek(value)

    def read(self, value: Any) -> int:
        return read(value)

    def keep(self, value: Any) -> int:
        self._kept.append(value)
        return read(value)

    def pid(self) -> int:
        return os.getpid()
