"""Hosts have clocks of their own: how far one is ahead of another, and how well that is known.

A question to another host's clock is answered between two times of this one's, so what the answer says was so
at some time in between: taking the middle is wrong by half of the round trip at most, whatever the two ways
took. Clocks also run at slightly different speeds. What happened between two such looks is put in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Offset(Struct, frozen=True):
    """At ``at``, by this host's clock, the other one was ahead by ``ahead``, give or take ``error``.
    Nanoseconds, as all here."""

    at: int
    ahead: int
    error: int

    @property
    def there(self) -> int:
        """What the other clock said then."""
        return self.at + self.ahead

    def seen_from(self, base: Offset) -> Offset:
        """The same by the clock that ``base`` is of; both are by the clock of one host, at about one time."""
        return Offset(self.at + base.ahead, self.ahead - base.ahead, self.error + base.error)


#: Of a host and its own clock.
NONE = Offset(0, 0, 0)


def estimate(samples: Sequence[tuple[int, int, int]]) -> Offset:
    """From questions to another clock (when it was asked, what it said, when that was here): by the one with
    the shortest round trip. There is at least one."""
    asked, says, answered = min(samples, key=lambda sample: sample[2] - sample[0])
    middle = (asked + answered) // 2
    # The middle is rounded down, so the other side may be one nanosecond further away.
    return Offset(middle, says - middle, answered - middle)


class Alignment(Struct, frozen=True):
    """Puts one clock in line with this host's, by two looks at it."""

    before: Offset
    after: Offset

    @property
    def error(self) -> int:
        """No time that both looks have in their midst is further from the truth, as long as the clock's
        speed stays what it is."""
        return max(self.before.error, self.after.error)

    def here(self, there: int) -> int:
        """The time of this host's clock when the other one said ``there``."""
        before, after = self.before, self.after
        span = after.there - before.there
        if span <= 0 or there <= before.there:
            return there - before.ahead
        if there >= after.there:
            return there - after.ahead
        drift = (after.ahead - before.ahead) * (there - before.there)
        return there - before.ahead - drift // span
