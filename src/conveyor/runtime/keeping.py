"""Letting go of what was kept as long as somebody had a frame."""

from __future__ import annotations

import threading
from collections.abc import Callable

from conveyor import _core
from conveyor.runtime import threads


class Keeping:
    """One thread, there from the first frame on that something is kept for. It sleeps until somebody who had
    such a frame has let go of it."""

    def __init__(self, ring: Callable[[], object]) -> None:
        """``ring`` wakes those who wait in this process for something to be let go of."""
        self._ring = ring
        self._lock = threading.RLock()  # a signal handler may send something, too
        self._thread: threading.Thread | None = None
        self._closed = False
        self._started = False

    def start(self) -> None:
        """Something is about to be kept.

        Raises:
            SystemLimitError: no thread is to be had, and nobody would let go of it.
        """
        if self._started:
            return
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threads.start(self._run, "keeping")
            self._started = True

    def close(self) -> None:
        """The session is over. What is still kept goes with the process."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            _core.stop_waiting_for_no_longer_kept()
            thread.join()

    def _run(self) -> None:
        while _core.wait_for_no_longer_kept():
            _core.no_longer_kept()
            self._ring()
