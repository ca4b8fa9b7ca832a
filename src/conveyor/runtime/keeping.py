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
        self._wait = _core.KeptWait()
        self._lock = threading.RLock()  # a signal handler may send something, too
        self._thread: threading.Thread | None = None
        self._closed = False
        #: Something has been kept, and may be.
        self.started = False

    def start(self) -> None:
        """Something is about to be kept.

        Raises:
            SystemLimitError: no thread is to be had, and nobody would let go of it.
        """
        if self.started:
            return
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threads.serve(self._run, "keeping")
            self.started = True

    def close(self) -> None:
        """The session is over. Refs may outlive it: the thread ends with the last value that is kept."""
        with self._lock:
            self._closed = True
            thread = self._thread
        # What it drops may run any code, also such that ends the session.
        if (
            not self._wait.stop()
            and thread is not None
            and thread is not threading.current_thread()
        ):
            thread.join()

    def _run(self) -> None:
        while self._wait.wait():
            _core.let_go_of_kept()
            if not self._closed:
                self._ring()
