"""The end of an actor's process, once its actor has ended."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from conveyor.runtime.actor.forked import flush_files

_libc = ctypes.CDLL(None)


def leave(status: int, *more: Callable[[], object]) -> NoReturn:
    """End the process as a Python program ends, but for the interpreter: it is not taken down, and what
    modules hold is not destroyed. ``more`` are steps that come last."""
    steps: tuple[Callable[[], object], ...] = (
        _join_threads,
        atexit._run_exitfuncs,
        flush,
        gc.collect,
    )
    try:
        for step in (*steps, *more):
            try:
                step()
            except BaseException:
                report()
    finally:
        os._exit(status)


def report() -> None:
    """Print the exception that is being handled, as the interpreter would."""
    with suppress(BaseException):
        sys.excepthook(*sys.exc_info())


def flush() -> None:
    """Flush what is open, of Python and of C."""
    flush_files()
    _libc.fflush(None)


def _join_threads() -> None:
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter's end does
