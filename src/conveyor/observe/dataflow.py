"""Plan as it is drawn: nodes, an arrow for each value that one needs of another, and each actor's steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conveyor.dag.inputs import Key, key_label
from conveyor.plan.flow import Made, Start, Value
from conveyor.plan.model import EXECUTOR, Edge, Passed, Plan
from conveyor.plan.reading import Move, Values, moves


@dataclass(frozen=True, slots=True)
class Node:
    """A box of the drawing.

    kind: the part of the graph that the box stands for.
    label: its text.
    actor: the number of the actor, or ``EXECUTOR`` for an end of the graph.
    """

    kind: Literal["input", "task", "output"]
    label: str
    actor: int


@dataclass(frozen=True, slots=True)
class Arrow:
    """Value that one node needs of another.

    source, target: the indexes of the two nodes in ``Dataflow.nodes``.
    edge: the channel; ``None``: the value stays in its process.
    parts: the elements or outputs that are meant, in the user's notation (``"[0]"``); empty for a whole
        value.
    """

    source: int
    target: int
    edge: int | None
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dataflow:
    """A graph as boxes and arrows.

    nodes: the inputs, then the tasks in the order of the Plan, then the output.
    arrows: by their targets, from the first to the last.
    """

    nodes: tuple[Node, ...]
    arrows: tuple[Arrow, ...]


def dataflow(plan: Plan) -> Dataflow:
    """Find the nodes and arrows of ``plan``. Names are made printable."""
    found = Values(plan)
    # Inputs with many readers travel on several edges.
    source_of = {bundle.keys: plan.edges[bundle.edge].source for bundle in plan.inputs}
    positions = {keys: position for position, keys in enumerate(source_of)}
    nodes = [Node("input", printable(source), EXECUTOR) for source in source_of.values()]
    inputs = {bundle.edge: positions[bundle.keys] for bundle in plan.inputs}
    holder = {key: position for keys, position in positions.items() for key in keys}
    passed = _passed(plan)
    for key in passed:
        if key not in holder:
            holder[key] = len(nodes)
            nodes.append(Node("input", f"input{_key(key)}", EXECUTOR))
    first_task = len(nodes)
    nodes += [Node("task", printable(task.label), task.actor) for task in plan.tasks]
    output = len(nodes)
    nodes.append(Node("output", "output", EXECUTOR))

    def origin(value: Value, edge: int | None) -> tuple[int, str]:
        """Find the node that makes a value, and which part of that node's result the value is."""
        if isinstance(value, Made):
            return first_task + value.task, "" if value.element is None else f"[{value.element}]"
        assert edge is not None  # a value that no task makes comes from the driver
        if isinstance(value, Start):
            return inputs[edge], "start"
        # The input's node names its one key already.
        return inputs[edge], _key(value.key) if len(found.carried[edge]) > 1 else ""

    # In the order in which they are found, each once; parts of one frame share an arrow.
    arrows: dict[tuple[int, int, int | None], dict[str, None]] = {}
    for task, needs in enumerate(found.needs, first_task):
        for held in needs:
            source, part = origin(held.value, held.edge)
            arrows.setdefault((source, task, held.edge), {})[part] = None
    for position, edge in enumerate(plan.outputs):
        source, part = origin(found.carried[edge][0], edge)
        parts = arrows.setdefault((source, output, edge), {part: None})
        if plan.multi_output and plan.shape is None:
            parts[f"-> [{position}]"] = None
    for edge in plan.effects:
        source, _ = origin(found.carried[edge][0], edge)
        arrows.setdefault((source, output, edge), {})["done"] = None
    for key in passed:
        arrows.setdefault((holder[key], output, None), {})
    made = [
        Arrow(source, target, edge, tuple(part for part in parts if part))
        for (source, target, edge), parts in arrows.items()
    ]
    made.sort(key=lambda arrow: (arrow.target, arrow.source))
    return Dataflow(tuple(nodes), tuple(made))


def arrow_lines(plan: Plan, arrow: Arrow, details: bool) -> tuple[str, ...]:
    """Write the text of an arrow, line by line: the edge's number and the parts of the value.

    ``details`` adds the transport, the depth and the reason of the route.
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
    """Describe how an edge's values travel, and why."""
    return printable(f"{edge.route}, depth {edge.depth}"), printable(edge.reason)


def participant_name(plan: Plan, participant: int) -> str:
    """Return the name of an actor, or ``"driver"``."""
    return "driver" if participant == EXECUTOR else printable(plan.actors[participant].name)


def printable(text: str) -> str:
    """Put ``text`` on one line and free it of control characters, which show as Python escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def _passed(plan: Plan) -> list[Key | None]:
    """Find the parts of the input that are results as they are."""
    leaves = () if plan.shape is None else plan.shape.leaves
    return list(dict.fromkeys(leaf.key for leaf in leaves if isinstance(leaf, Passed)))


def _key(key: Key | None) -> str:
    """Write a part of the input, as it stands after ``input``."""
    return printable(key_label(key, ""))


# The steps of each process, as short lines.


@dataclass(frozen=True, slots=True)
class Row:
    """A step of a process.

    kind: what the process does.
    what: the task, or the edge with its number.
    peers: the names of the processes that it sends to or receives from; empty for a call.
    """

    kind: Literal["recv", "try", "wait", "call", "send"]
    what: str
    peers: str

    def text(self, to: str = "→", by: str = "←") -> str:
        """Write the step without its kind, with the given arrows."""
        if self.kind == "call":
            return self.what
        return f"{self.what} {to if self.kind == 'send' else by} {self.peers}"


@dataclass(frozen=True, slots=True)
class Column:
    """The steps of one process.

    participant: the actor's number, or ``EXECUTOR``.
    title: its name.
    rows: its steps, in order.
    """

    participant: int
    title: str
    rows: tuple[Row, ...]


def columns(plan: Plan) -> tuple[Column, ...]:
    """Make the driver's column, then one for each actor."""
    return tuple(
        Column(
            participant,
            participant_name(plan, participant),
            tuple(_row(plan, m) for m in moves(plan, participant)),
        )
        for participant in (EXECUTOR, *range(len(plan.actors)))
    )


def _row(plan: Plan, move: Move) -> Row:
    kind, number = move
    if kind == "call":
        return Row(kind, printable(plan.tasks[number].label), "")
    edge = plan.edges[number]
    peers = edge.readers if kind == "send" else (edge.writer,)
    names = ", ".join(participant_name(plan, peer) for peer in peers)
    return Row(kind, f"#{edge.id} {printable(edge.source)}", names)
