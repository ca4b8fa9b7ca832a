"""The actor's side of generator methods that are called: see ``calls.streams``."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

from conveyor.refs.streams import NotYielded
from conveyor.runtime.uninterrupted import try_each

Key = tuple[int, int]
"""Names a generator to its actor: the caller's place on the process table, and a number of its own."""


class StreamWriter:
    """Generator that a caller has opened. Its methods may be called by several threads."""

    def __init__(self, make: Callable[[], Any], ended: Callable[[], object]) -> None:
        """``make()`` calls the method, before the first item.
        ``ended()`` is called when none comes any more."""
        self._make: Callable[[], Any] | None = make
        self._ended = ended
        self._lock = threading.Lock()
        self._items: Any = None
        self._busy = False  # an item is being made
        self._closed = False

    def next(self, _key: Key) -> tuple[Any, ...] | None:
        """The next item, in a tuple; ``None`` if there is none. A method that has returned no generator gives
        its value, and ``True`` behind it."""
        if not self._begin_item():
            return None
        over = True
        try:
            items = self._made()
            if needs_loop(items):
                raise without_loop("the method", items)
            if not hasattr(items, "__next__"):
                return (items, True)
            item = next(items)
            over = False
        except StopIteration:
            return None
        finally:
            if self._end_item(over):
                self._close_items()
        return (item,)

    async def async_next(self, _key: Key) -> tuple[Any, ...] | None:
        """Like :meth:`next`, on an event loop: of an asynchronous generator, or of any other."""
        if not self._begin_item():
            return None
        over = True
        try:
            items = self._made()
            if inspect.iscoroutine(items):
                items = self._items = await items
            if hasattr(items, "__anext__"):
                item = await items.__anext__()
            elif hasattr(items, "__next__"):
                item = next(items)
            else:
                return (items, True)
            over = False
        except (StopIteration, StopAsyncIteration):
            return None
        finally:
            if self._end_item(over):
                if hasattr(self._items, "aclose"):
                    await self._items.aclose()
                else:
                    self._close_items()
        return (item,)

    def _made(self) -> Any:
        make, self._make = self._make, None
        if make is not None:
            self._items = make()
        return self._items

    def _begin_item(self) -> bool:
        with self._lock:
            self._busy = not self._closed
            return self._busy

    def _end_item(self, over: bool) -> bool:
        """Whether the caller has dropped the stream meanwhile, and the generator is to be closed."""
        with self._lock:
            self._busy = False
            if over:
                self._closed = True
            to_close = self._closed and not over
        if over:
            self._ended()
        return to_close

    def close(self) -> None:
        """Close the generator: nobody takes its items any more."""
        with self._lock:
            before, self._closed = self._closed, True
            to_close = not (before or self._busy)
        self._ended()
        if to_close:
            self._close_items()

    def _close_items(self) -> None:
        self._make = None  # which has the arguments
        # An asynchronous one is closed by its event loop, once nobody refers to it.
        close = getattr(self._items, "close", None)
        if close is not None:
            close()


class OpenGenerators:
    """The generators that callers have opened, by their keys.

    Calls of one caller come in their order, and run in any: in threads, say. So ``open``, ``writer`` and
    ``closing`` are called as the calls come, on one thread, and run no code of the user's. What they give may
    run in any order.
    """

    def __init__(self) -> None:
        self._open: dict[Key, StreamWriter] = {}

    def __bool__(self) -> bool:
        """Whether a caller may ask for more."""
        return bool(self._open)

    def open(self, key: Key, make: Callable[[], Any]) -> None:
        """Open a generator, which ``make()`` gives."""
        self._open[key] = StreamWriter(make, functools.partial(self._open.pop, key, None))

    def writer(self, key: Key) -> StreamWriter:
        """The generator with that key; one that is over, if there is none."""
        return self._open.get(key) or _OVER

    def closing(self, key: Key) -> Callable[..., None]:
        """Close that generator, by calling this."""
        writer = self.writer(key)
        return lambda _key: writer.close()

    def caller_gone(self, slot: int) -> None:
        """Close what a caller has opened that is dead. What a generator raises is printed."""
        try_each(*[writer.close for key, writer in list(self._open.items()) if key[0] == slot])

    def close_all(self) -> KeyboardInterrupt | None:
        """Close all generators at the end of the actor. Asynchronous ones are its event loop's to close.
        Errors that a generator raises are printed."""
        return try_each(*[writer.close for writer in list(self._open.values())])


#: Stands for generators that have ended, or were never opened.
_OVER = StreamWriter(lambda: None, lambda: None)
_OVER.close()


def needs_loop(items: Any) -> bool:
    """Whether only an event loop can take items of what a method has returned."""
    return hasattr(items, "__anext__") or inspect.iscoroutine(items)


def without_loop(label: str, items: Any) -> TypeError:
    """Return the error of ``label``, which has returned them to an actor that has no event loop."""
    kind = "an asynchronous generator"
    if inspect.iscoroutine(items):
        items.close()
        kind = "a coroutine"
    return TypeError(
        f"{label} has returned {kind}, and the actor has no event loop for it: write the method, or what its "
        "decorator makes of it, with async def"
    )


def iterator(label: str, items: Any) -> Iterator[Any]:
    """Iterate over what ``label``, a task that was bound as a generator, has returned: over one
    ``NotYielded`` if that has no items."""
    if not hasattr(items, "__next__"):
        return iter((NotYielded(label, items),))
    return items  # type: ignore[no-any-return]
