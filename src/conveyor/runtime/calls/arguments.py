"""Refs among the arguments of a call, and what becomes of it if one of them has no value."""

from __future__ import annotations

from conveyor.exceptions import SerializationError
from conveyor.runtime.calls.call import Call, with_arguments
from conveyor.runtime.refs import values
from conveyor.runtime.refs.ref import Ref


def lacked(call: Call) -> Ref | None:
    """The first of the refs among its arguments that is not done."""
    return values.lacking(call[1], call[2])


def with_values(call: Call) -> Call:
    """``call``, whose refs are done, with their values. Raises ``RefFailed``."""
    return with_arguments(call, *values.with_values(call[1], call[2]))


def outcome_of(error: BaseException) -> BaseException:
    """What the ref of a call raises whose arguments could not be sent. Nobody who asks for it is to be
    interrupted or to leave."""
    if isinstance(error, values.RefFailed):
        return error.error
    if isinstance(error, Exception):
        return error
    told = SerializationError(f"the arguments cannot be sent: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
