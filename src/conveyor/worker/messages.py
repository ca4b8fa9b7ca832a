"""Messages between the driver and an actor's process: the bootstrap and orders, and the actor's requests,
their replies, and its notices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from conveyor.runtime.messages import Message
from conveyor.runtime.process import ArenaSize

if TYPE_CHECKING:
    from conveyor.calls.constructor import Constructor
    from conveyor.codec import Reader
    from conveyor.codec.frames import Sealed
    from conveyor.config import Config
    from conveyor.exceptions import ConveyorError
    from conveyor.graph.edges import Assignment
    from conveyor.graph.telemetry import Question
    from conveyor.plan.model import Plan
    from conveyor.runtime.broker import Side
    from conveyor.runtime.deadlock_detector import Waiting
    from conveyor.runtime.protocol import ActorId, MethodInfo, ProcessOptions


class WorkerBootstrap(Struct, frozen=True):
    """The bootstrap of an actor's process, sent after the version line. Descriptors come with it, in this
    order: process table, own arena, own eventfd, driver's arena, driver's eventfd, control socket, request
    socket, call segment, control segment."""

    #: The process's slot in the process table, its incarnation, and the actor's name.
    slot: int
    incarnation: int
    name: str
    #: The actor's number in the session.
    number: int
    session: str
    arena: ArenaSize
    driver_slot: int
    #: The doorbell bits for the driver's calls and for its orders.
    mailbox_bit: int
    control_bit: int
    max_concurrency: int | None
    has_async: bool
    #: Seconds that the actor has for an orderly end.
    grace: float
    #: Whether there is more than one node for the actors that it starts.
    places: bool


#: Processes that come with their descriptors: slot and incarnation.
NewPeers = tuple[tuple[int, int], ...]


class Order(Message, frozen=True):
    """An order to an actor, which acknowledges each. Orders come in order, and never behind calls."""


class Load(Order, frozen=True):
    """Take a part in a graph. The segment and the new peers' descriptors come with ``fds_id``."""

    assignment: Assignment
    new_peers: NewPeers
    fds_id: int


class Unload(Order, frozen=True):
    """Leave a graph."""

    graph: int


class Accept(Order, frozen=True):
    """Take calls of the ``incarnation``-th process of ``slot``, which ring ``bit``. The segment and the
    process's descriptors always come, with ``fds_id``: the actor may have forgotten the process, or know its
    successor."""

    slot: int
    incarnation: int
    bit: int
    fds_id: int


class HangUp(Order, frozen=True):
    """Forget a caller, whose calls ring ``bit``: it is gone."""

    bit: int


class Drain(Order, frozen=True):
    """Say that question ``question`` is answered, at the rendezvous of pickled refs, once nothing is left
    here that ``writers`` have sent. These processes are dead, so nothing more of theirs comes."""

    question: int
    writers: tuple[Reader, ...]


class End(Order, frozen=True):
    """End now: the running call is finished, queued ones are not begun."""


class Numbered(Message, frozen=True):
    """A request, or the reply to it, which has the same number. Replies come in any order. ``content`` is
    pickled by itself: if it cannot be read, only this request fails."""

    number: int
    content: bytes


class Request(Message, frozen=True):
    """A message that is answered. Behind the colon of each class's docstring stands the answer."""


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
    """Registration of a transport by the asking actor: ``None``."""

    name: str
    registration: bytes


class Kill(Request, frozen=True):
    """The end of an actor: ``None``."""

    actor: ActorId
    no_restart: bool
    graceful: bool


class WhyDead(Request, frozen=True):
    """How the actor's process that had ``slot`` as its ``incarnation``-th has died: an error. ``labels`` are
    names for the tasks that it may have run, by (graph, node)."""

    actor: ActorId
    slot: int
    incarnation: int
    labels: Mapping[tuple[int, int], str]


class NodesOf(Request, frozen=True):
    """The nodes of the processes that ``actors`` have now: their numbers."""

    actors: tuple[ActorId, ...]


class HaveGpus(Request, frozen=True):
    """Whether any of ``actors`` may have a GPU: a bool."""

    actors: tuple[ActorId, ...]


class Deploy(Request, frozen=True):
    """Channels of a graph that the asking actor executes: ``ChannelsSpec``, with their segment, and arena and
    eventfd of each member. ``tasks``: by actor; ``labels``: the names of the tasks, by number."""

    config: Config
    plan: Plan
    tasks: Sequence[Sealed]
    labels: Mapping[int, str]


class Redeploy(Request, frozen=True):
    """New channels of graph ``number``, whose first execution is number ``first``: the same as for
    :class:`Deploy`. timeout, left: how long dead actors may take to come back, and what is left of that;
    ``None``: as long as they take."""

    number: int
    first: int
    timeout: float | None
    left: float | None


