"""Opening a channel: a pair of ends."""

from __future__ import annotations

import operator
from typing import Any

from conveyor.channel.end import make
from conveyor.channel.receiver import Receiver
from conveyor.channel.sender import Sender
from conveyor.runtime import context
from conveyor.runtime.meeting import RECEIVING, SENDING
from conveyor.runtime.process import slots_of
from conveyor.typevars import ItemT

#: Values that a channel may hold, at most.
MOST_DEPTH = 1 << 16


class Channel(tuple[Sender[ItemT], Receiver[ItemT]]):
    """A new channel: ``sender, receiver = Channel(depth=8)``.

    depth: how many values may be sent before the first of them is received; then sending waits. It is rounded
    up to a power of two.

    Both ends are this process's at first. Each can be passed on before it is used, and belongs to the process
    that first uses it. Starts a session where there is none.
    """

    __slots__ = ()

    def __new__(cls, depth: int = 8) -> Channel[ItemT]:
        depth = _checked(depth)
        runtime = context.current()
        number = runtime.introductions.open(depth)
        sender: Any = make(runtime, number, SENDING, depth)
        receiver: Any = make(runtime, number, RECEIVING, depth)
        return super().__new__(cls, (sender, receiver))

    @property
    def sender(self) -> Sender[ItemT]:
        """The end that values go in at."""
        return self[0]

    @property
    def receiver(self) -> Receiver[ItemT]:
        """The end that values come out of."""
        return self[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ((self[0], self[1]),)


def _checked(depth: Any) -> int:
    try:
        if isinstance(depth, bool):
            raise TypeError
        number = operator.index(depth)
    except TypeError:
        raise TypeError(f"depth must be an integer, not {depth!r}") from None
    if not 1 <= number <= MOST_DEPTH:
        raise ValueError(f"depth must be from 1 to {MOST_DEPTH}, not {number}")
    return slots_of(number)
