"""What measurements share: the system, the effort, sampling loops and percentiles."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.model import Topology
from benchmarks.processes import cpu_between, last_core, tree_cpu_seconds
from benchmarks.systems.actors import ActorSystem
from benchmarks.systems.base import Path, System

Figures = dict[str, Any]
"""Numbers by name (the name ends in the unit), and ``cores``: samples of [driver, workers...]."""

BATCHES = 8


@dataclass
class Cpu:
    """CPU seconds of all processes of the case, while a block ran, less the block's own ``spent``
    on looking."""

    seconds: float = 0.0
    spent: float = 0.0


@dataclass
class Bench:
    """One process of cases. ``effort`` scales times and counts; ``tree`` is the ancestor whose
    descendants are the processes of the case."""

    system: System
    effort: float = 1.0
    tree: int = field(default_factory=os.getpid)
    split: bool = False
    _open: tuple[Topology, Path] | None = None
    _actors: dict[Any, list[Any]] = field(default_factory=dict)
    _cores: set[int] = field(default_factory=set)

    def path(self, topology: Topology) -> Path:
        """The path for ``topology``; the last one is kept for the next case."""
        if self._open is not None:
            if self._open[0] == topology:
                return self._open[1]
            self.close_path()
        path = self.system.path(topology)
        self._open = (topology, path)
        if self.split:
            self._split(path)
        return path

    def actors(self, cls: type, count: int, *args: Any, **options: Any) -> list[Any]:
        """``count`` actors that are so made, kept for the next cases: Ray takes a second to start one."""
        assert isinstance(self.system, ActorSystem)
        kept = self._actors.setdefault((cls, args, *options.items()), [])
        while len(kept) < count:
            kept.append(self.system.spawn(cls, *args, **options))
        return kept[:count]

    def close_path(self) -> None:
        if self._open is not None:
            path = self._open[1]
            self._open = None
            if self.split:
                os.sched_setaffinity(0, self._cores)
            path.close()

    def _split(self, path: Path) -> None:
        """This thread on the first core, the workers' main threads on the others."""
        self._cores = os.sched_getaffinity(0)
        first, *others = sorted(self._cores)
        os.sched_setaffinity(0, {first})
        for worker in path.workers:
            os.sched_setaffinity(worker, others)

    @contextmanager
    def cpu(self) -> Iterator[Cpu]:
        """Counts the CPU time of every descendant of ``tree`` in the block."""
        cpu = Cpu()
        before = tree_cpu_seconds(self.tree)
        before[os.getpid()] = time.process_time()  # read last, and first below: the scans cost too
        yield cpu
        own = time.process_time()
        after = tree_cpu_seconds(self.tree)
        after[os.getpid()] = own
        cpu.seconds = cpu_between(before, after) - cpu.spent

    def cores(self, path: Path) -> list[int]:
        """Where this process and the workers ran last; empty if that cannot be told."""
        if not self.system.main_threads_work:
            return []
        return [last_core(pid) for pid in (os.getpid(), *path.workers)]


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def spread(nanoseconds: Sequence[float]) -> Figures:
    """p50, p99, mean in microseconds, and the number of samples."""
    ordered = sorted(nanoseconds)
    return {
        "p50_us": percentile(ordered, 0.5) / 1e3,
        "p99_us": percentile(ordered, 0.99) / 1e3,
        "mean_us": sum(ordered) / len(ordered) / 1e3,
        "samples": len(ordered),
    }


def run_for(seconds: float, at_least: int, at_most: int, step: Callable[[], None]) -> int:
    """Repeat ``step`` for ``seconds``, within the bounds on the count; how often it ran."""
    end = time.perf_counter() + seconds
    count = 0
    while count < at_least or (count < at_most and time.perf_counter() < end):
        step()
        count += 1
    return count


def time_calls(
    once: Callable[[Any], Any],
    value: Any,
    seconds: float,
    at_most: int,
    at_least: int = 5,
    pause: float = 0.0,
) -> list[int]:
    """Nanoseconds of each of some executions, for about ``seconds``; ``pause`` before each."""
    clock = time.perf_counter_ns
    end = clock() + int(seconds * 1e9)
    times: list[int] = []
    while len(times) < at_most:
        if pause:
            time.sleep(pause)
        start = clock()
        once(value)
        done = clock()
        times.append(done - start)
        if done > end and len(times) >= at_least:
            break
    return times


def sampled(
    bench: Bench,
    path: Path,
    once: Callable[[Any], Any],
    value: Any,
    seconds: float,
    at_most: int,
    at_least: int = 5,
    pause: float = 0.0,
) -> Figures:
    """Latencies of ``once(value)`` with CPU per execution and the cores that ``path`` ran on."""
    times: list[int] = []
    cores: list[list[int]] = []
    with bench.cpu() as cpu:
        for batch in range(BATCHES):
            least = -(-at_least // BATCHES)
            most = max(least, at_most // BATCHES)
            times += time_calls(once, value, seconds / BATCHES, most, least, pause)
            if batch % 2:
                looking = time.process_time()
                cores.append(bench.cores(path))
                cpu.spent += time.process_time() - looking
    figures = spread(times)
    figures["cpu_us"] = cpu.seconds / len(times) * 1e6
    figures["cores"] = [sample for sample in cores if sample]
    return figures
