"""A trace of `graph.trace` as a picture: a row for each thread, slices over time, an arrow for each frame."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conveyor.observe.drawing.picture import (
    INK,
    LINE,
    MUTED,
    Line,
    Picture,
    Polygon,
    Rect,
    Shape,
    Text,
    actor_colour,
    text_width,
)

_MARGIN, _LABELS, _WIDTH, _ROW, _TOP = 20.0, 110.0, 760.0, 52.0, 58.0
_SLICE = 26.0
_GREY = "#dfe3e8"


def draw_trace(path: Path, executions: Sequence[int], title: str) -> Picture:
    """The slices of ``executions`` that the trace file ``path`` holds, and the frames between them."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    slices = [e for e in events if e["ph"] == "X" and e["args"]["execution"] in executions]
    begin = min(e["ts"] for e in slices if e["cat"] != "wait")
    end = max(e["ts"] + e["dur"] for e in slices if e["cat"] != "wait")
    rows = {pid: _TOP + row * _ROW for row, pid in enumerate(names)}

    def place(at: float) -> float:
        inside = min(max(at, begin), end)
        return _MARGIN + _LABELS + (inside - begin) / (end - begin) * _WIDTH

    bottom = _TOP + len(rows) * _ROW
    shapes: list[Shape] = [Text(_MARGIN, 30, title, 15, INK, bold=True)]
    shapes += _axis(begin, end, place, bottom)
    for number, (pid, y) in enumerate(rows.items()):
        shapes.append(Text(_MARGIN, y + _SLICE / 2 + 5, names[pid], 13, INK, bold=True))
        # What waits holds nothing else, and is drawn below the rest.
        for event in sorted(
            (e for e in slices if e["pid"] == pid), key=lambda e: (e["cat"] != "wait", e["ts"])
        ):
            shapes += _slice(event, number, y, place)
    for start, finish in _frames(events, begin, end):
        shapes += _arrow(
            (place(start["ts"]), rows[start["pid"]] + _SLICE),
            (place(finish["ts"]), rows[finish["pid"]]),
            rows[start["pid"]] < rows[finish["pid"]],
        )
    return Picture(_MARGIN * 2 + _LABELS + _WIDTH, bottom + 26, title, tuple(shapes))


def _slice(event: Mapping[str, Any], row: int, y: float, place: Any) -> list[Shape]:
    left, right = place(event["ts"]), place(event["ts"] + event["dur"])
    width = max(right - left, 1.5)
    label = f"{event['name']}, {event['dur']:.1f} us"
    if event["cat"] == "wait":
        return [Rect(left, y + _SLICE / 2 - 2, width, 4, _GREY, None, 1, label)]
    colour = actor_colour(row - 1)
    fill = colour.fill if event["cat"] == "task" else colour.stroke
    shapes: list[Shape] = [Rect(left, y, width, _SLICE, fill, colour.stroke, 2, label)]
    if event["cat"] == "task" and text_width(event["name"], 11) < width - 6:
        shapes.append(Text(left + width / 2, y + 17, event["name"], 11, INK, "middle"))
    return shapes


def _frames(events: Sequence[Mapping[str, Any]], begin: float, end: float) -> list[tuple[Any, Any]]:
    """The two ends of each frame that lies between ``begin`` and ``end``."""
    ends: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], {})[event["ph"]] = event
    pairs = [(both["s"], both["f"]) for both in ends.values() if len(both) == 2]
    return [(s, f) for s, f in pairs if begin <= s["ts"] and f["ts"] <= end]


def _arrow(start: tuple[float, float], end: tuple[float, float], down: bool) -> list[Shape]:
    (x0, y0), (x1, y1) = start, end
    if not down:
        y0, y1 = y0 - _SLICE, y1 + _SLICE
    tip = -5.0 if down else 5.0
    head = Polygon(((x1, y1), (x1 - 3, y1 + tip), (x1 + 3, y1 + tip)), MUTED)
    return [Line(((x0, y0), (x1, y1)), LINE, 1.0), head]


def _axis(begin: float, end: float, place: Any, bottom: float) -> list[Shape]:
    span = end - begin
    step = next(s for s in _STEPS if span / s <= 8)
    shapes: list[Shape] = []
    at = 0.0
    while at <= span:
        x = place(begin + at)
        shapes.append(Line(((x, _TOP - 8), (x, bottom - 8)), "#eef1f4", 1.0))
        shapes.append(Text(x, bottom + 8, f"{at:g} us", 11, MUTED, "middle"))
        at += step
    return shapes


_STEPS = [digit * 10.0**power for power in range(0, 9) for digit in (1, 2, 5)]
