"""Steps of a model over simulated devices: how much of the devices' time the system leaves to them."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from benchmarks.measure.bench import Bench, Figures, percentile
from benchmarks.model import Executor
from benchmarks.stage import scheduled

SECONDS = 2.0
WARM_STEPS = 20


def executor(bench: Bench, spec: Executor) -> Figures:
    """Keep as many steps under way as the pipeline has stages, and one more."""
    path = bench.system.executor_path(spec)
    submitted = received = 0
    waiting: deque[Any] = deque()

    def submit() -> None:
        nonlocal submitted
        waiting.append(path.submit(scheduled(submitted)))
        submitted += 1

    def receive() -> None:
        nonlocal received
        answer = path.receive(waiting.popleft())
        if answer not in (received, [received] * spec.ranks):
            raise ValueError(f"step {received} has the tokens of step {answer}")
        received += 1

    try:
        for _ in range(spec.stages + 1):
            submit()
        for _ in range(WARM_STEPS):
            receive()
            submit()
        steps = max(50, int(SECONDS * bench.effort * 1e3 / spec.stage_ms))
        gaps = []
        with bench.cpu() as cpu:
            last = start = time.perf_counter()
            for _ in range(steps):
                receive()
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
                submit()
            seconds = last - start
        while waiting:
            receive()
    finally:
        path.close()
    gaps.sort()
    ideal = steps * spec.stage_ms / 1e3
    return {
        "per_s": steps / seconds,
        "device_idle_percent": 100 * (1 - ideal / seconds),
        "p50_us": percentile(gaps, 0.5) * 1e6,
        "p99_us": percentile(gaps, 0.99) * 1e6,
        "cpu_us": cpu.seconds / steps * 1e6,
        "samples": steps,
    }
