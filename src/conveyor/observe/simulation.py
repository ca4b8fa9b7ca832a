"""What would happen if a graph were executed: its Plan in virtual time, and what is to be seen of that."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from conveyor.observe.costs import LONGEST, Durations, Sizes, checked, make_costs
from conveyor.observe.critical import (
    Link,
    Share,
    critical_path,
    shares,
    steady_rate,
    window,
)
from conveyor.observe.drawing.gantt import draw_timeline
from conveyor.observe.drawing.png import write_png
from conveyor.observe.drawing.svg import write_svg
from conveyor.observe.simulated_trace import write_trace
from conveyor.observe.stats import read_stats
from conveyor.observe.units import duration
from conveyor.plan.model import Plan
from conveyor.plan.overlap import overlapped
from conveyor.plan.simulate import follow
from conveyor.plan.timeline import Timeline
from conveyor.runtime.graph.parts import Account

#: As in ``Config``.
_DEEPEST = 4096


@dataclass(frozen=True)
class Simulation:
    """What ``graph.simulate()`` has found; ``print`` shows it. All times are seconds.

    graph: the graph's name.
    executions: how many were simulated.
    depth: how many of them may be on their way at once.
    timeline: what every process does when.
    throughput: executions that end in a second, once the first ones are through.
    latency_p50, latency_max: the time of an execution from the start of its submission until the last of its
        results is with the executor: as ``stats()`` has it.
    makespan: from the beginning until the last result.
    bubble: the share of the actors' time, from the first work to the last, in which they do nothing.
    actors: what each of them does with that time.
    critical_path: the spans that all of it took so long for, in order, each with what it had waited for.
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
        """Draw the timeline: a row for each process. Return it as SVG, and write it to ``path``, whose ending
        says in which format: ``.svg``, or ``.png`` (with the extra ``conveyor[png]``).

        Raises:
            ValueError: the path has another ending.
            ImportError: PNG is asked for, and resvg-py is not installed.
            OSError: the file cannot be written.
        """
        picture = draw_timeline(self.plan, self.timeline, self.graph)
        text = write_svg(picture)
        if path is not None:
            ending = os.path.splitext(os.fspath(path))[1]
            if ending.lower() not in (".svg", ".png"):
                raise ValueError(
                    f"there is no format {ending!r} to draw a timeline in: the path must end in '.svg' or "
                    f"'.png', and is {os.fspath(path)!r}"
                )
            # All of it is made before the file is opened, so none is left half written by a failure.
            data = text.encode() if ending.lower() == ".svg" else write_png(picture)
            with open(path, "wb") as file:
                file.write(data)
        return text

    def _repr_svg_(self) -> str:
        # What a notebook shows.
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
        """Say what the critical path consists of, the longest first, but for what is below a thousandth."""
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


def simulate_graph(graph: Account, durations: Durations | None, **options: Any) -> Simulation:
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
        self, plan: Plan, durations: Durations | None, name: str, graph: Account | None
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
