"""From SIGKILL of a working actor to the exception in the caller that waits for it."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

from benchmarks.measure.bench import Bench, Figures
from benchmarks.model import Death, Topology

SETTLE_S = 0.5
SETTLE_PER_GIB_S = 2.0
REPEATS = 5

# A process of its own, so that the waiting caller's GIL cannot delay the shot or its time stamp.
_KILLER = """
import os, sys, time
pid, delay = int(sys.argv[1]), float(sys.argv[2])
time.sleep(delay)
print(time.clock_gettime_ns(time.CLOCK_MONOTONIC), flush=True)
os.kill(pid, 9)
"""


def death(bench: Bench, spec: Death) -> Figures:
    repeats = max(2, round(REPEATS * min(1.0, bench.effort)))
    times: list[float] = []
    kinds: set[str] = set()
    for _ in range(repeats):
        milliseconds, kind = _once(bench, spec)
        times.append(milliseconds)
        kinds.add(kind)
    return {
        "death_ms": median(times),
        "death_max_ms": max(times),
        "raised": ", ".join(sorted(kinds)),
        "samples": len(times),
    }


def _once(bench: Bench, spec: Death) -> tuple[float, str]:
    system = bench.system
    graph = Topology("chain", 1, "hold")
    path = system.call_path("hold") if spec.eager else system.path(graph)
    delay = SETTLE_S + SETTLE_PER_GIB_S * spec.mebibytes / 1024
    command = [sys.executable, "-S", "-c", _KILLER, str(path.workers[0]), str(delay)]
    killer = subprocess.Popen(command, stdout=subprocess.PIPE)
    raised: Exception | None = None
    try:
        path.once(spec.mebibytes)
    except Exception as error:
        seen = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        raised = error
    shot = int(killer.communicate()[0])
    if raised is None:
        raise RuntimeError("the call returned although its actor was killed")
    if seen < shot:
        raise RuntimeError(f"raised before the kill: {type(raised).__name__}: {raised}")
    try:
        path.close()
    except Exception as error:  # a graph that lost its actor may not close; that is not measured
        print(f"close after death: {type(error).__name__}: {error}", file=sys.stderr)
    return (seen - shot) / 1e6, type(raised).__name__
