"""Results that are on their way: what ``execute`` and ``.remote()`` return."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

from conveyor import _core
from conveyor.channel import decode_error
from conveyor.exceptions import SerializationError
from conveyor.runtime import context
from conveyor.runtime.waiting import wait_until

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

    def doing(self) -> str:
        """What those that make the result are doing now, in words."""
        ...


class Ref(_core.RefCore):
    """The result of one execution or call, which may not be there yet.

    It can be got any number of times, awaited, and waited for together with others
    (:func:`conveyor.wait`). Dropping it costs nothing and blocks nothing.
    """

    # What is taken from the channel at once is got in the native part; see ``RefCore.get``.
    __slots__ = ()

    def __init__(self, source: Source, number: int, reader: int = 0) -> None:
        super().__init__(source, source.gate, number, reader)

    if TYPE_CHECKING:

        def get(self, timeout: float | None = None) -> Any:
            """The result; waits for it.

            timeout: seconds (``None`` or -1: no limit). Raises ``WaitTimeoutError`` when it is over,
            and then can be tried again; ``TaskError`` (also an instance of the user's exception) if
            the method raised; ``ActorDiedError`` if an actor it needs is gone.
            """

    def done(self) -> bool:
        """Whether ``get`` would return at once."""
        return self._outcome is not EMPTY or self._source.is_ready(self)

    def _get(self, timeout: float | None) -> Any:
        outcome = self._outcome
        if outcome is EMPTY:
            outcome = self._settle(None if timeout is not None and timeout < 0 else timeout)
        if type(outcome) is _Failed:
            raise _fresh(outcome.error)
        return outcome

    def _settle(self, timeout: float | None) -> Any:
        # One thread takes the result out of the channel; others who want it wait for that one.
        if not self._claim():
            wait_until(
                context.current().inbox,
                lambda: self._outcome is not EMPTY or self._claim(),
                timeout,
                lambda: self._source.describe(self),
                lambda: "another thread of this process is getting it",
            )
            if self._outcome is not EMPTY:
                return self._outcome
        try:
            if self._outcome is EMPTY:
                try:
                    self._arrived(self._source.wait_for(self, timeout))
                except SerializationError as error:
                    self._fail(error)
                except _Final as ended:
                    self._fail(ended.error)
            return self._outcome
        finally:
            self._unclaim()

    def _arrived(self, value: Any) -> None:
        """What came out of the channel is the outcome."""
        if type(value) is ErrorFrame:
            value = _Failed(decode_error(value.meta))
        self._outcome = value

    def _fail(self, error: BaseException) -> None:
        """``error`` is the outcome."""
        self._outcome = _Failed(error)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            from conveyor.runtime.aio import wait_until as wait_async  # asyncio is slow to import

            yield from wait_async(self.done).__await__()
        return self.get()

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
