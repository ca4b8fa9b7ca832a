"""Collective operations of several ranks."""

from __future__ import annotations

from benchmarks.measure.bench import Bench, Figures, percentile
from benchmarks.model import AllReduce


def allreduce(bench: Bench, spec: AllReduce) -> Figures:
    """One allreduce, as rank 0 sees it."""
    calls = max(6, min(1000, (256 << 20) // spec.size))
    path = bench.system.allreduce_path(spec)
    try:
        times = sorted(path.once(max(5, int(calls * bench.effort))))
    finally:
        path.close()
    return {
        "p50_us": percentile(times, 0.5) * 1e6,
        "p99_us": percentile(times, 0.99) * 1e6,
        "samples": len(times),
    }
