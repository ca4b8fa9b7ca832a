"""Pictures of a graph, with its legend and every actor's schedule, and of a timeline."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

from conveyor.observe.dataflow import (
    Column,
    Dataflow,
    arrow_lines,
    columns,
    dataflow,
    participant_name,
    printable,
)
from conveyor.observe.drawing.layers import Course, Link, lay_out
from conveyor.observe.units import duration
from conveyor.plan.explain import counted
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.plan.simulate import Span, Timeline

Point = tuple[float, float]

#: The width of a character, in units of the text's size. All text is monospaced.
ADVANCE = 0.61

INK = "#1b1f24"
MUTED = "#57606a"
LINE = "#6e7781"
PAPER = "#ffffff"

# After Okabe and Ito; the yellow is darker, so that a line of it shows on white.
_HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8f7a00", "#7a5cb8")
#: How much of the hue is in the fill: each round through the hues takes the next.
_STRENGTHS = (0.22, 0.42, 0.10)

_FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle with round corners. Viewers may show ``title`` when the pointer is over it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str | None = None
    radius: float = 0.0
    title: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through ``points``."""

    points: tuple[Point, ...]
    stroke: str
    width: float = 1.4
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Polygon:
    """A filled convex polygon: an arrow's head."""

    points: tuple[Point, ...]
    fill: str


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text. ``y`` is its baseline, ``x`` its start or, by ``anchor``, its middle."""

    x: float
    y: float
    text: str
    size: float
    fill: str
    anchor: Literal["start", "middle"] = "start"
    bold: bool = False


Shape = Rect | Line | Polygon | Text


@dataclass(frozen=True, slots=True)
class Picture:
    """Shapes, the later over the earlier, on white. All lengths are pixels, ``y`` grows down."""

    width: float
    height: float
    title: str
    shapes: tuple[Shape, ...]


def cells(text: str) -> int:
    """Count the characters' places that ``text`` takes: two for a wide one, none for a combining one."""
    return sum(char_cells(char) for char in text)


def char_cells(char: str) -> int:
    """Count the characters' places that ``char`` takes."""
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def text_width(text: str, size: float) -> float:
    """Return the width of ``text`` in pixels."""
    return cells(text) * size * ADVANCE


# Actors have colours, which the colour-blind can tell apart too, and which are light under text.


@dataclass(frozen=True, slots=True)
class Colour:
    """``fill`` is light enough for black text, ``stroke`` stands out from white; ``#rrggbb``."""

    fill: str
    stroke: str


