"""A picture is written as SVG."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from conveyor.observe.drawing.palette import PAPER
from conveyor.observe.drawing.picture import Line, Picture, Polygon, Rect, Shape, Text

_FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"


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
