"""Simulation of a graph's executions: its Plan in virtual time, and the results to look at."""

from __future__ import annotations

import functools
import gzip
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Union

from msgspec.structs import replace

from conveyor.exceptions import RuntimeStateError
from conveyor.graph.lifecycle import GraphInfo
from conveyor.observe.dataflow import participant_name, printable
from conveyor.observe.drawing.picture import draw_timeline, write_svg
from conveyor.observe.stats import GraphStats, Times, read_stats
from conveyor.observe.units import duration
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.plan.schedule import overlapped
from conveyor.plan.simulate import Costs, Span, Timeline, Why, follow

#: Limit of the depth, as in ``Config``.
_DEEPEST = 4096


@dataclass(frozen=True)
class Simulation:
    """Result of ``graph.simulate()``, which ``print`` shows. All times are seconds.

    graph: the graph's name.
    executions: how many were simulated.
    depth: how many executions may be in flight at once.
    timeline: the work and the waits of every process, in time.
    throughput: executions that end in a second, once the first ones are through.
    latency_p50, latency_max: the time of an execution from the start of its submission until the last of its
        results is with the executor, as in ``stats()``.
    makespan: from the beginning until the last result.
    bubble: the share of the actors' time, from the first work to the last, in which they do nothing.
    actors: how each of them spends that time.
    critical_path: the spans that determine the makespan, in order, each with what it had waited for.
    """

    graph: str
    executions: int
    depth: int
    timeline: Timeline = field(repr=False)
    throughput: float
    latency_p50: float
    latency_max: float
    makespan: float
    bubble: float
    actors: tuple[Share, ...]
    critical_path: tuple[Link, ...] = field(repr=False)
    plan: Plan = field(repr=False)

    def __str__(self) -> str:
        head = (
            f"{self.graph}: {self.executions} executions, up to {self.depth} on the way, take "
            f"{duration(self.makespan)}\n"
            f"{self.throughput:.4g} executions/s; latency p50 {duration(self.latency_p50)}, "
            f"max {duration(self.latency_max)}; bubble {self.bubble:.1%}"
        )
        return "\n\n".join([head, self._table(), self._path()])

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to ``path``, in the format of ``graph.trace()``, to be opened beside it.

        Raises:
            OSError: the file cannot be written.
        """
        write_trace(path, self.graph, self.plan, self.timeline)

    def draw(self, path: str | os.PathLike[str] | None = None) -> str:
        """Draw the timeline: a row for each process. Return it as SVG, and write it to ``path``, which ends
        in ``.svg``.

        Raises:
            ValueError: the path has another ending.
            OSError: the file cannot be written.
        """
        text = write_svg(draw_timeline(self.plan, self.timeline, self.graph))
        if path is not None:
            ending = os.path.splitext(os.fspath(path))[1]
            if ending.lower() != ".svg":
                raise ValueError(
                    f"there is no format {ending!r} to draw a timeline in: the path must end in '.svg', and "
                    f"is {os.fspath(path)!r}"
                )
            # All of it is made before the file is opened, so none is left half written by a failure.
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_svg_(self) -> str:
        # A notebook shows this.
        return self.draw()

    def _table(self) -> str:
        rows: list[tuple[str, ...]] = [("actor", "computing", "sending", "waiting", "idle")]
        for one in self.actors:
            parts = (one.computing, one.sending, one.waiting, one.idle)
            rows.append((one.actor, *(f"{part:.1%}" for part in parts)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            row[0].ljust(widths[0])
            + "".join(f"  {c.rjust(w)}" for c, w in zip(row[1:], widths[1:], strict=True))
            for row in rows
        )

    def _path(self, most: int = 8) -> str:
        """Describe the parts of the critical path, the longest first. Leave out those below a thousandth."""
        total: dict[str, float] = {}
        for link in self.critical_path:
            verb = "" if link.span.kind == "compute" else f"{link.span.kind} "
            name = f"{verb}{link.span.label}"
            total[name] = total.get(name, 0.0) + link.span.seconds
        gaps = self.makespan - sum(total.values())
        if gaps > 0:
            total["on the way"] = gaps
        least = self.makespan / 1000
        parts = sorted(
            (part for part in total.items() if part[1] >= least), key=lambda part: -part[1]
        )
        lines = [f"  {seconds / self.makespan:6.1%}  {name}" for name, seconds in parts[:most]]
        if len(parts) > most:
            lines.append(f"  and {len(parts) - most} more")
        return "\n".join(["critical path", *lines])


def simulate(
    plan: Plan,
    durations: Durations,
    *,
    executions: int | None = None,
    depth: int | None = None,
    overlap: bool | None = None,
    bandwidth: float | None = None,
    latency: float | None = None,
    sizes: Sizes | None = None,
    pace: float | None = None,
    name: str = "",
) -> Simulation:
    """Do what ``CompiledGraph.simulate`` does, for a Plan that nothing runs."""
    options = Options(executions, depth, overlap, bandwidth, latency, sizes, pace)
    return options.simulate(plan, durations, name or "graph", None)


def simulate_graph(graph: GraphInfo, durations: Durations | None, **options: Any) -> Simulation:
    """Do what ``CompiledGraph.simulate`` does."""
    return Options(**options).simulate(graph.plan, durations, graph.name, graph)


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of ``CompiledGraph.simulate`` by name."""

    executions: int | None
    depth: int | None
    overlap: bool | None
    bandwidth: float | None
    latency: float | None
    sizes: Sizes | None
    pace: float | None

    def simulate(
        self, plan: Plan, durations: Durations | None, name: str, graph: GraphInfo | None
    ) -> Simulation:
        """Check the options, and simulate ``plan``, whose counters ``graph`` has."""
        depth = plan.depth if self.depth is None else _counted(self.depth, "depth", _DEEPEST)
        executions = 8 * depth if depth > 4 else 32
        if self.executions is not None:
            executions = _counted(self.executions, "executions", None)
        if self.pace is not None:
            checked(self.pace, "pace", LONGEST)
        if self.overlap is not None:
            if type(self.overlap) is not bool:
                raise TypeError(f"overlap must be True, False or None, not {self.overlap!r}")
            plan = overlapped(plan, self.overlap)
        stats = None if graph is None else lambda: read_stats(graph)
        costs = make_costs(plan, durations, self.sizes, self.bandwidth, self.latency, stats)
        timeline = follow(plan, costs, executions, depth, self.pace)
        return _summed_up(name, replace(plan, depth=depth), timeline)


