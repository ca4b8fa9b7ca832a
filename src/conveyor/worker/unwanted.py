"""Deadline and cancellation of executions and calls, for waits inside of their actor."""

from __future__ import annotations

from conveyor import _core
from conveyor.exceptions import ConveyorError


class Unwanted(ConveyorError):
    """Outcome of an execution or call that waits here for something after nobody waits for it any more."""


def until(limits: _core.Limits, number: int) -> int:
    """Return when an execution or a call is over at the latest, on the monotonic clock in nanoseconds; 0: at
    no time. Below 0: nobody waits for it any more. A failed execution counts as waited for: its failure says
    more."""
    if limits.cancelled(number) and not limits.failed(number):
        return -1
    deadline = limits.deadline(number)
    return -1 if 0 < deadline <= _core.monotonic_ns() else deadline
