"""Waiting until the fork server takes more messages, where hundreds are before one."""

from __future__ import annotations

import select
import socket
import threading

from conveyor import _core, descriptors
from conveyor.engine.events import EventLoop
from conveyor.flag import Flag


class RoomWait:
    """How long one message waits for room. Whoever has this may end the wait at any moment, from any
    thread."""

    def __init__(self, seconds: float) -> None:
        self._end = _core.monotonic() + seconds
        self._given_up = False
        self.go_on = Flag()

    def give_up(self) -> None:
        """Wait no longer."""
        self._given_up = True
        self.go_on.set()

    @property
    def over(self) -> bool:
        """Whether it waits no longer."""
        return self._given_up or _core.monotonic() >= self._end

    def wait(self) -> None:
        """Until ``go_on`` is set, or it is over."""
        if not self.over:
            self.go_on.wait(self._end - _core.monotonic())


class Room:
    """Who waits for room in a socket, and what tells them. ``lock``: the launcher's."""

    def __init__(self, events: EventLoop, lock: threading.RLock, control: socket.socket) -> None:
        self._events = events
        self._lock = lock
        self._waiting: list[Flag] = []
        # The loop has the socket already, for what comes, and no descriptor twice. This can be read
        # when there is room. It is made now: who waits may find no descriptor left.
        self._watch = descriptors.epoll()
        self._watch.register(control, select.EPOLLOUT)

    def tell(self, waiter: Flag) -> None:
        """Set ``waiter``, which is cleared now, once there may be room or never will be. With the lock."""
        waiter.clear()
        if not self._waiting:
            self._events.add(self._watch.fileno(), self.wake)
        self._waiting.append(waiter)

    def wake(self) -> None:
        """Tell all of them; on the loop's thread."""
        with self._lock:
            self._events.remove(self._watch.fileno())
            waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.set()

    def close(self) -> None:
        """The other end is gone; on the loop's thread. Nobody waits from now on."""
        self.wake()
        self._watch.close()
