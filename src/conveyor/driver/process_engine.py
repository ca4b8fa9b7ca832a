"""Engines of actors' processes, as the driver sees them: its engine, and each remote node.

The processes of a remote node share no memory with the driver's node. Such a node has a process table and a
pump of its own, and an agent that does there what the driver does here: see
:mod:`conveyor.cluster.node_agent`. The driver sends it orders (:class:`NodeOrder`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from conveyor import _core
from conveyor.codec import Reader
from conveyor.exceptions import ActorStartError
from conveyor.futures import Future
from conveyor.graph.telemetry import Look, LookAtAll, Seen, SeenAll
from conveyor.runtime.blueprint import Blueprint
from conveyor.runtime.broker import Side
from conveyor.runtime.deadlock_detector import Frames, LookAtWaits, WaitsThere
from conveyor.runtime.messages import Message
from conveyor.runtime.process import ArenaSize, Process
from conveyor.runtime.protocol import ProcessOptions
from conveyor.runtime.stored_values import StoreSnapshot


class NodeOrder(Message, frozen=True):
    """An order to a remote node."""


class Adopt(NodeOrder, frozen=True):
    """Make what a process needs of its node: the process is about to begin there."""

    slot: int
    incarnation: int
    name: str


class Stand(NodeOrder, frozen=True):
    """Add a proxy of a process of node ``node`` there."""

    slot: int
    incarnation: int
    node: int
    name: str


class Remove(NodeOrder, frozen=True):
    """Remove a process or proxy: it is dead, or not needed, and its slot is about to be another's."""

    slot: int
    incarnation: int


class Reach(NodeOrder, frozen=True):
    """Connect to node ``node``, which waits there, and again whenever the connection breaks. The outcome is
    told later, so that a node that does not answer holds up nothing else."""

    node: int
    address: tuple[str, int]


class Locate(NodeOrder, frozen=True):
    """Note where node ``node`` accepts connections. The node is not to be connected to: it connects
    itself."""

    node: int
    address: tuple[str, int]


class GiveUp(NodeOrder, frozen=True):
    """Give node ``node`` up: it is lost. When this is done, nothing of ``node`` arrives there any more."""

    node: int


class CountDue(NodeOrder, frozen=True):
    """Count the frames published there that node ``to`` is to have. The answer is
    :data:`conveyor.runtime.deadlock_detector.Frames`."""

    to: int


class TellWhenCome(NodeOrder, frozen=True):
    """Send message ``number`` when these frames of node ``node`` have come there, or no frame of it comes any
    more."""

    node: int
    frames: Frames
    number: int


class Spread(NodeOrder, frozen=True):
    """Make a segment, and join it to the segments that other nodes have under the same number.
    ``submitter_hosts``: the nodes of the processes that submit over its limits, by their slots. ``joined``:
    other nodes have it, too."""

    number: int
    blueprint: Blueprint
    submitter_hosts: dict[int, int]
    joined: bool


class BreakGroup(NodeOrder, frozen=True):
    """Break the collective group of that segment. ``session``: because the session ends."""

    number: int
    members: tuple[Reader, ...]
    session: bool


class Forget(NodeOrder, frozen=True):
    """Let go of a segment."""

    number: int


class SendDescriptors(NodeOrder, frozen=True):
    """Give a process the descriptors of a segment, and those that introduce other processes to it. They come
    with ``fds_id`` over its control socket."""

    slot: int
    incarnation: int
    fds_id: int
    segment: int
    processes: tuple[Reader, ...]


class Answer(NodeOrder, frozen=True):
    """Send a process the pickled answer to its request, with the given descriptors, if there are any.
    ``connection``: with its end of that connection; see
    :meth:`conveyor.driver.process_engine.RemoteNode.carry`. ``memory``: with its end of a connection
    over which its node fetches memory of others."""

    slot: int
    incarnation: int
    data: bytes
    segment: int = 0
    processes: tuple[Reader, ...] = ()
    connection: int = 0
    memory: bool = False


class Cut(NodeOrder, frozen=True):
    """Tell a process that it cannot be answered any more, so that it waits for no answer."""

    slot: int
    incarnation: int


