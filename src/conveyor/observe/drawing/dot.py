"""A Plan is written in Graphviz's language, DOT."""

from __future__ import annotations

from conveyor.observe.dataflow import arrow_lines, dataflow
from conveyor.observe.drawing.palette import INK, actor_colour
from conveyor.observe.drawing.schedule import columns
from conveyor.plan.model import Plan


def write_dot(plan: Plan, name: str, channel_details: bool, schedule: bool) -> str:
    """Write the source of a digraph named ``compiled_graph``."""
    flow = dataflow(plan)
    lines = [
        "digraph compiled_graph {",
        f'  node [style=filled, fontname="monospace", fontcolor="{INK}"];',
        '  edge [fontname="monospace", fontsize=10];',
    ]
    if name:
        lines.append(f'  label={_quoted(name)}; labelloc=t; fontname="monospace";')
    for place, node in enumerate(flow.nodes):
        colour = actor_colour(node.actor)
        shape = "box" if node.kind == "task" else "oval"
        lines.append(
            f"  n{place} [label={_quoted(node.label)}, shape={shape}, "
            f'fillcolor="{colour.fill}", color="{colour.stroke}"];'
        )
    for arrow in flow.arrows:
        colour = actor_colour(flow.nodes[arrow.source].actor)
        style = "dashed" if arrow.edge is None else "solid"
        label = _quoted(*arrow_lines(plan, arrow, channel_details))
        lines.append(
            f"  n{arrow.source} -> n{arrow.target} "
            f'[label={label}, style={style}, color="{colour.stroke}"];'
        )
    if schedule:
        lines += ["  subgraph cluster_schedule {", '    label="schedule";']
        for number, column in enumerate(columns(plan)):
            colour = actor_colour(column.place)
            rows = [f"{i} {row.kind} {row.text()}" for i, row in enumerate(column.rows, 1)]
            lines.append(
                f"    s{number} [label={_quoted(column.title, *rows, left=True)}, shape=box, "
                f'fillcolor="{colour.fill}", color="{colour.stroke}"];'
            )
        lines.append("  }")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(*lines: str, left: bool = False) -> str:
    """Make a label of the given lines. A backslash would begin an escape, so it is doubled."""
    escaped = [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    text = "".join(line + "\\l" for line in escaped) if left else "\\n".join(escaped)
    return f'"{text}"'
