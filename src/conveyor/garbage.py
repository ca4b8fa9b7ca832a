"""Pauses of the garbage collector, while many objects are made of which none is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the collector: it would look through the new objects again and again, and each time that there
    are a quarter more of them through all that the process has."""
    pauses = gc.isenabled()
    try:
        if pauses:
            gc.disable()
        yield
    finally:
        if pauses:
            gc.enable()
