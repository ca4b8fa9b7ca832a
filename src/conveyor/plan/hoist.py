"""Steps go to where they can be done first, if that keeps no other step from its turn."""

from __future__ import annotations

from conveyor.plan.model import Program
from conveyor.plan.steps import Await, Call, Recv, Send, Step, Try, assert_never


def hoist(program: Program) -> Program:
    """Put every send of ``program`` right behind the step that gives it its value.

    A send does not wait, so this only makes values come sooner. Receives and calls stay: what they
    wait for, and how long they run, would keep others from what they could do first.
    """
    groups: list[tuple[Step, list[Send]]] = []
    sends_of: dict[
        int | None, list[Send]
    ] = {}  # by register: the sends behind the step that fills it
    filled: tuple[int | None, ...]
    for step in program.steps:
        match step:
            case Recv():
                filled = (step.reg,) if step.spread is None else step.spread
            case Await():
                filled = (step.reg,)
            case Try():
                filled = ()
            case Call():
                filled = (step.out, *step.outs)
            case Send():
                sends_of[step.reg].append(step)
                continue
            case _:
                assert_never(step)
        sends: list[Send] = []
        groups.append((step, sends))
        for reg in filled:
            sends_of[reg] = sends
    steps: list[Step] = []
    for first, sends in groups:
        steps.append(first)
        # In the order of the edges' numbers, which is the order in which the values come to be.
        sends.sort(key=lambda send: send.edge)
        steps += sends
    made = tuple(steps)
    return program if made == program.steps else Program(program.actor, program.registers, made)
