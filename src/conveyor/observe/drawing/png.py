"""A picture becomes a PNG, which resvg draws of its SVG."""

from __future__ import annotations

from functools import cache

from conveyor.observe.drawing.palette import INK
from conveyor.observe.drawing.picture import Picture, Text
from conveyor.observe.drawing.svg import write_svg

#: A picture has two pixels for each unit of length, but never more than so many.
_ZOOM, _MOST_PIXELS = 2.0, 12_000_000


def write_png(picture: Picture) -> bytes:
    """Return the bytes of a PNG file.

    Raises:
        ImportError: resvg-py is not installed.
        RuntimeError: this machine has no font to write with.
    """
    if not _can_write():
        raise RuntimeError(
            "no font was found to write a PNG with: install one (the package fonts-dejavu-core, say), "
            "or use format='svg', whose text is drawn by whoever shows it"
        )
    return _draw(picture)


def _draw(picture: Picture) -> bytes:
    try:
        import resvg_py
    except ImportError as error:
        raise ImportError(
            "a PNG is drawn by the package resvg-py, which is not installed: pip install "
            "'conveyor[png]'; or use format='svg', which needs nothing"
        ) from error
    zoom = min(_ZOOM, (_MOST_PIXELS / (picture.width * picture.height)) ** 0.5)
    return bytes(resvg_py.svg_to_bytes(svg_string=write_svg(picture), zoom=zoom))


@cache
def _can_write() -> bool:
    """Without any font, text is left out without a word."""
    text = Text(1, 12, "x", 13, INK)
    return _draw(Picture(12, 16, "", (text,))) != _draw(Picture(12, 16, "", ()))