class MarkRefused(NodeOrder, frozen=True):
    """Mark the link of that segment as refused, and have the caller look."""

    segment: int
    slot: int


class MarkClosed(NodeOrder, frozen=True):
    """Mark ``side`` of the channel of that segment as closed, and have the process at the other end look: the
    end was closed before the two processes met."""

    segment: int
    side: Side
    slot: int


class RemoteDescriptors(Struct, frozen=True):
    """Substitute for descriptors, given to a process of another node: see
    :class:`conveyor.driver.process_engine.Answer`."""

    segment: int = 0
    processes: tuple[Reader, ...] = ()
    connection: int = 0
    memory: bool = False


class DriverCallbacks(Struct, frozen=True):
    """Callbacks of the driver, for engines that have nodes beside the driver's.

    pump: gives the pump of the driver's node. It is made with the seconds that a node may be without a
        connection, and the IP address to which other nodes connect.
    heard: takes a request of a process of another node, with the slot and incarnation.
    gone: is told of a node that is no more, by number.
    node_of: the number of the node of the process that has a slot.
    remote_stored: the values that processes of other nodes store for others.
    when_come: calls the first function when these frames of a node have come to the driver's, or nothing of
        that node comes any more; it calls the second one if that is not told, since the session is over.
    come: is told the number of a :class:`TellWhenCome` whose frames have come.
    reached: is told the outcome of a :class:`Reach`: both nodes, and why they cannot connect, if so.
    process: the driver's own, which gets the fetcher of other nodes' memory as soon as there are any.
    """

    pump: Callable[[float, str], _core.HostPump]
    heard: Callable[[int, int, bytes], None]
    gone: Callable[[int], None]
    node_of: Callable[[int], int]
    remote_stored: Callable[[], list[StoreSnapshot]]
    when_come: Callable[[int, Frames, Callable[[], object], Callable[[], object]], None]
    come: Callable[[int], None]
    reached: Callable[[int, int, Exception | None], None]
    process: Process

    @property
    def arena(self) -> ArenaSize:
        """Arena size of each process on the driver's node."""
        return self.process.arena_size

    @property
    def driver(self) -> Reader:
        """Slot and incarnation of the driver's process."""
        return self.process.identity


class RemoteNode(Protocol):
    """A remote node, as the driver sees it."""

    #: Its number in the session; the driver's is 0.
    number: int
    #: Its name for users.
    name: str
    #: Arena size of each process there.
    arena: ArenaSize
    #: Where it accepts connections of other nodes.
    address: tuple[str, int]

    def send(self, order: NodeOrder) -> Future[Any]:
        """Have the node carry an order out; return its outcome. The loss of the node is an error."""
        ...

    def look(self, look: Look) -> Future[Seen]:
        """Have the node look at actors of a graph that are there. No order has to wait for that."""
        ...

    def look_at_all(self, look: LookAtAll) -> Future[SeenAll]:
        """Have the node look at all processes that are there."""
        ...

    def look_at_waits(self, look: LookAtWaits) -> Future[WaitsThere]:
        """Have the node say what the processes there wait for."""
        ...

    def stored(self) -> Future[list[StoreSnapshot]]:
        """Return the values that the processes there store for others."""
        ...

    def tell(self, order: NodeOrder) -> Future[Any]:
        """Have the node carry an order out that nobody waits for: a node that cannot is given up."""
        ...

    def carry(self, sock: socket.socket) -> int:
        """Have the data of ``sock``, which is the node's from now on, carried to a process there, and back.
        Return the number under which the process is given its end."""
        ...

    def hold(self, fd: int) -> None:
        """Hold a file that processes there are sent messages with, so that it goes there once."""
        ...

    def let_go(self, fd: int) -> None:
        """Let go of a file of :meth:`hold`: no process there has anything of it any more."""
        ...


#: Substitute for a wait status: the process was no child of ours, and how it has ended is not known.
UNKNOWN_END = -1

PrepareRemote: TypeAlias = "Callable[[RemoteNode], tuple[Reader, bytes, list[int]]]"
"""Has a node make the endpoints of a process that comes to be there: see :meth:`ProcessEngine.spawn`."""

ProcessSnapshot: TypeAlias = tuple[int, int, int, int, int, int, str]
"""Row of a process table: see ``ProcessTable.status``."""


