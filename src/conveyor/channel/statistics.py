"""What an end of a channel has counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Counts of one end, from the channel's beginning on."""

    #: How many values the channel holds that were sent and not received yet, at most.
    depth: int
    #: Values that this end has sent or received.
    values: int
    #: Bytes of them, as they are encoded.
    bytes: int
    #: Values that were sent and not received yet.
    waiting: int
