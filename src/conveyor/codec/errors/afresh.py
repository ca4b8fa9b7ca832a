"""Errors that are kept, and raised more than once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from conveyor.codec.errors.apart import args_of, attributes_of, put_together

ErrorT = TypeVar("ErrorT", bound=BaseException)


#: What knows more of an error that had to be given early; for who keeps the error.
_LATER = "_conveyor_later"


def set_later(error: BaseException, later: Callable[[], BaseException | None]) -> None:
    """Have whoever keeps ``error`` ask ``later()``, which returns a better one once that is known."""
    error.__dict__[_LATER] = later


def completed(error: ErrorT) -> ErrorT:
    """Return ``error`` as it is known by now."""
    later = error.__dict__.get(_LATER)
    return error if later is None else (later() or error)


def afresh(error: ErrorT) -> ErrorT:
    """One like ``error``, to be raised in its place by whoever keeps it.

    What is raised refers to the frames that it passes, and they to all that their functions have: what is
    kept and raised would keep the streams, refs and tensors of whoever has caught it.
    """
    made = put_together(type(error), args_of(error), attributes_of(error))
    assert isinstance(made, type(error))
    made.__dict__.update(error.__dict__)  # also what does not travel with it
    made.__dict__.pop(_LATER, None)
    made.__cause__ = error.__cause__
    made.__context__ = error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made
