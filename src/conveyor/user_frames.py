"""Callers of this package: warnings are about a line of the user's, not of ours."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

from conveyor.exceptions import ConveyorError, ConveyorWarning


def users_level() -> int:
    """The level of the first frame outside of this package, as ``warnings.warn`` counts in the caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("conveyor."):
        level, frame = level + 1, frame.f_back
    return level


class Site(NamedTuple):
    """A line of the user's, of which something is warned later, or by another thread. It holds no frame."""

    filename: str
    line: int
    module: str
    registry: dict[Any, Any]

    def warn(self, text: str) -> None:
        """Warn as if that line had called."""
        filename, line, module, registry = self
        warnings.warn_explicit(text, ConveyorWarning, filename, line, module, registry)


def users_site() -> Site:
    """The line outside of this package that the thread is in."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("conveyor."):
        frame = frame.f_back
    module = frame.f_globals
    registry = module.setdefault("__warningregistry__", {})
    return Site(
        frame.f_code.co_filename, frame.f_lineno, module.get("__name__") or "<unknown>", registry
    )


ErrorT = TypeVar("ErrorT", bound=BaseException)

_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
#: Errors that the library raises on purpose. Of any other error all frames are of use.
_MEANT = (ConveyorError, TypeError, ValueError)


def trimmed(error: ErrorT) -> ErrorT:
    """Return ``error`` without the library's frames in its traceback. Whoever raises it adds one."""
    if isinstance(error, _MEANT):
        users = []
        at = error.__traceback__
        while at is not None:
            if not at.tb_frame.f_code.co_filename.startswith(_OURS):
                users.append(at)
            at = at.tb_next
        below: TracebackType | None = None
        for one in reversed(users):
            below = TracebackType(below, one.tb_frame, one.tb_lasti, one.tb_lineno)
        error.__traceback__ = below
    return error
