"""Waiting on the host for an event of a device, where somebody may have to end the wait.

A device rings for nobody. What waits for an event inside of its driver (``Event.synchronize``) is broken off
by nothing, and an event of a process that has died may never happen. So the host asks, and sleeps between two
looks: as long as it has waited by then, from microseconds up to the longest pause. That keeps what is short
as short as it is, and a long wait costs few looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from conveyor.device.base import Event

#: Seconds that somebody sleeps at first, and at most while others wait for him.
FIRST, LONGEST = 0.00002, 0.0005


def happened(event: Event) -> bool:
    """Whether an event has happened, or cannot any more since the device has failed: whoever uses the device
    is told of that."""
    with suppress(Exception):
        return event.query()
    return True


def wait_until(
    done: Callable[[], bool],
    sleep: Callable[[float], object] = time.sleep,
    *,
    first: float = FIRST,
    longest: float = LONGEST,
) -> bool:
    """Call ``done`` until it returns true, and return whether it has.

    sleep: called between two looks with the seconds until the next. What it raises ends the wait, and so does
    a true value: somebody has ended it, as ``Flag.wait`` says.
    first, longest: seconds of the first sleep and at most of one. Each is twice as long as the one before.
    """
    pause = min(first, longest)
    while not done():
        if sleep(pause):
            return False
        pause = min(2 * pause, longest)
    return True
