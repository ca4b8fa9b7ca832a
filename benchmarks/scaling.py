"""How cost grows with the number of actors and with the size of a value, and what a line through it predicts.

    python -m benchmarks.scaling                 # 1 to 64 actors, 1 KB to 64 MB; some two minutes
    python -m benchmarks.scaling --most 128
    python -m benchmarks.scaling --hosts 4       # nodes of a Ray cluster, each a host of its own

Each number of actors has a process and a session of its own, in turn, in several rounds. A model of two
numbers (so much at once, so much for each) is taken from the smallest and the largest; what it says of those
between is printed beside what was measured. docs/scaling.md explains what the numbers consist of.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

import conveyor
from benchmarks.machine import facts
from benchmarks.ray_nodes import cluster_of, measured_apart
from conveyor.dag import InputNode, MultiOutputNode

SIZES = [1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26]

#: What is measured of a number of actors: name, unit and what a unit is of a second or a byte.
FIGURES = {
    "start": ("ms", 1e3),
    "memory": ("MiB", 1 / (1 << 20)),
    "descriptors of the driver": ("", 1.0),
    "compile a chain": ("ms", 1e3),
    "chain": ("us", 1e6),
    "compile a fan-out": ("ms", 1e3),
    "fan-out": ("us", 1e6),
    "call each": ("us", 1e6),
    "end": ("ms", 1e3),
}


class Stage:
    """Passes on what it gets."""

    def run(self, x: Any) -> Any:
        return x

    def length(self, x: Any) -> float:
        return float(x.sum())


def _timed(work: Callable[[], object], calls: int) -> float:
    """The median of ``calls`` calls, in seconds."""
    work()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def _memory(pids: Sequence[int]) -> float:
    """What these processes have for themselves and their part of what they share (PSS), in bytes."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as lines:
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return float(total)


def measure_actors(count: int, effort: float) -> dict[str, float]:
    """What ``count`` actors cost, in this process and a session of its own."""
    calls = max(10, int(effort * 2000 / count))
    figures: dict[str, float] = {}
    conveyor.init()
    remote = conveyor.remote(Stage)
    conveyor.get(remote.remote().run.remote(0))  # whatever only a first one costs
    start = time.perf_counter()
    actors = [remote.remote() for _ in range(count)]
    conveyor.get([actor.run.remote(0) for actor in actors])
    figures["start"] = time.perf_counter() - start
    figures["call each"] = _timed(
        lambda: conveyor.get([actor.run.remote(0) for actor in actors]), calls
    )
    with InputNode() as node:
        chain: Any = node
        for actor in actors:
            chain = actor.run.bind(chain)
    with InputNode() as node:
        fan_out = MultiOutputNode([actor.run.bind(node) for actor in actors])
    for name, dag in (("chain", chain), ("fan-out", fan_out)):
        start = time.perf_counter()
        graph = dag.compile()
        conveyor.get(graph.execute(0))
        figures[f"compile a {name}"] = time.perf_counter() - start
        figures[name] = _timed(lambda graph=graph: conveyor.get(graph.execute(0)), calls)
        if name == "fan-out":
            pids = conveyor.get([actor.__ray_call__.remote(_pid) for actor in actors])
            figures["memory"] = _memory(pids)
            figures["descriptors of the driver"] = float(len(os.listdir("/proc/self/fd")))
        graph.teardown()
    start = time.perf_counter()
    conveyor.shutdown()
    figures["end"] = time.perf_counter() - start
    return figures


#: The same of hosts, the driver's own not counted.
HOST_FIGURES = {
    "start of a first actor": ("ms", 1e3),
    "chain over all": ("us", 1e6),
    "fan-out to all": ("us", 1e6),
    "1 MB to all": ("us", 1e6),
    "descriptors of the driver": ("", 1.0),
    "idle processor time of the driver": ("us/s", 1e6),
}
_IDLE_SECONDS = 4.0


