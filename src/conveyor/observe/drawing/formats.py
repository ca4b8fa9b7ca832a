"""A Plan is drawn, in any of the formats."""

from __future__ import annotations

import logging
import os
import webbrowser
from pathlib import Path

from conveyor.observe.drawing.ascii import write_ascii
from conveyor.observe.drawing.compose import compose
from conveyor.observe.drawing.dot import write_dot
from conveyor.observe.drawing.mermaid import write_mermaid
from conveyor.observe.drawing.png import write_png
from conveyor.observe.drawing.svg import write_svg
from conveyor.plan.model import Plan

#: Format to the file's ending; ``ascii`` goes into no file.
_ENDINGS = {
    "png": "png",
    "svg": "svg",
    "dot": "dot",
    "gv": "gv",
    "mermaid": "mmd",
    "ascii": "",
}

logger = logging.getLogger("conveyor")


def visualize(
    plan: Plan,
    filename: str | os.PathLike[str] | None = "compiled_graph",
    format: str = "svg",
    view: bool = False,
    channel_details: bool = False,
    schedule: bool = True,
    name: str = "",
) -> str:
    """Draw ``plan``: its graph, a colour for each actor, and every actor's schedule beside it.

    Args:
        filename: the file's name without its ending, which the format gives (``.mmd`` for
            ``"mermaid"``); an existing file is replaced. ``None`` writes no file. Of no meaning
            for ``"ascii"``, which goes into no file.
        format: ``"svg"``, ``"png"`` (with the extra ``conveyor[png]``), ``"dot"`` or ``"gv"`` (Graphviz),
            ``"mermaid"``, ``"ascii"``.
        view: show it: a picture's file is opened as by a web browser, any other text is printed.
        channel_details: write at each edge its transport, its depth and the reason for it.
        schedule: whether to show what every actor does, in order.
        name: what the graph is called.

    Returns:
        The DOT source when a picture is written to a file or the format is ``"png"``; otherwise the text of
        the format.

    Raises:
        ValueError: there is no such format, or a picture is to be viewed without a file.
        ImportError: PNG is asked for, and resvg-py is not installed.
        OSError: the file cannot be written.
    """
    if format not in _ENDINGS:
        known = ", ".join(map(repr, _ENDINGS))
        raise ValueError(f"there is no format {format!r} to draw a graph in; there are {known}")
    graphic = format in ("png", "svg")
    if graphic and view and filename is None:
        raise ValueError(f"view=True opens the {format} file: it needs a filename")
    if format == "ascii":
        text = write_ascii(plan, name, channel_details, schedule)
    elif format == "mermaid":
        text = write_mermaid(plan, name, channel_details, schedule)
    elif format == "svg" and filename is None:
        return write_svg(compose(plan, name, channel_details, schedule))
    else:
        text = write_dot(plan, name, channel_details, schedule)
    if filename is not None and format != "ascii":
        # All of it is made before the file is opened, so none is left half written by a failure.
        if format == "png":
            data = write_png(compose(plan, name, channel_details, schedule))
        elif format == "svg":
            data = write_svg(compose(plan, name, channel_details, schedule)).encode()
        else:
            data = text.encode()
        path = Path(f"{os.fspath(filename)}.{_ENDINGS[format]}")
        path.write_bytes(data)
        if view and graphic and not webbrowser.open(path.absolute().as_uri()):
            logger.warning("no browser was found to view %s", path)
    if view and not graphic:
        print(text)
    return text
