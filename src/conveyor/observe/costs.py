"""What is given to a simulation, or was measured, says how long things take."""

from __future__ import annotations

import functools
import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Union

from conveyor.exceptions import RuntimeStateError
from conveyor.observe.stats import GraphStats, Times
from conveyor.plan.model import Plan
from conveyor.plan.simulate import Costs

Durations = Union[float, Mapping[str, float], Callable[[str, int], float]]  # noqa: UP007 - Python 3.10 evaluates it
"""Seconds: of every task; by label; or what is called with a label and the number of an execution."""

Sizes = Union[float, Mapping[str, float]]  # noqa: UP007
"""Bytes: of the value on every edge, or by what comes on it (``"input"``, ``"a.echo"``)."""

#: Seconds from the publication of a frame until its reader goes on, where none are given: what a hop between
#: two processes takes on a machine with a core for each of them. A core that sleeps takes longer to come.
LATENCY = 10e-6

#: Seconds and bytes beyond which nothing is: with more, times are no numbers in the end.
LONGEST = 1e9
LARGEST = 1e18

_PROBE_BYTES = 16 << 20


def make_costs(
    plan: Plan,
    durations: Durations | None,
    sizes: Sizes | None,
    bandwidth: float | None,
    latency: float | None,
    stats: Callable[[], GraphStats] | None,
) -> Costs:
    """Check what was given, and find the rest.

    Args:
        stats: what the graph has counted, where it runs.

    Raises:
        TypeError, ValueError: something that was given is no duration, size or rate, or names no task or
            edge.
        RuntimeStateError: durations are to be taken from the counters of a graph that has not run.
    """
    if bandwidth is not None:
        checked(bandwidth, "bandwidth", math.inf, positive=True)
    if latency is not None:
        checked(latency, "latency", LONGEST)
    measured = stats() if stats is not None and (durations is None or sizes is None) else None
    task = _measured(measured) if durations is None else _given(plan, durations)
    size = _sizes_of(plan, sizes, measured)
    rate = bandwidth
    if rate is None:
        rate = memory_bandwidth() if any(size) else math.inf
    # An integer may be larger than any float.
    rate = math.inf if rate > sys.float_info.max else rate
    seconds = [
        checked(count / rate, f"the time that copying {edge.source} takes", LONGEST)
        for count, edge in zip(size, plan.edges, strict=True)
    ]
    return Costs(task, seconds.__getitem__, LATENCY if latency is None else latency)


def checked(number: object, what: str, most: float, *, positive: bool = False) -> float:
    """Return ``number`` if it is one, not negative, and at most ``most``. It may be of any class of real
    numbers: numpy's, fractions."""
    value = _real(number)
    if value is None:
        raise TypeError(f"{what} must be a number, not {number!r}")
    if not 0 <= value <= most or (positive and not value):
        least = "above 0" if positive else "at least 0"
        bounds = least if most == math.inf else f"{least} and at most {most:g}"
        raise ValueError(f"{what} must be {bounds}, not {number!r:.40}")
    return value


def _real(number: object) -> float | None:
    if isinstance(number, bool):
        return None
    if isinstance(number, (int, float)):
        return number  # an integer may be larger than any float
    if not isinstance(number, Real):
        return None
    try:
        return float(number)
    except OverflowError:  # a fraction, too, may be larger
        return math.inf


@functools.cache
def memory_bandwidth() -> float:
    """Measure once in this process how many bytes in a second are copied from memory to memory."""
    source = memoryview(bytes(_PROBE_BYTES))
    target = memoryview(bytearray(_PROBE_BYTES))
    best = math.inf
    for _ in range(6):
        begin = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - begin)
    return _PROBE_BYTES / best


def _given(plan: Plan, durations: Durations) -> Callable[[int, int], float]:
    labels = [task.label for task in plan.tasks]
    if callable(durations):
        asked = durations

        def ask(task: int, execution: int) -> float:
            label = labels[task]
            return checked(
                asked(label, execution),
                f"the duration of {label} in execution {execution}",
                LONGEST,
            )

        return ask
    if isinstance(durations, Mapping):
        given = _by_task(plan, durations)
    else:
        given = [checked(durations, "the duration of all tasks", LONGEST)] * len(labels)
    return lambda task, _: given[task]


def _by_task(plan: Plan, durations: Mapping[str, float]) -> list[float]:
    """Find the duration of each task: by its label, by that without its number, or by its method."""
    used: set[str] = set()
    found: list[float] = []
    missing: list[str] = []
    for task in plan.tasks:
        # In `flow.py`, where labels are made, only a task that is bound once more has a number.
        names = (task.label, re.sub(r"#\d+$", "", task.label), task.method)
        name = next((name for name in names if name in durations), None)
        if name is None:
            missing.append(task.label)
            continue
        used.add(name)
        found.append(checked(durations[name], f"the duration of {name}", LONGEST))
    known = {name for task in plan.tasks for name in (task.label, task.method)}
    _refuse(set(durations) - used - known, "durations", known)
    if missing:
        raise ValueError(f"durations has none for {', '.join(missing)}")
    return found


def _measured(stats: GraphStats | None) -> Callable[[int, int], float]:
    if stats is None:
        raise TypeError("a Plan has no counters to take durations from: give durations")
    never = [task.task for task in stats.tasks if not task.running.count]
    if never:
        raise RuntimeStateError(
            f"{stats.graph} has no times of {', '.join(never)} yet: execute it first, or give "
            f"simulate() the durations"
        )
    seconds = [_usual(task.running) for task in stats.tasks]
    return lambda task, _: seconds[task]


def _usual(running: Times) -> float:
    """Return the mean of a task's runs without the longest of them, which is the first one as a rule. The
    quantiles are known to a sixteenth only."""
    if running.count == 1:
        return running.total_s
    return (running.total_s - running.max_s) / (running.count - 1)


def _sizes_of(plan: Plan, sizes: Sizes | None, stats: GraphStats | None) -> list[float]:
    if sizes is None:
        if stats is None:
            return [0.0] * len(plan.edges)
        return [edge.bytes / edge.frames if edge.frames else 0.0 for edge in stats.edges]
    if isinstance(sizes, Mapping):
        known = {edge.source for edge in plan.edges}
        _refuse(set(sizes) - known, "sizes", known)
        return [
            checked(sizes.get(edge.source, 0), f"the size of {edge.source}", LARGEST)
            for edge in plan.edges
        ]
    return [checked(sizes, "the size of all values", LARGEST)] * len(plan.edges)


def _refuse(unknown: set[str], what: str, known: set[str]) -> None:
    if unknown:
        names = ", ".join(sorted(map(repr, unknown)))
        raise ValueError(f"{what} has {names}, but the graph has {', '.join(sorted(known))}")
