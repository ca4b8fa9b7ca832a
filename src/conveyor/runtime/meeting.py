"""Two processes that meet over a channel: its memory, and what each of them learns of the other."""

from __future__ import annotations

from typing import Literal, Protocol

from msgspec import Struct

from conveyor import _core
from conveyor.codec import Reader
from conveyor.exceptions import ChannelClosedError, ConveyorError
from conveyor.runtime.blueprint import Blueprint, LimitsPlan, RingPlan
from conveyor.runtime.process import CALL_STRIDE, RESULT_BIT, Place, slots_of
from conveyor.runtime.protocol import ActorId

#: An end of a channel: what is sent goes in at the first, and comes out at the second.
Side = Literal[0, 1]
SENDING: Side = 0
RECEIVING: Side = 1
#: How each end is called in messages to people.
SIDES = "sending", "receiving"


def other(side: Side) -> Side:
    """Return the end at the other side."""
    return RECEIVING if side == SENDING else SENDING


def channel_blueprint(depth: int, sender: Reader, receiver: Reader) -> Blueprint:
    """Memory for a channel: its ring at 0, and behind it a word for each end that says it is closed."""
    slots = slots_of(depth)
    ends = sender, receiver
    places = [Place(*end, RESULT_BIT) for end in ends]
    ring = _core.Segment.ring_bytes(slots, CALL_STRIDE, 1)
    word = _core.Limits.bytes(1, 0)
    may_wait = _core.RING_WRITER_MAY_WAIT
    return Blueprint(
        ring + 2 * word,
        (RingPlan(0, slots, CALL_STRIDE, places[SENDING], (places[RECEIVING],), may_wait),),
        tuple([LimitsPlan(ring + side * word, 1, 0, ends[side][0]) for side in (0, 1)]),
    )


class ClosedWord:
    """Word that says that an end is closed. It is set once, without a lock. Between nodes the word overtakes
    values that were sent before: so it bears the number of these values."""

    def __init__(self, segment: _core.Segment, side: Side) -> None:
        ring = _core.Segment.ring_bytes(segment.slots(0), CALL_STRIDE, 1)
        self._words = _core.Limits(segment, ring + side * _core.Limits.bytes(1, 0), 1, 0)

    def after(self, count: int) -> bool:
        """Whether the end was closed when it had sent ``count`` values, so that no more come. ``count`` is 0
        for an end that sends none."""
        return self._words.cancelled(count)

    def mark(self, count: int = 0) -> None:
        """Mark the end as closed, with the number of values that it has sent. The caller has to notify
        whoever waits at the other end."""
        self._words.cancel(count)


class Meeting(Struct, frozen=True):
    """Knowledge of the process at one end about the other. ``actor`` is ``None`` where that is the driver.
    ``view``: of the other process's arena; it keeps a descriptor, and is for whoever opens the receiving
    end. ``spread``: the channel's memory is on other nodes than the driver's; the driver is told when an end
    is closed, as these nodes have to let go of the memory."""

    segment: _core.Segment
    slot: int
    incarnation: int
    actor: ActorId | None
    view: _core.ArenaView | None
    spread: bool = False


def closed_error(number: int, side: Side) -> ChannelClosedError:
    """Make the error for whoever needs end ``side`` of channel ``number``, and finds it closed."""
    return ChannelClosedError(f"the {SIDES[side]} end of channel {number} is closed")


class Introductions(Protocol):
    """Broker between the processes at the two ends of a channel. An end belongs to the process that first
    uses it, and cannot leave that process any more."""

    def open(self, depth: int) -> int:
        """Create a channel with both ends here, and return its number in the session."""
        ...

    def hold(self, number: int, side: Side) -> None:
        """Note that an end has come to this process, which has not used it yet."""
        ...

    def meet(self, number: int, side: Side, alone: bool) -> Meeting | None:
        """Use an end in this process. ``alone``: the other end is here as well. ``None``: the process that
        has the other end does not use it yet; the doorbell rings when it does. Raises the death of that
        process, ``ChannelClosedError`` if the other end is closed, and ``RuntimeStateError`` if this end is
        another process's."""
        ...

    def awaits(self, number: int, side: Side) -> bool:
        """Whether it is known, at no cost, that :meth:`meet` would still find the other end unused, as it
        did before."""
        ...

    def close(self, number: int, side: Side) -> None:
        """Close an end whose process has not met the other, or whose channel is on other nodes."""
        ...

    def death(self, meeting: Meeting) -> ConveyorError:
        """Make the error for whoever needs the process at the other end, which is no more."""
        ...
