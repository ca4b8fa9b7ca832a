"""What an actor does although nobody waits for it any more."""

from __future__ import annotations

from conveyor import _core
from conveyor.exceptions import ConveyorError


class Unwanted(ConveyorError):
    """Nobody waits any more for an execution, or a call, that is waiting here for something."""


def until(limits: _core.Limits, number: int) -> int:
    """When an execution or a call is over at the latest, on the monotonic clock in nanoseconds; 0: at no
    time. Below 0: nobody waits for it any more. One that has failed is waited for: its failure says more."""
    if limits.cancelled(number) and not limits.failed(number):
        return -1
    deadline = limits.deadline(number)
    return -1 if 0 < deadline <= _core.monotonic_ns() else deadline
