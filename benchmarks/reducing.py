"""What one rank does to time an allreduce: the same on every system."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any


def bind_to_core(rank: int) -> None:
    """Rank r on core r, modulo the number of cores, with all threads to come."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


class Steps:
    """The steps of one rank, as a program has them: it writes its tensor, has it reduced, and reads the sum.
    Only the reduction is timed."""

    def __init__(self, rank: int, size: int) -> None:
        import torch

        bind_to_core(rank)
        torch.set_num_threads(1)
        self._ones = torch.ones(size // 4)
        self._tensor = torch.zeros(size // 4)
        self._began = 0.0

    def write(self, *_: object) -> Any:
        """Return the tensor, written anew."""
        return self._tensor.copy_(self._ones)

    def begin(self, written: Any) -> Any:
        """Begin to take the time: all ranks have written."""
        self._began = time.perf_counter()
        return written

    def read(self, reduced: Any) -> float:
        """Return the seconds since ``begin``, and read all of what has come."""
        took = time.perf_counter() - self._began
        reduced.sum().item()
        return took

    def time(
        self, allreduce: Callable[[Any], object], barrier: Callable[[], object], calls: int
    ) -> list[float]:
        """Time so many calls of ``allreduce``, after one that nobody counts."""
        times = []
        for _ in range(calls + 1):
            tensor = self.write()
            barrier()
            self.begin(tensor)
            allreduce(tensor)
            times.append(self.read(tensor))
        return times[1:]
