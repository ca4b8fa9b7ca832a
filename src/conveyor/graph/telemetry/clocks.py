"""Clocks of nodes: how far one is ahead of another, and how well that is known.

A question to another node's clock is answered between two times of this node's clock. The answer was right at
some time in between: taking the middle is wrong by half of the round trip at most, however long each way
took. Clocks also run at slightly different speeds. Times between two such looks are interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Offset(Struct, frozen=True):
    """Offset of another node's clock: at ``at``, by this node's clock, the other one was ahead by ``ahead``,
    give or take ``error``. Nanoseconds, as everywhere here."""

    at: int
    ahead: int
    error: int

    @property
    def there(self) -> int:
        """Time of the other clock at that moment."""
        return self.at + self.ahead

    def seen_from(self, base: Offset) -> Offset:
        """Return the offset as seen from the clock of ``base``. Both are given by the clock of one node, at
        about one time."""
        return Offset(self.at + base.ahead, self.ahead - base.ahead, self.error + base.error)


#: The offset of a node and its own clock.
NONE = Offset(0, 0, 0)


def estimate(samples: Sequence[tuple[int, int, int]]) -> Offset:
    """Estimate an offset from questions to another clock, of which there is at least one: when it was asked,
    what it said, when that was here. The one with the shortest round trip counts."""
    asked, says, answered = min(samples, key=lambda sample: sample[2] - sample[0])
    middle = (asked + answered) // 2
    # The middle is rounded down, so the other side may be one nanosecond further away.
    return Offset(middle, says - middle, answered - middle)


class Alignment(Struct, frozen=True):
    """Conversion of another clock's times to this node's, by two looks at that clock."""

    before: Offset
    after: Offset

    @property
    def error(self) -> int:
        """Bound of the error of times between the two looks, as long as the clock's speed stays what it
        is."""
        return max(self.before.error, self.after.error)

    def here(self, there: int) -> int:
        """Return the time of this node's clock when the other one said ``there``."""
        before, after = self.before, self.after
        span = after.there - before.there
        if span <= 0 or there <= before.there:
            return there - before.ahead
        if there >= after.there:
            return there - after.ahead
        drift = (after.ahead - before.ahead) * (there - before.there)
        return there - before.ahead - drift // span
