"""Who does what in which order, as short lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from conveyor.observe.dataflow import place_name, printable
from conveyor.plan.model import DRIVER, Plan, Program, Recv, Send


@dataclass(frozen=True, slots=True)
class Row:
    """One step. ``peers`` are who it sends to or receives from; empty for a call."""

    kind: Literal["recv", "call", "send"]
    what: str
    peers: str

    def text(self, to: str = "→", by: str = "←") -> str:
        """The step without its kind, with the given arrows."""
        if self.kind == "call":
            return self.what
        return f"{self.what} {to if self.kind == 'send' else by} {self.peers}"


@dataclass(frozen=True, slots=True)
class Column:
    """The steps of one actor, or of the driver (``DRIVER``)."""

    place: int
    title: str
    rows: tuple[Row, ...]


def columns(plan: Plan) -> tuple[Column, ...]:
    """The driver's column, then one for each actor."""
    driver = [_send(plan, bundle.edge) for bundle in plan.inputs]
    driver += [_recv(plan, edge) for edge in dict.fromkeys((*plan.outputs, *plan.effects))]
    made = [Column(DRIVER, place_name(plan, DRIVER), tuple(driver))]
    for program in plan.programs:
        title = place_name(plan, program.actor)
        made.append(Column(program.actor, title, tuple(_rows(plan, program))))
    return tuple(made)


def _rows(plan: Plan, program: Program) -> Iterable[Row]:
    for step in program.steps:
        if isinstance(step, Recv):
            yield _recv(plan, step.edge)
        elif isinstance(step, Send):
            yield _send(plan, step.edge)
        else:
            yield Row("call", printable(plan.tasks[step.task].label), "")


def _recv(plan: Plan, edge: int) -> Row:
    return Row("recv", _value(plan, edge), place_name(plan, plan.edges[edge].writer))


def _send(plan: Plan, edge: int) -> Row:
    readers = ", ".join(place_name(plan, reader) for reader in plan.edges[edge].readers)
    return Row("send", _value(plan, edge), readers)


def _value(plan: Plan, edge: int) -> str:
    return f"#{edge} {printable(plan.edges[edge].source)}"
