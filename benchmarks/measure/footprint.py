"""What it costs to be there: CPU while idle, memory."""

from __future__ import annotations

import os
import time

from benchmarks.measure.bench import Bench, Figures
from benchmarks.model import Idle, Memory, Topology
from benchmarks.processes import descendants, pss_mib
from benchmarks.systems.actors import ActorSystem

EXECUTIONS = 20
SETTLE_S = 1.0
WATCH_S = 5.0


def idle(bench: Bench, spec: Idle) -> Figures:
    path = bench.path(Topology("chain", spec.actors))
    for _ in range(EXECUTIONS):
        path.once("hello")
    time.sleep(SETTLE_S)
    watch = max(2.0, WATCH_S * min(1.0, bench.effort))
    start = time.perf_counter()
    with bench.cpu() as cpu:
        time.sleep(watch)
    seconds = time.perf_counter() - start
    path.once("hello")
    return {"idle_percent": 100 * cpu.seconds / seconds, "watched_s": seconds}


def memory(bench: Bench, spec: Memory) -> Figures:
    """``pss_mib``: mean of the actors; ``tree_mib``: all processes but this one."""
    system = bench.system
    assert isinstance(system, ActorSystem)
    actors, pids = system.start_actors(spec.actors)
    each = [pss_mib(pid) for pid in pids]
    others = [pss_mib(pid) for pid in descendants(bench.tree) if pid != os.getpid()]
    system.stop_actors(actors)
    return {"pss_mib": sum(each) / len(each), "pss_max_mib": max(each), "tree_mib": sum(others)}
