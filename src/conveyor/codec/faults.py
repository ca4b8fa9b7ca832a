"""Distinction between errors of a value and all else that its own code may raise while it is sent or
received.

Panics of Rust extensions are a ``BaseException`` and no ``Exception``, and they are errors of the value like
any other. Ctrl-C is none, nor what else a signal handler raises, nor ``sys.exit``, nor what breaks off
decoding to go on later: those are to go their way.
"""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Callable
from typing import Any


def type_name(kind: type) -> str:
    """The name that a user knows a class by."""
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def shown(value: Any, longest: int) -> str:
    """``repr`` of ``value``, in at most so many characters, whatever its class does."""
    try:
        text = repr(value)
    except BaseException as failure:
        if not is_fault(failure):
            raise
        text = f"<{type(value).__name__}>"
    return text if len(text) <= longest else text[: longest - 3] + "..."


def message_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as failure:
        if not is_fault(failure):
            raise
        return f"<str() of the exception failed: {type(failure).__name__}>"


_ctrl_c = True


class NotThere(BaseException):
    """Raised to break off decoding where memory of the value has not come yet. ``ready()`` tells whether to
    try again; it is asked after every ring of the process's doorbell."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        super().__init__("a value that has stayed elsewhere has not come yet")
        self.ready = ready


def nobody_presses_ctrl_c() -> None:
    """Count each ``KeyboardInterrupt`` from now on as raised by the code itself: an actor's process gets no
    SIGINT."""
    global _ctrl_c
    _ctrl_c = False


def is_fault(error: BaseException) -> bool:
    """Whether ``error`` is to be told as an error of the value whose code has raised it."""
    return isinstance(error, Exception) or (
        not isinstance(error, SystemExit) and is_of_value(error)
    )


def is_of_value(error: BaseException) -> bool:
    """Whether the value's code has raised ``error``, be it ``SystemExit``, and no signal's handler has."""
    if isinstance(error, NotThere):
        return False
    if isinstance(error, Exception) or threading.current_thread() is not threading.main_thread():
        return True  # handlers run in the main thread
    return not (_ctrl_c and isinstance(error, KeyboardInterrupt)) and not _of_a_handler(error)


def _of_a_handler(error: BaseException) -> bool:
    """Whether a signal handler that ran just then has raised ``error``."""
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: object) -> types.CodeType | None:
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, types.CodeType) else None
