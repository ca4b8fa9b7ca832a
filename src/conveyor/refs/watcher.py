"""Watching refs: others are told when one is done, by descriptors, callbacks, or a thread for callbacks."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

from conveyor import _core, descriptors
from conveyor.refs.ref import Ref
from conveyor.runtime import threads
from conveyor.system_limits import explained
from conveyor.weak import WeakKeys

logger = logging.getLogger("conveyor")


class Completions:
    """The callbacks of one process, one after the other, on a thread that is there as long as there are any.
    Not on the watcher's: to get a value may take long, as may the user's callbacks, and the watcher has
    others to serve."""

    def __init__(self, thread: str = "futures") -> None:
        """``thread``: what its thread is called."""
        self._thread = thread
        # Reentrant: a signal handler may ask for a future in the middle of this.
        self._lock = threading.RLock()
        # Single steps change it.
        self._ahead: deque[Callable[[], object]] = deque()
        # Who does what is ahead, by his own word: whoever has him start may be interrupted before he does.
        self._runner: threading.Thread | None = None

    def put(self, work: Callable[[], object]) -> None:
        """Have ``work`` done soon."""
        self._ahead.append(work)
        with self._lock:
            if self._runner is not None:
                return
        threads.start_or_run(self._run, self._thread)

    def _run(self) -> None:
        with self._lock:
            if self._runner is not None:
                return
            self._runner = threading.current_thread()
        try:
            while self._do_one():
                pass
        finally:  # an interrupt may have ended this, on a thread of the program's
            with self._lock:
                if self._runner is threading.current_thread():
                    self._runner = None

    def _do_one(self) -> bool:
        """Do the first that is ahead. Whether there was one; else nobody runs any more."""
        with self._lock:
            if not self._ahead:
                self._runner = None
                return False
            work = self._ahead.popleft()
        try:
            work()
        except BaseException:
            # The others are still to be told, also where a callback has left by sys.exit.
            logger.exception("what comes after a reference is done has failed (%s)", self._thread)
        return True


class Awaited(Protocol):
    """Ref, or part of one."""

    def done(self) -> bool: ...


class Watcher:
    """Thread that sleeps on this process's doorbell. It exists only while somebody has asked about a ref
    that is not done."""

    def __init__(self, inbox: _core.Inbox, notify: Callable[[], object]) -> None:
        self._inbox = inbox
        self._notify = notify
        # Nothing of others is called, and no ref is asked, while it is held: callbacks take locks of
        # their own. Reentrant, because finalizers may run in the middle of anything.
        self._lock = threading.RLock()
        # By what stands for one request: several may be for the same ref.
        self._watched: dict[object, tuple[weakref.ref[Awaited], Callable[[], object]]] = {}
        self._descriptors: WeakKeys[Ref, int] = WeakKeys()
        self._thread: threading.Thread | None = None
        self._closed = False
        #: Work that comes after a ref is done, and may take long.
        self.completions = Completions()

    def fileno(self, ref: Ref) -> int:
        """Return the descriptor of ``ref``, made if it has none; it is closed with the ref."""
        with self._lock:
            fd = self._descriptors.get(ref)
            if fd is None:
                with explained(f"make a descriptor for {ref!r}"):
                    fd = descriptors.event()
                try:
                    key = self.watch(ref, lambda: os.eventfd_write(fd, 1))
                except BaseException:
                    os.close(fd)
                    raise
                self._descriptors[ref] = fd
                weakref.finalize(ref, self._close, fd, key).atexit = False
            return fd

    def watch(self, ref: Awaited, callback: Callable[[], object]) -> object:
        """Call back once when ``ref`` is done, on the watcher's thread or here; at the latest when the
        session ends. Nothing is called if the ref becomes garbage before. Returns a key for this request."""
        key = object()
        if ref.done():
            callback()
            return key
        with self._lock:
            if not self._closed:
                self._watched[key] = (weakref.ref(ref), callback)
                if self._thread is not None:
                    self._notify()  # it may sleep already, and the ref be done just now
                    return key
                try:
                    self._thread = threads.serve(self._run, "watcher")
                except BaseException:
                    self._watched.pop(key, None)
                    raise
                return key
        callback()
        return key

    @property
    def closed(self) -> bool:
        """Whether the session is over: callbacks then run at once, and none later."""
        return self._closed

    def close(self) -> None:
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._notify()
            thread.join()

    def _close(self, fd: int, key: object) -> None:
        # In a finalizer: without the lock. Nobody writes any more, because who does holds the ref.
        self._watched.pop(key, None)
        os.close(fd)
        self._notify()  # the thread may have nothing left to do

    def _run(self) -> None:
        while True:
            seen = self._inbox.count
            with self._lock:
                watched = list(self._watched.items())
            for key, (known, callback) in watched:
                ref = known()
                over = ref is None or self._closed or ref.done()
                if over and self._watched.pop(key, None) is not None and ref is not None:
                    try:
                        callback()
                    except Exception:  # the others are still to be told
                        threads.log(
                            "error",
                            "what waited for %s could not be told that it is done",
                            ref,
                            exc_info=True,
                        )
                del ref, callback
            with self._lock:
                if not self._watched:
                    self._thread = None
                    return
            del watched
            self._inbox.rest(seen)
