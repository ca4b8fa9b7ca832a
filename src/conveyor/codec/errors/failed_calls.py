"""Which failed calls an exception tells of, so that whoever raises it can say that they are known."""

from __future__ import annotations

from typing import TypeAlias

FailedCall: TypeAlias = "tuple[int, int, int]"
"""The session's number, the slot of the process whose call has failed, and the failure's number there."""

#: The attribute that has them. Exceptions of users are their own: it is a name that none has.
_CALLS = "_conveyor_failed_calls"


def failed_calls(error: BaseException) -> tuple[FailedCall, ...]:
    """The first has failed by itself, and each of the others because of the one before."""
    found: tuple[FailedCall, ...] = error.__dict__.get(_CALLS, ())
    return found


def tells_of(error: BaseException, calls: tuple[FailedCall, ...]) -> None:
    """``error``, which goes to the caller, tells of these as well."""
    if calls:
        error.__dict__[_CALLS] = failed_calls(error) + calls
