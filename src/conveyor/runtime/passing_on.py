"""Mark of threads that get values for others, as for an argument. Such a value is not put into memory that
the user has named for it (``set_target_for_ref``)."""

from __future__ import annotations

import threading


class _Passing(threading.local):
    depth = 0


_passing = _Passing()


def passing_on() -> bool:
    """Whether what this thread gets is for others."""
    return _passing.depth > 0


class PassingOn:
    """Context in which what is got is not for the user."""

    def __enter__(self) -> None:
        _passing.depth += 1

    def __exit__(self, *_: object) -> None:
        _passing.depth -= 1
