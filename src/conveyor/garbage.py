"""Pauses of the garbage collector, while many objects are made of which none is garbage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from conveyor import _core


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the collector: it would look through the new objects again and again, and each time that there
    are a quarter more of them through all that the process has."""
    paused = _core.Uncollected()
    try:
        yield
    finally:
        paused.end()


# Not by pthread_atfork: a library may fork without the GIL, and such a child runs no Python.
os.register_at_fork(after_in_child=_core.go_on_collecting)
