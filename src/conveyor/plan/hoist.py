"""Steps that need not wait for the place where they were put."""

from __future__ import annotations

from conveyor.plan.model import Program
from conveyor.plan.reading import registers_written
from conveyor.plan.steps import Call, Recv, Send, Step, assert_never


def hoist(program: Program) -> Program:
    """``program`` with every send right behind the step that gives it its value.

    A send does not wait, so this only makes values come sooner. Receives and calls stay: what they
    wait for, and how long they run, would keep others from what they could do first.
    """
    groups: list[tuple[Step, list[Send]]] = []
    sends_of: dict[int, list[Send]] = {}  # by register: the sends behind the step that fills it
    for step in program.steps:
        match step:
            case Recv() | Call():
                sends: list[Send] = []
                groups.append((step, sends))
                for reg in registers_written(step):
                    sends_of[reg] = sends
            case Send():
                sends_of[step.reg].append(step)
            case _:
                assert_never(step)
    steps: list[Step] = []
    for first, sends in groups:
        steps.append(first)
        # In the order of the edges' numbers, which is the order in which the values come to be.
        sends.sort(key=lambda send: send.edge)
        steps += sends
    return Program(program.actor, program.registers, tuple(steps))
