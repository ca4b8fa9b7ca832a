"""Who has called this package: warnings are about a line of the user's, not of ours."""

from __future__ import annotations

import sys


def users_level() -> int:
    """The level of the first frame outside of this package, as ``warnings.warn`` counts in the caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("conveyor."):
        level, frame = level + 1, frame.f_back
    return level
