"""Errors that are kept, and raised more than once."""

from __future__ import annotations

from typing import TypeVar

from conveyor.codec.errors.apart import args_of, attributes_of, put_together

ErrorT = TypeVar("ErrorT", bound=BaseException)


def afresh(error: ErrorT) -> ErrorT:
    """One like ``error``, to be raised in its place by whoever keeps it.

    What is raised refers to the frames that it passes, and they to all that their functions have: what is
    kept and raised would keep the streams, refs and tensors of whoever has caught it.
    """
    made = put_together(type(error), args_of(error), attributes_of(error))
    assert isinstance(made, type(error))
    made.__dict__.update(error.__dict__)  # also what does not travel with it
    made.__cause__ = error.__cause__
    made.__context__ = error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made
