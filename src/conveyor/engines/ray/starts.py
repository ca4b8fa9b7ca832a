"""The starts that are under way. They end with the session, whatever Ray is waiting for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from conveyor.exceptions import ActorStartError
from conveyor.flag import Flag
from conveyor.runtime.events import EventLoop

_log = logging.getLogger("conveyor")

#: Error text of a start that the session's end has ended.
ENDED = "the session has ended"
#: Timeout of a call to Ray that asks for a process, or ends one, in seconds.
_TIMEOUT = 10.0


class Starts:
    """The starts of one session's actors."""

    def __init__(self) -> None:
        # Entered as a lock: entering a condition runs Python code, so a signal handler that raises there may
        # leave the lock held. Then no thread could start an actor any more, nor end the session.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._under_way: dict[int, Callable[[], object]] = {}
        self._asking = 0
        self._closed = False

    def begin(self, number: int, end: Callable[[], object]) -> None:
        """Note that the start of that number waits for Ray. ``end()`` ends the wait."""
        with self._lock:
            self._under_way[number] = end

    def over(self, number: int) -> None:
        """Note that the start of that number does not wait any more."""
        with self._lock:
            self._under_way.pop(number, None)

    @contextmanager
    def waiting(self, number: int) -> Iterator[None]:
        """Context at whose end the wait of :meth:`begin` is over."""
        try:
            yield
        finally:
            self.over(number)

    @contextmanager
    def under_way(self, number: int, end: Callable[[], object]) -> Iterator[None]:
        """Context within which the start of that number waits for Ray. ``end()`` ends the wait."""
        self.begin(number, end)
        with self.waiting(number):
            yield

    @contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Context within which Ray is asked for a process, or for what the process needs. ``ActorStartError``
        if the session has ended, so that it is too late to do ``what``."""
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
        """Let Ray be asked for nothing from now on, and end the starts that are under way, on the thread of
        ``events``. Wait for the calls that ask Ray now, since their processes have to be ended, too."""
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
