"""A timeline is drawn: a row for each process, time to the right."""

from __future__ import annotations

from conveyor.observe.dataflow import place_name, printable
from conveyor.observe.drawing.palette import INK, LINE, MUTED, actor_colour
from conveyor.observe.drawing.picture import Line, Picture, Rect, Shape, Text, text_width
from conveyor.observe.units import duration
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.plan.timeline import Span, Timeline

_WIDTH = 1100.0  # of the time axis
_ROW = 26.0
_GAP = 8.0
_TEXT = 11.0
_MARGIN = 16.0
_TICKS = 6


def draw_timeline(plan: Plan, timeline: Timeline, name: str) -> Picture:
    """Draw ``timeline``. What a process works at is a box, in the colour of its
    actor; what comes to it meanwhile is a line below."""
    places = (EXECUTOR, *range(len(plan.actors)))
    names = [place_name(plan, place) for place in places]
    left = _MARGIN + max(text_width(title, _TEXT) for title in names) + 10
    top = _MARGIN + 24
    scale = _WIDTH / (timeline.end or 1.0)
    row_of = {place: top + row * (_ROW + _GAP) for row, place in enumerate(places)}
    bottom = top + len(places) * (_ROW + _GAP)
    shapes: list[Shape] = [Text(_MARGIN, _MARGIN + 8, printable(name), 13, INK, bold=True)]
    for tick in range(_TICKS + 1):
        x = left + _WIDTH * tick / _TICKS
        shapes.append(Line(((x, top - 4), (x, bottom)), LINE, 0.4, dashed=True))
        shapes.append(
            Text(x, bottom + 14, duration(timeline.end * tick / _TICKS), _TEXT, MUTED, "middle")
        )
    for place, title in zip(places, names, strict=True):
        shapes.append(Text(_MARGIN, row_of[place] + _ROW * 0.65, title, _TEXT, INK))
    for span in timeline.spans:
        y, x, width = row_of[span.place], left + span.start * scale, span.seconds * scale
        if span.kind == "transfer":
            shapes.append(Rect(x, y + _ROW + 1, width, 4, MUTED, title=_title(span)))
        elif span.kind in ("compute", "send", "submit") and width > 0:
            colour = actor_colour(span.place)
            solid = span.kind == "send"
            fill = colour.stroke if solid else colour.fill
            # The smallest box is still to be seen.
            shapes.append(
                Rect(x, y, max(width, 0.5), _ROW, fill, colour.stroke, title=_title(span))
            )
            text = str(span.execution)
            if not solid and width > text_width(text, _TEXT) + 2:
                shapes.append(Text(x + width / 2, y + _ROW * 0.65, text, _TEXT, INK, "middle"))
    return Picture(left + _WIDTH + 3 * _MARGIN, bottom + 24, name, tuple(shapes))


def _title(span: Span) -> str:
    return (
        f"{span.kind} {printable(span.label)}, execution {span.execution}: "
        f"{duration(span.seconds)} from {duration(span.start)}"
    )
