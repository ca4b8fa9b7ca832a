"""Another host, as the driver has it: where processes share no memory with the driver's own.

Such a host has a board and a pump of its own, and somebody who does there what the driver does here: see
:mod:`conveyor.engine.net.station`. What it is to do is an order:
:mod:`conveyor.runtime.driver.hosts.far_host`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from conveyor import _core
from conveyor.codec import Reader
from conveyor.futures import Future
from conveyor.runtime.blueprint import Blueprint
from conveyor.runtime.graph.telemetry.afar import Look, LookAtAll, Seen, SeenAll
from conveyor.runtime.kept import KeptAt
from conveyor.runtime.meeting import Side
from conveyor.runtime.messages.message import Message
from conveyor.runtime.process import ArenaSize, Process
from conveyor.runtime.waiting.inquiry import Frames, LookAtWaits, WaitsThere


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


class Handed(Struct, frozen=True):
    """What a process of another host is given instead of descriptors: see
    :class:`conveyor.runtime.driver.hosts.far_host.Answer`."""

    segment: int = 0
    processes: tuple[Reader, ...] = ()
    line: int = 0
    memory: bool = False


class Home(Struct, frozen=True):
    """What hosts that have others beside the driver's need of the driver.

    pump: gives that of its host, which is made for so many seconds without a connection, and for other hosts
    to come to that IP address. heard: takes what a process of another host asks, by slot and incarnation.
    gone: is told of a host that is no more, by its number. host_of: the number of the host of the process
    that has a slot. kept_afar: what processes of other hosts keep. when_come: calls the first function when
    these frames of a host have come to the driver's, or nothing of it comes any more, and the second one
    where that is not told, since the session is over. come: is told by which number a host was asked to tell
    when something has come there, when it has. reached: is told what has come of it that a host
    was to connect to another one, and why it cannot. process: the driver's own, which is given what
    fetches memory of other hosts as soon as there are any.
    """

    pump: Callable[[float, str], _core.HostPump]
    heard: Callable[[int, int, bytes], None]
    gone: Callable[[int], None]
    host_of: Callable[[int], int]
    kept_afar: Callable[[], list[KeptAt]]
    when_come: Callable[[int, Frames, Callable[[], object], Callable[[], object]], None]
    come: Callable[[int], None]
    reached: Callable[[int, int, Exception | None], None]
    process: Process

    @property
    def arena(self) -> ArenaSize:
        """Of each process here."""
        return self.process.arena_size

    @property
    def driver(self) -> Reader:
        """The driver's process."""
        return self.process.identity


class FarHost(Protocol):
    """Another host."""

    #: Its number in the session; the driver's is 0.
    number: int
    #: What users call it.
    name: str
    #: Of each process there.
    arena: ArenaSize
    #: Where it lets other hosts in.
    address: tuple[str, int]

    def send(self, order: FarOrder) -> Future[Any]:
        """Have it do something; what comes of it. Its loss is an error."""
        ...

    def look(self, look: Look) -> Future[Seen]:
        """Have it look at actors of a graph that are there. No order has to wait for that."""
        ...

    def look_at_all(self, look: LookAtAll) -> Future[SeenAll]:
        """Have it look at all processes that are there."""
        ...

    def look_at_waits(self, look: LookAtWaits) -> Future[WaitsThere]:
        """Have it say what the processes there wait for."""
        ...

    def kept(self) -> Future[list[KeptAt]]:
        """What the processes there keep for others."""
        ...

    def tell(self, order: FarOrder) -> Future[Any]:
        """The same where nobody waits for it: a host that cannot do it is given up."""
        ...

    def carry(self, sock: socket.socket) -> int:
        """Have what comes over ``sock``, which is the host's from now on, carried to a process there, and
        back. The number under which that process is given its end."""
        ...

    def hold(self, fd: int) -> None:
        """Processes there are sent messages with that file: it has to come there once."""
        ...

    def let_go(self, fd: int) -> None:
        """None of them has anything of it any more."""
        ...
