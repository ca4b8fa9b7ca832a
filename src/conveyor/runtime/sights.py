"""When somebody learns that a call has failed: where its error is raised to who has asked for the result.

An actor that has failed before a collective operation is one behind the other ranks, and the calls that were
queued behind that would meet the wrong ones. The clock of sights tells them from calls that were made by who
knew: it moves when somebody learns of a failure, and every call bears what it said when the call was made
(``native/failed_calls.h``, ``CollectiveGroup::shifted``). A ref that is only waited for, or passed on, tells
nobody.
"""

from __future__ import annotations

import threading

from conveyor import _core
from conveyor.codec.errors.failed_calls import failed_calls


class _Passing(threading.local):
    #: What the thread gets is for others.
    depth = 0


_passing = _Passing()


def passing_on() -> bool:
    """Whether what this thread gets is for others."""
    return _passing.depth > 0


def tells(error: BaseException) -> bool:
    """Whether who is about to get ``error`` learns of a call that has failed."""
    return bool(failed_calls(error)) and not _passing.depth


def learn(error: BaseException, board: _core.Board) -> None:
    """Somebody gets ``error``, which tells of one."""
    for session, slot, number in failed_calls(error):
        if session == board.session:  # else it was kept from an earlier one
            board.see(slot, number)


class PassingOn:
    """What is got inside of it is not for the user: an argument, say."""

    def __enter__(self) -> None:
        _passing.depth += 1

    def __exit__(self, *_: object) -> None:
        _passing.depth -= 1
