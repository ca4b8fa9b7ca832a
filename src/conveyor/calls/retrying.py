"""Order in which the calls of one actor are made again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from conveyor.refs.watcher import Completions


class Retrying:
    """The calls of one actor that are under way here, in the order of their last tries, and the thread that
    makes the next ones.

    They are made in that order again where the actor has died, although who tells of it looks at one after
    the other, and a death may become known in between."""

    def __init__(self) -> None:
        # Guards the order. Reentrant: a signal handler may call in the middle of this.
        self._lock = threading.RLock()
        self._under_way: OrderedDict[object, None] = OrderedDict()
        self._queue = Completions("retries")

    def begun(self, call: object) -> None:
        """Note that ``call`` has been tried, after all other calls."""
        with self._lock:
            self._under_way[call] = None
            self._under_way.move_to_end(call)

    def ended(self, call: object) -> None:
        """No other one will be."""
        with self._lock:
            self._under_way.pop(call, None)

    def see_soon(self, look: Callable[[], object]) -> None:
        """Have ``look`` called on the thread: a try may take as long as an actor takes to come back."""
        self._queue.put(look)

    def first(self) -> object | None:
        """Return the call whose last try was made before those of all others."""
        with self._lock:
            return next(iter(self._under_way), None)
