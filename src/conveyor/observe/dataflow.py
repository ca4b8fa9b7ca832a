"""A Plan as what is drawn of it: nodes, and an arrow for each value that one needs of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conveyor.dag.parts import Key, key_label
from conveyor.plan.model import (
    DRIVER,
    Call,
    Edge,
    Passed,
    Plan,
    Program,
    Recv,
    Send,
)
from conveyor.plan.template import registers


@dataclass(frozen=True, slots=True)
class Node:
    """A box of the drawing. ``actor`` is the index of the actor, ``DRIVER`` for its own ends."""

    kind: Literal["input", "task", "output"]
    label: str
    actor: int


@dataclass(frozen=True, slots=True)
class Arrow:
    """What ``target`` needs of ``source``: both are places in ``Dataflow.nodes``.

    ``parts`` are the elements or outputs meant, in the user's notation (``"[0]"``); none for a
    whole value. ``edge`` is the channel; ``None``: the value stays in its process.
    """

    source: int
    target: int
    edge: int | None
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dataflow:
    """``nodes``: the inputs, then the tasks in the order of the Plan, then the output."""

    nodes: tuple[Node, ...]
    arrows: tuple[Arrow, ...]


@dataclass(frozen=True, slots=True)
class _Value:
    """Where a value comes from: a node and the part of what it makes, over a channel or not."""

    node: int
    edge: int | None
    part: str


def dataflow(plan: Plan) -> Dataflow:
    """The nodes and arrows of ``plan``. Names are made printable."""
    nodes = [
        Node("input", printable(plan.edges[bundle.edge].source), DRIVER) for bundle in plan.inputs
    ]
    inputs = {key: place for place, bundle in enumerate(plan.inputs) for key in bundle.keys}
    passed = _passed(plan)
    for key in passed:
        if key not in inputs:
            inputs[key] = len(nodes)
            nodes.append(Node("input", f"input{_key(key)}", DRIVER))
    first_task = len(nodes)
    nodes += [Node("task", printable(task.label), task.actor) for task in plan.tasks]
    nodes.append(Node("output", "output", DRIVER))

    makers = {bundle.edge: place for place, bundle in enumerate(plan.inputs)}
    parts = dict.fromkeys(makers, "")
    for program in plan.programs:
        for edge, (maker_task, element) in _sent(program).items():
            makers[edge] = first_task + maker_task
            parts[edge] = element
    keys = {bundle.edge: bundle.keys for bundle in plan.inputs}

    # In the order in which they are found, each once; parts of one frame share an arrow.
    found: dict[tuple[int, int, int | None], dict[str, None]] = {}
    for program in plan.programs:
        values: dict[int, _Value] = {}
        starts: list[int] = []
        for step in program.steps:
            if isinstance(step, Recv):
                maker = makers[step.edge]
                if keys.get(step.edge) == ():
                    # Nothing is in it: it starts the next task.
                    starts.append(step.edge)
                if step.reg is not None:
                    values[step.reg] = _Value(maker, step.edge, parts[step.edge])
                for key, reg in zip(keys.get(step.edge, ()), step.spread or (), strict=False):
                    if reg is not None:
                        # The input's node names its one key already.
                        part = _key(key) if len(keys[step.edge]) > 1 else ""
                        values[reg] = _Value(maker, step.edge, part)
            elif isinstance(step, Call):
                place = first_task + step.task
                task = plan.tasks[step.task]
                for edge in starts:
                    found.setdefault((makers[edge], place, edge), {})["start"] = None
                starts.clear()
                for argument in (*task.args, *(value for _, value in task.kwargs)):
                    for reg in registers(argument):
                        value = values[reg]
                        known = found.setdefault((value.node, place, value.edge), {})
                        known[value.part] = None
                if step.out is not None:
                    values[step.out] = _Value(place, None, "")
                for i, made in enumerate(step.outs):
                    if made is not None:
                        values[made] = _Value(place, None, f"[{i}]")
    output = len(nodes) - 1
    for position, edge in enumerate(plan.outputs):
        known = found.setdefault((makers[edge], output, edge), {parts[edge]: None})
        if plan.multi_output and plan.shape is None:
            known[f"-> [{position}]"] = None
    for edge in plan.effects:
        found.setdefault((makers[edge], output, edge), {})["done"] = None
    for key in passed:
        found.setdefault((inputs[key], output, None), {})
    arrows = [
        Arrow(source, target, by, tuple(part for part in known if part))
        for (source, target, by), known in found.items()
    ]
    arrows.sort(key=lambda arrow: (arrow.target, arrow.source))
    return Dataflow(tuple(nodes), tuple(arrows))


def arrow_lines(plan: Plan, arrow: Arrow, details: bool) -> tuple[str, ...]:
    """What is written at an arrow, line by line: the edge's number and the parts of the value.

    With ``details`` the transport, the depth and the reason of the route as well.
    """
    what = ", ".join(part for part in arrow.parts if not part.startswith("->"))
    where = ", ".join(part[3:] for part in arrow.parts if part.startswith("->"))
    text = " ".join(
        (
            *([] if arrow.edge is None else [f"#{arrow.edge}"]),
            *([what] if what else []),
            *([f"to {where}"] if where else []),
        )
    )
    lines = [text] if text else []
    if details and arrow.edge is None:
        lines.append("no channel")
    elif details and arrow.edge is not None:
        lines += edge_details(plan.edges[arrow.edge])
    return tuple(lines)


def edge_details(edge: Edge) -> tuple[str, str]:
    """How an edge's values travel, and why so."""
    return printable(f"{edge.route}, depth {edge.depth}"), printable(edge.reason)


def place_name(plan: Plan, place: int) -> str:
    """The name of an actor, or of the driver."""
    return "driver" if place == DRIVER else printable(plan.actors[place].name)


def printable(text: str) -> str:
    """``text`` on one line and free of control characters; they show as Python escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def _passed(plan: Plan) -> list[Key | None]:
    """The parts of the input that are results as they are."""
    leaves = () if plan.shape is None else plan.shape.leaves
    return list(dict.fromkeys(leaf.key for leaf in leaves if isinstance(leaf, Passed)))


def _key(key: Key | None) -> str:
    """A part of the input, as it is written after ``input``."""
    return printable(key_label(key, ""))


def _sent(program: Program) -> dict[int, tuple[int, str]]:
    """For each edge that ``program`` writes: the task that makes the value, and which element."""
    made: dict[int, tuple[int, str]] = {}
    sent: dict[int, tuple[int, str]] = {}
    for step in program.steps:
        if isinstance(step, Call):
            if step.out is not None:
                made[step.out] = (step.task, "")
            made.update(
                (reg, (step.task, f"[{i}]")) for i, reg in enumerate(step.outs) if reg is not None
            )
        elif isinstance(step, Send):
            sent[step.edge] = made[step.reg]
    return sent
