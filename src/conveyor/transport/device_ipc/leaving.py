"""Release of memory that is not needed any more, by a thread, once nobody reads it.

This may take a while: to close another process's memory takes until the device has done all work that it was
given.
"""

from __future__ import annotations

import functools
import os
import select
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from conveyor.device import Event
from conveyor.device.base import happened, wait_until
from conveyor.transport.base import Wire

#: Seconds between two looks, at first and at most: nobody waits for it.
_SHORT, _LONG = 0.001, 0.05


@dataclass(eq=False)
class Left:
    """Object that may still be read.

    what: the object.
    reads: the events that happen when it has been read.
    reader: the process whose events these are. ``None``: this one.
    """

    what: object
    reads: Sequence[Event]
    reader: int | None = None

    def is_read(self) -> bool:
        """Return whether nobody reads it: all reads are done, or the reading process is dead."""
        return all(map(happened, self.reads)) or (
            self.reader is not None and _has_ended(self.reader)
        )


#: Objects for which no thread could be started.
_waiting: list[Left] = []


def let_go(wire: Wire, left: list[Left]) -> None:
    """Release ``left`` when nobody reads it. The list belongs to this function from then on."""
    with suppress(IndexError):  # until there is none; another thread may take some
        while True:
            left.append(_waiting.pop())
    if not left:
        return
    try:
        wire.start_thread(functools.partial(_wait_for, left), "device-ipc-ends")
    except OSError:
        _waiting.extend(left)


def _wait_for(left: list[Left]) -> None:
    def none_is_left() -> bool:
        left[:] = [one for one in left if not one.is_read()]
        return not left

    wait_until(none_is_left, first=_SHORT, longest=_LONG)


def _has_ended(pid: int) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # no descriptor is free
        return False
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(process)
