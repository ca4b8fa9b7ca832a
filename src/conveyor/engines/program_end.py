"""A session ends with its program: at the interpreter's end, and by SIGTERM."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from conveyor import _core
from conveyor.flag import Flag
from conveyor.runtime import context, ending, threads
from conveyor.runtime.protocol import Runtime
from conveyor.worker.forked import flush_files

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


#: How much longer than that the end by SIGTERM may take.
_BACKSTOP = 5.0


class ProgramEnd:
    """Ends ``runtime`` with the interpreter, and by SIGTERM if ``handle_sigterm``. Cancelled when the
    session ends before, so that nothing keeps its memory and descriptors.

    SIGTERM is handled only where nothing else is done about it, and only if the session is started on
    the main thread, which alone may say so. The program still ends by that signal: only the session's
    end comes before.
    """

    def __init__(
        self, runtime: Runtime, grace: float, handle_sigterm: bool, first: bool = False
    ) -> None:
        """``first``: before what was registered with ``atexit`` until now, as by a library that the session
        needs for its end."""
        self._runtime = runtime
        self._pid = os.getpid()
        self._limit = grace + _BACKSTOP
        ending.with_program(self._run)
        if first:
            atexit.register(self._run)
        self._handles = (
            handle_sigterm
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        # One object: each access to a method makes a new one.
        self._handler = self._on_sigterm
        if self._handles:
            signal.signal(signal.SIGTERM, self._handler)
            global _latest
            _latest = weakref.ref(self)

    def in_child(self) -> None:
        # A handler in Python runs between bytecodes: a child that is about to wait in native code when the
        # signal comes would go on waiting. Pools of processes end theirs in this way.
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def cancel(self) -> None:
        """Undo the preparations, since the session has ended. May be called again if it was interrupted."""
        if context.running() is self._runtime:
            context.install(None)
        atexit.unregister(self._run)
        ending.not_with_program(self._run)
        # Elsewhere than on the main thread it stays, with nothing to end.
        if self._handles and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) is self._handler:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._handles = False

    def _run(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: the session is its parent's
        while True:
            try:
                ending.begin()
                if context.running() is self._runtime:
                    context.install(None)
                self._runtime.shutdown()  # the first time; then it has nothing to do
                return
            except KeyboardInterrupt:
                # It has ended the grace period. Raised here, it would be printed and nothing else.
                _core.die_of_interrupt()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the program at once
        # Handlers that interrupt a wait of the library's run with all of them blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        if os.getpid() == self._pid:
            # The signal has interrupted this thread anywhere, so it may hold locks that nobody will release.
            threads.start(_end_at_last, "sigterm", self._limit)
            try:
                self._run()
            except BaseException:
                traceback.print_exc()
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
        signal.raise_signal(number)
        os._exit(128 + number)  # the first process of a container does not die of it


_latest: weakref.ref[ProgramEnd] | None = None


def _in_child() -> None:
    end = None if _latest is None else _latest()
    if end is not None:
        end.in_child()


os.register_at_fork(after_in_child=_in_child)


def _end_at_last(seconds: float) -> None:
    Flag().wait(seconds)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(128 + signal.SIGTERM)
