"""A picture as pixels: shapes with smooth edges, drawn into rows of RGB."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from conveyor.observe.font import BASELINE, LEFT, UNIT_X, UNIT_Y, glyph
from conveyor.observe.palette import PAPER, rgb
from conveyor.observe.picture import (
    ADVANCE,
    Line,
    Picture,
    Point,
    Polygon,
    Rect,
    Text,
    char_cells,
    text_width,
)

#: Pixels for a unit of the picture, where the image does not become too large.
_SCALE = 2.0
#: More pixels than this, and the image is made smaller: 72 MB while it is drawn.
_MOST_PIXELS = 24_000_000

Coverage = dict[tuple[int, int], float]


class Canvas:
    """An image of ``width`` times ``height`` pixels, three bytes each, row after row."""

    def __init__(self, width: int, height: int, scale: float) -> None:
        self.width = width
        self.height = height
        self.scale = scale
        self.pixels = bytearray(bytes(rgb(PAPER)) * (width * height))
        self._glyphs: dict[tuple[str, float, bool], Coverage] = {}

    def rect(self, shape: Rect) -> None:
        """Draw a rectangle; its border lies half inside and half outside, as in SVG."""
        half = 0.7 if shape.stroke else 0.0
        x, y, width, height = shape.x, shape.y, shape.width, shape.height
        if shape.stroke:
            self._box(
                x - half, y - half, width + 2 * half, height + 2 * half,
                shape.radius + half, shape.stroke,
            )  # fmt: skip
        self._box(
            x + half, y + half, width - 2 * half, height - 2 * half,
            max(shape.radius - half, 0.0), shape.fill,
        )  # fmt: skip

    def line(self, shape: Line) -> None:
        """Draw a line."""
        points = [(x * self.scale, y * self.scale) for x, y in shape.points]
        radius = max(shape.width * self.scale / 2, 0.5)
        runs = _dashes(points, 5 * self.scale, 4 * self.scale) if shape.dashed else [points]
        self._blend(_stroke(runs, radius), 0, 0, shape.stroke)

    def polygon(self, shape: Polygon) -> None:
        """Fill a convex polygon."""
        points = [(x * self.scale, y * self.scale) for x, y in shape.points]
        self._blend(_fill(points), 0, 0, shape.fill)

    def text(self, shape: Text) -> None:
        """Draw a line of text."""
        x = shape.x
        if shape.anchor == "middle":
            x -= text_width(shape.text, shape.size) / 2
        for char in shape.text:
            key = (char, shape.size, shape.bold)
            if key not in self._glyphs:
                self._glyphs[key] = self._glyph(*key)
            # On whole pixels, so that a letter looks the same everywhere.
            left, top = round(x * self.scale), round(shape.y * self.scale)
            self._blend(self._glyphs[key], left, top, shape.fill)
            x += shape.size * ADVANCE * char_cells(char)

    def _glyph(self, char: str, size: float, bold: bool) -> Coverage:
        unit = size * self.scale
        runs = [
            [((LEFT + x * UNIT_X) * unit, (y - BASELINE) * UNIT_Y * unit) for x, y in run]
            for run in glyph(char)
        ]
        return _stroke(runs, max((0.068 if bold else 0.046) * unit, 0.4))

    def _box(
        self, x: float, y: float, width: float, height: float, radius: float, fill: str
    ) -> None:
        left, right = round(x * self.scale), round((x + width) * self.scale)
        top, bottom = round(y * self.scale), round((y + height) * self.scale)
        round_by = radius * self.scale
        colour = bytes(rgb(fill))
        edges: Coverage = {}
        for row in range(max(top, 0), min(bottom, self.height)):
            # How far the row is inside the rows where the corners are.
            off = max(top + round_by - row - 0.5, row + 0.5 - (bottom - round_by), 0.0)
            inset = round_by - math.sqrt(max(round_by * round_by - off * off, 0.0))
            whole = math.ceil(inset)
            first, last = max(left + whole, 0), min(right - whole, self.width)
            if last > first:
                at = (row * self.width + first) * 3
                self.pixels[at : at + (last - first) * 3] = colour * (last - first)
            if whole > inset:
                edges[left + whole - 1, row] = edges[right - whole, row] = whole - inset
        self._blend(edges, 0, 0, fill)

    def _blend(self, coverage: Coverage, dx: int, dy: int, colour: str) -> None:
        red, green, blue = rgb(colour)
        whole = bytes((red, green, blue))
        pixels, width, height = self.pixels, self.width, self.height
        for (x, y), share in coverage.items():
            column, row = x + dx, y + dy
            if 0 <= column < width and 0 <= row < height:
                at = (row * width + column) * 3
                if share >= 1:
                    pixels[at : at + 3] = whole
                    continue
                pixels[at] += round((red - pixels[at]) * share)
                pixels[at + 1] += round((green - pixels[at + 1]) * share)
                pixels[at + 2] += round((blue - pixels[at + 2]) * share)


def rasterise(picture: Picture) -> Canvas:
    """The pixels of ``picture``, two for each of its units, or fewer if it is very large."""
    area = max(picture.width * picture.height, 1.0)
    scale = min(_SCALE, math.sqrt(_MOST_PIXELS / area))
    canvas = Canvas(
        max(math.ceil(picture.width * scale), 1), max(math.ceil(picture.height * scale), 1), scale
    )
    for shape in picture.shapes:
        if isinstance(shape, Rect):
            canvas.rect(shape)
        elif isinstance(shape, Line):
            canvas.line(shape)
        elif isinstance(shape, Polygon):
            canvas.polygon(shape)
        else:
            canvas.text(shape)
    return canvas


def _stroke(runs: Iterable[Sequence[Point]], radius: float) -> Coverage:
    """How much of each pixel lies within ``radius`` of the lines. Where they meet, the most."""
    coverage: Coverage = {}
    reach = radius + 0.5
    for run in runs:
        for (x0, y0), (x1, y1) in pairwise(run):
            dx, dy = x1 - x0, y1 - y0
            length2 = dx * dx + dy * dy
            steep = abs(dy) >= abs(dx)
            # Walk along the longer side; across it, the line is this wide at most.
            along0, along1, across0 = (y0, y1, x0) if steep else (x0, x1, y0)
            slope = (dx / dy if dy else 0.0) if steep else dy / dx
            low, high = min(along0, along1), max(along0, along1)
            spread = reach * math.sqrt(1 + slope * slope)
            for along in range(math.floor(low - reach), math.ceil(high + reach)):
                middle = across0 + (min(max(along + 0.5, low), high) - along0) * slope
                for across in range(math.floor(middle - spread), math.ceil(middle + spread)):
                    x, y = (across, along) if steep else (along, across)
                    px, py = x + 0.5 - x0, y + 0.5 - y0
                    t = min(max((px * dx + py * dy) / length2, 0.0), 1.0) if length2 else 0.0
                    share = reach - math.hypot(px - t * dx, py - t * dy)
                    if share > 0 and share > coverage.get((x, y), 0.0):
                        coverage[x, y] = min(share, 1.0)
    return coverage


def _fill(points: Sequence[Point]) -> Coverage:
    """How much of each pixel lies in a convex polygon."""
    area = sum(
        x0 * y1 - x1 * y0
        for (x0, y0), (x1, y1) in zip(points, [*points[1:], points[0]], strict=True)
    )
    ring = list(points) if area > 0 else list(reversed(points))
    xs, ys = [x for x, _ in ring], [y for _, y in ring]
    coverage: Coverage = {}
    for y in range(math.floor(min(ys)), math.ceil(max(ys))):
        for x in range(math.floor(min(xs)), math.ceil(max(xs))):
            share = 1.0
            for (x0, y0), (x1, y1) in zip(ring, [*ring[1:], ring[0]], strict=True):
                side = math.hypot(x1 - x0, y1 - y0)
                if side:
                    inside = ((x1 - x0) * (y + 0.5 - y0) - (y1 - y0) * (x + 0.5 - x0)) / side
                    share = min(share, inside + 0.5)
            if share > 0:
                coverage[x, y] = share
    return coverage


def _dashes(points: Sequence[Point], on: float, off: float) -> list[list[Point]]:
    """The pieces of a line that are drawn: ``on`` pixels, then ``off`` pixels nothing."""
    pieces: list[list[Point]] = [[points[0]]]
    drawing, left = True, on
    for (x0, y0), (x1, y1) in pairwise(points):
        length = math.hypot(x1 - x0, y1 - y0)
        done = 0.0
        while length - done > left:
            done += left
            point = (x0 + (x1 - x0) * done / length, y0 + (y1 - y0) * done / length)
            if drawing:
                pieces[-1].append(point)
            else:
                pieces.append([point])
            drawing = not drawing
            left = on if drawing else off
        left -= length - done
        if drawing:
            pieces[-1].append((x1, y1))
    return pieces