def measure_hosts(address: str, count: int, effort: float) -> dict[str, float]:
    """What ``count`` hosts beside the driver's cost, with an actor on each."""
    calls = max(10, int(effort * 1000))
    figures: dict[str, float] = {}
    conveyor.init(engine="ray", address=address, shared_memory="node", node_timeout=10)
    remote = conveyor.remote(Stage)
    actors = []
    times = []
    for number in range(1, count + 1):
        start = time.perf_counter()
        actors.append(remote.options(resources={f"node{number}": 1}).remote())
        conveyor.get(actors[-1].run.remote(0))
        times.append(time.perf_counter() - start)
    figures["start of a first actor"] = median(times)
    with InputNode() as node:
        chain: Any = node
        for actor in actors:
            chain = actor.run.bind(chain)
    with chain.compile() as graph:
        figures["chain over all"] = _timed(lambda: conveyor.get(graph.execute(0)), calls)
    with InputNode() as node:
        fan_out = MultiOutputNode([actor.run.bind(node) for actor in actors])
    with fan_out.compile() as graph:
        figures["fan-out to all"] = _timed(lambda: conveyor.get(graph.execute(0)), calls)
    with InputNode() as node:
        totals = MultiOutputNode([actor.length.bind(node) for actor in actors])
    value = np.ones(1 << 17)
    with totals.compile() as graph:
        figures["1 MB to all"] = _timed(
            lambda: conveyor.get(graph.execute(value)), max(10, calls // 10)
        )
    figures["descriptors of the driver"] = float(len(os.listdir("/proc/self/fd")))
    before = time.process_time()
    time.sleep(_IDLE_SECONDS)
    figures["idle processor time of the driver"] = (time.process_time() - before) / _IDLE_SECONDS
    conveyor.shutdown()
    return figures


def _hosts(most: int, rounds: int, effort: float) -> dict[int, dict[str, float]]:
    found: dict[int, list[dict[str, float]]] = {count: [] for count in range(1, most + 1)}
    nodes = [{}, *({f"node{number}": 2.0} for number in found)]
    with cluster_of(nodes, cpus=1, store=100 << 20) as address:
        for _ in range(rounds):
            for count, times in found.items():
                told = ["--address", address, "--on", str(count), "--effort", str(effort)]
                times.append(measured_apart("benchmarks.scaling", *told))
    return {count: _medians(times) for count, times in found.items()}


def _pid(_: Any) -> int:
    return os.getpid()


def measure_sizes(effort: float) -> dict[str, float]:
    """Seconds of an execution that passes a value of each size to one actor, which reads all of it."""
    figures = {}
    remote = conveyor.remote(Stage)
    actor = remote.remote()
    with InputNode() as node:
        dag = actor.length.bind(node)
    with dag.compile() as graph:
        for size in SIZES:
            value = np.ones(size // 8)
            calls = max(8, min(2000, int(effort * (1 << 30) / size)))
            figures[str(size)] = _timed(
                lambda value=value: conveyor.get(graph.execute(value)), calls
            )
    conveyor.shutdown()
    return figures


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(at once, for each), by the smallest and the largest."""
    each = (ys[-1] - ys[0]) / (xs[-1] - xs[0])
    return ys[0] - each * xs[0], each


def _report(name: str, unit: str, factor: float, xs: Sequence[int], ys: Sequence[float]) -> str:
    once, each = _line(xs, ys)
    cells = []
    for x, y in zip(xs, ys, strict=True):
        said = once + each * x
        off = 0.0 if not y else (said - y) / y
        between = x not in (xs[0], xs[-1])
        cells.append(f"{y * factor:.3g}" + (f" ({off:+.0%})" if between else ""))
    model = f"{once * factor:.3g} + {each * factor:.3g} n {unit}".rstrip()
    return f"| {name} | {' | '.join(cells)} | {model} | {(once + each * 1000) * factor:.3g} |"


def _print(
    what: str,
    kinds: Mapping[str, tuple[str, float]],
    found: Mapping[int, Mapping[str, float]],
) -> None:
    for fact, value in facts().items():
        print(f"{fact}: {value}")
    counts = sorted(found)
    print("\nIn parentheses: by how much the model's line is beside it.\n")
    print(f"| n {what} | {' | '.join(map(str, counts))} | model | 1,000 |")
    print("|---|" + "---|" * (len(counts) + 2))
    for name, (unit, factor) in kinds.items():
        ys = [found[count][name] for count in counts]
        print(_report(f"{name}, {unit}" if unit else name, unit, factor, counts, ys))


def _print_sizes(sizes: Mapping[str, float]) -> None:
    print("\n| bytes | us | GB/s |\n|---|---|---|")
    for size, seconds in sizes.items():
        print(f"| {int(size):,} | {seconds * 1e6:.3g} | {int(size) / seconds / 1e9:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--most", type=int, default=64, help="actors (64)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--hosts", type=int, help="nodes beside the driver's, instead of actors")
    parser.add_argument("--actors", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--on", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sizes", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.actors:
        print(json.dumps(measure_actors(given.actors, given.effort)))
        return
    if given.sizes:
        print(json.dumps(measure_sizes(given.effort)))
        return
    if given.on:
        print(json.dumps(measure_hosts(given.address, given.on, given.effort)))
        return
    if given.hosts:
        _print("hosts", HOST_FIGURES, _hosts(given.hosts, given.rounds, given.effort))
        return
    counts = [1]
    while counts[-1] < given.most:
        counts.append(min(2 * counts[-1], given.most))
    actors: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    sizes = []
    effort = ["--effort", str(given.effort)]
    for _ in range(given.rounds):
        for count in counts:
            actors[count].append(
                measured_apart("benchmarks.scaling", "--actors", str(count), *effort)
            )
        sizes.append(measured_apart("benchmarks.scaling", "--sizes", *effort))
    _print("actors", FIGURES, {count: _medians(found) for count, found in actors.items()})
    _print_sizes(_medians(sizes))


if __name__ == "__main__":
    main()
