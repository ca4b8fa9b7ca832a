"""A graph is drawn with characters."""

from __future__ import annotations

from itertools import pairwise

from conveyor.observe.dataflow import Dataflow, arrow_lines
from conveyor.observe.drawing.layers import Link, lay_out
from conveyor.observe.drawing.picture import cells
from conveyor.observe.drawing.tracks import tracks
from conveyor.plan.model import Plan


def draw(plan: Plan, flow: Dataflow) -> list[str]:
    """Draw all rows, from the inputs down to the output."""
    texts = []
    for place, node in enumerate(flow.nodes):
        left, right = "[]" if node.kind == "task" else "()"
        texts.append(f"{left}{place}: {node.label}{right}")
    labels = [" ".join(arrow_lines(plan, arrow, False)) for arrow in flow.arrows]
    links = [
        # An odd width has a middle, where the line is.
        Link(arrow.source, arrow.target, cells(label) | 1, 1 if label else 0)
        for arrow, label in zip(flow.arrows, labels, strict=True)
    ]
    layout = lay_out(
        [(cells(text), 1) for text in texts],
        links,
        spacing=2,
        port=2,
        gap=lambda spans: _height(_columns(spans)),
    )
    grid = _Grid()
    dashed = [arrow.edge is None for arrow in flow.arrows]
    # The lines in each gap, by its first row.
    gaps: dict[int, list[int]] = {}
    spans: dict[int, list[tuple[int, int]]] = {}
    ends: dict[int, int] = {}
    for index, course in enumerate(layout.courses):
        for x, top, bottom in course.stops:
            for row in range(int(top), int(bottom)):
                grid.down(int(x), row, dashed[index])
        for (x0, _, start), (x1, end, _) in pairwise(course.stops):
            gaps.setdefault(int(start), []).append(index)
            spans.setdefault(int(start), []).append((int(x0), int(x1)))
            ends[int(start)] = int(end)
    for start, lines in gaps.items():
        turns = tracks(spans[start])
        for index, span, turn in zip(lines, spans[start], turns, strict=True):
            grid.step(span, start, ends[start], turn, dashed[index])
    for course in layout.courses:
        x, _, y = course.stops[-1]
        grid.write(int(x), int(y) - 1, "v")
    for label, course in zip(labels, layout.courses, strict=True):
        if label:
            x, y, _ = course.stops[course.label]
            grid.write(int(x) - (cells(label) | 1) // 2, int(y), label)
    for text, box in zip(texts, layout.boxes, strict=True):
        grid.write(int(box.x) + (int(box.width) - cells(text)) // 2, int(box.y), text)
    return grid.lines()


def _columns(spans: list[tuple[float, float]]) -> list[tuple[int, int]]:
    return [(int(x0), int(x1)) for x0, x1 in spans]


def _height(spans: list[tuple[int, int]]) -> int:
    """Leave room for the tracks, and for an arrow's head below them."""
    return max(tracks(spans), default=-1) + 2


class _Grid:
    """Characters by column and row."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, int], str] = {}

    def down(self, x: int, y: int, dashed: bool) -> None:
        """Draw a piece of a line that runs down."""
        flat = self._at.get((x, y)) in ("-", "~")
        self._at[x, y] = "+" if flat else ":" if dashed else "|"

    def flat(self, x: int, y: int, dashed: bool) -> None:
        """Draw a piece of a line that runs to the side."""
        steep = self._at.get((x, y)) in ("|", ":")
        self._at[x, y] = "+" if steep else "~" if dashed else "-"

    def step(self, span: tuple[int, int], top: int, bottom: int, track: int, dashed: bool) -> None:
        """Draw a line through a gap: down to its track, along it, and down from there."""
        x0, x1 = span
        turn = top + max(track, 0)
        for y in range(top, bottom):
            if x0 == x1 or y != turn:
                self.down(x0 if y < turn else x1, y, dashed)
        if x0 != x1:
            self._at[x0, turn], self._at[x1, turn] = "'", "."
            for x in range(min(x0, x1) + 1, max(x0, x1)):
                self.flat(x, turn, dashed)

    def write(self, x: int, y: int, text: str) -> None:
        """Write ``text`` from (``x``, ``y``) on; a wide character takes two places."""
        for char in text:
            width = cells(char)
            if width == 0:
                self._at[x - 1, y] = self._at.get((x - 1, y), "") + char
                continue
            self._at[x, y] = char
            for rest in range(1, width):
                self._at[x + rest, y] = ""
            x += width

    def lines(self) -> list[str]:
        """Return all rows, top down."""
        rows: dict[int, dict[int, str]] = {}
        for (x, y), char in self._at.items():
            rows.setdefault(y, {})[x] = char
        return [
            "".join(row.get(x, " ") for x in range(max(row) + 1)) if row else ""
            for row in (rows.get(y, {}) for y in range(max(rows, default=-1) + 1))
        ]
