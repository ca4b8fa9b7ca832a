"""What the driver orders another host to do: one order after the other, as they were given.

Who does it there is :mod:`conveyor.engine.net.station`.
"""

from __future__ import annotations

from conveyor.codec import Reader
from conveyor.runtime.blueprint import Blueprint
from conveyor.runtime.meeting import Side
from conveyor.runtime.messages.message import Message
from conveyor.runtime.waiting.inquiry import Frames


class FarOrder(Message, frozen=True):
    """What another host has to do."""


class Adopt(FarOrder, frozen=True):
    """A process is about to begin there: make what it needs of its host."""

    slot: int
    incarnation: int
    name: str


class Stand(FarOrder, frozen=True):
    """A process of host ``host`` is to have a proxy there."""

    slot: int
    incarnation: int
    host: int
    name: str


class Bury(FarOrder, frozen=True):
    """That process is dead, or its proxy not needed: its slot is about to be another one's."""

    slot: int
    incarnation: int


class Reach(FarOrder, frozen=True):
    """Connect to host ``host``, which waits there, and again whenever the connection breaks. What has come of
    it is told later, so that a host that does not answer holds up nothing else."""

    host: int
    address: tuple[str, int]


class Locate(FarOrder, frozen=True):
    """Host ``host`` lets others in there. It is not to be connected to: it does that itself."""

    host: int
    address: tuple[str, int]


class GiveUp(FarOrder, frozen=True):
    """Host ``host`` is lost: nothing of its comes there any more when that is done."""

    host: int


class CountDue(FarOrder, frozen=True):
    """Which frames host ``to`` is to have of what was published there: answered with
    :data:`conveyor.runtime.waiting.inquiry.Frames`."""

    to: int


class TellWhenCome(FarOrder, frozen=True):
    """Tell of ``number`` when these frames of host ``host`` have come there, or none of its comes any
    more."""

    host: int
    frames: Frames
    number: int


class Spread(FarOrder, frozen=True):
    """Make a segment, and join it to those that other hosts have under the same number. ``homes``: the hosts
    of who submits over its limits, by their slots. ``joined``: other hosts have it, too."""

    number: int
    blueprint: Blueprint
    homes: dict[int, int]
    joined: bool


class BreakGroup(FarOrder, frozen=True):
    """Nothing goes on any more in the collective group of that segment. ``session``: as it ends."""

    number: int
    members: tuple[Reader, ...]
    session: bool


class Forget(FarOrder, frozen=True):
    """Let go of a segment."""

    number: int


class Hand(FarOrder, frozen=True):
    """Give a process the descriptors of a segment, and what introduces other processes to it. They come with
    ``ticket`` over its control socket."""

    slot: int
    incarnation: int
    ticket: int
    segment: int
    processes: tuple[Reader, ...]


class Answer(FarOrder, frozen=True):
    """Send a process the pickled answer to a request of its, with such descriptors, if there are any.
    ``line``: with its end of that connection; see
    :meth:`conveyor.runtime.driver.hosts.far_host.FarHost.carry`. ``memory``: with its end of one over
    which its host fetches memory of others."""

    slot: int
    incarnation: int
    data: bytes
    segment: int = 0
    processes: tuple[Reader, ...] = ()
    line: int = 0
    memory: bool = False


class Cut(FarOrder, frozen=True):
    """A process cannot be answered any more: have it hear that, so that it waits for no answer."""

    slot: int
    incarnation: int


class MarkRefused(FarOrder, frozen=True):
    """Nobody serves the link of that segment: mark it, and have the caller look."""

    segment: int
    slot: int


class MarkClosed(FarOrder, frozen=True):
    """End ``side`` of the channel of that segment was closed before its process met the other: mark it, and
    have the process at the other look."""

    segment: int
    side: Side
    slot: int
