"""Drawings of a Plan in any of the formats, and the display of a compiled graph in a notebook."""

from __future__ import annotations

import json
import logging
import os
import webbrowser
from collections.abc import Sequence
from html import escape
from pathlib import Path

from conveyor.graph.lifecycle import GraphInfo
from conveyor.observe.dataflow import (
    Dataflow,
    arrow_lines,
    columns,
    dataflow,
    edge_details,
    participant_name,
)
from conveyor.observe.drawing.layers import depths
from conveyor.observe.drawing.picture import INK, actor_colour, cells, compose, write_svg
from conveyor.observe.stats import read_stats
from conveyor.plan.model import EXECUTOR, Plan


def write_ascii(plan: Plan, name: str, channel_details: bool, schedule: bool) -> str:
    """Write the text. What is drawn is ASCII; names stand as they are. It is best for up to 20 tasks."""
    flow = dataflow(plan)
    blocks = [
        _titled("Nodes", _nodes(plan, flow)),
        _titled("Edges", _edges(plan, flow, channel_details)),
        _titled("Legend", _LEGEND),
        _titled("Graph", _graph(plan, flow)),
    ]
    if schedule:
        blocks.append(_titled("Schedule", _schedule(plan)))
    if name:
        blocks.insert(0, name)
    return "\n\n".join(blocks) + "\n"


_LEGEND = (
    "[n: name]  a task, by its number under Nodes; (n: name) what comes from or goes to the driver",
    "| #k       a value on channel k, of the node whose number stands above",
    ":          a value that stays in its process",
)


