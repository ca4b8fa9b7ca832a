"""A flag that threads wait for."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from conveyor import _core
from conveyor.exceptions import RuntimeStateError

#: Locks that threads sleep for just now. A forked child has a copy, and its parent wakes nobody there.
_slept_for: set[threading.Lock] = set()
_forks = 0

#: Seconds within which a thread that sleeps raises what another thread throws into it. Python does so
#: between two bytecodes, and nothing wakes a thread that waits for a lock.
LOOK = 0.04


def sleep_for(waiter: threading.Lock, timeout: float | None, interruptible: bool = True) -> bool:
    """Sleep until ``waiter``, which is held, is released by another thread, for ``timeout`` seconds at most.
    Whether it was. ``interruptible``: raise what another thread throws into this one
    (``PyThreadState_SetAsyncExc``); a thread of the library's own need not.

    Raises ``RuntimeStateError`` in a child that a signal handler has forked meanwhile.
    """
    forks = _forks
    try:
        _slept_for.add(waiter)
        left = threading.TIMEOUT_MAX if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        end = _core.monotonic() + left
        woken = False
        while interruptible and left > LOOK and not (woken := waiter.acquire(timeout=LOOK)):
            left = end - _core.monotonic()
        if not woken:
            woken = waiter.acquire(timeout=max(left, 0.0))
    finally:
        _slept_for.discard(waiter)
    if _forks != forks:
        raise forked()
    return woken


def forked() -> RuntimeStateError:
    """Return the error for a child that a signal handler has forked in a wait."""
    return RuntimeStateError("this belongs to the process that this one was forked from")


def _in_child() -> None:
    """Wake all sleepers in a forked child, where they would sleep for ever: the threads that would wake them
    are the parent's."""
    global _forks
    _forks += 1
    while _slept_for:
        with suppress(RuntimeError):  # it has been woken
            _slept_for.pop().release()


os.register_at_fork(after_in_child=_in_child)


class Flag:
    """``threading.Event``, but one whose waiters, and who sets it, may be broken off at any moment.

    That of ``threading`` has a lock, which Python code enters. A signal handler that raises there (Ctrl-C)
    leaves it held, and whoever sets the event afterwards waits for ever. Here each waiter has a lock of its
    own, which only wakes it.
    """

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Whether the flag is set."""
        return self._set

    def set(self) -> None:
        """Set the flag, and wake all who wait for it."""
        try:
            self._set = True
            for waiter in tuple(self._waiters):
                with suppress(RuntimeError):  # another thread has woken that one
                    waiter.release()
        except BaseException:  # a signal handler has raised: those behind it are woken all the same
            self.set()
            raise

    def clear(self) -> None:
        """Clear the flag: those who come from now on wait."""
        self._set = False

    def wait(self, timeout: float | None = None, interruptible: bool = False) -> bool:
        """Wait until the flag is set, for ``timeout`` seconds at most. Returns whether it is.
        ``interruptible``: see :func:`sleep_for`.

        Raises ``RuntimeStateError`` in a child that a signal handler has forked meanwhile.
        """
        if self._set:
            return True
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            # Looked at once more: it may have been set before the waiter was there to be woken.
            if self.is_set():
                return True
            return sleep_for(waiter, timeout, interruptible) or self._set
        finally:
            self._waiters.remove(waiter)
