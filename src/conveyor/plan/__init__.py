"""From a graph to a Plan: pure functions over immutable data, no I/O.

``lower`` makes the Plan, ``explain`` prints it, ``fill`` is what a worker needs to follow it.
"""

from __future__ import annotations

from conveyor.plan.explain import explain
from conveyor.plan.lower import lower
from conveyor.plan.model import (
    EXECUTOR,
    ActorInfo,
    Argument,
    Call,
    Const,
    Edge,
    InputBundle,
    Nested,
    Passed,
    Plan,
    Program,
    Recv,
    Reg,
    Send,
    Shape,
    Step,
    Task,
)
from conveyor.plan.template import fill

__all__ = [
    "EXECUTOR",
    "ActorInfo",
    "Argument",
    "Call",
    "Const",
    "Edge",
    "InputBundle",
    "Nested",
    "Passed",
    "Plan",
    "Program",
    "Recv",
    "Reg",
    "Send",
    "Shape",
    "Step",
    "Task",
    "explain",
    "fill",
    "lower",
]
