"""A simulated timeline is written as ``graph.trace()`` writes what has really happened."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conveyor.observe.dataflow import place_name, printable
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.plan.timeline import Span, Timeline

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
    """Write ``timeline`` to ``path``; compressed, if that ends in ``.gz``."""
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
    places = (EXECUTOR, *range(len(plan.actors)))
    for place in places:
        title = f"{place_name(plan, place)} (simulated)"
        yield _metadata("process_name", _pid(place), 0, {"name": title})
        yield _metadata("process_sort_index", _pid(place), 0, {"sort_index": _pid(place)})
        yield _metadata("thread_name", _pid(place), _pid(place), {"name": name})
    # Transfers go on beside what the actor does: those of each edge have a track of their own.
    beside = {(s.place, s.number): s.label for s in timeline.spans if s.kind == "transfer"}
    for (place, edge), label in beside.items():
        track = {"name": f"tensors of {printable(label)}"}
        yield _metadata("thread_name", _pid(place), _transfers(plan, edge), track)

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
            for more, at, place in (
                ({"ph": "s"}, source.start, source.place),
                ({"ph": "f", "bp": "e"}, span.start, span.place),
            ):
                yield {
                    **more,
                    "id": flow,
                    "name": printable(span.label),
                    "cat": "edge",
                    "ts": _us(at),
                    "pid": _pid(place),
                    "tid": _pid(place),
                }


def _slice(plan: Plan, span: Span) -> dict[str, Any]:
    apart = span.kind == "transfer"
    return {
        "ph": "X",
        "name": f"{_VERBS[span.kind]}{printable(span.label)}",
        "cat": _CATEGORIES.get(span.kind, span.kind),
        "ts": _us(span.start),
        "dur": _us(span.seconds),
        "pid": _pid(span.place),
        "tid": _transfers(plan, span.number) if apart else _pid(span.place),
        "args": {"execution": span.execution, "why": span.why},
    }


def _pid(place: int) -> int:
    """Return a number for a place's process: there is none, and viewers want more than 0."""
    return place + 2


def _transfers(plan: Plan, edge: int) -> int:
    return len(plan.actors) + 2 + edge


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _metadata(name: str, pid: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": thread, "args": args}
