"""The memory of a link: a mailbox ring, a reply ring, and marks beside them."""

from __future__ import annotations

from conveyor import _core
from conveyor.runtime.blueprint import Blueprint, LimitsPlan, RingPlan
from conveyor.runtime.process import CALL_SLOTS, CALL_STRIDE, MOST_CALL_SLOTS, Place


def link_depth(max_concurrency: int | None) -> int:
    """How many calls of one caller are with an actor at once, at the most. Never fewer than may run."""
    wanted = min(max(max_concurrency or 0, CALL_SLOTS), MOST_CALL_SLOTS)
    return 1 << (wanted - 1).bit_length()


def link_blueprint(caller: Place, mailbox: Place, depth: int = CALL_SLOTS) -> Blueprint:
    """Memory for a link: the mailbox ring at 0, the reply ring at :func:`reply_offset`, behind it
    the marks of cancelled calls, and the mark of a link that the other side could not accept.

    ``caller``: with the bit that replies ring; ``mailbox``: the actor's process, with the bit that calls
    ring. ``depth``: a power of two. The other side reads it off the mailbox ring."""
    ring = _ring_bytes(depth)
    return Blueprint(
        _refusal_offset(depth) + _core.Limits.bytes(1, 0),
        (
            RingPlan(0, depth, CALL_STRIDE, caller, (mailbox,)),
            RingPlan(ring, depth, CALL_STRIDE, mailbox, (caller,)),
        ),
        (LimitsPlan(2 * ring, depth, 0, caller.slot),),
    )


def reply_offset(segment: _core.Segment) -> int:
    return _ring_bytes(segment.slots(0))


def link_limits(segment: _core.Segment) -> _core.Limits:
    """Open the marks that say which calls of a link are cancelled."""
    depth = segment.slots(0)
    return _core.Limits(segment, 2 * _ring_bytes(depth), depth, 0)


def _ring_bytes(depth: int) -> int:
    return _core.Segment.ring_bytes(depth, CALL_STRIDE, 1)


def _refusal_offset(depth: int) -> int:
    return 2 * _ring_bytes(depth) + _core.Limits.bytes(depth, 0)


class Refusal:
    """A word of a link that says that nobody serves it, and nobody will. The driver writes it."""

    def __init__(self, segment: _core.Segment) -> None:
        self._words = _core.Limits(segment, _refusal_offset(segment.slots(0)), 1, 0)

    def __bool__(self) -> bool:
        return self._words.cancelled(0)

    def mark(self) -> None:
        self._words.cancel(0)
