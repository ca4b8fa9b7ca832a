"""Results that are on their way: what ``execute`` and ``.remote()`` return."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any, Protocol

from conveyor import _core
from conveyor.channel import decode_error
from conveyor.exceptions import SerializationError, WaitTimeoutError

EMPTY = _core.EMPTY
ErrorFrame = _core.ErrorFrame


class _Failed:
    """An outcome that is an exception."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Source(Protocol):
    """Where a ref's result comes from: a graph, or a caller's link to an actor."""

    gate: _core.Gate

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        """The result as the gate gave it; raises what ended the wait instead. The slow path."""
        ...

    def is_ready(self, ref: Ref) -> bool:
        """Whether ``get`` would return (or raise) without waiting."""
        ...

    def describe(self, ref: Ref) -> str: ...


class Ref:
    """The result of one execution or call, which may not be there yet.

    It can be got any number of times, awaited, and waited for together with others
    (:func:`conveyor.wait`). Dropping it costs nothing and blocks nothing.
    """

    __slots__ = ("__weakref__", "_lock", "_number", "_outcome", "_reader", "_source")

    def __init__(self, source: Source, number: int, reader: int = 0) -> None:
        self._source = source
        self._number = number
        self._reader = reader
        self._outcome: Any = EMPTY
        # One thread takes the result out of the channel; others who want it wait for that one.
        self._lock = threading.Lock()

    def get(self, timeout: float | None = None) -> Any:
        """The result; waits for it.

        timeout: seconds (``None`` or -1: no limit). Raises ``WaitTimeoutError`` when it is over, and
        then can be tried again; ``TaskError`` (also an instance of the user's exception) if the
        method raised; ``ActorDiedError`` if an actor it needs is gone.
        """
        outcome = self._outcome
        if outcome is EMPTY:
            outcome = self._settle(None if timeout is not None and timeout < 0 else timeout)
        if type(outcome) is _Failed:
            raise _fresh(outcome.error)
        return outcome

    def done(self) -> bool:
        """Whether ``get`` would return at once."""
        return self._outcome is not EMPTY or self._source.is_ready(self)

    def _settle(self, timeout: float | None) -> Any:
        lock = self._lock
        if not lock.acquire(False) and not lock.acquire(
            timeout=-1 if timeout is None else max(timeout, 0)
        ):
            raise WaitTimeoutError(f"timed out waiting for {self._source.describe(self)}")
        try:
            if self._outcome is not EMPTY:
                return self._outcome
            try:
                value = self._source.wait_for(self, timeout)
            except (SerializationError, _Final) as error:
                value = _Failed(error.error if isinstance(error, _Final) else error)
            else:
                if type(value) is ErrorFrame:
                    value = _Failed(decode_error(value.meta))
            self._outcome = value
            return value
        finally:
            lock.release()

    def _resolve(self, value: Any) -> None:
        """Give the ref its outcome from outside the channel (put, failed submissions)."""
        self._outcome = value

    def _fail(self, error: BaseException) -> None:
        self._outcome = _Failed(error)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            from conveyor.runtime.aio import wait_until

            yield from wait_until(self.done).__await__()
        return self.get()

    def __del__(self) -> None:
        try:
            if self._outcome is EMPTY and self._number >= 0:
                self._source.gate.drop(self._number, self._reader)
        except AttributeError:  # not fully made, or the interpreter is ending
            pass

    def __reduce__(self) -> Any:
        raise SerializationError(
            f"{self!r} cannot be pickled: pass it as an argument of a call (its value is sent then), "
            "or get it first and send the value"
        )

    def __copy__(self) -> Ref:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Ref:
        return self

    def __repr__(self) -> str:
        state = "done" if self._outcome is not EMPTY else "pending"
        return f"<{type(self).__name__} {self._source.describe(self)}, {state}>"


class ElementRef(Ref):
    """One element of a call's result that has several (``num_returns``)."""

    __slots__ = ("_index", "_whole")

    def __init__(self, whole: Ref, index: int) -> None:
        super().__init__(whole._source, -1)
        self._whole = whole
        self._index = index

    def get(self, timeout: float | None = None) -> Any:
        return self._whole.get(timeout)[self._index]

    def done(self) -> bool:
        return self._whole.done()


class _Final(Exception):
    """The ref's outcome is this error, now and for ever (an actor died, say)."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def final(error: BaseException) -> Exception:
    """Wrap ``error`` so that the ref keeps it as its outcome."""
    return _Final(error)


def _fresh(error: BaseException) -> BaseException:
    # The same exception object raised twice would grow its traceback with every get.
    return error.with_traceback(None)
