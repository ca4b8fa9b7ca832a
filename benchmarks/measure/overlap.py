"""Tensors of a simulated accelerator that travel while it computes, and what the simulation says of that."""

from __future__ import annotations

import time

from benchmarks.measure.bench import Bench, Figures, spread
from benchmarks.model import Overlap

WARM = 3
SECONDS = 4.0


def overlap(bench: Bench, spec: Overlap) -> Figures:
    """One execution after the other."""
    path, simulated = bench.system.overlap_path(spec)
    try:
        for value in range(WARM):
            path.once(value)
        times = []
        for value in range(max(5, int(SECONDS * bench.effort / simulated))):
            start = time.perf_counter_ns()
            path.once(value)
            times.append(time.perf_counter_ns() - start)
    finally:
        path.close()
    return spread(times) | {"simulated_us": simulated * 1e6}
