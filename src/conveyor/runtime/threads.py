"""Background threads of the library."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from conveyor.exceptions import SessionEndedError, SystemLimitError
from conveyor.system_limits import hint

# A fault of a thread must reach that thread, or the process dies without a report.
_FAULTS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGABRT,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)


#: Ends the session of this process, which a thread has left that all of it depends on; why, in words.
fail_session: Callable[[str], object] = bool


def log(level: str, text: str, *args: object, exc_info: bool = False) -> None:
    """Log for a thread of the library's own, which does not end with what the program's handlers raise."""
    import logging  # slow to import, and rarely needed

    with suppress(Exception):
        logging.getLogger("conveyor").log(
            getattr(logging, level.upper()), text, *args, exc_info=exc_info
        )


class Background(threading.Thread):
    """A thread of the library's own.

    An exception that ends it is logged, whatever the program has made of ``threading.excepthook``, which has
    it too. If the session depends on the thread, the session ends with that cause.
    """

    #: Whether the session depends on it.
    vital = False

    def run(self) -> None:
        try:
            super().run()
        except (SystemExit, SessionEndedError):  # ends, and no faults
            raise
        except BaseException as error:
            log(
                "critical",
                "the thread %s has ended with %s: %s; what it serves does not go on",
                self.name,
                type(error).__name__,
                str(error),
            )
            if self.vital:
                fail_session(
                    f"its thread {self.name} has ended with {type(error).__name__}: {error}. This is a fault "
                    "of the library's, which its log shows"
                )
            raise


def start(target: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """Start a daemon thread that is handed no signal: those are the main thread's, which lets them in
    only while it sleeps and would not wake up if another thread took one.

    Raises ``SystemLimitError`` if the system has no thread left.
    """
    return _start(Background(target=target, args=args, name=f"conveyor-{name}", daemon=True))


def serve(target: Callable[..., object], name: str, *args: Any) -> threading.Thread:
    """Start a thread as :func:`start` does, on which the session depends: it ends if the thread fails."""
    thread = Background(target=target, args=args, name=f"conveyor-{name}", daemon=True)
    thread.vital = True
    return _start(thread)


def _start(thread: Background) -> Background:
    # Known before it is changed, so that a handler that raises then does not leave it changed.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        # It inherits the mask, so there is no moment at which it could be handed one.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        thread.start()
    except RuntimeError as error:
        refused = OSError(errno.EAGAIN, str(error))
        text = f"cannot start the thread {thread.name!r}: {error}; {hint(refused)}"
        raise SystemLimitError(errno.EAGAIN, text) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return thread


def start_or_run(target: Callable[..., object], name: str, *args: Any) -> None:
    """Run it on a thread of its own, or here if there is none: others wait for what it does."""
    try:
        start(target, name, *args)
    except SystemLimitError:
        target(*args)


@contextmanager
def lent(*locks: Any) -> Iterator[None]:
    """Let go of those of these reentrant locks that this thread holds, and take them again afterwards.

    A signal handler may end the session in the middle of a call that holds them. What it waits for is done
    by other threads, which may need them; the call goes on when nothing is left to be guarded.
    """
    # As `threading.Condition` does it. There is no other way to let go of all turns at once.
    held = [(lock, lock._release_save()) for lock in locks if lock._is_owned()]
    try:
        yield
    finally:
        for lock, call_lock in reversed(held):
            lock._acquire_restore(call_lock)
