"""Awaiting a value that has stayed elsewhere: the event loop runs on while its memory is on its way.

A fetch is part of decoding, which cannot be suspended. So where memory is not there yet, decoding is broken
off, and done once more when it is: what has come until then is taken out of a stock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from conveyor import _core
from conveyor.runtime.far_memory import Wanted
from conveyor.runtime.refs.ref import Ref, asyncio_waits


class Coming(Protocol):
    """Memory that is on its way, or has come."""

    def done(self) -> bool:
        """Whether it has come, or never will."""
        ...

    def memory(self) -> _core.Buffer:
        """What has come. ``OSError`` if it never will."""
        ...

    def give_up(self) -> None:
        """Nobody waits for it any more, if it has not come yet."""
        ...


Stock = dict[Wanted, Coming]


class NotThere(BaseException):
    """What breaks off decoding. ``ready()``: whether it is worth being tried again; asked after every ring of
    the process's bell."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        super().__init__("a value that has stayed elsewhere has not come yet")
        self.ready = ready


class _Deferral(threading.local):
    """Of the thread that decodes for an await: what has been asked for; else ``None``."""

    stock: Stock | None = None


deferral = _Deferral()


@contextmanager
def _deferring(stock: Stock) -> Iterator[None]:
    before, deferral.stock = deferral.stock, stock
    try:
        yield
    finally:
        deferral.stock = before


async def value_of(ref: Ref) -> Any:
    """What ``ref``, which is done, gives. Whoever is cancelled meanwhile leaves nothing under way."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # another kind of loop, which cannot wait for the bell
        return ref.get()
    stock: Stock = {}
    try:
        while True:
            try:
                with _deferring(stock):
                    return ref.get()
            except NotThere as one:
                ready = one.ready
            await asyncio_waits().wait_until(ready)
    finally:
        for coming in stock.values():
            coming.give_up()