def _counted(number: object, what: str, most: int | None) -> int:
    if type(number) is not int:
        raise TypeError(f"{what} must be an integer, not {number!r}")
    if number < 1 or (most is not None and number > most):
        limits = "at least 1" if most is None else f"from 1 to {most}"
        raise ValueError(f"{what} must be {limits}, not {number}")
    return number


def _summed_up(name: str, plan: Plan, timeline: Timeline) -> Simulation:
    latencies = [
        end - begin for begin, end in zip(timeline.submitted, timeline.completed, strict=True)
    ]
    parts = shares(plan, timeline)
    begin, end = window(timeline)
    busy = sum(part.busy for part in parts) / len(parts)
    return Simulation(
        graph=name,
        executions=len(latencies),
        depth=plan.depth,
        timeline=timeline,
        throughput=steady_rate(timeline.completed, plan.depth),
        latency_p50=statistics.median(latencies),
        latency_max=max(latencies),
        makespan=max(timeline.completed),
        bubble=max(1 - busy, 0.0) if end > begin else 0.0,
        actors=parts,
        critical_path=critical_path(timeline),
        plan=plan,
    )


# How long things take: given to a simulation, or measured.

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
        requested = durations

        def ask(task: int, execution: int) -> float:
            label = labels[task]
            return checked(
                requested(label, execution),
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
    """Return the mean of a task's runs without the longest one, which is usually the first. The quantiles
    would be less exact: they are known to a sixteenth only."""
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


# Sums over the spans of a timeline: how busy each actor was, and the critical path.


@dataclass(frozen=True, slots=True)
class Share:
    """Shares of an actor's time, from the first work of any actor to the last.

    actor: its name.
    computing, sending, waiting, idle: the shares of that time, which add up to 1. An actor waits between two
        works, and is idle before the first and after the last.
    """

    actor: str
    computing: float
    sending: float
    waiting: float
    idle: float

    @property
    def busy(self) -> float:
        """Share of the time in which the actor works."""
        return self.computing + self.sending


@dataclass(frozen=True, slots=True)
class Link:
    """A span of the critical path.

    span: the span; its length is not 0.
    why: the last thing that it had waited for: see ``conveyor.plan.simulate.Why``.
    what: the same in words.
    gap: the seconds between the span before it and this one: something travels, or a time has to come.
    """

    span: Span
    why: Why
    what: str
    gap: float


def shares(plan: Plan, timeline: Timeline) -> tuple[Share, ...]:
    """Sum up the spans of each actor."""
    begin, end = window(timeline)
    length = end - begin
    made = []
    for info in plan.actors:
        spans = [span for span in timeline.spans if span.participant == info.index]
        computing = sum(span.seconds for span in spans if span.kind == "compute")
        sending = sum(span.seconds for span in spans if span.kind == "send")
        waiting = sum(span.seconds for span in spans if span.kind == "wait")
        idle = max(length - computing - sending - waiting, 0.0)
        whole = length or 1.0
        made.append(
            Share(
                participant_name(plan, info.index),
                computing / whole,
                sending / whole,
                waiting / whole,
                idle / whole,
            )
        )
    return tuple(made)


def window(timeline: Timeline) -> tuple[float, float]:
    """Return when the first actor begins to work, and when the last one ends."""
    work = [
        span
        for span in timeline.spans
        if span.kind in ("compute", "send") and span.participant >= 0
    ]
    return min(span.start for span in work), max(span.end for span in work)


def critical_path(timeline: Timeline) -> tuple[Link, ...]:
    """Follow the last result back to the first submission, from each span to the one it waited for last."""
    participant = max(range(len(timeline.ends)), key=lambda n: timeline.completed[n])
    at = timeline.ends[participant]
    links: list[Link] = []
    spans = timeline.spans
    while at >= 0:
        span = spans[at]
        before, why, what = span.after, span.why, _in_words(span)
        # A span of length 0 only hands on why the next one had to wait.
        while before >= 0 and not spans[before].seconds:
            handed = spans[before]
            # An input that comes when there is room waits for the room, not for its frame.
            if why == "order" or (handed.kind == "submit" and handed.why in ("room", "pace")):
                why, what = handed.why, _in_words(handed)
            before = handed.after
        if span.seconds:
            end = spans[before].end if before >= 0 else 0.0
            links.append(Link(span, why, what, max(span.start - end, 0.0)))
        at = before
    return tuple(reversed(links))


def _in_words(span: Span) -> str:
    match span.why:
        case "start":
            return "the beginning"
        case "order":
            return "its actor's step before"
        case "data":
            return span.label if span.kind == "receive" else "a frame"
        case "tensors":
            return "tensors"
        case "room":
            return "room: an older execution's end"
        case "pace":
            return "its time"


def steady_rate(completed: Sequence[float], depth: int) -> float:
    """Return the executions that end in a second once the first ones are through.

    Executions may end in groups of up to ``depth``. If there are enough, a multiple of ``depth`` is counted.
    """
    last = len(completed) - 1
    warm = min(max(depth, len(completed) // 4), len(completed) // 2)
    counted = last - warm
    if counted > depth:
        counted -= counted % depth
    if not counted or completed[last] == completed[last - counted]:
        return len(completed) / completed[last] if completed[last] else math.inf
    return counted / (completed[last] - completed[last - counted])


# The trace file of a timeline, as `graph.trace()` writes one of real executions.

_VERBS = {
    "wait": "wait for ",
    "idle": "wait for ",
    "receive": "receive ",
    "transfer": "transfer ",
    "send": "send ",
    "compute": "",
    "submit": "",
}
_CATEGORIES = {"compute": "task", "submit": "execute", "idle": "wait"}


def write_trace(path: str | os.PathLike[str], name: str, plan: Plan, timeline: Timeline) -> None:
    """Write ``timeline`` to ``path``, compressed if the path ends in ``.gz``."""
    document = {
        "displayTimeUnit": "ns",
        "otherData": {"graph": name, "clock": "virtual", "simulated": True, "dropped_events": {}},
        "traceEvents": [*_events(name, plan, timeline)],
    }
    # All of it is made before the file is opened, so none is left half written by a failure.
    data = json.dumps(document).encode()
    if Path(path).suffix == ".gz":
        data = gzip.compress(data, 5)
    Path(path).write_bytes(data)


def _events(name: str, plan: Plan, timeline: Timeline) -> Iterator[dict[str, Any]]:
    participants = (EXECUTOR, *range(len(plan.actors)))
    for participant in participants:
        title = f"{participant_name(plan, participant)} (simulated)"
        yield _metadata("process_name", _pid(participant), 0, {"name": title})
        yield _metadata(
            "process_sort_index", _pid(participant), 0, {"sort_index": _pid(participant)}
        )
        yield _metadata("thread_name", _pid(participant), _pid(participant), {"name": name})
    # Transfers run beside the actor's work, so the transfers of each edge have a track of their own.
    out_of_band = {
        (s.participant, s.number): s.label for s in timeline.spans if s.kind == "transfer"
    }
    for (participant, edge), label in out_of_band.items():
        track = {"name": f"tensors of {printable(label)}"}
        yield _metadata("thread_name", _pid(participant), _transfers(plan, edge), track)

    sent: dict[tuple[int, int], Span] = {}
    inputs = [bundle.edge for bundle in plan.inputs]
    for span in timeline.spans:
        if span.kind == "send":
            sent[span.number, span.execution] = span
        elif span.kind == "submit":
            sent |= {(edge, span.execution): span for edge in inputs}
    flow = 0
    for span in timeline.spans:
        if span.execution < 0:
            continue  # nothing is left to do
        yield _slice(plan, span)
        if span.kind == "receive" and (span.number, span.execution) in sent:
            flow += 1
            source = sent[span.number, span.execution]
            for more, at, participant in (
                ({"ph": "s"}, source.start, source.participant),
                ({"ph": "f", "bp": "e"}, span.start, span.participant),
            ):
                yield {
                    **more,
                    "id": flow,
                    "name": printable(span.label),
                    "cat": "edge",
                    "ts": _us(at),
                    "pid": _pid(participant),
                    "tid": _pid(participant),
                }


def _slice(plan: Plan, span: Span) -> dict[str, Any]:
    is_transfer = span.kind == "transfer"
    return {
        "ph": "X",
        "name": f"{_VERBS[span.kind]}{printable(span.label)}",
        "cat": _CATEGORIES.get(span.kind, span.kind),
        "ts": _us(span.start),
        "dur": _us(span.seconds),
        "pid": _pid(span.participant),
        "tid": _transfers(plan, span.number) if is_transfer else _pid(span.participant),
        "args": {"execution": span.execution, "why": span.why},
    }


def _pid(participant: int) -> int:
    """Return a made-up pid for a participant, since there is no process. Viewers want numbers above 0."""
    return participant + 2


def _transfers(plan: Plan, edge: int) -> int:
    return len(plan.actors) + 2 + edge


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _metadata(name: str, pid: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": thread, "args": args}
