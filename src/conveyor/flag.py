"""A flag that threads wait for."""

from __future__ import annotations

import threading
from contextlib import suppress


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
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it, and wake all who wait for it."""
        try:
            self._set = True
            for waiter in tuple(self._waiters):
                with suppress(RuntimeError):  # another thread has woken that one
                    waiter.release()
        except BaseException:  # a signal handler has raised: those behind it are woken all the same
            self.set()
            raise

    def clear(self) -> None:
        """Have those wait who come from now on."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for ``timeout`` seconds at most. Whether it is."""
        if self._set:
            return True
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            # Looked at once more: it may have been set before the waiter was there to be woken.
            if self.is_set():
                return True
            left = -1.0 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
            return waiter.acquire(timeout=left) or self._set
        finally:
            self._waiters.remove(waiter)