def _titled(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:", *(f"  {line}".rstrip() for line in lines)])


def _nodes(plan: Plan, flow: Dataflow) -> list[str]:
    return _aligned(
        [
            (
                str(number),
                node.label,
                node.kind if node.actor == EXECUTOR else "on " + participant_name(plan, node.actor),
            )
            for number, node in enumerate(flow.nodes)
        ]
    )


def _edges(plan: Plan, flow: Dataflow, details: bool) -> list[str]:
    rows = []
    for arrow in flow.arrows:
        line = "...>" if arrow.edge is None else "--->"
        text = (
            " ".join(arrow_lines(plan, arrow, False))
            if arrow.parts or arrow.edge is not None
            else ""
        )
        more = ""
        if arrow.edge is None:
            text = f"no channel {text}".rstrip()
        elif details:
            more = ": ".join(edge_details(plan.edges[arrow.edge]))
        rows.append((f"{arrow.source} {line} {arrow.target}", text, more))
    return _aligned(rows)


def _graph(plan: Plan, flow: Dataflow) -> list[str]:
    """Draw the boxes in layers, and over each box the arrows that come to it, with their sources' numbers."""
    coming: list[list[tuple[str, ...]]] = [[] for _ in flow.nodes]
    for arrow in flow.arrows:
        line = ":" if arrow.edge is None else "|"
        label = " ".join((line, *arrow_lines(plan, arrow, False)))
        coming[arrow.target].append((str(arrow.source), label, "v"))
    layers: dict[int, list[int]] = {}
    ends = [(arrow.source, arrow.target) for arrow in flow.arrows]
    for number, depth in enumerate(depths(len(flow.nodes), ends)):
        layers.setdefault(depth, []).append(number)
    lines: list[str] = []
    for depth in sorted(layers):
        blocks = []
        for number in layers[depth]:
            node = flow.nodes[number]
            left, right = "[]" if node.kind == "task" else "()"
            arrows = _aligned(list(zip(*coming[number], strict=True)))
            blocks.append([*arrows, f"{left}{number}: {node.label}{right}"])
        height = max(map(len, blocks))
        # Boxes of a layer stand in one row: a box without arrows begins further down.
        blocks = [[""] * (height - len(block)) + block for block in blocks]
        lines += ["", *_aligned(list(zip(*blocks, strict=True)))]
    return lines[1:]


def _schedule(plan: Plan) -> list[str]:
    lines: list[str] = []
    for column in columns(plan):
        lines.append(column.title)
        lines += _aligned(
            [(f"  {i}", row.kind, row.text("->", "<-")) for i, row in enumerate(column.rows, 1)]
        )
    return lines


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell + " " * (width - cells(cell)) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


# DOT


def write_dot(plan: Plan, name: str, channel_details: bool, schedule: bool) -> str:
    """Write the source of a digraph named ``compiled_graph``."""
    flow = dataflow(plan)
    lines = [
        "digraph compiled_graph {",
        f'  node [style=filled, fontname="monospace", fontcolor="{INK}"];',
        '  edge [fontname="monospace", fontsize=10];',
    ]
    if name:
        lines.append(f'  label={_dot_label(name)}; labelloc=t; fontname="monospace";')
    for number, node in enumerate(flow.nodes):
        colour = actor_colour(node.actor)
        shape = "box" if node.kind == "task" else "oval"
        lines.append(
            f"  n{number} [label={_dot_label(node.label)}, shape={shape}, "
            f'fillcolor="{colour.fill}", color="{colour.stroke}"];'
        )
    for arrow in flow.arrows:
        colour = actor_colour(flow.nodes[arrow.source].actor)
        style = "dashed" if arrow.edge is None else "solid"
        label = _dot_label(*arrow_lines(plan, arrow, channel_details))
        lines.append(
            f"  n{arrow.source} -> n{arrow.target} "
            f'[label={label}, style={style}, color="{colour.stroke}"];'
        )
    if schedule:
        lines += ["  subgraph cluster_schedule {", '    label="schedule";']
        for number, column in enumerate(columns(plan)):
            colour = actor_colour(column.participant)
            rows = [f"{i} {row.kind} {row.text()}" for i, row in enumerate(column.rows, 1)]
            lines.append(
                f"    s{number} [label={_dot_label(column.title, *rows, left=True)}, shape=box, "
                f'fillcolor="{colour.fill}", color="{colour.stroke}"];'
            )
        lines.append("  }")
    return "\n".join([*lines, "}"]) + "\n"


def _dot_label(*lines: str, left: bool = False) -> str:
    """Make a label of the given lines. A backslash would begin an escape, so it is doubled."""
    escaped = [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    text = "".join(line + "\\l" for line in escaped) if left else "\\n".join(escaped)
    return f'"{text}"'


# Mermaid


def write_mermaid(plan: Plan, name: str, channel_details: bool, schedule: bool) -> str:
    """Write the source of a flowchart from top to bottom."""
    flow = dataflow(plan)
    title = ["---", f"title: {json.dumps(name)}", "---"] if name else []
    lines = [*title, "flowchart TD"]
    for number, node in enumerate(flow.nodes):
        left, right = ("[", "]") if node.kind == "task" else ("([", "])")
        lines.append(f"  n{number}{left}{_mermaid_label(node.label)}{right}:::{_class(node.actor)}")
    for arrow in flow.arrows:
        line = "-.->" if arrow.edge is None else "-->"
        text = arrow_lines(plan, arrow, channel_details)
        label = f"|{_mermaid_label(*text)}|" if text else ""
        lines.append(f"  n{arrow.source} {line}{label} n{arrow.target}")
    if schedule:
        lines.append('  subgraph schedule["schedule"]')
        for number, column in enumerate(columns(plan)):
            rows = [f"{i} {row.kind} {row.text()}" for i, row in enumerate(column.rows, 1)]
            lines.append(
                f"    s{number}[{_mermaid_label(column.title, *rows)}]:::{_class(column.participant)}"
            )
        lines.append("  end")
    for actor in (EXECUTOR, *range(len(plan.actors))):
        colour = actor_colour(actor)
        lines.append(
            f"  classDef {_class(actor)} fill:{colour.fill},stroke:{colour.stroke},color:{INK}"
        )
    return "\n".join(lines) + "\n"


def _class(actor: int) -> str:
    return "driver" if actor == EXECUTOR else f"actor{actor}"


def _mermaid_label(*lines: str) -> str:
    """Make a label of the given lines; what Mermaid or HTML would read stands as a character's code."""
    escaped = ("".join(f"#{ord(c)};" if c in '"#&<>`*_\\|' else c for c in line) for line in lines)
    return f'"{"<br/>".join(escaped)}"'


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


def graph_html(graph: GraphInfo, title: str) -> str:
    """Show the title, the graph's drawing and its counters, in a notebook."""
    drawing = write_svg(compose(graph.plan, graph.name, channel_details=False, schedule=False))
    return f"<p><b>{escape(title)}</b></p>{drawing}{read_stats(graph)._repr_html_()}"
