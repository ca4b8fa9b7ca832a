"""Drawings of a Plan in any of the formats, and the display of a compiled graph in a notebook."""

from __future__ import annotations

import logging
import os
import webbrowser
from html import escape
from pathlib import Path

from conveyor.graph.compiled import Account
from conveyor.observe.drawing.picture import compose
from conveyor.observe.drawing.svg import write_svg
from conveyor.observe.drawing.text import write_ascii, write_dot, write_mermaid
from conveyor.observe.stats import read_stats
from conveyor.plan.model import Plan

#: Format to the file's ending; ``ascii`` goes into no file.
_ENDINGS = {"svg": "svg", "dot": "dot", "mermaid": "mmd", "ascii": ""}

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
        format: ``"svg"``, ``"dot"`` (Graphviz), ``"mermaid"``, ``"ascii"``.
        view: show the drawing: a web browser opens an SVG file; any other text is printed.
        channel_details: write at each edge its transport, its depth and the reason for it.
        schedule: whether to show what every actor does, in order.
        name: the graph's name.

    Returns:
        The DOT source when an SVG is written to a file; otherwise the text of the format.

    Raises:
        ValueError: there is no such format, or an SVG is to be viewed without a file.
        OSError: the file cannot be written.
    """
    if format not in _ENDINGS:
        known = ", ".join(map(repr, _ENDINGS))
        raise ValueError(f"there is no format {format!r} to draw a graph in; there are {known}")
    if format == "svg" and view and filename is None:
        raise ValueError("view=True opens the svg file: it needs a filename")
    if format == "ascii":
        made = text = write_ascii(plan, name, channel_details, schedule)
    elif format == "mermaid":
        made = text = write_mermaid(plan, name, channel_details, schedule)
    else:
        made = text = write_dot(plan, name, channel_details, schedule)
    if format == "svg":
        made = write_svg(compose(plan, name, channel_details, schedule))
    if filename is None:
        text = made
    elif format != "ascii":
        # All of it is made before the file is opened, so none is left half written by a failure.
        path = Path(f"{os.fspath(filename)}.{_ENDINGS[format]}")
        path.write_bytes(made.encode())
        if view and format == "svg" and not webbrowser.open(path.absolute().as_uri()):
            logger.warning("no browser was found to view %s", path)
    if view and format != "svg":
        print(text)
    return text


def graph_html(graph: Account, title: str) -> str:
    """Show the title, the graph's drawing and its counters, in a notebook."""
    drawing = write_svg(compose(graph.plan, graph.name, channel_details=False, schedule=False))
    return f"<p><b>{escape(title)}</b></p>{drawing}{read_stats(graph)._repr_html_()}"
