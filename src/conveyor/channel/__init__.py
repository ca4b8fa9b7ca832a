"""Channels: typed values from one process of a session to another, in order, through shared memory.

``sender, receiver = conveyor.channel.open[int](depth=8)``. Either end can be passed to an actor, as an
argument.
"""

from __future__ import annotations

from conveyor.channel.end import ChannelStatistics
from conveyor.channel.pair import Channel
from conveyor.channel.pair import Channel as open
from conveyor.channel.receiver import Receiver
from conveyor.channel.sender import Sender

__all__ = ["Channel", "ChannelStatistics", "Receiver", "Sender", "open"]
