"""Order in which the calls of one actor are made again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from typing import Protocol

from conveyor.refs.watcher import Completions


class Tried(Protocol):
    """A call that is made again where it fails."""

    def is_over(self) -> bool:
        """Whether its last try is over, and nobody has looked at that."""

    def has_lost_its_actor(self) -> bool:
        """Whether its last try has failed since the actor has died."""

    def see(self) -> None:
        """Look at it: either another try is made, or there is the outcome."""


class Retrying:
    """The calls of one actor that are under way here, in the order of their last tries, and the thread that
    makes the next ones.

    They are made in that order again where the actor has died, although who tells of it looks at one after
    the other, and a death may become known in between."""

    def __init__(self) -> None:
        # Guards the order. Reentrant: a signal handler may call in the middle of this.
        self._lock = threading.RLock()
        self._under_way: OrderedDict[Tried, None] = OrderedDict()
        self._queue = Completions("retries")

    def begun(self, call: Tried) -> None:
        """Note that ``call`` has been tried, after all other calls."""
        with self._lock:
            self._under_way[call] = None
            self._under_way.move_to_end(call)

    def ended(self, call: Tried) -> None:
        """No other one will be."""
        with self._lock:
            self._under_way.pop(call, None)

    def see_soon(self, call: Tried) -> None:
        """Look at ``call`` on the thread: to make a try may take as long as an actor takes to come back."""
        self._queue.put(partial(self._see, call))

    def _see(self, call: Tried) -> None:
        if not call.is_over():  # it was seen when another was, before
            return
        try:
            if call.has_lost_its_actor():
                while (before := self._first()) is not call and before and before.is_over():
                    before.see()
        finally:  # nobody tells of it again
            call.see()

    def _first(self) -> Tried | None:
        with self._lock:
            return next(iter(self._under_way), None)
