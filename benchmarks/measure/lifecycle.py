"""Beginnings and ends: compile, teardown, actor start, import."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

from benchmarks.measure.bench import Bench, Figures, run_for
from benchmarks.model import ImportTime, Lifecycle, Start, Topology
from benchmarks.systems.actors import ActorSystem, GraphSystem
from benchmarks.worker import TorchWorker, Worker

VALUE = "hello"
SECONDS = 4.0
MOST = 12
IMPORTS = 5


def compile_and_teardown(bench: Bench, spec: Lifecycle) -> Figures:
    system = bench.system
    assert isinstance(system, GraphSystem)
    actors, _ = system.start_actors(spec.actors)
    topology = Topology("chain", spec.actors, tasks=spec.tasks)
    compiles: list[float] = []
    teardowns: list[float] = []

    def step() -> None:
        bound = system.bind(actors, topology)
        start = time.perf_counter()
        graph = system.compile(bound)
        if system.api.get(graph.execute(VALUE)) != VALUE:
            raise ValueError("wrong result")
        compiles.append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        graph.teardown()
        teardowns.append((time.perf_counter() - start) * 1e3)

    # At least three, so that the median is not of the first, which may be another matter.
    run_for(SECONDS * bench.effort, 3, MOST, step)
    system.stop_actors(actors)
    return {
        "compile_ms": median(compiles),
        "compile_first_ms": compiles[0],
        "teardown_ms": median(teardowns),
        "samples": len(compiles),
    }


def start(bench: Bench, spec: Start) -> Figures:
    """``start_ms`` is the first time in this process, ``again_ms`` the second."""
    system = bench.system
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        if isinstance(system, ActorSystem):
            actors, _ = system.start_actors(spec.actors, TorchWorker if spec.torch else Worker)
            times.append((time.perf_counter() - begin) * 1e3)
            system.stop_actors(actors)
        else:
            _import_in_parallel("torch", spec.actors)
            times.append((time.perf_counter() - begin) * 1e3)
    return {"start_ms": times[0], "again_ms": times[1]}


def _import_in_parallel(package: str, count: int) -> None:
    """The least that actors which import ``package`` need: bare interpreters that import it."""
    command = [sys.executable, "-c", f"import {package}"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise RuntimeError(f"cannot import {package}")


def import_time(bench: Bench, _: ImportTime) -> Figures:
    package = bench.system.package
    probe = (
        f"import time; start = time.perf_counter(); import {package}; "
        "print(time.perf_counter() - start)"
    )

    def run() -> float:
        command = [sys.executable, "-c", probe]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return float(done.stdout.split()[-1]) * 1e3

    run()  # byte code and page cache
    return {"import_ms": median([run() for _round in range(IMPORTS)]), "samples": IMPORTS}
