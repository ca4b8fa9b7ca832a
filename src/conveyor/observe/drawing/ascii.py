"""A Plan is drawn as plain text: nodes, edges, a drawing of the graph, and the schedule."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor.observe.dataflow import Dataflow, arrow_lines, dataflow, edge_details, place_name
from conveyor.observe.drawing.lineart import draw
from conveyor.observe.drawing.picture import cells
from conveyor.observe.drawing.schedule import columns
from conveyor.plan.model import EXECUTOR, Plan


def write_ascii(plan: Plan, name: str, channel_details: bool, schedule: bool) -> str:
    """Write the text. What is drawn is ASCII; names stand as they are. It is best for up to 20 tasks."""
    flow = dataflow(plan)
    blocks = [
        _titled("Nodes", _nodes(plan, flow)),
        _titled("Edges", _edges(plan, flow, channel_details)),
        _titled("Legend", _LEGEND),
        _titled("Graph", draw(plan, flow)),
    ]
    if schedule:
        blocks.append(_titled("Schedule", _schedule(plan)))
    if name:
        blocks.insert(0, name)
    return "\n\n".join(blocks) + "\n"


_LEGEND = (
    "[n: name]  a task, by its number under Nodes; (n: name) what comes from or goes to the driver",
    "|  -  #k   a value on channel k",
    ":  ~       a value that stays in its process",
    "+          lines that cross",
)


def _titled(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:", *(f"  {line}".rstrip() for line in lines)])


def _nodes(plan: Plan, flow: Dataflow) -> list[str]:
    return _aligned(
        [
            (
                str(place),
                node.label,
                node.kind if node.actor == EXECUTOR else "on " + place_name(plan, node.actor),
            )
            for place, node in enumerate(flow.nodes)
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
