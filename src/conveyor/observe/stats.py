"""Counters and times of a graph, as data and as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, NamedTuple

from conveyor import _core
from conveyor.graph.lifecycle import GraphInfo
from conveyor.graph.telemetry import (
    TIME_LIMIT,
    Counted,
    Histogram,
    Progress,
    Question,
    RecorderLayout,
    RemoteStatus,
)
from conveyor.observe.dataflow import participant_name, printable
from conveyor.observe.units import duration, size
from conveyor.plan.model import EXECUTOR, Plan


@dataclass(frozen=True, slots=True)
class Times:
    """Durations of something, in seconds. All are 0 if ``count`` is.

    count: how many durations were measured.
    total_s: their sum.
    p50_s, p99_s: the quantiles, no further from a measured duration than a sixteenth of it.
    max_s: the longest.
    """

    count: int
    total_s: float
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class TaskStats:
    """Counters and times of one task.

    task, actor: the names of the task and of its actor.
    running: its runs, each from its call to its return (for an async method: until its coroutine ended).
    errors: how many runs raised.
    skipped: how often the task did not run because an argument was an error already.
    current_s: how long the present run has lasted, or the run in which the actor died; ``None``: there is
        none.
    """

    task: str
    actor: str
    running: Times
    errors: int
    skipped: int
    current_s: float | None


@dataclass(frozen=True, slots=True)
class WaitStats:
    """Waits of one reader of an edge.

    reader: its name.
    waiting: how long it waited for a frame (0: there was one), or for the out-of-band data of the frame. An
        actor's wait for its first input is also the time in which nobody executed the graph. The driver's
        waits are those of ``get``, one for each result that was got; ``await`` does not count as waiting.
    """

    reader: str
    waiting: Times


@dataclass(frozen=True, slots=True)
class EdgeStats:
    """Counters of one channel, and the waits of its readers.

    edge: its number.
    source: the name of the value that it carries.
    writer: the name of the process that writes it.
    frames: how many frames were sent on it.
    errors: how many of the frames carried an error.
    bytes: the size of the frames' bodies, with their out-of-band data.
    waits: the waits of each of its readers.
    """

    edge: int
    source: str
    writer: str
    frames: int
    errors: int
    bytes: int
    waits: tuple[WaitStats, ...]


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Counters and times of a graph since it was compiled.

    graph: its name.
    submitted, completed, in_flight: how many executions were submitted, are completed, and are in flight.
    latency: the times of each completed execution, from the start of its submission (its arguments are
        encoded in it) until the last of its results was in the driver's memory, whether or not the
        driver had looked by then.
    room: the waits of ``execute`` because ``depth`` executions were in flight.
    tasks, edges: the tasks and edges of the Plan, in its order.
    stashed_results, stashed_bytes: results that have come and were not asked for yet.
    arena_bytes: by process, the memory behind its arena, which it uses for all its graphs and calls; an
        actor's as of its last large value in this graph.
    unknown: actors of which nothing is known, as their node has not answered, and why. Their counters are 0
        here.
    """

    graph: str
    submitted: int
    completed: int
    in_flight: int
    latency: Times
    room: Times
    tasks: tuple[TaskStats, ...]
    edges: tuple[EdgeStats, ...]
    stashed_results: int
    stashed_bytes: int
    arena_bytes: dict[str, int]
    unknown: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as dicts and lists of numbers and strings, for export."""
        made: dict[str, Any] = asdict(self)
        made["tasks"] = list(made["tasks"])
        made["edges"] = [{**edge, "waits": list(edge["waits"])} for edge in made["edges"]]
        return made

    def __str__(self) -> str:
        parts = [_summary(self)]
        parts += [_aligned(table) for table in _tables(self)]
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        return f"<p>{escape(_summary(self))}</p>" + "".join(map(_html, _tables(self)))


def read_stats(graph: GraphInfo) -> GraphStats:
    """Read the counters and times of ``graph``. Nodes that do not answer in time are left out."""
    plan, recording = graph.plan, graph.recording
    remote_status = graph.remote_status(Question(counters=True), TIME_LIMIT)
    progress = graph.progress()
    now = _core.monotonic_ns()
    recorders, layouts = recording.recorders, recording.layouts
    tasks: dict[int, TaskStats] = {}
    sent: dict[int, tuple[int, int, int]] = {}
    waits: dict[int, list[WaitStats]] = {edge.id: [] for edge in plan.edges}
    for participant, where in layouts.items():
        name = participant_name(plan, participant)
        snapshot = remote_status.seen.get(participant)
        if snapshot is not None and snapshot.counted is not None:
            noted = _of_another_host(snapshot.counted, now)
        else:
            noted = _of_this_host(recorders[participant], where)
        for edge, waited in zip(where.receives, noted.receives, strict=True):
            waits[edge].append(WaitStats(name, times(waited)))
        sent.update(zip(where.sends, noted.sends, strict=True))
        if participant == EXECUTOR:
            continue
        running_now = noted.running
        for index, task in enumerate(where.tasks):
            errors, skipped, running = noted.tasks[index]
            label = printable(plan.tasks[task].label)
            current = None
            if running_now is not None and running_now[0] == index:
                current = max(now - running_now[2], 0) / 1e9
            tasks[task] = TaskStats(label, name, times(running), errors, skipped, current)
    return GraphStats(
        graph=graph.name,
        submitted=progress.submitted,
        completed=progress.completed,
        in_flight=progress.submitted - progress.completed,
        latency=times(recording.own.task(0)[2]),
        room=times(recording.own.task(1)[2]),
        tasks=tuple(tasks[task.id] for task in plan.tasks),
        edges=tuple(
            EdgeStats(
                edge.id,
                printable(edge.source),
                participant_name(plan, edge.writer),
                *sent[edge.id],
                tuple(waits[edge.id]),
            )
            for edge in plan.edges
        ),
        stashed_results=progress.stashed,
        stashed_bytes=progress.stashed_bytes,
        arena_bytes=_by_name(plan, _arenas(progress, remote_status)),
        unknown=_unknown(graph, remote_status),
    )


class _Noted(NamedTuple):
    """Counters of one process. running: the task that runs, the execution, and since when."""

    tasks: Sequence[tuple[int, int, Histogram]]
    receives: Sequence[Histogram]
    sends: Sequence[tuple[int, int, int]]
    running: tuple[int, int, int] | None


def _of_this_host(recorder: _core.Recorder, where: RecorderLayout) -> _Noted:
    return _Noted(
        [recorder.task(index) for index in range(len(where.tasks))],
        [recorder.receive(index) for index in range(len(where.receives))],
        [recorder.send(index) for index in range(len(where.sends))],
        recorder.running,
    )


def _of_another_host(counted: Counted, now: int) -> _Noted:
    running = counted.running
    if running is not None:  # by the clock of another node
        running = (running[0], running[1], now - running[2])
    return _Noted(counted.tasks, counted.receives, counted.sends, running)


def _arenas(progress: Progress, remote_status: RemoteStatus) -> dict[int, int]:
    """Return the arena sizes, by actor. For an actor on another node, that node tells it: this node only
    knows the values of the actor that have come here."""
    return progress.arena_bytes | {
        participant: s.process_snapshot.memory for participant, s in remote_status.seen.items()
    }


def _unknown(graph: GraphInfo, remote_status: RemoteStatus) -> dict[str, str]:
    hosts = graph.hosts
    return {
        participant_name(graph.plan, participant): remote_status.why_unknown(name)
        for participant, name in hosts.items()
        if name != hosts[EXECUTOR] and participant not in remote_status.seen
    }


def _by_name(plan: Plan, numbers: dict[int, int]) -> dict[str, int]:
    return {
        participant_name(plan, participant): number
        for participant, number in sorted(numbers.items())
    }


def times(histogram: Histogram) -> Times:
    """Sum up a histogram of nanoseconds."""
    total, largest, buckets = histogram
    count = sum(n for _, _, n in buckets)
    return Times(
        count,
        total / 1e9,
        quantile(buckets, 0.5, largest) / 1e9,
        quantile(buckets, 0.99, largest) / 1e9,
        largest / 1e9,
    )


def quantile(buckets: Sequence[tuple[int, int, int]], share: float, largest: int) -> float:
    """Find the value that a ``share`` of all values does not exceed, as the middle of its bucket."""
    count = sum(n for _, _, n in buckets)
    rank = max(math.ceil(share * count), 1)
    for low, high, n in buckets:
        rank -= n
        if rank <= 0:
            return min((low + high - 1) / 2, largest)
    return 0.0


@dataclass(frozen=True, slots=True)
class _Table:
    """A table to print. The first ``text`` columns are text, the others are numbers."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    text: int


