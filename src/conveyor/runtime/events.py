"""One background thread that waits for descriptors and calls back.

An engine has few things to hear of (the fork server's answers, ends of actors, their output), none of
them urgent enough for a hop's latency: the native death watch sees to those. One thread with
one epoll set is enough, and it sleeps whenever nothing happens.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from conveyor import _core, descriptors
from conveyor.runtime import threads


class EventLoop:
    """Calls back from one daemon thread when a descriptor is readable (or has hung up).

    All methods may be called from any thread. Callbacks must not block, since they share the
    thread. What one raises is printed to stderr and harms nothing else.

    The thread and its descriptors come into being with the first ``add`` or ``call``. In a forked
    child there is no thread, and every method does nothing. Close the loop before the interpreter
    ends (from ``atexit``): a daemon thread caught while printing can abort the process.
    """

    def __init__(self, name: str = "events") -> None:
        self._name = name
        self._owner = os.getpid()
        # Reentrant: a finalizer may run (and call us) while this thread holds it.
        self._lock = threading.RLock()
        self._callbacks: dict[int, tuple[int, Callable[[], object]]] = {}
        self._added = 0
        self._calls: deque[Callable[[], object]] = deque()
        #: Resting descriptors: when they are looked at again, and what was to be called for them.
        self._resting: dict[int, tuple[float, tuple[int, Callable[[], object]]]] = {}
        self._thread: threading.Thread | None = None
        self._epoll: select.epoll | None = None
        self._wakeup = -1
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed or (self._wakeup >= 0 and descriptors.lost(self._wakeup))

    def on_thread(self) -> bool:
        """Whether the caller is a callback of this loop."""
        return threading.current_thread() is self._thread

    def add(self, fd: int, callback: Callable[[], object]) -> None:
        """Call ``callback()`` whenever ``fd`` is readable, until it is removed."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            self._start()
            assert self._epoll is not None
            self._added += 1
            self._callbacks[fd] = (self._added, callback)
            try:
                self._epoll.register(fd, select.EPOLLIN)
            except BaseException:
                del self._callbacks[fd]
                raise

    def remove(self, fd: int) -> None:
        """Stop watching ``fd``; does nothing if it is not watched.

        No new callback begins after this, but one may be running just now: to close ``fd`` as
        well, do both in one callback (or in one ``call``). Remove before closing, always: epoll
        watches the open file, which a forked child may keep open.
        """
        if os.getpid() != self._owner:
            # The epoll set is shared with the parent: removing here would remove there.
            return
        with self._lock:
            if self._callbacks.pop(fd, None) is not None and self._epoll is not None:
                with suppress(OSError):
                    self._epoll.unregister(fd)

    def rest(self, fd: int, seconds: float) -> None:
        """Do not call back for ``fd`` for so many seconds: what is there to be read cannot be taken just now.
        Others are called back meanwhile. On the loop's thread only."""
        entry = self._callbacks.get(fd)
        if os.getpid() != self._owner or entry is None:
            return
        with self._lock:
            assert self._epoll is not None
            self._epoll.modify(fd, 0)
            self._resting[fd] = _core.monotonic() + seconds, entry

    def call(self, fn: Callable[[], object]) -> None:
        """Run ``fn()`` on the loop's thread soon; calls run in the order they were made."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            self._start()
            self._calls.append(fn)
            os.eventfd_write(self._wakeup, 1)

    def close(self, timeout: float = 5.0) -> None:
        """Run the calls made so far, end the thread and free its descriptors. Idempotent.

        Waits at most ``timeout`` seconds for a callback that blocks. Called from a callback, it
        does not wait.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closed = True
            thread = self._thread
            if self._wakeup >= 0:
                if descriptors.lost(self._wakeup):
                    return  # the thread sleeps, and nobody can wake it
                os.eventfd_write(self._wakeup, 1)
        if thread is not None and not self.on_thread():
            thread.join(timeout)

    def _start(self) -> None:
        if self._thread is not None:
            return
        epoll = descriptors.epoll()
        wakeup = -1
        try:
            wakeup = descriptors.event()
            epoll.register(wakeup, select.EPOLLIN)
            self._epoll, self._wakeup = epoll, wakeup
            self._thread = threads.start(self._run, self._name)
        except BaseException:
            self._epoll, self._wakeup = None, -1
            epoll.close()
            if wakeup >= 0:
                os.close(wakeup)
            raise

    def _run(self) -> None:
        epoll = self._epoll
        assert epoll is not None
        try:
            while not self._closed:
                # A descriptor added from here on may bear the number of one removed and closed
                # since, whose event is still to be dispatched. It waits for the next round.
                known = self._added
                for fd, _ in epoll.poll(self._until_rested()):
                    if fd == self._wakeup:
                        os.eventfd_read(fd)
                        continue
                    entry = self._callbacks.get(fd)
                    if entry is not None and entry[0] <= known:
                        guarded(entry[1])
                self._run_calls()
                self._end_rests()
            self._run_calls()
        finally:
            with self._lock:
                self._closed = True
                epoll.close()
                os.close(self._wakeup)
                self._wakeup = -1
                self._callbacks.clear()
                self._resting.clear()
                self._calls.clear()

    def _until_rested(self) -> float | None:
        """Return the seconds until a resting descriptor is looked at again, if any rests."""
        if not self._resting:
            return None
        first = min(due for due, _ in self._resting.values())
        return max(first - _core.monotonic(), 0.0)

    def _end_rests(self) -> None:
        if not self._resting:
            return
        now = _core.monotonic()
        with self._lock:
            for fd in [fd for fd, (due, _) in self._resting.items() if due <= now]:
                _, entry = self._resting.pop(fd)
                if self._callbacks.get(fd) is entry and self._epoll is not None:
                    # The thread goes on whatever has become of it.
                    guarded(partial(self._epoll.modify, fd, select.EPOLLIN))

    def _run_calls(self) -> None:
        # Only those there now: a call that calls again must not starve the descriptors.
        for _ in range(len(self._calls)):
            guarded(self._calls.popleft())


def guarded(fn: Callable[[], object]) -> None:
    """Run ``fn()``; print what it raises instead of passing it on."""
    try:
        fn()
    except BaseException:
        # Even SystemExit: it would end this thread, silently.
        if sys.stderr is not None:
            with suppress(Exception):
                traceback.print_exc(file=sys.stderr)
