"""The items of generators in a graph, as they come out of their ring at the process that executes it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from conveyor import _core
from conveyor.refs.ref import EMPTY
from conveyor.runtime.process import Process

#: No execution has such a number.
_NOTHING = (1 << 64) - 1


class Items:
    """Items of one generator task, of all executions of its graph, in the order of the ring."""

    def __init__(
        self,
        reader: _core.Reader,
        process: Process,
        first: int,
        limits: _core.Limits,
        task: int,
    ) -> None:
        """``first``: the number of the first execution. ``task``: the generator's, in ``limits``."""
        self._reader = reader
        self._process = process
        self._limits = limits
        self._task = task
        # Reentrant: a signal handler may end the session, or the graph, in the middle of a `take`.
        self._lock = threading.RLock()
        # Items that came for one execution while another's were looked for.
        self._kept: dict[int, deque[Any]] = {}
        self._over: set[int] = set()
        self._wanted = first
        # Noted by finalizers, which may run in the middle of anything.
        self._ended: deque[int] = deque()

    def take(self, number: int) -> Any:
        """Return the next item of execution ``number``, or ``EMPTY``."""
        try:
            with self._lock:
                item = self._take(number)
        finally:
            if self._ended:
                self._tidy()
        if type(item) is _Broken:
            raise item.take_error()
        return item

    def is_there(self, number: int) -> bool:
        """Whether ``take`` would find an item."""
        try:
            with self._lock:
                if not self._kept.get(number):
                    item = self._take(number)
                    if item is not EMPTY:
                        self._kept.setdefault(number, deque()).appendleft(item)
                return bool(self._kept.get(number))
        finally:
            self._tidy()

    def end(self, number: int) -> None:
        """Let go of the items of execution ``number``: nobody wants more. May be called by a finalizer."""
        self._ended.append(number)
        self._tidy()

    def close(self) -> None:
        """Keep the items that have come and that somebody may want, and take no more."""
        try:
            with self._lock:
                self._reader.want(_NOTHING)  # or generators would run on, with nobody in their way
                try:
                    self._take(-1)
                finally:
                    self._reader.close()
        finally:
            self._tidy()

    def _take(self, number: int) -> Any:
        kept = self._kept.get(number)
        if kept:
            return kept.popleft()
        if 0 <= number < self._wanted or number in self._over:
            return EMPTY  # what has come since, or still comes, would have a hole before it
        reader, others = self._reader, False
        found: Any = EMPTY
        while found is EMPTY and not reader.empty:
            try:
                item = reader.receive()
            except Exception as error:  # it is out of the ring: this is what there is of it
                item = _Broken(error)
            if reader.tag == number:
                found = item
            elif reader.tag >= self._wanted and reader.tag not in self._over:
                self._kept.setdefault(reader.tag, deque()).append(item)
                others = True
        if others:  # another thread may sleep until one of these comes
            self._process.ring()
        return found

    def _tidy(self) -> None:
        """Do the clean-up that finalizers have noted, unless another thread holds the lock. That thread
        calls this afterwards: a finalizer does not wait for it."""
        while self._ended and self._lock.acquire(blocking=False):
            try:
                while self._ended:
                    self._forget(self._ended.popleft())
            finally:
                self._lock.release()

    def _forget(self, number: int) -> None:
        if number < self._wanted or number in self._over:
            return
        self._kept.pop(number, None)
        self._over.add(number)
        while self._wanted in self._over:
            self._over.discard(self._wanted)
            self._wanted += 1
        # By itself: those before it may be wanted for as long as anybody likes.
        self._limits.drop_stream(number, self._task)
        self._reader.want(self._wanted)  # rings the actor
        while self._reader.front >= 0 and (
            self._reader.front < self._wanted or self._reader.front in self._over
        ):
            self._reader.skip()


class _Broken:
    """Item that could not be decoded."""

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error.with_traceback(None)

    def take_error(self) -> Exception:
        """Return the error, and forget it here: its frames refer to this object."""
        error, self._error = self._error, None
        assert error is not None
        return error
