"""A notebook shows a compiled graph."""

from __future__ import annotations

from html import escape

from conveyor.observe.drawing.compose import compose
from conveyor.observe.drawing.svg import write_svg
from conveyor.observe.stats import read_stats
from conveyor.runtime.graph.parts import Account


def graph_html(graph: Account, title: str) -> str:
    """Show the title, its drawing and what it has counted."""
    drawing = write_svg(compose(graph.plan, graph.name, channel_details=False, schedule=False))
    return f"<p><b>{escape(title)}</b></p>{drawing}{read_stats(graph)._repr_html_()}"
