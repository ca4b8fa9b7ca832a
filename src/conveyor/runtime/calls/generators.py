"""The actor's side of generator methods that are called: see ``calls.streams``."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from conveyor.runtime.calls.try_each import try_each

Key = tuple[int, int]
"""Names a generator to its actor: the caller's place on the board, and a number of its own."""


class OpenGenerators:
    """An actor's side: the generators that callers have opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Key, Any] = {}
        # Those that make an item just now, and whether more will be wanted of them after it.
        self._busy: dict[Key, bool] = {}

    def opening(self, method: Callable[..., Any]) -> Callable[..., None]:
        """What opens a generator of ``method``: it is called with a key and the arguments."""
        return lambda key, *args, **kwargs: self._begin(key, method(*args, **kwargs))

    def _begin(self, key: Key, items: Any) -> None:
        if not hasattr(items, "__next__") and not inspect.isasyncgen(items):
            raise TypeError(f"a generator method has returned a {type(items).__name__}")
        self._open[key] = items

    def next(self, key: Key) -> tuple[Any] | None:
        """The next item, in a tuple; ``None`` if there is none."""
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

    async def async_next(self, key: Key) -> tuple[Any] | None:
        """Like :meth:`next`, of an asynchronous generator."""
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

    def close(self, key: Key) -> None:
        """Nobody takes its items any more."""
        with self._lock:
            items = self._open.pop(key, None)
            if key in self._busy:
                self._busy[key] = False
        _close(items)

    def close_all(self) -> KeyboardInterrupt | None:
        """The actor ends. Asynchronous ones are its event loop's to close. What a generator raises is
        printed."""
        return try_each(*(functools.partial(self.close, key) for key in list(self._open)))


def _close(items: Any) -> None:
    # An asynchronous one is closed by its event loop, once nobody refers to it.
    close = getattr(items, "close", None)
    if close is not None:
        close()
