"""A Plan is written as a Mermaid flowchart."""

from __future__ import annotations

import json

from conveyor.observe.dataflow import arrow_lines, dataflow
from conveyor.observe.drawing.palette import INK, actor_colour
from conveyor.observe.drawing.schedule import columns
from conveyor.plan.model import EXECUTOR, Plan


def write_mermaid(plan: Plan, name: str, channel_details: bool, schedule: bool) -> str:
    """Write the source of a flowchart from top to bottom."""
    flow = dataflow(plan)
    title = ["---", f"title: {json.dumps(name)}", "---"] if name else []
    lines = [*title, "flowchart TD"]
    for place, node in enumerate(flow.nodes):
        left, right = ("[", "]") if node.kind == "task" else ("([", "])")
        lines.append(f"  n{place}{left}{_quoted(node.label)}{right}:::{_class(node.actor)}")
    for arrow in flow.arrows:
        line = "-.->" if arrow.edge is None else "-->"
        text = arrow_lines(plan, arrow, channel_details)
        label = f"|{_quoted(*text)}|" if text else ""
        lines.append(f"  n{arrow.source} {line}{label} n{arrow.target}")
    if schedule:
        lines.append('  subgraph schedule["schedule"]')
        for number, column in enumerate(columns(plan)):
            rows = [f"{i} {row.kind} {row.text()}" for i, row in enumerate(column.rows, 1)]
            lines.append(f"    s{number}[{_quoted(column.title, *rows)}]:::{_class(column.place)}")
        lines.append("  end")
    for actor in (EXECUTOR, *range(len(plan.actors))):
        colour = actor_colour(actor)
        lines.append(
            f"  classDef {_class(actor)} fill:{colour.fill},stroke:{colour.stroke},color:{INK}"
        )
    return "\n".join(lines) + "\n"


def _class(actor: int) -> str:
    return "driver" if actor == EXECUTOR else f"actor{actor}"


def _quoted(*lines: str) -> str:
    """Make a label of the given lines; what Mermaid or HTML would read stands as a character's code."""
    escaped = ("".join(f"#{ord(c)};" if c in '"#&<>`*_\\|' else c for c in line) for line in lines)
    return f'"{"<br/>".join(escaped)}"'
