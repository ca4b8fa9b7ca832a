"""What one rank does to time an allreduce: the same on every system."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

#: Bytes below which calls simply follow each other.
SMALL = 16 << 10


def bind_to_core(rank: int) -> None:
    """Rank r on core r, modulo the number of cores, with all threads to come."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def time_allreduce(
    allreduce: Callable[[Any], object], barrier: Callable[[], object], size: int, calls: int
) -> list[float]:
    """Seconds of each call, or below ``SMALL`` means of a fifth of them. From there on each rank writes its
    tensor anew before a call, as a program would."""
    import torch

    torch.set_num_threads(1)
    ones = torch.ones(size // 4)
    tensor = torch.zeros(size // 4)
    allreduce(tensor)
    times = []
    if size < SMALL:
        for _ in range(5):
            barrier()
            start = time.perf_counter()
            for _ in range(calls // 5):
                allreduce(tensor)
            times.append((time.perf_counter() - start) / (calls // 5))
        return times
    for _ in range(calls):
        tensor.copy_(ones)
        barrier()
        start = time.perf_counter()
        allreduce(tensor)
        times.append(time.perf_counter() - start)
    return times
