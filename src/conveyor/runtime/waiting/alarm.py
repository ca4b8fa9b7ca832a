"""Ringing this process's bell when a deadline passes, for those who sleep on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from conveyor import _core
from conveyor.runtime import threads
from conveyor.weak import WeakSet


class Timed(Protocol):
    """Something that is waited for until a time on the monotonic clock, in nanoseconds."""

    @property
    def deadline(self) -> int: ...


class Alarm:
    """Thread that rings the doorbell at deadlines. It exists only while something with a deadline is waited
    for in general: by ``conveyor.wait``, an event loop, or a descriptor. ``get`` watches the clock itself."""

    def __init__(self, ring: Callable[[], object]) -> None:
        self._ring = ring
        # By itself, since a signal handler that raises may leave a condition held that was entered: its
        # entering is Python's. Then no deadline would be seen any more, nor the session's end.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Weak: what nobody waits for any more has no deadline.
        self._timed: WeakSet[Timed] = WeakSet()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, timed: Timed) -> None:
        with self._lock:
            if self._closed:
                return
            self._timed.add(timed)
            if self._thread is not None:
                self._changed.notify_all()
                return
            try:
                self._thread = threads.serve(self._run, "alarm")
            except BaseException:
                self._timed.discard(timed)
                raise

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                now = _core.monotonic_ns()
                waiting = list(self._timed)
                due = [timed for timed in waiting if timed.deadline <= now]
                for timed in due:
                    self._timed.discard(timed)
                left = min((t.deadline - now for t in waiting if t.deadline > now), default=None)
                del waiting
                if not due:
                    if left is None or self._closed:
                        self._thread = None
                        return
                    self._changed.wait(left / 1e9)
                    continue
                due.clear()
            self._ring()
