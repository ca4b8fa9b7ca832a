"""A thread on which what waits for refs without sleeping gets their values, and goes on."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from conveyor.runtime import threads

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
