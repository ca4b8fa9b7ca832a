"""Futures of refs, for what knows those of ``concurrent.futures``."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from conveyor.exceptions import ExecutionCancelledError, WaitTimeoutError
from conveyor.futures import Future
from conveyor.refs.ref import EMPTY, Ref, cancelled_error
from conveyor.refs.streams import StreamRef
from conveyor.runtime import context


def future_of(ref: Ref[Any]) -> RefFuture:
    """Return a new future, which is done soon after ``ref``, whoever holds either."""
    if isinstance(ref, StreamRef):
        raise TypeError(
            f"{ref!r} has items, and no one result that a future could have: iterate over it"
        )
    watcher = context.current().watcher
    future = RefFuture(ref)
    watcher.watch(ref, lambda: watcher.completions.put(future.finish))
    return future


class RefFuture(Future[Any]):
    """Future of a ref. Waiting for it is waiting as by ``get``: it takes part in finding deadlocks, and does
    not need the thread on which callbacks run."""

    def __init__(self, ref: Ref[Any]) -> None:
        super().__init__()
        self._ref: Ref[Any] | None = ref
        self._lock = threading.Lock()
        self._value: Any = EMPTY
        self._failure: BaseException | None = None
        self._notified = False

    def result(self, timeout: float | None = None) -> Any:
        """Return the result like ``get``; raises ``concurrent.futures.TimeoutError`` when the time is
        over."""
        __tracebackhide__ = True  # by pytest
        self._wait(timeout)
        try:
            return super().result(timeout)
        except CancelledError:
            if self._failure is None:
                raise
            raise self._failure from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception that ``result`` raises; ``None`` if it returns. Raises when the future was
        cancelled."""
        self._wait(timeout)
        return super().exception(timeout)

    def cancel(self) -> bool:
        """Cancel the execution or call of the ref. False if it is done already."""
        ref = self._ref
        if self.done() or ref is None or not ref.cancel():
            return self.cancelled()
        with self._lock:
            if self._is_open():
                part = ref.parts()[0]
                self._failure = cancelled_error(part._source.describe(part))
        self._tell()
        return self.cancelled()

    def finish(self) -> None:
        """Take the result of the ref, which is done or will never be."""
        with self._lock:
            if self._is_open():
                assert self._ref is not None
                try:
                    self._value = self._ref.get(-1)
                except Exception as error:
                    self._failure = error.with_traceback(None)  # which would hold this
        self._tell()

    def _is_open(self) -> bool:
        return self._value is EMPTY and self._failure is None

    def _wait(self, timeout: float | None) -> None:
        ref = self._ref
        if self.done() or ref is None:
            return
        try:
            ref._resolved(-1 if timeout is None else timeout)
        except WaitTimeoutError as error:
            if isinstance(error, FutureTimeoutError):
                raise
            raise FutureTimeoutError(str(error)) from error  # another class before Python 3.11
        self.finish()

    def _tell(self) -> None:
        with self._lock:
            if self._notified:
                return
            self._notified = True
            self._ref = None  # its value is here
        if self._failure is None:
            self.set_result(self._value)
        elif isinstance(self._failure, ExecutionCancelledError):
            super().cancel()
            self.set_running_or_notify_cancel()
        else:
            self.set_exception(self._failure)