class Spawned(Struct, frozen=True):
    """A process that the engine has started.

    stderr_tail: gives the last lines that it wrote to stderr.
    out_of_memory: whether SIGKILL, which has ended it, came from the kernel's out-of-memory killer; ``None``:
        that cannot be told.
    end_headless: :meth:`ProcessEngine.end_headless` of it.
    went_on: whether that has ended it, once it has ended.
    location: in words, where it is, if not on the driver's node.
    last_snapshot: its last process snapshot, and whether it was left by ``sys.exit``, once it has ended on
        another node.
    lost: whether its node was lost, and how.
    attached: it is somebody else's, and no end of ours ends it: ``kill`` has it leave the session, which it
    does
        when the method that it runs has returned.
    """

    pid: int
    stderr_tail: Callable[[], str]
    out_of_memory: Callable[[], bool | None]
    end_headless: Callable[[], None]
    went_on: Callable[[], bool]
    location: str = ""
    last_snapshot: Callable[[], tuple[ProcessSnapshot, bool] | None] = lambda: None
    lost: Callable[[], str] = lambda: ""
    attached: bool = False


class GpusTakenError(ActorStartError):
    """Too few GPUs are free just now."""


class Spawning(Protocol):
    """A process that may take long to come: there may be no place for it yet."""

    def ask(self) -> bool:
        """Ask for the process. Nothing has been done before. Return whether :meth:`wait` returns at once.
        Raises ``GpusTakenError`` if it can be asked for again when others have ended."""
        ...

    def wait(self) -> Spawned:
        """Return the process, when it is there. Raises ``ActorStartError`` if it does not come."""
        ...

    def give_up(self, why: str) -> None:
        """Stop asking for the process, and end the waits for it: nobody wants it any more. On any thread."""
        ...


class ProcessEngine(Protocol):
    """An engine, which hosts actors as processes. It is handed to the driver, and knows processes but no
    channels.

    The driver takes for granted that they are processes of this machine, under one kernel with it: they are
    given descriptors when they are spawned, they share the memory behind them, each has a pid, and its end is
    told as a wait status. For a process on another node, that node (:class:`RemoteNode`) does so; its pid is
    a number that no other process of the session has.
    """

    #: Whether the engine chooses a node by ``ProcessOptions.placement``.
    places: bool

    def start(self, on_exit: Callable[[int, int], None], callbacks: DriverCallbacks) -> None:
        """Begin the session. ``on_exit(pid, status)`` is called on a thread of the engine's when a process
        has ended. The status is the kernel's (see ``os.waitstatus_to_exitcode``), or :data:`UNKNOWN_END`."""
        ...

    def on_thread(self) -> bool:
        """Whether the calling thread is the one on which the engine calls back: while it waits, no end is
        told."""
        ...

    def spawn(
        self,
        name: str,
        payload: bytes,
        fds: Sequence[int],
        options: ProcessOptions,
        on_spawned: Callable[[int], object],
        prepare_remote: PrepareRemote,
    ) -> Spawned | Spawning:
        """Start a process that runs ``worker.main(payload, fds)``, or return how it is asked for.
        ``on_spawned(pid)`` is called, on a thread of the engine's, before ``on_exit`` for this process, and
        both may be before this returns. ``fds`` are not closed before :meth:`Spawning.wait` has returned.

        If the process comes to be on another node, ``prepare_remote(node)`` is called before. It has that
        node make the process's endpoints. It returns the process's slot and incarnation there, the substitute
        for the payload, and the numbers of the segments that are to be passed last.
        """
        ...

    def kill(self, pid: int) -> None: ...

    def end_headless(self, pid: int) -> None:
        """End a process whose main thread is gone. If the process goes on (as another program, or with its
        other threads) it is killed; one that is ending is left to it. Returns at once."""
        ...

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Call back, on a thread of the engine's, whenever ``fd`` can be read."""
        ...

    def unwatch(self, fd: int) -> None: ...

    def hurry(self) -> None:
        """Have :meth:`close`, also one under way, wait only for what ends processes."""
        ...

    def close(self) -> None:
        """End all processes and wait until they are gone. No wait for one that is still to come outlasts
        this."""
        ...
