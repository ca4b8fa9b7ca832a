"""What an actor asks the driver for while it runs, tells it, and is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from conveyor.runtime.messages.message import Message

if TYPE_CHECKING:
    from conveyor.codec.sealed import Sealed
    from conveyor.config import Config
    from conveyor.exceptions import ConveyorError
    from conveyor.plan.model import Plan
    from conveyor.runtime.calls.constructor import Constructor
    from conveyor.runtime.graph.telemetry.afar import Question
    from conveyor.runtime.meeting import Side
    from conveyor.runtime.protocol import ActorId, MethodInfo, ProcessOptions
    from conveyor.runtime.waiting.inquiry import Waiting


class Numbered(Message, frozen=True):
    """A request, or the reply to it, which has the same number. Replies come in any order. ``content`` is
    pickled: what cannot be read is the affair of that request alone."""

    number: int
    content: bytes


class Request(Message, frozen=True):
    """Something that is answered. What it is answered with is said by each."""


class Connect(Request, frozen=True):
    """A link to an actor: :class:`Connected`, with the link's segment and the actor's arena and eventfd."""

    actor: ActorId


class WhyRefused(Request, frozen=True):
    """Why link ``number`` was not accepted: an error, or ``None``."""

    number: int


class Create(Request, frozen=True):
    """A new actor: its id. Without ``constructor`` it is started by whoever asks."""

    class_name: str
    methods: Mapping[str, MethodInfo]
    name: str | None
    options: ProcessOptions
    max_concurrency: int | None
    max_restarts: int
    constructor: Constructor | None


class Find(Request, frozen=True):
    """The actor with this name: its id, its class and its methods."""

    name: str


class FindTransport(Request, frozen=True):
    """How the transport with this name was registered: bytes, or ``None``."""

    name: str


class AddTransport(Request, frozen=True):
    """The asking actor has registered a transport: ``None``."""

    name: str
    registration: bytes


class Kill(Request, frozen=True):
    """The end of an actor: ``None``."""

    actor: ActorId
    no_restart: bool
    graceful: bool


class WhyDead(Request, frozen=True):
    """How the actor's process that had ``slot`` as its ``incarnation``-th has died: an error. ``labels`` are
    names for what it may have run, by (graph, node)."""

    actor: ActorId
    slot: int
    incarnation: int
    labels: Mapping[tuple[int, int], str]


class HostsOf(Request, frozen=True):
    """On which hosts the processes are that ``actors`` have now: their numbers."""

    actors: tuple[ActorId, ...]


class HaveGpus(Request, frozen=True):
    """Whether any of ``actors`` may have a GPU."""

    actors: tuple[ActorId, ...]


class Lay(Request, frozen=True):
    """Channels of a graph that the asking actor executes: ``LaidChannels``, with their segment, and arena
    and eventfd of each member. ``tasks`` are those of each actor; ``labels`` are what they are called."""

    config: Config
    plan: Plan
    tasks: Sequence[Sealed]
    labels: Mapping[int, str]


class LayAgain(Request, frozen=True):
    """New channels of graph ``number``, whose first execution is number ``first``: as :class:`Lay`. timeout,
    left: how long dead actors may take to come back, and what is left of that; ``None``: as long as they
    take."""

    number: int
    first: int
    timeout: float | None
    left: float | None


class ComesBack(Request, frozen=True):
    """Whether the dead actors of graph ``number`` are started again without being asked."""

    number: int


class EndUnmade(Request, frozen=True):
    """The end of the processes of graph ``number`` whose constructor has raised: ``None``."""

    number: int


class Unlay(Request, frozen=True):
    """The end of graph ``number``: ``None``. ``wait``: it will be asked who is :class:`Staying`."""

    number: int
    wait: bool


class LookAfar(Request, frozen=True):
    """What other hosts than the asking actor's say of their actors of graph ``number``, in so many seconds at
    most: ``Afar``."""

    number: int
    question: Question
    patience: float


class LookForCycle(Request, frozen=True):
    """Whether one of these waits of the asking process is part of a cycle that leads over several hosts:
    ``Found``, or ``None``. The answer may take as long as they may be."""

    waits: tuple[Waiting, ...]


class Staying(Request, frozen=True):
    """The slots of those who have not left graph ``number`` yet, which is being taken down."""

    number: int


class Introduce(Request, frozen=True):
    """Whether the process that has ``slot`` as its ``incarnation``-th lives on another host than the asking
    actor's. If so, that host knows it from then on."""

    slot: int
    incarnation: int


class KeptAfar(Request, frozen=True):
    """What processes of other hosts than the asking actor's keep for others: a list of ``KeptAt``."""


class OpenFarMemory(Request, frozen=True):
    """A connection to the asking actor's host, which fetches memory of other hosts' processes: ``None``, with
    its socket."""


class OpenRefs(Request, frozen=True):
    """A connection to the rendezvous of pickled refs: ``None``, with its socket."""


class OpenGraph(Request, frozen=True):
    """A connection to the driver's graph ``number``: ``None``, with its socket."""

    number: int
    name: str


Opening: TypeAlias = OpenRefs | OpenGraph | OpenFarMemory
"""What is answered with the socket of a connection."""


class OpenChannel(Request, frozen=True):
    """A new channel whose ends are the asking actor's: its number."""

    depth: int


class HoldEnd(Request, frozen=True):
    """An end of channel ``number`` has come to the asking actor: ``None``. This is a request, since what an
    actor has only told before it died may not be heard, and then nobody would learn of its death."""

    number: int
    side: Side


class CloseEnd(Request, frozen=True):
    """The asking actor has closed an end of channel ``number`` with which it has met nobody, or whose channel
    is on other hosts than the driver's: ``None``.
    This is a request for the same reason."""

    number: int
    side: Side


class Meet(Request, frozen=True):
    """The asking actor uses an end of channel ``number``; ``alone``: the other one is there as well.
    :class:`Met`, with the channel's segment, and the arena and eventfd of the process at the other end if
    that is an actor's; ``None`` if that process does not use its end yet."""

    number: int
    side: Side
    alone: bool


class CreateGroup(Request, frozen=True):
    """A new collective group of the processes that ``actors`` have now: its number."""

    actors: Sequence[ActorId]


class JoinGroup(Request, frozen=True):
    """The asking process takes its place in collective group ``number``: its ``ranks.Membership``, with the
    group's segment, and arena and eventfd of each other rank."""

    number: int


class CloseGroup(Request, frozen=True):
    """Collective group ``number`` is destroyed: ``None``."""

    number: int


class Notice(Message, frozen=True):
    """Something that is not answered."""


class Disconnect(Notice, frozen=True):
    """The link ``number``, which this actor has asked for, could not be opened here."""

    number: int


class Refuse(Notice, frozen=True):
    """The caller that came with order ``tag`` could not be accepted: ``error`` says why."""

    tag: int
    error: ConveyorError


class Reply(Message, frozen=True):
    """How a request has ended."""


class Done(Reply, frozen=True):
    """It is done; the request's class says what ``value`` is."""

    value: Any


class Failed(Reply, frozen=True):
    """It has failed; the error is for whoever has asked."""

    error: Exception


class Connected(Message, frozen=True):
    """A link that is laid: its number, the callee's process, and the bit that its mailbox rings there."""

    number: int
    slot: int
    incarnation: int
    bit: int


class Met(Message, frozen=True):
    """The process at the other end of a channel; ``actor`` is ``None`` if it is the driver. ``spread``: see
    ``Meeting``."""

    slot: int
    incarnation: int
    actor: ActorId | None
    spread: bool
