"""Counters and times of graphs, for monitoring: as Prometheus text, and through OpenTelemetry.

The counters are those of ``graph.stats()``, which are always kept. Reading them asks no actor, so a scrape
costs the actors nothing and works while they are busy, stopped or dead. Counters of actors on other nodes are
asked of these nodes; without an answer in time they have no sample. Nothing here listens on a socket: serve
:func:`prometheus_text` from the web server that the program has. ::

    @app.get("/metrics")
    def metrics():
        return Response(conveyor.metrics.prometheus_text(), media_type=conveyor.metrics.CONTENT_TYPE)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from conveyor import _core
from conveyor.graph.compiled import CompiledGraph, graph_id
from conveyor.graph.lifecycle import GraphInfo
from conveyor.later import LaterModule
from conveyor.observe.stats import GraphStats, Times, read_stats
from conveyor.runtime import context

if TYPE_CHECKING:
    from opentelemetry import metrics as otel
else:
    otel = LaterModule("opentelemetry.metrics")

__all__ = ["CONTENT_TYPE", "observe_with_opentelemetry", "prometheus_text"]

#: The media type of :func:`prometheus_text`.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]
Kind = Literal["counter", "gauge", "summary"]


@dataclass(frozen=True, slots=True)
class _Metric:
    """Description of a metric. ``unit`` is the ending of its name, as Prometheus wants it."""

    name: str
    kind: Kind
    help: str
    unit: str = ""


_SUBMITTED = _Metric("executions_submitted", "counter", "Executions that were started.")
_COMPLETED = _Metric(
    "executions_completed", "counter", "Executions all of whose results have come."
)
_IN_FLIGHT = _Metric("executions_in_flight", "gauge", "Executions that are on their way.")
_LATENCY = _Metric(
    "execution_latency",
    "summary",
    "From the start of an execution's submission until its last result is in memory.",
    "seconds",
)
_ROOM = _Metric("room_wait", "summary", "Waits of execute for one of the graph's depth.", "seconds")
_TASK = _Metric("task_run", "summary", "Runs of a task, from its call to its return.", "seconds")
_TASK_ERRORS = _Metric("task_errors", "counter", "Runs of a task that raised.")
_TASK_SKIPPED = _Metric("task_skipped", "counter", "Times a task did not run: an argument failed.")
_TASK_NOW = _Metric(
    "task_current_run", "gauge", "How long the present run lasts, else 0.", "seconds"
)
_FRAMES = _Metric("edge_frames", "counter", "Values and errors that were sent on a channel.")
_EDGE_ERRORS = _Metric("edge_errors", "counter", "Errors that were sent on a channel.")
_BYTES = _Metric("edge_sent", "counter", "What was sent on a channel.", "bytes")
_WAIT = _Metric(
    "edge_wait", "summary", "Waits of a reader for the next frame of a channel.", "seconds"
)
_STASHED = _Metric("stashed_results", "gauge", "Results that nobody has asked for yet.")
_STASHED_BYTES = _Metric(
    "stashed", "gauge", "What results take that nobody has asked for.", "bytes"
)
_ARENA = _Metric("arena", "gauge", "Memory behind a process's arena of large values.", "bytes")

_METRICS = (
    _SUBMITTED,
    _COMPLETED,
    _IN_FLIGHT,
    _LATENCY,
    _ROOM,
    _TASK,
    _TASK_ERRORS,
    _TASK_SKIPPED,
    _TASK_NOW,
    _FRAMES,
    _EDGE_ERRORS,
    _BYTES,
    _WAIT,
    _STASHED,
    _STASHED_BYTES,
    _ARENA,
)

Samples = dict[_Metric, list[tuple[Labels, "float | Times"]]]


def prometheus_text(graphs: Iterable[CompiledGraph] | None = None) -> str:
    """Return the metrics of ``graphs`` in Prometheus' text format, version 0.0.4.

    Names begin with ``conveyor_``; times are seconds, sizes bytes, quantiles 0.5 and 0.99 of the whole
    time since the graph was compiled. Every sample has the labels ``graph`` (its name) and ``graph_id``
    (which tells graphs of one name apart).

    Args:
        graphs: the graphs to show; default: all that this process has compiled and not torn down.

    Raises:
        TypeError: ``graphs`` is something else, such as a single graph.
    """
    samples = _samples(None if graphs is None else _listed(graphs))
    lines: list[str] = []
    for metric in _METRICS:
        found = samples.get(metric)
        if not found:
            continue
        name = "_".join(filter(None, ("conveyor", metric.name, metric.unit)))
        if metric.kind == "counter":
            name += "_total"
        lines.append(f"# HELP {name} {metric.help}")
        lines.append(f"# TYPE {name} {metric.kind}")
        for labels, value in found:
            if isinstance(value, Times):
                for quantile, seconds in (("0.5", value.p50_s), ("0.99", value.p99_s)):
                    shown = seconds if value.count else float("nan")
                    lines.append(_line(name, {**labels, "quantile": quantile}, shown))
                lines.append(_line(f"{name}_sum", labels, value.total_s))
                lines.append(_line(f"{name}_count", labels, value.count))
            else:
                lines.append(_line(name, labels, value))
    return "".join(f"{line}\n" for line in lines)


def _listed(graphs: object) -> list[CompiledGraph]:
    if isinstance(graphs, Iterable):
        found = list(graphs)
        others = [graph for graph in found if not isinstance(graph, CompiledGraph)]
        if not others:
            return found
        graphs = others[0]
    raise TypeError(
        "prometheus_text takes compiled graphs in a list, as in prometheus_text([graph]), not "
        f"{type(graphs).__name__}"
    )


def observe_with_opentelemetry(provider: otel.MeterProvider | None = None) -> None:
    """Let OpenTelemetry read the metrics of all graphs that this process has, whenever it collects.

    Counters and gauges are observable instruments named ``conveyor.*``, with the attributes that
    :func:`prometheus_text` has as labels. A summary becomes ``*.count`` and ``*.sum`` (counters), ``*.p50``
    and ``*.p99`` (gauges).

    Args:
        provider: the source of the meter; default: the global provider.

    Raises:
        ImportError: ``opentelemetry-api`` is not installed.
    """
    meter = (provider or otel.get_meter_provider()).get_meter("conveyor")
    read = _Shared(lambda: _samples(None))

    def observed(metric: _Metric, value: Callable[[Any], float]) -> Callable[[Any], Iterable[Any]]:
        def callback(_options: Any) -> Iterable[Any]:
            found = read().get(metric, ())
            return [otel.Observation(value(v), dict(labels)) for labels, v in found]

        return callback

    units = {"seconds": "s", "bytes": "By"}
    for metric in _METRICS:
        name, unit = f"conveyor.{metric.name}", units.get(metric.unit, "1")
        if metric.kind == "counter":
            meter.create_observable_counter(name, [observed(metric, float)], unit, metric.help)
        elif metric.kind == "gauge":
            meter.create_observable_gauge(name, [observed(metric, float)], unit, metric.help)
        else:
            for part, of, kind in _PARTS:
                create = getattr(meter, f"create_observable_{kind}")
                create(
                    f"{name}.{part}",
                    [observed(metric, of)],
                    "1" if part == "count" else unit,
                    metric.help,
                )


_PARTS: tuple[tuple[str, Callable[[Times], float], str], ...] = (
    ("count", lambda times: times.count, "counter"),
    ("sum", lambda times: times.total_s, "counter"),
    ("p50", lambda times: times.p50_s, "gauge"),
    ("p99", lambda times: times.p99_s, "gauge"),
)


class _Shared:
    """Samples that all instruments of one collection share. The instruments ask one after the other, and the
    samples are read once."""

    _SECONDS = 0.1

    def __init__(self, read: Callable[[], Samples]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._samples: Samples = {}
        self._until = 0.0

    def __call__(self) -> Samples:
        with self._lock:
            if _core.monotonic() >= self._until:
                self._samples = self._read()
                self._until = _core.monotonic() + self._SECONDS
            return self._samples


def _samples(graphs: Iterable[CompiledGraph] | None) -> Samples:
    if graphs is not None:
        read = {graph.get_id(): graph.stats() for graph in graphs}
    else:
        runtime = context.running()
        graph_infos: list[GraphInfo] = [] if runtime is None else list(runtime.graphs)
        read = {graph_id(a.number): read_stats(a) for a in graph_infos if not a.is_teardown}
    samples: Samples = {}
    for number, stats in sorted(read.items()):
        _add(samples, stats, {"graph": stats.graph, "graph_id": number})
    return samples


def _add(samples: Samples, stats: GraphStats, graph: Labels) -> None:
    def add(metric: _Metric, value: float | Times, **labels: str) -> None:
        samples.setdefault(metric, []).append(({**graph, **labels}, value))

    add(_SUBMITTED, stats.submitted)
    add(_COMPLETED, stats.completed)
    add(_IN_FLIGHT, stats.in_flight)
    add(_LATENCY, stats.latency)
    add(_ROOM, stats.room)
    for task in stats.tasks:
        if task.actor in stats.unknown:  # a 0 would say that the task has begun anew
            continue
        where = {"task": task.task, "actor": task.actor}
        add(_TASK, task.running, **where)
        add(_TASK_ERRORS, task.errors, **where)
        add(_TASK_SKIPPED, task.skipped, **where)
        add(_TASK_NOW, task.current_s or 0.0, **where)
    for edge in stats.edges:
        where = {"edge": str(edge.edge), "source": edge.source, "writer": edge.writer}
        if edge.writer not in stats.unknown:
            add(_FRAMES, edge.frames, **where)
            add(_EDGE_ERRORS, edge.errors, **where)
            add(_BYTES, edge.bytes, **where)
        for wait in edge.waits:
            if wait.reader in stats.unknown:
                continue
            add(_WAIT, wait.waiting, **where, reader=wait.reader)
    add(_STASHED, stats.stashed_results)
    add(_STASHED_BYTES, stats.stashed_bytes)
    for process, size in stats.arena_bytes.items():
        if process in stats.unknown:
            continue
        add(_ARENA, size, process=process)


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return "NaN" if value != value else repr(value)