def actor_colour(index: int) -> Colour:
    """Return the colour of an actor; they repeat only after 24. A negative number is the driver's grey."""
    if index < 0:
        return Colour("#eaeef2", LINE)
    hue = _HUES[index % len(_HUES)]
    strength = _STRENGTHS[index // len(_HUES) % len(_STRENGTHS)]
    return Colour(_mix(hue, strength), hue)


def rgb(colour: str) -> tuple[int, int, int]:
    """Return the three components, 0 to 255, of ``#rrggbb``."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _mix(colour: str, share: float) -> str:
    """Mix ``colour`` into white."""
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in rgb(colour))


def write_svg(picture: Picture) -> str:
    """Write the text of an SVG file. It refers to nothing outside."""
    width, height = _number(picture.width), _number(picture.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family={quoteattr(_FONT)} role="img">',
        f"<title>{escape(picture.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        *map(_shape, picture.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _shape(shape: Shape) -> str:
    match shape:
        case Rect():
            stroke = f' stroke="{shape.stroke}" stroke-width="1.4"' if shape.stroke else ""
            start = (
                f'<rect x="{_number(shape.x)}" y="{_number(shape.y)}" '
                f'width="{_number(shape.width)}" height="{_number(shape.height)}" '
                f'rx="{_number(shape.radius)}" fill="{shape.fill}"{stroke}'
            )
            title = escape(shape.title)
            return f"{start}><title>{title}</title></rect>" if title else f"{start}/>"
        case Line():
            dash = ' stroke-dasharray="5 4"' if shape.dashed else ""
            return (
                f'<polyline points="{_points(shape.points)}" fill="none" stroke="{shape.stroke}" '
                f'stroke-width="{_number(shape.width)}" stroke-linejoin="round"{dash}/>'
            )
        case Polygon():
            return f'<polygon points="{_points(shape.points)}" fill="{shape.fill}"/>'
        case Text():
            bold = ' font-weight="bold"' if shape.bold else ""
            anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
            place = f'x="{_number(shape.x)}" y="{_number(shape.y)}"'
            look = f'font-size="{_number(shape.size)}" fill="{shape.fill}"{anchor}{bold}'
            return f'<text {place} {look} xml:space="preserve">{escape(shape.text)}</text>'


def _points(points: tuple[tuple[float, float], ...]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


_SIZE, _SMALL, _TITLE = 13.0, 11.0, 15.0
_LEADING = 1.35  # from baseline to baseline, in units of the text's size
_MARGIN, _BETWEEN = 24.0, 36.0
_LONGEST = 34  # characters in a line of a box
_LINES = 3  # of a box
_HEAD = 8.0  # the length of an arrow's head


def compose(plan: Plan, name: str, channel_details: bool, schedule: bool) -> Picture:
    """Make the whole picture."""
    summary = _summary(plan, name)
    graph = _graph(plan, dataflow(plan), channel_details)
    legend = _legend(plan, max(graph.width, 360.0))
    parts = [_stack(graph, legend)]
    if schedule:
        parts.append(_schedule(plan, parts[0]))
    top = _MARGIN + _TITLE + 18
    shapes: list[Shape] = [Text(_MARGIN, _MARGIN + _TITLE, summary, _TITLE, INK, bold=True)]
    # The schedule goes to the right or below: wherever the page comes nearer to a screen's shape.
    side_by_side = len(parts) == 2 and parts[1].side_by_side
    x, y = _MARGIN, top
    right, bottom = _MARGIN + text_width(summary, _TITLE), top
    for part in parts:
        shapes += _moved(part.shapes, x, y)
        right, bottom = max(right, x + part.width), max(bottom, y + part.height)
        if side_by_side:
            x += part.width + _BETWEEN
        else:
            y += part.height + _BETWEEN
    return Picture(right + _MARGIN, bottom + _MARGIN, summary, tuple(shapes))


class _Part:
    """Some shapes, and the size of the area that they fill from (0, 0) on."""

    def __init__(
        self, width: float, height: float, shapes: list[Shape], side_by_side: bool = False
    ) -> None:
        self.width = width
        self.height = height
        self.shapes = shapes
        self.side_by_side = side_by_side


def _summary(plan: Plan, name: str) -> str:
    counts = ((plan.actors, "actor"), (plan.tasks, "task"), (plan.edges, "edge"))
    text = ", ".join(counted(len(what), noun) for what, noun in counts)
    return f"{name}{name and ': '}{text}; depth {plan.depth}"


def _graph(plan: Plan, flow: Dataflow, details: bool) -> _Part:
    texts = [_wrapped(node.label) for node in flow.nodes]
    sizes = [
        (
            max(text_width(line, _SIZE) for line in lines) + 24,
            len(lines) * _SIZE * _LEADING + 14,
        )
        for lines in texts
    ]
    written = [
        [part for line in arrow_lines(plan, arrow, details) for part in _wrapped(line)]
        for arrow in flow.arrows
    ]
    links = [
        Link(
            arrow.source,
            arrow.target,
            max((text_width(line, _SMALL) + 6 for line in lines), default=0),
            len(lines) * _SMALL * _LEADING,
        )
        for arrow, lines in zip(flow.arrows, written, strict=True)
    ]
    layout = lay_out(sizes, links, spacing=18, port=12, gap=_gap)
    shapes: list[Shape] = []
    for arrow, course in zip(flow.arrows, layout.courses, strict=True):
        shapes += _arrow(course, actor_colour(flow.nodes[arrow.source].actor).stroke, arrow.edge)
    for lines, course in zip(written, layout.courses, strict=True):
        shapes += _label(lines, course)
    for node, lines, box in zip(flow.nodes, texts, layout.boxes, strict=True):
        colour = actor_colour(node.actor)
        radius = 5.0 if node.kind == "task" else min(box.height / 2, 16.0)
        shapes.append(
            Rect(
                box.x, box.y, box.width, box.height, colour.fill, colour.stroke, radius, node.label
            )
        )
        y = box.y + box.height / 2 - len(lines) * _SIZE * _LEADING / 2 + _SIZE
        for line in lines:
            x = box.x + box.width / 2
            shapes.append(Text(x, y, line, _SIZE, INK, "middle", bold=node.kind == "task"))
            y += _SIZE * _LEADING
    return _Part(layout.width, layout.height, shapes)


def _gap(spans: list[tuple[float, float]]) -> float:
    """Leave more height where arrows run far to the side, so that they do not lie flat."""
    far = max((abs(x1 - x0) for x0, x1 in spans), default=0.0)
    return 14 + min(far * 0.12, 60)


def _arrow(course: Course, stroke: str, edge: int | None) -> list[Shape]:
    points: list[Point] = [(course.stops[0][0], course.stops[0][1])]
    for number, (x, top, bottom) in enumerate(course.stops):
        # The line ends within the head, whose tip touches the box.
        back = _HEAD - 1 if number == len(course.stops) - 1 else 0.0
        if number:
            points += _curve(points[-1], (x, top - back))
        if bottom > top:
            points.append((x, bottom - back))
    x, _, tip = course.stops[-1]
    head = ((x, tip), (x - _HEAD / 2.2, tip - _HEAD), (x + _HEAD / 2.2, tip - _HEAD))
    return [Line(tuple(points), stroke, dashed=edge is None), Polygon(head, stroke)]


def _curve(start: Point, end: Point) -> list[Point]:
    """Make the points of a Bezier curve that leaves and arrives upright, without ``start``."""
    (x0, y0), (x1, y1) = start, end
    if abs(x1 - x0) < 0.5:
        return [end]
    made: list[Point] = []
    for i in range(1, 11):
        t = i / 10
        sideways = t * t * (3 - 2 * t)
        # The handles reach half way down.
        down = 1.5 * t * (1 - t) ** 2 + 1.5 * t * t * (1 - t) + t**3
        made.append((x0 + (x1 - x0) * sideways, y0 + (y1 - y0) * down))
    return made


def _label(lines: Sequence[str], course: Course) -> list[Shape]:
    if not lines:
        return []
    x, top, _ = course.stops[course.label]
    width = max(text_width(line, _SMALL) for line in lines)
    height = len(lines) * _SMALL * _LEADING
    shapes: list[Shape] = [Rect(x - width / 2 - 3, top, width + 6, height, PAPER)]
    for number, line in enumerate(lines):
        y = top + _SMALL + number * _SMALL * _LEADING
        shapes.append(Text(x, y, line, _SMALL, MUTED, "middle"))
    return shapes


def _legend(plan: Plan, max_width: float) -> _Part:
    """Draw the actors with their colours, and what the lines mean; rows are as wide as ``max_width``."""
    shapes: list[Shape] = []
    x, y, row, right = 0.0, 0.0, 22.0, 0.0

    def place(width: float) -> tuple[float, float]:
        nonlocal x, y, right
        if x > 0 and x + width > max_width:
            x, y = 0.0, y + row
        at = x, y
        right = max(right, x + width)
        x += width + 18
        return at

    for actor in (EXECUTOR, *range(len(plan.actors))):
        name = _short(participant_name(plan, actor), 40)
        left, top = place(20 + text_width(name, _SMALL))
        colour = actor_colour(actor)
        shapes.append(Rect(left, top, 14, 14, colour.fill, colour.stroke, 3))
        shapes.append(Text(left + 20, top + 11, name, _SMALL, INK))
    x, y = 0.0, y + row
    for dashed, text in ((False, "#n: over channel n"), (True, "stays in its process")):
        left, top = place(38 + text_width(text, _SMALL))
        shapes.append(Line(((left, top + 7), (left + 30, top + 7)), LINE, dashed=dashed))
        shapes.append(Text(left + 38, top + 11, text, _SMALL, INK))
    return _Part(right, y + 16, shapes)


def _schedule(plan: Plan, graph: _Part) -> _Part:
    """Draw all columns, in rows as long as makes the page's shape best."""
    made = [_column(column) for column in columns(plan)]
    best: tuple[float, list[list[_Part]], bool] | None = None
    for count in range(1, len(made) + 1):
        rows = [made[i : i + count] for i in range(0, len(made), count)]
        width = max(sum(part.width + 16 for part in row) for row in rows)
        height = sum(max(part.height for part in row) + 16 for row in rows)
        for side_by_side in (True, False):
            page_width = graph.width + width if side_by_side else max(graph.width, width)
            page_height = max(graph.height, height) if side_by_side else graph.height + height
            # The smaller this is, the larger the page shows on a screen of this shape.
            score = max(page_width / 1.6, page_height)
            if best is None or score < best[0]:
                best = score, rows, side_by_side
    assert best is not None  # there is the driver's column at least
    shapes: list[Shape] = []
    y = right = 0.0
    for row in best[1]:
        x = 0.0
        for part in row:
            shapes += _moved(part.shapes, x, y)
            x += part.width + 16
        right = max(right, x - 16)
        y += max(part.height for part in row) + 16
    return _Part(right, y - 16, shapes, side_by_side=best[2])


def _column(column: Column) -> _Part:
    colour = actor_colour(column.participant)
    title = _short(column.title, 44)
    texts = [_short(row.text(), 60) for row in column.rows]
    number = len(str(len(texts)))
    lead = (number + 7) * _SMALL * ADVANCE
    width = max(
        text_width(title, _SIZE) + 20,
        lead + max((text_width(text, _SMALL) for text in texts), default=0.0) + 20,
    )
    height, head = 20.0, 26.0
    total = head + len(texts) * height + 4
    shapes: list[Shape] = [
        Rect(0, 0, width, total, PAPER, colour.stroke, 5, column.title),
        Rect(0, 0, width, head, colour.fill, colour.stroke, 5),
        Text(10, 18, title, _SIZE, INK, bold=True),
    ]
    for index, (row, text) in enumerate(zip(column.rows, texts, strict=True)):
        y = head + 2 + index * height
        call = row.kind == "call"
        if call:
            shapes.append(Rect(2, y, width - 4, height, colour.fill, None, 3))
        lead_text = f"{index + 1:>{number}} {row.kind}"
        shapes.append(Text(10, y + 14, lead_text, _SMALL, INK if call else MUTED, bold=call))
        shapes.append(Text(10 + lead, y + 14, text, _SMALL, INK, bold=call))
    return _Part(width, total, shapes)


def _stack(first: _Part, second: _Part) -> _Part:
    y = first.height + 20
    return _Part(
        max(first.width, second.width),
        y + second.height,
        [*first.shapes, *_moved(second.shapes, 0, y)],
    )


def _moved(shapes: Sequence[Shape], dx: float, dy: float) -> list[Shape]:
    moved: list[Shape] = []
    for shape in shapes:
        if isinstance(shape, (Line, Polygon)):
            points = tuple((x + dx, y + dy) for x, y in shape.points)
            moved.append(replace(shape, points=points))
        else:
            moved.append(replace(shape, x=shape.x + dx, y=shape.y + dy))
    return moved


def _wrapped(text: str) -> list[str]:
    """Break ``text`` into a few lines; the last tells if there is more."""
    if cells(text) <= _LONGEST:
        return [text]
    lines = textwrap.wrap(text, _LONGEST) or [""]
    if len(lines) > _LINES:
        lines = [*lines[: _LINES - 1], _short("".join(lines[_LINES - 1 :]), _LONGEST)]
    return lines


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


# A timeline: a row for each process, time to the right.

_WIDTH = 1100.0  # of the time axis
_ROW = 26.0
_GAP = 8.0
_SIDE = 16.0
_TICKS = 6


def draw_timeline(plan: Plan, timeline: Timeline, name: str) -> Picture:
    """Draw ``timeline``. Work of a process is a box, in the colour of its actor. A transfer to the process
    is a line below."""
    participants = (EXECUTOR, *range(len(plan.actors)))
    names = [participant_name(plan, participant) for participant in participants]
    left = _SIDE + max(text_width(title, _SMALL) for title in names) + 10
    top = _SIDE + 24
    scale = _WIDTH / (timeline.end or 1.0)
    row_of = {who: top + row * (_ROW + _GAP) for row, who in enumerate(participants)}
    bottom = top + len(participants) * (_ROW + _GAP)
    shapes: list[Shape] = [Text(_SIDE, _SIDE + 8, printable(name), 13, INK, bold=True)]
    for tick in range(_TICKS + 1):
        x = left + _WIDTH * tick / _TICKS
        shapes.append(Line(((x, top - 4), (x, bottom)), LINE, 0.4, dashed=True))
        shapes.append(
            Text(x, bottom + 14, duration(timeline.end * tick / _TICKS), _SMALL, MUTED, "middle")
        )
    for participant, title in zip(participants, names, strict=True):
        shapes.append(Text(_SIDE, row_of[participant] + _ROW * 0.65, title, _SMALL, INK))
    for span in timeline.spans:
        y, x, width = row_of[span.participant], left + span.start * scale, span.seconds * scale
        if span.kind == "transfer":
            shapes.append(Rect(x, y + _ROW + 1, width, 4, MUTED, title=_title(span)))
        elif span.kind in ("compute", "send", "submit") and width > 0:
            colour = actor_colour(span.participant)
            solid = span.kind == "send"
            fill = colour.stroke if solid else colour.fill
            # The smallest box is still to be seen.
            shapes.append(
                Rect(x, y, max(width, 0.5), _ROW, fill, colour.stroke, title=_title(span))
            )
            text = str(span.execution)
            if not solid and width > text_width(text, _SMALL) + 2:
                shapes.append(Text(x + width / 2, y + _ROW * 0.65, text, _SMALL, INK, "middle"))
    return Picture(left + _WIDTH + 3 * _SIDE, bottom + 24, name, tuple(shapes))


def _title(span: Span) -> str:
    return (
        f"{span.kind} {printable(span.label)}, execution {span.execution}: "
        f"{duration(span.seconds)} from {duration(span.start)}"
    )
