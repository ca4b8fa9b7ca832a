"""The end of the program, as the threads see it that are still there.

A thread that waits for something of a session that ends, or asks for more, gets one error. If that
reaches the thread's end, nothing is printed: nobody has made a mistake. Who comes back after it sleeps,
as every thread does that asks for the interpreter while it ends.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.exceptions import SessionEndedError
from conveyor.runtime.threads import Background

if TYPE_CHECKING:
    import logging

#: Seconds that the interpreter's end waits for threads that are in Python code which the codec calls.
_TIME_LIMIT = 1.0

#: Why the session has ended before its end, in words; empty if it has not.
fault = ""
_ender: int | None = None  # the thread that ends the program
_session_ends: list[Callable[[], object]] = []  # each ends the session that it is of
_had_error = threading.local()  # whether this thread has had its error


def begin() -> None:
    """Note that the calling thread ends the program."""
    global _ender
    if _ender is not None:
        return
    _ender = threading.get_ident()
    hook = threading.excepthook

    def excepthook(args: Any, /) -> None:
        if not _is_of_the_end(args.exc_value):
            hook(args)

    threading.excepthook = excepthook
    if "asyncio" in sys.modules:  # which prints what tasks raise that nobody waits for
        import logging

        logging.getLogger("asyncio").addFilter(_not_of_the_end)


def begun_by_others() -> bool:
    """Whether another thread than the calling one ends the program."""
    return _ender is not None and _ender != threading.get_ident()


def begun_here() -> bool:
    """Whether the calling thread ends the program."""
    return _ender == threading.get_ident()


def ended() -> SessionEndedError:
    """Make the error for whoever needs a session that is over. A thread that has had it, and comes back
    although the program is over, sleeps for ever: not to be called with a lock held."""
    if begun_by_others():
        if getattr(_had_error, "once", False):
            _core.sleep_for_ever()
        # The library's own threads have to go on, to come to their end.
        _had_error.once = not isinstance(threading.current_thread(), Background)
    return error()


def error() -> SessionEndedError:
    """Make the error like :func:`ended`, for a caller that holds a lock."""
    if fault:
        return SessionEndedError(
            f"the session has ended: {fault}; "
            "conveyor.shutdown() ends what is left, and another session can begin after it"
        )
    if not begun_by_others():
        return SessionEndedError("the session has ended: it has been shut down")
    return SessionEndedError("the session has ended with the program")


def _is_of_the_end(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, SessionEndedError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _not_of_the_end(record: logging.LogRecord) -> bool:
    return not (record.exc_info and _is_of_the_end(record.exc_info[1]))


def with_program(end: Callable[[], object]) -> None:
    """Have ``end()`` called when the program ends. As if it were registered with ``atexit`` when the library
    was imported: what the program has registered since may still use the session."""
    _session_ends.append(end)


def not_with_program(end: Callable[[], object]) -> None:
    """Note that the session has ended before the program. Does nothing the second time."""
    if end in _session_ends:
        _session_ends.remove(end)


def _end_sessions() -> None:
    for end in list(_session_ends):
        end()


def _finish() -> None:
    try:
        begin()
        _core.begin_exit(_TIME_LIMIT)
    except KeyboardInterrupt:
        _core.die_of_interrupt()


def _forget_in_child() -> None:
    global _ender
    _ender = None
    _had_error.__dict__.clear()


# Early, so that it comes after what sessions, and programs, do at the end.
atexit.register(_finish)
atexit.register(_end_sessions)
os.register_at_fork(after_in_child=_forget_in_child)
