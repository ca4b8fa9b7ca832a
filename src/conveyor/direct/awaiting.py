"""Values that have stayed elsewhere, in event loops: these run on while the memory is on its way.

A fetch is part of decoding, which cannot be suspended. So where memory is not there yet, decoding is broken
off, and done once more when it is: what has come until then is taken out of a stock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from conveyor.codec.faults import NotThere
from conveyor.refs.ref import asyncio_waits

ResultT = TypeVar("ResultT")


class Awaited(Protocol):
    """Anything that decoding has to wait for: memory that is on its way, or the end of a hold."""

    def give_up(self) -> None:
        """Stop waiting for this, if it has not come yet."""
        ...


#: By what it is: memory that is ``Wanted``, say.
Stock = dict[object, Awaited]


class _Deferral(threading.local):
    """Stock of the values that the current thread has asked for while it decodes for an event loop. Its
    ``stock`` is ``None`` on any other thread."""

    stock: Stock | None = None


deferral = _Deferral()


class Attempts:
    """Decoding one value for an event loop, as often as it takes."""

    __slots__ = ("_stock",)

    def __init__(self) -> None:
        self._stock: Stock = {}

    def of(self, decode: Callable[[], ResultT]) -> ResultT:
        """Run ``decode`` over the memory that has come by now.

        Raises:
            NotThere: something is missing, which is on its way from now on.
        """
        before, deferral.stock = deferral.stock, self._stock
        try:
            return decode()
        finally:
            deferral.stock = before

    def end(self) -> None:
        """End the attempts: memory that is still on its way is not needed."""
        stock, self._stock = self._stock, {}
        for coming in stock.values():
            coming.give_up()


async def when_there(decode: Callable[[], ResultT]) -> ResultT:
    """Return the result of ``decode``, once all that it needs has come. A cancelled caller leaves nothing
    under way."""
    import asyncio  # slow to import, and whoever fetches anything has this module

    try:
        asyncio.get_running_loop()
    except RuntimeError:  # another kind of loop, which cannot wait for the doorbell
        return decode()
    attempts = Attempts()
    try:
        while True:
            try:
                return attempts.of(decode)
            except NotThere as one:
                ready = one.ready
            await asyncio_waits().wait_until(ready)
    finally:
        attempts.end()
