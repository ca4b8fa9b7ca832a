"""Short lines say who does what in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conveyor.observe.dataflow import place_name, printable
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.plan.reading import Move, moves


@dataclass(frozen=True, slots=True)
class Row:
    """One step.

    kind: what is done.
    what: the task, or the edge with its number.
    peers: who it is sent to or received from; empty for a call.
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

    place: the actor's number, or ``EXECUTOR``.
    title: its name.
    rows: its steps, in order.
    """

    place: int
    title: str
    rows: tuple[Row, ...]


def columns(plan: Plan) -> tuple[Column, ...]:
    """Make the driver's column, then one for each actor."""
    return tuple(
        Column(place, place_name(plan, place), tuple(_row(plan, m) for m in moves(plan, place)))
        for place in (EXECUTOR, *range(len(plan.actors)))
    )


def _row(plan: Plan, move: Move) -> Row:
    kind, number = move
    if kind == "call":
        return Row(kind, printable(plan.tasks[number].label), "")
    edge = plan.edges[number]
    peers = edge.readers if kind == "send" else (edge.writer,)
    names = ", ".join(place_name(plan, peer) for peer in peers)
    return Row(kind, f"#{edge.id} {printable(edge.source)}", names)
