"""Two actors' worth of work that costs little beside moving values."""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def make(kind: str, number: int, size: int) -> Any:
    """A value of about ``size`` bytes that ``number`` can be read from at both its ends."""
    if kind == "bytes":
        word = number.to_bytes(8, "little")
        return word + bytes(max(size - 16, 0)) + word
    array = np.empty(max(size // 8, 2), np.int64)
    array[0] = array[-1] = number
    if kind == "array":
        return array
    import torch

    return torch.from_numpy(array)


def read(value: Any) -> int:
    """The number of a value; ``ValueError`` if its ends say different things."""
    if isinstance(value, bytes):
        first, last = (int.from_bytes(part, "little") for part in (value[:8], value[-8:]))
    else:
        first, last = int(value[0]), int(value[-1])
    if first != last:
        raise ValueError(f"a value says {first} at its start and {last} at its end")
    return first


class Maker:
    def make(self, order: tuple[str, int, int]) -> Any:
        return make(*order)

    def pid(self) -> int:
        return os.getpid()


class Passer:
    """Hands on what it gets, and keeps some of it for a while."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, Any]] = {}

    def hand_on(self, value: Any) -> Any:
        number = read(value)
        # Every 64th, until another comes to its place.
        if number % 64 == 0:
            place = (number // 64) % 16
            if place in self._kept:
                was, old = self._kept.pop(place)
                if read(old) != was:
                    raise ValueError(f"the value {was}, which was kept, has become {read(old)}")
            if getattr(value, "nbytes", len(value)) < 1 << 20:
                self._kept[place] = number, value
        return value

    def forget(self) -> None:
        self._kept.clear()

    def pid(self) -> int:
        return os.getpid()
