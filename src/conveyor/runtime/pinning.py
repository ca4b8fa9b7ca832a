"""Giving up memory of arenas that devices have pinned and do not use."""

from __future__ import annotations

import threading

from conveyor import _core
from conveyor.codec.tensors import pinned
from conveyor.runtime import threads


class Pinning:
    """One thread, there from the first block on that this process pins. It sleeps while nothing is pinned."""

    def __init__(self, board: _core.Board, slot: int, arena: _core.Arena, idle: float) -> None:
        self._words = _core.PinWords(board, slot)
        self._lock = threading.RLock()  # a signal handler may get a value, too
        self._thread: threading.Thread | None = None
        self._closed = False

        def allocate(nbytes: int) -> _core.Buffer:
            return arena.allocate(nbytes, may_wait=False)

        self.pinned = pinned.Pinned(self._words, allocate, self._start, idle)
        pinned.set_current(self.pinned)

    def close(self) -> None:
        """The session is over: nothing stays pinned but what a device still copies."""
        self._closed = True
        if pinned.current() is self.pinned:
            pinned.set_current(None)
        if self.pinned.here():
            self.pinned.close()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threads.serve(self._run, "pinning")

    def _run(self) -> None:
        while True:
            asked = self._words.wait(self.pinned.pause())
            left = self.pinned.tidy(asked)
            if asked:
                self._words.answer()
            if self._closed and not left:
                return
