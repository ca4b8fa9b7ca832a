"""Finding actors that wait for each other in a cycle.

Every blocked process writes on its status page whom it waits for. Whoever is about to sleep follows
these marks; if they lead back to it, it rings the others, so that each looks once more for what it
waits for, and believes in the cycle only if all have looked in vain and are in the same wait still.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from conveyor import _core


@dataclass(frozen=True, slots=True)
class _Mark:
    slot: int
    waits: int
    checks: int


def _follow(board: _core.Board, me: int, target: int) -> list[_Mark] | None:
    """The other members of the cycle through ``me``, or ``None`` if the marks lead elsewhere."""
    marks: list[_Mark] = []
    seen = {me}
    while target >= 0:
        if target == me:
            return marks
        if target in seen:
            return None  # somebody else's cycle; they will find it
        seen.add(target)
        following, waits, checks = board.waits(target)
        marks.append(_Mark(target, waits, checks))
        target = following
    return None


class CycleCheck:
    """One wait's suspicion. :meth:`confirmed` is asked whenever the wait has woken up in vain."""

    def __init__(self, board: _core.Board, me: int, target: int) -> None:
        self._board = board
        self._me = me
        self._target = target
        self._suspects: list[_Mark] | None = None

    def suspicious(self) -> bool:
        """Look; if there is a cycle, ask its members to look again. True while it is suspected."""
        marks = _follow(self._board, self._me, self._target)
        if marks is None:
            self._suspects = None
            return False
        if self._suspects is None or [(m.slot, m.waits) for m in marks] != [
            (m.slot, m.waits) for m in self._suspects
        ]:
            self._suspects = marks
        for mark in marks:
            self._board.ring(mark.slot, _core.ATTENTION_BIT)
        return True

    def confirmed(self) -> list[int] | None:
        """The cycle as board slots, this process first, once it is certain."""
        if self._suspects is None:
            return None
        now = _follow(self._board, self._me, self._target)
        if now is None or len(now) != len(self._suspects):
            return None
        for before, after in zip(self._suspects, now, strict=True):
            if (before.slot, before.waits) != (after.slot, after.waits):
                return None
            if after.checks == before.checks:
                return None
        return [self._me, *(mark.slot for mark in now)]


@contextmanager
def waiting(inbox: _core.Inbox, target: int) -> Iterator[None]:
    """Mark this process as blocked on the process in slot ``target``."""
    inbox.waiting_for(target)
    try:
        yield
    finally:
        inbox.waiting_for(-1)
