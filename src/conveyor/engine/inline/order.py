"""The tasks of a Plan, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conveyor.plan import DRIVER, Call, Plan, Recv, Send


@dataclass(frozen=True, slots=True)
class Stage:
    """One task with what its actor's program has it receive before and send afterwards."""

    actor: int
    receives: tuple[Recv, ...]
    call: Call
    sends: tuple[Send, ...]


def in_order(plan: Plan) -> tuple[Stage, ...]:
    """The whole Plan in one order that every program allows, as near as can be to bind order."""
    programs = [_stages(program.actor, program.steps) for program in plan.programs]
    position = [0] * len(programs)
    published = {edge.id for edge in plan.edges if edge.writer == DRIVER}
    order: list[Stage] = []
    while True:
        ready = [
            (stages[at].call.task, index)
            for index, (stages, at) in enumerate(zip(programs, position, strict=True))
            if at < len(stages) and all(r.edge in published for r in stages[at].receives)
        ]
        if not ready:
            return tuple(order)  # `lower` has proved that this is all
        _, index = min(ready)
        stage = programs[index][position[index]]
        position[index] += 1
        published.update(send.edge for send in stage.sends)
        order.append(stage)


def _stages(actor: int, steps: Sequence[Recv | Call | Send]) -> list[Stage]:
    stages: list[Stage] = []
    receives: list[Recv] = []
    for i, step in enumerate(steps):
        if isinstance(step, Recv):
            receives.append(step)
        elif isinstance(step, Call):
            end = i + 1
            while end < len(steps) and isinstance(steps[end], Send):
                end += 1
            sends = [s for s in steps[i + 1 : end] if isinstance(s, Send)]
            stages.append(Stage(actor, tuple(receives), step, tuple(sends)))
            receives = []
    return stages
