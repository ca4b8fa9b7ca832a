"""A thread on which what waits for refs without sleeping gets their values, and goes on."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from conveyor.runtime import threads

logger = logging.getLogger("conveyor")


class Completions:
    """Of one process: one after the other, on a thread that is there as long as there are any. Not on the
    watcher's: to get a value may take long, as may the user's callbacks, and the watcher has others to
    serve."""

    def __init__(self, thread: str = "futures") -> None:
        """``thread``: what its thread is called."""
        self._thread = thread
        # Reentrant: a signal handler may ask for a future in the middle of this.
        self._lock = threading.RLock()
        self._ahead: deque[Callable[[], object]] = deque()
        self._runs = False

    def put(self, work: Callable[[], object]) -> None:
        """Have ``work`` done soon."""
        with self._lock:
            self._ahead.append(work)
            if self._runs:
                return
            self._runs = True
        threads.start_or_run(self._run, self._thread)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._ahead:
                    self._runs = False
                    return
                work = self._ahead.popleft()
            try:
                work()
            except BaseException:
                # The others are still to be told, also where a callback has left by sys.exit.
                logger.exception(
                    "what comes after a reference is done has failed (%s)", self._thread
                )
            del work  # it may be the last that holds a value
