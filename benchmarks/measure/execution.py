"""Executions of a graph: one at a time, paced, and several in flight."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from benchmarks.measure.bench import Bench, Figures, run_for, sampled
from benchmarks.model import Latency, Throughput
from benchmarks.systems.base import Path

VALUE = "hello"
HOT_SECONDS = 0.6
HOT_MOST = 40_000
WARM_SECONDS = 0.3
WARM_MOST = 300
PACED_COUNT = {1.0: 240, 20.0: 56, 100.0: 16}
FLIGHT_SECONDS = 0.6


def latency(bench: Bench, spec: Latency) -> Figures:
    path = bench.path(spec.topology)
    answer = path.once(VALUE)
    if answer != spec.topology.expected(VALUE):
        raise ValueError(f"wrong result: {answer!r}")
    if spec.pace_ms:
        count = max(8, int(PACED_COUNT[spec.pace_ms] * min(1.0, bench.effort)))
        pause = spec.pace_ms / 1e3
        for _ in range(3):
            time.sleep(pause)
            path.once(VALUE)
        return sampled(bench, path, path.once, VALUE, 1e9, count, count, pause)
    _warm(path)
    return sampled(bench, path, path.once, VALUE, HOT_SECONDS * bench.effort, HOT_MOST, at_least=40)


def throughput(bench: Bench, spec: Throughput) -> Figures:
    path = bench.path(spec.topology)
    _warm(path)
    submit, receive = path.submit, path.receive
    waiting: deque[Any] = deque(submit(VALUE) for _ in range(spec.in_flight))

    def turn() -> None:
        for _ in range(20):
            receive(waiting.popleft())
            waiting.append(submit(VALUE))

    with bench.cpu() as cpu:
        start = time.perf_counter()
        call_lock = run_for(FLIGHT_SECONDS * bench.effort, 2, 1_000_000, turn)
        seconds = time.perf_counter() - start
    while waiting:
        receive(waiting.popleft())
    count = call_lock * 20
    return {"per_s": count / seconds, "cpu_us": cpu.seconds / count * 1e6, "samples": count}


def _warm(path: Path) -> None:
    run_for(WARM_SECONDS, 20, WARM_MOST, lambda: path.once(VALUE))
