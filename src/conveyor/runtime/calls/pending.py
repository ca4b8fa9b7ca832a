"""Calls that wait in their caller's process."""

from __future__ import annotations

import threading
from collections import deque
from typing import TypeAlias

from conveyor.callers import Site
from conveyor.runtime.calls.arguments import lacked
from conveyor.runtime.calls.call import Call
from conveyor.runtime.calls.call_ref import CallRef
from conveyor.runtime.refs.ref import Ref

#: Each with the line that has made it, as long as refs among its arguments stand for their values.
Waiting: TypeAlias = "deque[tuple[CallRef, Call, Site | None]]"


def place_of(waiting: Waiting, ref: Ref) -> int | None:
    """Where the call of ``ref`` waits."""
    # By identity: arguments need not be comparable.
    return next((i for i, (r, _, _) in enumerate(waiting) if r is ref), None)


def first_lacked(waiting: Waiting) -> Ref | None:
    """What the first call that waits lacks, if it is an argument."""
    _, call, site = waiting[0] if waiting else (None, None, None)
    return lacked(call) if call is not None and site is not None else None


def lacked_now(waiting: Waiting, lock: threading.RLock) -> Ref | None:
    """The same, without waiting for ``lock``: whoever has it may wait himself. ``None`` then."""
    if not lock.acquire(blocking=False):
        return None
    try:
        return first_lacked(waiting)
    finally:
        lock.release()


def withdraw(waiting: Waiting, ref: Ref) -> bool:
    """Whether the call of ``ref`` was waiting, and does no longer."""
    place = place_of(waiting, ref)
    if place is not None:
        del waiting[place]
    return place is not None
