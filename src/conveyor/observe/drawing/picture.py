"""A picture has shapes, which the writer of SVG draws."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal

Point = tuple[float, float]

#: The width of a character, in units of the text's size. All text is monospaced.
ADVANCE = 0.61


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle with round corners; ``title`` is what a pointer over it may show."""

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
    """One line of text; ``y`` is its baseline, ``x`` where it starts or, by ``anchor``, its middle."""

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