class ComesBack(Request, frozen=True):
    """Whether the dead actors of graph ``number`` are started again without being asked: a bool."""

    number: int


class EndUnmade(Request, frozen=True):
    """The end of the processes of graph ``number`` whose constructor has raised: ``None``."""

    number: int


class Undeploy(Request, frozen=True):
    """The end of graph ``number``: ``None``. ``wait``: :class:`StillDeployed` will be asked afterwards."""

    number: int
    wait: bool


class LookAtRemote(Request, frozen=True):
    """Status of the actors of graph ``number`` on other nodes than the asking actor's, as these nodes report
    it within ``time_limit`` seconds: ``RemoteStatus``."""

    number: int
    question: Question
    time_limit: float


class LookForCycle(Request, frozen=True):
    """Whether one of these waits of the asking process is part of a cycle that leads over several nodes:
    ``Found``, or ``None``. The answer may take as long as the waits do."""

    waits: tuple[Waiting, ...]


class StillDeployed(Request, frozen=True):
    """The processes that have not left graph ``number`` yet, which is being taken down: their slots."""

    number: int


class Introduce(Request, frozen=True):
    """Whether the process that has ``slot`` as its ``incarnation``-th lives on another node than the asking
    actor's: a bool. If so, the asking actor's node knows it from then on."""

    slot: int
    incarnation: int


class RemoteStored(Request, frozen=True):
    """The values that processes of other nodes than the asking actor's store for others: a list of
    ``StoreSnapshot``."""


class OpenRemoteMemory(Request, frozen=True):
    """A connection to the asking actor's node, which fetches memory of processes on other nodes: ``None``,
    with its socket."""


class OpenRefs(Request, frozen=True):
    """A connection to the rendezvous of pickled refs: ``None``, with its socket."""


class OpenGraph(Request, frozen=True):
    """A connection to the driver's graph ``number``: ``None``, with its socket."""

    number: int
    name: str


Opening: TypeAlias = OpenRefs | OpenGraph | OpenRemoteMemory
"""Requests that are answered with the socket of a connection."""


class OpenChannel(Request, frozen=True):
    """A new channel whose ends are the asking actor's: its number."""

    depth: int


class HoldEnd(Request, frozen=True):
    """Notice that an end of channel ``number`` has come to the asking actor: ``None``. This is a request,
    since a mere notice of an actor that then dies may not be heard, and nobody would learn of its death."""

    number: int
    side: Side


class CloseEnd(Request, frozen=True):
    """Notice that the asking actor has closed an end of channel ``number``: ``None``. Sent if the end has met
    nobody, or if the channel is on other nodes than the driver's. This is a request for the same reason as
    :class:`HoldEnd`."""

    number: int
    side: Side


class Meet(Request, frozen=True):
    """Use of an end of channel ``number`` by the asking actor: :class:`Met`, with the channel's segment, and
    the arena and eventfd of the process at the other end if that is an actor's; ``None`` if that process does
    not use its end yet. ``alone``: the asking actor has the other end as well."""

    number: int
    side: Side
    alone: bool


class CreateGroup(Request, frozen=True):
    """A new collective group of the processes that ``actors`` have now: its number."""

    actors: Sequence[ActorId]


class JoinGroup(Request, frozen=True):
    """Membership of the asking process in collective group ``number``: ``ranks.Membership``, with the group's
    segment, and arena and eventfd of each other rank."""

    number: int


class CloseGroup(Request, frozen=True):
    """The end of collective group ``number``: ``None``."""

    number: int


class Notice(Message, frozen=True):
    """A message that is not answered."""


class Disconnect(Notice, frozen=True):
    """Notice that link ``number``, which this actor has asked for, could not be opened here."""

    number: int


class Refuse(Notice, frozen=True):
    """Notice that the caller that came with order ``order_id`` could not be accepted; ``error`` says why."""

    order_id: int
    error: ConveyorError


class Reply(Message, frozen=True):
    """The outcome of a request."""


class Done(Reply, frozen=True):
    """The reply to a request that was carried out. The request's class says what ``value`` is."""

    value: Any


class Failed(Reply, frozen=True):
    """The reply to a request that has failed, with the error for the requester."""

    error: Exception


class Connected(Message, frozen=True):
    """A link that is set up: its number, the callee's process, and the bit that its mailbox rings there."""

    number: int
    slot: int
    incarnation: int
    bit: int


class Met(Message, frozen=True):
    """The process at the other end of a channel; ``actor`` is ``None`` if it is the driver. ``spread``: see
    ``ChannelPeer``."""

    slot: int
    incarnation: int
    actor: ActorId | None
    spread: bool
