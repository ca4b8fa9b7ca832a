"""Channels of users as the driver has them: until both ends have met, or, on several hosts, are closed."""

from __future__ import annotations

from conveyor import _core
from conveyor.runtime.driver.hosts.far_host import Handed
from conveyor.runtime.driver.processes.record import ActorRecord

Party = ActorRecord | None
"""A process at an end of a channel; ``None`` is the driver."""


class End:
    """One end of a channel, until both have met."""

    __slots__ = ("closed", "fds", "given", "holder", "told", "used", "view")

    def __init__(self, holder: Party) -> None:
        #: The process that was the last to have it, and whether it has used it.
        self.holder = holder
        self.used = False
        self.closed = False
        #: Whether its process knows of the other end's.
        self.told = False
        #: What introduces the process of the other end to this one, once it has come.
        self.fds: list[int] = []
        self.view: _core.ArenaView | None = None
        #: The same where its process is on another host.
        self.given: Handed | None = None

    @property
    def introduced(self) -> bool:
        """Whether something is kept for it."""
        return bool(self.fds or self.view or self.given)

    def is_over(self, spread: int) -> bool:
        """Whether nobody will ask for what is kept for it. ``spread``: nor use the channel any more."""
        dead = self.holder is not None and not self.holder.alive
        return (self.told and not spread) or self.closed or dead


class Channel:
    """A channel whose ends have not both met; or one on several hosts, until both are closed."""

    __slots__ = ("depth", "ends", "segment", "spread")

    def __init__(self, depth: int, creator: Party) -> None:
        self.depth = depth
        self.ends = End(creator), End(creator)
        #: As it is on the driver's host, if an end is there.
        self.segment: _core.Segment | None = None
        #: The number of the segment on the hosts of its ends; 0: it is on the driver's alone.
        self.spread = 0

    @property
    def introduced(self) -> bool:
        """Whether both ends have been used, and something is kept for them, or was told."""
        return any(end.told or end.introduced for end in self.ends)
