"""Pauses between tries, for waits whose end nothing announces.

Most waits end because something announces their end. This is for the others: whether a listener is there
again or has room for one more connection, or whether some process of the system has closed a descriptor or
given memory back. The waiting thread tries again, until a deadline or until it is told that nobody needs the
result.
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
