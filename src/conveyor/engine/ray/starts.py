"""The starts that are under way: with the session they end, whatever Ray is waiting for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from conveyor.engine.events import EventLoop
from conveyor.exceptions import ActorStartError
from conveyor.flag import Flag

_log = logging.getLogger("conveyor")

#: Why there is no process.
ENDED = "the session has ended"
#: Seconds that a call of Ray's may take which asks for a process, or ends one.
_TIMEOUT = 10.0


class Starts:
    """The starts of one session's actors."""

    def __init__(self) -> None:
        # By itself, since a signal handler that raises may leave a condition held that was entered: its
        # entering is Python's. Then nobody could start an actor any more, nor end the session.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._under_way: dict[int, Callable[[], object]] = {}
        self._asking = 0
        self._closed = False

    def begin(self, number: int, end: Callable[[], object]) -> None:
        """The start of that number waits for Ray; ``end()`` has it wait no longer."""
        with self._lock:
            self._under_way[number] = end

    def over(self, number: int) -> None:
        """It waits no more."""
        with self._lock:
            self._under_way.pop(number, None)

    @contextmanager
    def waiting(self, number: int) -> Iterator[None]:
        """The end of this is the end of the wait that was begun."""
        try:
            yield
        finally:
            self.over(number)

    @contextmanager
    def under_way(self, number: int, end: Callable[[], object]) -> Iterator[None]:
        """Meanwhile the start of that number waits for Ray."""
        self.begin(number, end)
        with self.waiting(number):
            yield

    @contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Meanwhile Ray is asked for the process, or for what it needs. ``ActorStartError`` if it is too
        late to do ``what``."""
        with self._lock:
            if self._closed:
                raise ActorStartError(f"cannot {what}: {ENDED}")
            self._asking += 1
        try:
            yield
        finally:
            with self._lock:
                self._asking -= 1
                self._changed.notify_all()

    def close(self, events: EventLoop) -> None:
        """Nothing is asked for from now on, and the starts that are under way are ended, on the thread of
        ``events``. Whoever is asking is waited for: what he gets is to be ended, too."""
        with self._lock:
            self._closed = True
            if not self._changed.wait_for(lambda: not self._asking, _TIMEOUT):
                _log.warning("Ray has not answered for %g s who asks it for a process", _TIMEOUT)
            ends = list(self._under_way.values())
        ended = Flag()
        for end in ends:
            events.call(end)
        events.call(ended.set)
        if not events.on_thread() and not events.closed and not ended.wait(_TIMEOUT):
            _log.warning("a call of Ray's has taken %g s, and holds up the session's end", _TIMEOUT)
