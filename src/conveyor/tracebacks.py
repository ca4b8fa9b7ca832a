"""Tracebacks of errors that users get: their own frames, and of the library's the one that they called."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TypeVar

from conveyor.exceptions import ConveyorError

ErrorT = TypeVar("ErrorT", bound=BaseException)

_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
#: Errors that the library raises on purpose. Of any other error all frames are of use.
_MEANT = (ConveyorError, TypeError, ValueError)


def trimmed(error: ErrorT) -> ErrorT:
    """Return ``error`` without the library's frames in its traceback. Whoever raises it adds one."""
    if isinstance(error, _MEANT):
        kept = []
        at = error.__traceback__
        while at is not None:
            if not at.tb_frame.f_code.co_filename.startswith(_OURS):
                kept.append(at)
            at = at.tb_next
        below: TracebackType | None = None
        for one in reversed(kept):
            below = TracebackType(below, one.tb_frame, one.tb_lasti, one.tb_lineno)
        error.__traceback__ = below
    return error
