"""Results that are on their way: what ``execute`` and ``.remote()`` return."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

from conveyor import _core
from conveyor.channel import decode_error, drop_picklers
from conveyor.exceptions import SerializationError
from conveyor.runtime import context
from conveyor.runtime.waiting.patience import wait_until

EMPTY = _core.EMPTY
_CANCELLED = _core.CANCELLED
_OVERDUE = _core.OVERDUE
ErrorFrame = _core.ErrorFrame

#: What a negative timeout stands for: no limit, whatever the default is.
FOREVER = 1e9


class _Failed:
    """An outcome that is an exception."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


def failure_of(outcome: Any) -> BaseException | None:
    """The error, if ``outcome`` is one."""
    return outcome.error if type(outcome) is _Failed else None


class Source(Protocol):
    """Where a ref's result comes from: a graph, or a caller's link to an actor."""

    gate: _core.Gate

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        """The result as the gate gave it; raises what ended the wait instead. The slow path.

        ``EMPTY`` if the ref may have got its outcome meanwhile in another way: look again."""
        ...

    def is_ready(self, ref: Ref) -> bool:
        """Whether ``get`` would return (or raise) without waiting."""
        ...

    def cancel(self, ref: Ref) -> bool:
        """Cancel what ``ref``, which is not done, is the result of. False if that cannot be."""
        ...

    def stopped(self, ref: Ref, overdue: bool) -> BaseException:
        """The error of what was not run: it was cancelled, or its deadline had passed."""
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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        drop_picklers()  # reducers go by the exact type

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

    def fileno(self) -> int:
        """A descriptor that polls readable once the ref is done: for ``select``, ``poll``, ``epoll``
        and event loops other than asyncio.

        It is made when it is first asked for and closed when the ref is garbage; neither read nor
        close it.
        """
        return context.current().watcher.fileno(self)

    def cancel(self) -> bool:
        """Cancel the execution, or the call, that this is a result of. False if it is done already.

        From now on every ref of the execution that has not been got raises
        ``ExecutionCancelledError``. Tasks that have not begun are skipped, a coroutine that runs is
        cancelled; a method that runs is not interrupted, but nobody hears of what it returns.
        """
        return not self.done() and self._source.cancel(self)

    def cancelled(self) -> bool:
        """Whether ``get`` raises because of a :meth:`cancel`."""
        outcome = self._outcome
        if type(outcome) is not _Failed:
            return False
        from conveyor.exceptions import ExecutionCancelledError

        return isinstance(outcome.error, ExecutionCancelledError)

    def parts(self) -> tuple[Ref, ...]:
        """The refs that this one's result is made of: itself, where it comes from one channel."""
        return (self,)

    def _get(self, timeout: float | None) -> Any:
        outcome = self._outcome
        if outcome is EMPTY:
            outcome = self._settle(FOREVER if timeout is not None and timeout < 0 else timeout)
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
            while self._outcome is EMPTY:
                try:
                    value = self._source.wait_for(self, timeout)
                    # It may have been cancelled just now.
                    if value is not EMPTY and self._outcome is EMPTY:
                        self._arrived(value)
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
            meta = value.meta
            if meta in (_CANCELLED, _OVERDUE):
                value = _Failed(self._source.stopped(self, meta == _OVERDUE))
            else:
                value = _Failed(decode_error(meta))
        self._outcome = value

    def _fail(self, error: BaseException) -> None:
        """``error`` is the outcome."""
        self._outcome = _Failed(error)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            from conveyor.runtime.waiting.aio import (
                wait_until as wait_async,  # asyncio is slow to import
            )

            yield from wait_async(self.done).__await__()
        return self.get()

    def __reduce__(self) -> Any:
        from conveyor.runtime.refs.imports import pickled  # which is above

        return pickled(self)

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

    def cancel(self) -> bool:
        return self._whole.cancel()

    def cancelled(self) -> bool:
        return self._whole.cancelled()

    def parts(self) -> tuple[Ref, ...]:
        return (self._whole,)


class _Final(Exception):
    """The ref's outcome is this error, now and for ever (an actor died, say)."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def final(error: BaseException) -> Exception:
    """Wrap ``error`` so that the ref keeps it as its outcome."""
    return _Final(error)


def cancelled_error(what: str) -> BaseException:
    """The error of whoever wants the result of ``what``."""
    from conveyor.exceptions import ExecutionCancelledError  # slow to import, and rarely needed

    return ExecutionCancelledError(f"{what} was cancelled")


def _fresh(error: BaseException) -> BaseException:
    # The same exception object raised twice would grow its traceback with every get.
    return error.with_traceback(None)
