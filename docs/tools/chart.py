"""The headlines of docs/benchmarks.md as a picture: one bar for each time, on one logarithmic scale."""

from __future__ import annotations

import itertools
import math
import re

from conveyor.observe.drawing.picture import INK, MUTED, Line, Picture, Rect, Shape, Text

#: Columns of the table, and their colours.
_SYSTEMS = {
    "Conveyor": "#d1495b",
    "floor": "#9a9a9a",
    "Ray Compiled Graph": "#30638e",
    "Ray Core": "#6fa3c7",
    "`multiprocessing.Pipe`": "#66a182",
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LEFT, _WIDTH, _BAR, _BETWEEN, _TOP = 330.0, 500.0, 11.0, 12.0, 74.0


def measured(page: str) -> dict[str, dict[str, float]]:
    """Seconds by row and system: the rows that are times, of the first table whose corner says ``p50``."""
    lines = page.splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith("| p50 |"))
    systems = [cell.strip() for cell in lines[begin].strip("|").split("|")][1:]
    rows: dict[str, dict[str, float]] = {}
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines[begin + 2 :]):
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for system, cell in zip(systems, cells, strict=True):
            told = re.match(r"\**([\d.]+) (us|ms|s)\b", cell)
            if told:
                rows.setdefault(name, {})[system] = float(told[1]) * _SECONDS[told[2]]
    return rows


def draw_chart(page: str) -> Picture:
    """Draw the chart of that table."""
    rows = {
        name: times
        for name, times in measured(page).items()
        if "Ray Core" in times or "Ray Compiled Graph" in times or "floor" in times
    }
    low = math.floor(math.log10(min(min(times.values()) for times in rows.values())))
    high = math.ceil(math.log10(max(max(times.values()) for times in rows.values())))

    def place(seconds: float) -> float:
        return _LEFT + (math.log10(seconds) - low) / (high - low) * _WIDTH

    title = "Median times; the scale is logarithmic"
    shapes: list[Shape] = [Text(20, 30, title, 15, INK, bold=True)]
    x = 20.0
    for system, colour in _SYSTEMS.items():
        name = system.strip("`")
        shapes += [Rect(x, 42, 11, 11, colour, None, 2), Text(x + 17, 52, name, 12, INK)]
        x += 17 + len(name) * 12 * 0.61 + 20
    y = _TOP
    bars: list[Shape] = []
    for name, times in rows.items():
        middle = y + len(times) * _BAR / 2 + 4
        bars.append(Text(20, middle, name.replace("`", ""), 12, INK))
        for system, colour in _SYSTEMS.items():
            if system in times:
                width = place(times[system]) - _LEFT
                label = _spoken(times[system])
                bars.append(Rect(_LEFT, y, width, _BAR - 2, colour, None, 1, f"{system}: {label}"))
                bars.append(Text(_LEFT + width + 5, y + _BAR - 2, label, 10, MUTED))
                y += _BAR
        y += _BETWEEN
    for power in range(low, high + 1):
        at = place(10.0**power)
        shapes.append(Line(((at, _TOP - 8), (at, y)), "#e3e7eb", 1.0))
        shapes.append(Text(at, y + 14, _spoken(10.0**power), 11, MUTED, "middle"))
    return Picture(_LEFT + _WIDTH + 90, y + 30, title, (*shapes, *bars))


def _spoken(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size * 0.9999:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
