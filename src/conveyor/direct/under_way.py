"""Waits for values of other processes, as this process's slot shows them: of several the first."""

from __future__ import annotations

from typing import Any

from conveyor import _core

# In the order in which they have begun. Single steps change it, so it needs no lock.
_waits: dict[UnderWay, None] = {}


class UnderWay:
    """Wait for a value, from its creation to its end."""

    __slots__ = ("_about", "_process")

    def __init__(self, process: Any, keeper: int, number: int, total: int = 0) -> None:
        """``keeper``: the slot of the process whose memory it is. ``number``, ``total``: of the value, and
        its bytes; 0: it is held back."""
        self._process = process
        self._about = keeper, number, total, _core.monotonic_ns()
        _waits[self] = None
        self._tell()

    def end(self) -> None:
        """End the wait. Nothing happens the second time."""
        if self in _waits:
            _waits.pop(self, None)
            self._tell()

    def _tell(self) -> None:
        process = self._process
        # Those of an earlier session are not this one's.
        waits = [one for one in list(_waits) if one._process is process]
        if not waits:
            process.board.note_fetch(process.slot, -1)
            return
        keeper, number, total, since = waits[0]._about
        process.board.note_fetch(process.slot, keeper, number, total, len(waits) - 1, since)