def _summary(stats: GraphStats) -> str:
    latency = stats.latency
    lines = [
        f"{stats.graph}: {stats.submitted} executions, {stats.completed} completed, "
        f"{stats.in_flight} in flight"
    ]
    if latency.count:
        lines.append(
            f"latency: p50 {duration(latency.p50_s)}, p99 {duration(latency.p99_s)}, "
            f"max {duration(latency.max_s)}"
        )
    if stats.room.count:
        lines.append(
            f"waits for room: {stats.room.count}, {duration(stats.room.total_s)} in total, "
            f"max {duration(stats.room.max_s)}"
        )
    held = ", ".join(f"{name} {size(n)}" for name, n in stats.arena_bytes.items() if n)
    lines.append(
        f"memory: arenas {held or 'empty'}; {stats.stashed_results} results not asked for yet"
        + (f" ({size(stats.stashed_bytes)})" if stats.stashed_results else "")
    )
    lines += [f"not known: {name}, as {why}" for name, why in stats.unknown.items()]
    return "\n".join(lines)


def _tables(stats: GraphStats) -> list[_Table]:
    tasks = _Table(
        ("task", "actor", "runs", "errors", "skipped", "total", *_QUANTILES, "now"), [], 2
    )
    for task in stats.tasks:
        tasks.rows.append(
            (
                task.task,
                task.actor,
                str(task.running.count),
                str(task.errors),
                str(task.skipped),
                duration(task.running.total_s),
                *_quantiles(task.running),
                "-" if task.current_s is None else duration(task.current_s),
            )
        )
    edges = _Table(("edge", "from", "to", "frames", "errors", "bytes", *_WAITS), [], 3)
    for edge in stats.edges:
        first = (
            f"#{edge.edge} {edge.source}",
            edge.writer,
        )
        numbers = (str(edge.frames), str(edge.errors), size(edge.bytes))
        for wait in edge.waits:
            edges.rows.append((*first, wait.reader, *numbers, *_quantiles(wait.waiting)))
            # The numbers of the edge stand at its first reader.
            first, numbers = ("", ""), ("", "", "")
    return [tasks, edges]


_QUANTILES = ("p50", "p99", "max")
_WAITS = ("wait p50", "p99", "max")


def _quantiles(measured: Times) -> tuple[str, str, str]:
    if not measured.count:
        return "-", "-", "-"
    return duration(measured.p50_s), duration(measured.p99_s), duration(measured.max_s)


def _aligned(table: _Table) -> str:
    rows = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < table.text else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _html(table: _Table) -> str:
    def cells(row: tuple[str, ...], kind: str) -> str:
        made = []
        for i, cell in enumerate(row):
            side = "left" if i < table.text else "right"
            made.append(f'<{kind} style="text-align:{side}">{escape(cell)}</{kind}>')
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(cells(row, "td") for row in table.rows)
    return f"<table><thead>{cells(table.head, 'th')}</thead><tbody>{body}</tbody></table>"
