"""A picture as SVG."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from conveyor.observe.palette import PAPER
from conveyor.observe.picture import Line, Picture, Polygon, Rect, Shape

_FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"


def write_svg(picture: Picture) -> str:
    """The text of an SVG file. It refers to nothing outside."""
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
    if isinstance(shape, Rect):
        stroke = f' stroke="{shape.stroke}" stroke-width="1.4"' if shape.stroke else ""
        start = (
            f'<rect x="{_number(shape.x)}" y="{_number(shape.y)}" '
            f'width="{_number(shape.width)}" height="{_number(shape.height)}" '
            f'rx="{_number(shape.radius)}" fill="{shape.fill}"{stroke}'
        )
        return (
            f"{start}><title>{escape(shape.title)}</title></rect>" if shape.title else f"{start}/>"
        )
    if isinstance(shape, Line):
        dash = ' stroke-dasharray="5 4"' if shape.dashed else ""
        return (
            f'<polyline points="{_points(shape.points)}" fill="none" stroke="{shape.stroke}" '
            f'stroke-width="{_number(shape.width)}" stroke-linejoin="round"{dash}/>'
        )
    if isinstance(shape, Polygon):
        return f'<polygon points="{_points(shape.points)}" fill="{shape.fill}"/>'
    bold = ' font-weight="bold"' if shape.bold else ""
    anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
    return (
        f'<text x="{_number(shape.x)}" y="{_number(shape.y)}" font-size="{_number(shape.size)}" '
        f'fill="{shape.fill}"{anchor}{bold} xml:space="preserve">{escape(shape.text)}</text>'
    )


def _points(points: tuple[tuple[float, float], ...]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
