"""Pictures of shapes and colours, written as SVG."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

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
