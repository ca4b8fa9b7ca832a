"""Values that stay with their maker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.making import answer, read
from benchmarks.measure.bench import Bench, Figures, spread, time_calls
from benchmarks.model import Direct
from benchmarks.processes import cpu_seconds
from benchmarks.systems.base import DirectPath

SECONDS = 0.6
MOST = 5_000
BEGIN_S = 0.05  # until which a maker has begun to compute
MOVED = 512 << 20  # bytes, for each case
IN_PLACE = 60  # values, for each case


def direct(bench: Bench, spec: Direct) -> Figures:
    path = bench.system.direct_path(spec)
    try:
        if spec.use == "call":
            return _calls(bench, spec, path)
        if spec.use in ("again", "busy"):
            return _again(bench, spec, path)
        return _fresh(bench, spec, path)
    finally:
        path.close()


def _check(spec: Direct, number: int, found: list[int]) -> None:
    expected = [answer(spec, number)] * len(found)
    if found != expected:
        raise ValueError(f"readers have found {found}, not {expected}")


def _calls(bench: Bench, spec: Direct, path: DirectPath) -> Figures:
    make, pull = path.make, path.pull

    def once(_: Any) -> None:
        _check(spec, 1, pull(make(1)))

    time_calls(once, None, 0.2, 200)
    return spread(time_calls(once, None, SECONDS * bench.effort, MOST, at_least=20))


def _again(bench: Bench, spec: Direct, path: DirectPath) -> Figures:
    """What ends after the maker has ceased to compute does not count."""
    handle, pull = path.make(1), path.pull
    path.made(handle)

    def once(_: Any) -> None:
        _check(spec, 1, pull(handle))

    time_calls(once, None, 0.2, 200)
    seconds = SECONDS * bench.effort
    if spec.use == "again":
        return spread(time_calls(once, None, seconds, MOST, at_least=20))
    end = time.monotonic() + BEGIN_S + max(0.5, seconds)
    computing = path.compute(end)
    time.sleep(BEGIN_S)
    times = []
    while True:
        start = time.perf_counter_ns()
        once(None)
        times.append(time.perf_counter_ns() - start)
        if time.monotonic() > end:
            break
    path.made(computing)
    return spread(times[:-1] or times)


def _fresh(bench: Bench, spec: Direct, path: DirectPath) -> Figures:
    """Each value is made anew, and the readers are woken; then begins the time.

    ``p50_us`` and ``p99_us``: to having read all of it. ``had_us``: to having it in the tensor that was
    there. ``maker_cpu_us``: the maker's processor time meanwhile."""
    rounds = max(3, min(100, int(MOVED * bench.effort) // spec.nbytes))
    if spec.use == "cold":
        rounds = min(rounds, 6)
    elif spec.use == "in-place":  # nothing is moved
        rounds = IN_PLACE
    had: list[int] = []
    used: list[int] = []
    cpu: list[int] = []
    out_of_band: dict[str, list[int]] = {name: [] for name in path.out_of_band}
    warm = 0 if spec.use == "cold" else 1 if spec.count > 1 else 2
    for turn in range(warm + rounds):
        number = 1 + turn % 100
        middle, end, maker = _once(spec, path, path.pull, number)
        others = {
            name: _once(spec, path, pull, number)[1] for name, pull in path.out_of_band.items()
        }
        if turn < warm:
            continue
        had.append(middle)
        used.append(end)
        cpu.append(maker)
        for name, nanoseconds in others.items():
            out_of_band[name].append(nanoseconds)
    figures = spread(used)
    if spec.use == "into":
        figures["had_us"] = spread(had)["p50_us"]
    if path.maker:
        figures["maker_cpu_us"] = spread(cpu)["p50_us"]
    return figures | {name: spread(times)["p50_us"] for name, times in out_of_band.items()}


def _once(
    spec: Direct, path: DirectPath, pull: Callable[[Any], list[int]], number: int
) -> tuple[int, int, int]:
    """Nanoseconds: to having a value, to having used it, and of the maker's processor meanwhile."""
    handle = path.make(number)
    path.made(handle)
    path.wake()
    before = cpu_seconds(path.maker)
    start = time.perf_counter_ns()
    found = pull(handle)
    middle = time.perf_counter_ns()
    if spec.use == "into":
        found = [read(path.target)]
    end = time.perf_counter_ns()
    _check(spec, number, found)
    return middle - start, end - start, int((cpu_seconds(path.maker) - before) * 1e9)
