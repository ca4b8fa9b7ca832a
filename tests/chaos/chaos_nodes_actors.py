"""Actors of rounds over nodes, and what plain Python makes of the same."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import ray

import conveyor
from conveyor.experimental import collective

_MODULUS = 1_000_003


def number_of(value: Any) -> int:
    """What a task takes of a value."""
    return int(np.sum(value, dtype=np.int64)) % _MODULUS


def made_of(number: int, values: Iterable[Any], size: int) -> Any:
    """What a task makes of its arguments: a number, or an array that says which."""
    total = number + sum(map(number_of, values))
    return total if size == 0 else np.full(size, total % 251, np.uint8)


def kept_of(number: int, size: int) -> Any:
    """What stays with its maker."""
    return np.arange(number, number + size, dtype=np.int64)


class Stage:
    """Does what the plain functions do."""

    def where(self) -> tuple[int, str]:
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def make(self, number: int, size: int, *values: Any) -> Any:
        return made_of(number, values, size)

    def nap(self, number: int, seconds: float) -> int:
        time.sleep(seconds)
        return number

    def ask(self, other: Any, number: int, size: int) -> Any:
        return conveyor.get(other.make.remote(number, size, number))

    def items(self, number: int, count: int) -> Any:
        for i in range(count):
            yield made_of(number, [i], 300 if i % 3 == 0 else 0)

    def keep(self, number: int, size: int, in_place: bool) -> Any:
        if not in_place:
            return kept_of(number, size)
        made = conveyor.empty(size, "int64")
        made[:] = kept_of(number, size)
        return made

    def numbers(self, *values: Any) -> list[int]:
        return [number_of(value) for value in values]

    def numbers_of(self, refs: Sequence[Any]) -> list[int]:
        return [number_of(value) for value in conveyor.get(list(refs))]

    def through(self, value: Any) -> Any:
        return value

    def pass_on(self, other: Any, refs: Sequence[Any]) -> list[int]:
        found: list[int] = conveyor.get(other.numbers_of.remote(refs))
        return found

    def meet(self, group: str, rank: int, number: int, size: int) -> Any:
        tensor = np.full(size, number + rank, np.int64)
        collective.allreduce(tensor, group)
        return tensor

    def send(self, sender: Any, number: int, count: int, size: int) -> int:
        with sender:
            for i in range(count):
                sender.send(made_of(number, [i], size))
        return count

    def receive(self, receiver: Any) -> list[int]:
        with receiver:
            return [number_of(value) for value in receiver]


#: Actors of the session's, and of a Ray program's own.
Ours = conveyor.remote(Stage)
Rays = ray.remote(num_cpus=0)(Stage)
