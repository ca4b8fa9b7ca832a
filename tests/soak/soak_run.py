"""Very many executions with results of all sizes, held at random for random times.

At the end memory and latency must be what they were at the beginning.
"""

from __future__ import annotations

import gc
import heapq
import os
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from soak_actors import Maker, Passer, read
from soak_measure import Floor, median, quantile, resident

import conveyor
from conveyor.dag import InputNode

KB, MB = 1 << 10, 1 << 20
#: Parts of a run; each is one point of every curve. Those that warm up are not counted.
PARTS = 50
WARM_UP = 5
#: Small executions timed in each part (at most), and as many round trips of the floor in between.
TIMED = 1000
IN_FLIGHT = 8
#: Of what is held at one time.
MOST_HELD = 64 * MB
#: How much larger the memory of the last tenth may be than that of the first after warming up.
MEMORY_MAY_GROW = 0.05
#: How much larger the p99 of a small execution may be, measured by the floor's p99 of that time.
LATENCY_MAY_GROW = 0.5


@dataclass
class Part:
    executions: int
    seconds: float
    resident: int
    times: array[float]  # of small executions, one at a time
    floors: array[float]  # of the floor, in between


@dataclass
class Held:
    """Results by the execution at which they are let go."""

    rng: Random
    heap: list[tuple[int, int, int, Any]] = field(default_factory=list)
    bytes: int = 0
    total: int = 0

    def keep(self, now: int, number: int, value: Any) -> None:
        size = getattr(value, "nbytes", None) or len(value)
        if self.bytes + size > MOST_HELD:
            return
        self.bytes += size
        self.total += 1
        until = now + int(self.rng.expovariate(1 / 200))
        heapq.heappush(self.heap, (until, number, size, value))

    def let_go(self, now: int) -> None:
        while self.heap and self.heap[0][0] <= now:
            _, number, size, value = heapq.heappop(self.heap)
            self.bytes -= size
            if read(value) != number:
                raise AssertionError(f"result {number} was held and has become {read(value)}")


def soak(executions: int, seed: int, with_torch: bool, tell: Callable[[str], None]) -> list[Part]:
    """Run, and return the curve. Raises ``AssertionError`` for a wrong or a changed result."""
    rng = Random(seed)
    floor = Floor()
    conveyor.init()
    maker = conveyor.remote(Maker).remote()
    passer = conveyor.remote(Passer).remote()
    pids = [os.getpid(), *conveyor.get([maker.pid.remote(), passer.pid.remote()])]
    held = Held(rng)
    parts: list[Part] = []
    on_the_way: list[tuple[int, Any]] = []
    with InputNode() as inp:
        dag = passer.hand_on.bind(maker.make.bind(inp))
    number = 0

    def take() -> None:
        which, ref = on_the_way.pop(0)
        value = ref.get()
        if read(value) != which:
            raise AssertionError(f"execution {which} gave {read(value)}")
        if rng.random() < 0.05:
            held.keep(number, which, value)

    with dag.compile(depth=IN_FLIGHT) as graph:
        for part in range(WARM_UP + PARTS):
            start, until = time.perf_counter(), number + executions // PARTS
            first = number
            while number < until:
                on_the_way.append((number, graph.execute(_order(rng, number, with_torch))))
                if rng.random() < 0.02:
                    on_the_way.pop(rng.randrange(len(on_the_way)))  # not wanted
                while len(on_the_way) >= IN_FLIGHT or (on_the_way and rng.random() < 0.1):
                    take()
                number += 1
                held.let_go(number)
            while on_the_way:
                take()
            seconds = time.perf_counter() - start
            times, floors = _time_small(graph, floor, min(TIMED, executions // PARTS))
            gc.collect()
            parts.append(Part(number - first, seconds, resident(pids), times, floors))
            if part % 5 == 0:
                tell(
                    f"{number:>9} executions, {parts[-1].executions / seconds:8.0f}/s, "
                    f"{parts[-1].resident / MB:7.1f} MiB, p99 {quantile(times, 0.99) * 1e6:6.0f} us "
                    f"(floor {quantile(floors, 0.99) * 1e6:4.0f} us), holding {len(held.heap)} "
                    f"results, {held.bytes / MB:.1f} MiB"
                )
        held.let_go(1 << 62)
    conveyor.get(passer.forget.remote())
    conveyor.shutdown()
    floor.close()
    return parts[WARM_UP:]


def _order(rng: Random, number: int, with_torch: bool) -> tuple[str, int, int]:
    scale = rng.random()
    if scale < 0.80:
        size = rng.randrange(8, 2 * KB)
    elif scale < 0.97:
        size = rng.randrange(2 * KB, 64 * KB)
    elif scale < 0.995:
        size = rng.randrange(64 * KB, MB)
    else:
        size = rng.randrange(MB, 4 * MB)
    kind = rng.choice(("bytes", "array"))
    if with_torch and rng.random() < 0.02:
        kind = "torch"
    return kind, number, size


def _time_small(graph: Any, floor: Floor, count: int) -> tuple[array[float], array[float]]:
    times, floors = array("d"), array("d")
    for _ in range(count):
        floors.append(floor.round_trip())
        start = time.perf_counter()
        graph.execute(("bytes", 1, 64)).get()
        times.append(time.perf_counter() - start)
    return times, floors


def judge(parts: list[Part]) -> tuple[str, list[str]]:
    """The run in words, and what is wrong with it."""
    tenth = max(len(parts) // 10, 1)
    first, last = parts[:tenth], parts[-tenth:]
    was, now = (median([p.resident for p in some]) for some in (first, last))
    growth = now / was - 1
    (p99, floor), (late_p99, late_floor) = (_latency(some) for some in (first, last))
    # What the machine itself has become slower by is not ours.
    slower = late_p99 / p99 / max(late_floor / floor, 1.0) - 1
    executions = sum(p.executions for p in parts)
    seconds = sum(p.seconds for p in parts)
    text = (
        f"{executions} executions in {seconds:.0f} s\n"
        f"memory of driver and actors: {was / MB:.1f} MiB in the first tenth, {now / MB:.1f} MiB in "
        f"the last ({growth:+.1%}, may be {MEMORY_MAY_GROW:+.0%})\n"
        f"p99 of a small execution in the best part of the first and of the last tenth: "
        f"{p99 * 1e6:.0f} and {late_p99 * 1e6:.0f} us; of the floor: {floor * 1e6:.0f} and "
        f"{late_floor * 1e6:.0f} us"
    )
    wrong = []
    if growth > MEMORY_MAY_GROW:
        wrong.append("memory has grown")
    if slower > LATENCY_MAY_GROW:
        wrong.append("latency has grown")
    return text, wrong


def _latency(parts: list[Part]) -> tuple[float, float]:
    """p99 of small executions and of the floor in the best of these parts, in seconds. What drifts
    is worse in all of them, what other programs do to this machine in some."""
    return (
        min(quantile(part.times, 0.99) for part in parts),
        min(quantile(part.floors, 0.99) for part in parts),
    )
