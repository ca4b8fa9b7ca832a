"""Letting go of results that were dropped before they came."""

from __future__ import annotations

import threading
from contextlib import suppress

from conveyor import _core
from conveyor.runtime import threads


class Sweeper:
    """One thread, there from the first channel on that brings results to this process. It sleeps while
    no result is dropped that is still to come, and wakes up once for all that are dropped within
    ``quiet`` seconds."""

    def __init__(self, inbox: _core.Inbox, quiet: float) -> None:
        self._leftovers = inbox.leftovers
        self._quiet = quiet
        self._lock = threading.RLock()  # a signal handler may lay a channel, too
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Results will come. Not called by finalizers, which drop them: they may start no thread."""
        with self._lock:
            if self._thread is None and not self._closed:
                with suppress(RuntimeError):  # no thread is to be had: the next channel tries again
                    self._thread = threads.serve(self._run, "sweeper")

    def close(self) -> None:
        """Nothing more is let go of by itself."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._leftovers.stop()
            thread.join()

    def _run(self) -> None:
        while self._leftovers.wait(self._quiet):
            self._leftovers.sweep()
