"""Pauses between tries of something that nothing tells of.

What ends a wait mostly tells so, and then it is waited for. This is for the rest: whether a listener is there
again, or has a place for one more, whether some process of the system has closed a descriptor, or has given
memory back. Somebody who waits for that tries again, until a deadline, or until he is told that nobody needs
it.
"""

from __future__ import annotations

import random

#: By this one is longer than the one before, and so about a third of the time since the first. And what part
#: of what it could be it is at least.
_GROWTH, _LEAST = 1.5, 0.75


class Pauses:
    """Pauses between tries, each longer than the one before: short at first, since the cause may last for a
    moment only, and rare where it lasts longer.

    Each pause is a random part of its full length. So processes that have lost the same node at the same
    moment do not all come back to it at the same moments.
    """

    def __init__(self, first: float = 0.01, most: float = 0.5) -> None:
        """Set the first pause and the longest one, in seconds."""
        self._first, self._most = min(first, most), most
        self._next = self._first

    def next(self) -> float:
        """Return the seconds until the next try: three quarters of the full pause, or more."""
        longest = self._next
        self._next = min(_GROWTH * longest, self._most)
        return random.uniform(_LEAST * longest, longest)

    def begin_anew(self) -> None:
        """Make the next pause short again, since a try has succeeded."""
        self._next = self._first
