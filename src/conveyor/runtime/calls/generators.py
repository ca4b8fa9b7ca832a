"""Ordinary calls of generator methods: the items stay with the actor until they are asked for.

Such a call is several on the wire: ``method#open`` with a key and the arguments, then ``method#next``
(``method#anext`` for an asynchronous generator) for each item, one ahead of who takes them, and
``method#close``.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from conveyor.exceptions import GraphError
from conveyor.runtime.calls.last_steps import try_each
from conveyor.runtime.refs.ref import EMPTY, Ref, blockers_of, cancelled_error
from conveyor.runtime.refs.streams import StreamRef
from conveyor.runtime.waiting.works import Blockers

if TYPE_CHECKING:
    from conveyor.runtime.base import CallingRuntime

#: Ray's name for calling a function with an actor's instance.
RAY_CALL = "__ray_call__"

Key = tuple[int, int]
"""Names a generator to its actor: the caller's place on the board, and a number of its own."""


class Incarnation(Protocol):
    """Leads to an actor as it is now, and to nothing that comes after its death."""

    @property
    def gone(self) -> bool:
        """Whether every call raises why."""

    def call(
        self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_returns: int = 1
    ) -> Any:
        """Start a call; one ref, or a list of them for ``num_returns > 1``."""


class CallStream(StreamRef):
    """The items of one call."""

    __slots__ = (
        "_actor_name",
        "_ahead",
        "_cancelled",
        "_error",
        "_key",
        "_link",
        "_method",
        "_next",
        "_opened",
        "_over",
        "_runtime",
        "_will",
    )

    def __init__(
        self,
        runtime: CallingRuntime,
        link: Incarnation,
        actor_name: str,
        method: str,
        is_async: bool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._over = False
        self._cancelled = False
        # Of asking for the item after the last that was given.
        self._error: BaseException | None = None
        self._key: Key = (runtime.process.slot, next(runtime.stream_numbers))
        self._runtime = runtime
        # The generator is in the process at its other end: one that comes after that has none.
        self._link = link
        self._actor_name = actor_name
        self._method = method
        self._next = f"{method}#{'anext' if is_async else 'next'}"
        # The generator may go on although its items can come no more: whatever happens here from now on, it
        # is closed once this is garbage.
        close = functools.partial(runtime.close_stream, link, method, self._key)
        self._will = runtime.will(close)
        try:
            opened: Ref = link.call(f"{method}#open", (self._key, *args), kwargs)
        except Exception:  # it was not opened
            self._will.revoke()
            raise
        super().__init__(opened._source)
        self._opened: Ref | None = opened
        self._ahead: Ref = self._ask()

    def _ask(self) -> Ref:
        ref: Ref = self._link.call(self._next, (self._key,), {})
        return ref

    def _look(self) -> Any:
        if self._over:
            raise StopIteration
        if self._cancelled:
            raise cancelled_error(f"{self._actor_name}.{self._method}")
        if self._error is not None:
            raise self._error.with_traceback(None)
        if not self._ahead.done():
            return EMPTY
        # What they raise stays theirs: kept here, its frames would keep all that its catchers had.
        if self._opened is not None:
            self._opened.get()
            self._opened = None
        found = self._ahead.get()
        if found is None:
            self._over = True
            self._will.revoke()
            raise StopIteration
        try:
            self._ahead = self._ask()
        except Exception as error:  # comes after this item
            self._error = error
        return found[0]

    def _is_there(self) -> bool:
        ended = self._over or self._cancelled or self._error is not None
        return ended or self._ahead.done()

    def cancel(self) -> bool:
        ahead = self._ahead
        if self._over or self._cancelled or self._error is not None:
            return False
        if not ahead.cancel() and not _is_item(ahead):
            return False
        if self._opened is not None:  # the actor may be busy: nobody has to wait until it begins
            self._opened.cancel()
        self._cancelled = True
        self._will.revoke()
        self._runtime.drop_stream(self._link, self._method, self._key)
        self._runtime.close_dropped_streams()
        return True

    def cancelled(self) -> bool:
        return self._cancelled

    def parts(self) -> tuple[Ref, ...]:
        return (self._ahead,) if self._opened is None else (self._opened, self._ahead)

    def _blockers(self, question: int) -> Blockers | None:
        return blockers_of(self, question)

    def _describe(self) -> str:
        return f"the next item of {self._actor_name}.{self._method}"

    def _doing(self) -> str:
        doing: str = self._source.doing()
        return doing


def _is_item(ahead: Ref) -> bool:
    """Whether what has come is an item: neither the generator's end nor its error."""
    try:
        return ahead.get() is not None
    except Exception:
        return ahead._outcome is EMPTY  # it is there, and could not be had just now


class OpenGenerators:
    """An actor's side: the generators that callers have opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Key, Any] = {}
        # Those that make an item just now, and whether more will be wanted of them after it.
        self._busy: dict[Key, bool] = {}

    def operation(
        self, method: Callable[..., Any], operation: str
    ) -> tuple[Callable[..., Any], bool]:
        """What ``method#operation`` does, and whether it is a coroutine function."""
        if operation == "open":
            return lambda key, *args, **kwargs: self._begin(key, method(*args, **kwargs)), False
        if operation == "anext":
            return self._next_later, True
        return {"next": self._next, "close": self._close}[operation], False

    def _begin(self, key: Key, items: Any) -> None:
        if not hasattr(items, "__next__") and not inspect.isasyncgen(items):
            raise TypeError(f"a generator method has returned a {type(items).__name__}")
        self._open[key] = items

    def _next(self, key: Key) -> tuple[Any] | None:
        items = self._begin_item(key)
        if items is None:
            return None
        over = True
        try:
            item = next(items)
            over = False
        except StopIteration:
            return None
        finally:
            if not self._end_item(key, items, over):
                _close(items)
        return (item,)

    async def _next_later(self, key: Key) -> tuple[Any] | None:
        items = self._begin_item(key)
        if items is None:
            return None
        over = True
        try:
            item = await items.__anext__()
            over = False
        except StopAsyncIteration:
            return None
        finally:
            if not self._end_item(key, items, over):
                await items.aclose()
        return (item,)

    def _begin_item(self, key: Key) -> Any:
        with self._lock:
            items = self._open.pop(key, None)
            if items is not None:
                self._busy[key] = True
        return items

    def _end_item(self, key: Key, items: Any, over: bool) -> bool:
        """False: the caller has dropped the stream meanwhile, and ``items`` are to be closed."""
        with self._lock:
            wanted = self._busy.pop(key)
            if wanted and not over:
                self._open[key] = items
        return wanted or over

    def _close(self, key: Key) -> None:
        with self._lock:
            items = self._open.pop(key, None)
            if key in self._busy:
                self._busy[key] = False
        _close(items)

    def close(self) -> KeyboardInterrupt | None:
        """The actor ends. Asynchronous ones are its event loop's to close. What a generator raises is
        printed."""
        return try_each(*(functools.partial(self._close, key) for key in list(self._open)))


def _close(items: Any) -> None:
    # An asynchronous one is closed by its event loop, once nobody refers to it.
    close = getattr(items, "close", None)
    if close is not None:
        close()


def find_method(
    instance: Any, generators: OpenGenerators, name: str
) -> tuple[Callable[..., Any], bool]:
    """The bound method, and whether it is a coroutine function. Raises ``GraphError`` if there is none.

    Besides methods there are what a generator method's calls do (see above), ``name#call`` (for
    coroutine functions ``name#acall``), which calls its first argument, and ``__ray_call__``, which
    calls its first argument with the instance.
    """
    if "#" in name:
        name, _, operation = name.rpartition("#")
        if operation == "call":
            return _call, False
        if operation == "acall":
            return _call_later, True
        return generators.operation(find_method(instance, generators, name)[0], operation)
    if name == RAY_CALL:
        return functools.partial(_call_with, instance), False
    method = getattr(instance, name, None)
    if not callable(method):
        raise GraphError(f"{type(instance).__name__} has no method {name!r}")
    if type(method) is types.MethodType:
        return method, _is_async(method.__func__)
    return method, inspect.iscoroutinefunction(method)  # it may refer to the instance: none is kept


#: Of the functions of classes. Python takes longer to say it than many a call does.
_is_async = functools.lru_cache(maxsize=1024)(inspect.iscoroutinefunction)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _call_with(instance: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(instance, *args, **kwargs)


async def _call_later(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await function(*args, **kwargs)
