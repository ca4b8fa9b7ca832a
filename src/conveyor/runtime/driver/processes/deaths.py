"""Native death watches: threads that watch the liveness futexes of actors."""

from __future__ import annotations

import threading

from conveyor import _core

#: Liveness futexes for one death watch: the limit of futex_waitv, less the watch's own alarm.
MAX_WATCHED = 120


class DeathWatches:
    """The death watches of a session, as many as are needed: each can watch a limited number of liveness
    futexes."""

    def __init__(self, board: _core.Board, told: int) -> None:
        """``told``: an eventfd that the watches write to whenever a liveness futex has fired."""
        self._board = board
        self._told = told
        self._lock = threading.Lock()
        self._watches: list[tuple[_core.DeathWatch, set[int]]] = []

    def add(self, slot: int) -> None:
        with self._lock:
            found = next((w for w in self._watches if len(w[1]) < MAX_WATCHED), None)
            if found is None:
                found = (_core.DeathWatch(self._board, self._told), set())
                self._watches.append(found)
            found[1].add(slot)
            found[0].add(slot)

    def remove(self, slot: int) -> None:
        with self._lock:
            for watch, slots in self._watches:
                if slot in slots:
                    slots.discard(slot)
                    watch.remove(slot)

    def stop(self) -> None:
        for watch, _ in self._watches:
            watch.stop()
