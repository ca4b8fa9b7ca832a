"""Futures whose waiters may be broken off."""

from __future__ import annotations

import threading
from _thread import RLock
from collections.abc import Callable, Iterable
from concurrent import futures
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from conveyor.flag import Flag, sleep_for

T = TypeVar("T")


class Future(futures.Future[T]):
    """A ``concurrent.futures.Future`` that a signal handler which raises (Ctrl-C) cannot leave locked.

    All that is asked of a future enters its condition, and the entering of one of ``threading`` is Python's.
    Broken off there by a handler, it stays taken, and the thread that has the result waits for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = _Condition()

    if TYPE_CHECKING:

        def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None: ...


def wait(requested: Iterable[Future[T]], timeout: float) -> list[Future[T]]:
    """Wait until all futures are done, for ``timeout`` seconds at most. Returns those that are done."""
    waited = list(requested)
    done = Flag()
    left = [None] * len(waited)

    def tell(_: Future[T]) -> None:
        left.pop()
        if not left:
            done.set()

    for one in waited:
        one.add_done_callback(tell)
    if waited:
        done.wait(timeout)
    return [one for one in waited if one.done()]


class _Condition(RLock):  # type: ignore[misc]
    """Lock that is a future's condition as well. Entering it runs no Python code."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[threading.Lock] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as ``threading.Condition`` does. Call with the lock, which others may have meanwhile.

        Raises ``RuntimeStateError`` in a child that a signal handler has forked meanwhile.
        """
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        depth = self._release_save()  # type: ignore[attr-defined]
        try:
            return sleep_for(waiter, timeout)
        finally:
            self._acquire_restore(depth)  # type: ignore[attr-defined]
            with suppress(ValueError):  # it has been woken
                self._waiters.remove(waiter)

    def notify_all(self) -> None:
        """Wake all who wait. Call with the lock."""
        while self._waiters:
            self._waiters.pop().release()
