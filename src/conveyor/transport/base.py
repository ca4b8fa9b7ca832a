"""Every transport has the same small shape.

A graph's edge is a ring in shared memory, whatever its route: frames say in which order values come, and
carry errors. What a transport moves is the tensors of those values, beside the frames. A :class:`Transport`
says what it can do, and opens a :class:`Endpoint` in each process at an edge that was routed over it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec import Struct

from conveyor.codec.out_of_band import TensorSpec
from conveyor.later import LaterModule

if TYPE_CHECKING:
    from concurrent import futures
else:  # slow to import
    futures = LaterModule("concurrent.futures")

__all__ = [
    "Capabilities",
    "Endpoint",
    "Enqueued",
    "Host",
    "Sending",
    "TensorSpec",
    "Transport",
    "Wire",
]


@dataclass(frozen=True)
class Capabilities:
    """Abilities of a transport, as far as the choice of a transport depends on them.

    devices: the kinds of device whose tensors it moves, as torch calls them: ``"cpu"``, ``"cuda"``.
    in_frame: tensors travel inside of the frames, with everything else. Such a transport needs no endpoints
        in a graph, and it serves the executor of the graph as well.
    others_in_frame: tensors of other kinds of device travel in the frames; else they are refused.
    streams: the streams on which it enqueues its work: ``"own"``, streams of its own; ``"overlap"``, streams
        of its own in a graph with ``overlap=True``, else the program's. ``None``: it enqueues nothing.
    between_hosts: the ends of an edge may be on nodes that share no memory. :attr:`Wire.hosts` then says
        which nodes, and where they are; the wire works between them as always. A transport without this
        ability is refused for an edge between nodes.
    """

    devices: frozenset[str]
    in_frame: bool = False
    others_in_frame: bool = False
    streams: Literal["own", "overlap"] | None = None
    between_hosts: bool = False


class Host(Struct, frozen=True):
    """Node of one end of a wire.

    number: ends with the same number share memory.
    address: the IP address at which the session's other nodes reach it. An end that listens for them does so
        at this address alone, and only for as long as needed.
    """

    number: int
    address: str


class Wire(Protocol):
    """Messages between the ends of one route, in order, from the writer to all readers and from each reader
    to the writer. They are meant for what has to be agreed on: addresses, keys, that something was taken. A
    large message goes too: over shared memory, or the session's connections between nodes.

    rank: which end this is: 0 is the writer, the readers follow.
    members: the names of the actors at all ends, by rank.
    edge: what the edge carries, for errors.
    overlap: whether the graph was compiled with ``overlap=True``: what moves on a device goes beside what the
        program enqueues, on streams of its own.
    hosts: where all ends are, by rank; empty where they all share memory.
    known_dead_within: seconds within which this end's graph is told that a member has died, or is lost with
        its host. What else is noticed of that, a connection that ends, says less.
    deployed: the number of the deployment. It grows from each graph that the session deploys to the next.
    """

    @property
    def rank(self) -> int: ...
    @property
    def members(self) -> tuple[str, ...]: ...
    @property
    def edge(self) -> str: ...
    @property
    def overlap(self) -> bool: ...
    @property
    def hosts(self) -> tuple[Host, ...]: ...
    @property
    def known_dead_within(self) -> float: ...
    @property
    def deployed(self) -> int: ...

    def send(self, message: Any) -> None:
        """Send a value that can be pickled, without waiting: a message that finds no room goes as soon as
        there is some. At the cap of memory it raises ``ArenaFullError``. Only the thread that calls the
        endpoint may call this. In :meth:`Endpoint.close` the writer's first message always has room, and
        messages that wait for room are dropped. Between nodes a message may arrive after the reader has
        ended."""
        ...

    def receive(self) -> list[tuple[int, Any]]:
        """Return the messages that have come, each with the rank of its sender. An empty list is no reason to
        wait: whenever a message has come, :meth:`Endpoint.progress` is called."""
        ...

    def start_thread(self, target: Callable[[], object], name: str) -> None:
        """Start a daemon thread ``conveyor-NAME`` that is handed no signals. It ends by itself, soon after
        :meth:`Endpoint.abort` or :meth:`Endpoint.close`; nobody joins it. Every thread of an endpoint must
        be such a thread: an actor sleeps with a mask that lets signals in, and a signal that another thread
        takes would not wake it."""
        ...

    def notify(self) -> None:
        """Have :meth:`Endpoint.progress` called soon. Any thread may call this."""
        ...


class Sending(Struct, frozen=True):
    """Tensors that are about to be sent.

    begin: starts it, once the frame is published that tells of it. When it returns the tensors have been
        read: the actor's next task may write to them. (On a device: everything that reads them has been
        enqueued before what that task enqueues.) The future is done when the transfer is, as far as the
        writer knows; its exception, or what ``begin`` raises, becomes the readers' error.
    note: what the readers get with the frame, before anything else: an address to read from, say.
    withdraw: called in place of ``begin`` where the frame could not be published, soon afterwards.
    """

    begin: Callable[[], futures.Future[None]]
    note: bytes = b""
    withdraw: Callable[[], None] = lambda: None


class Enqueued(Struct, frozen=True):
    """Tensors that have come as far as the CPU can tell: the work that fills them is enqueued on a stream.

    tensors: one for each that was asked for.
    join: orders all that the thread enqueues from now on, on its current stream, behind that work. It is
        called where the tensors are needed, on the endpoint's thread, and does not wait.
    """

    tensors: list[Any]
    join: Callable[[], None]


class Endpoint(ABC):
    """Endpoint of the route that an edge's tensors take: one writer, and readers that each get all tensors.

    A *transfer* is the set of tensors of one execution. Its number grows from one to the next, and numbers
    may be missing. All methods are called on one thread, and none of them may wait. Futures may be completed
    on any thread.
    """

    @abstractmethod
    def send(self, tensors: Sequence[Any], transfer: int) -> Sending:
        """Prepare to send contiguous tensors that the transport has accepted. Tensors that cannot be sent
        raise here, before any reader is told; nothing has moved then."""

    @abstractmethod
    def receive(
        self, specs: Sequence[TensorSpec], note: bytes, transfer: int
    ) -> futures.Future[Any]:
        """Ask for the tensors of a transfer whose frame has come. The future gives a list with one for each
        of ``specs``, of its dtype and shape, or an :class:`Enqueued`, whose values come behind an event on a
        stream. They are the reader's alone, or their memory is never written again. An actor asks for the
        next transfer of an edge when this one is done."""

    def drop(self, transfer: int) -> None:  # noqa: B027 - most have nothing to forget
        """Forget a transfer that was asked for: it has failed at the writer, or nobody waits for it any more.
        Its tensors may still come, and its future is looked at no more."""

    def progress(self) -> None:  # noqa: B027 - most transports have threads or hardware for it
        """Do what can be done without waiting. Called when something has come on the wire, and otherwise.
        After an error here the edge moves nothing any more, until its graph is deployed anew."""

    @abstractmethod
    def abort(self, reason: BaseException) -> None:
        """Have each transfer that is under way fail with ``reason``, within a second, whatever the other ends
        do. Nothing is sent or received afterwards."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything that the endpoint holds. Called once, after :meth:`abort`."""


class Transport(ABC):
    """A way for tensors from actor to actors. It is sent to the actors that use it, so it can be pickled.

    name: what ``with_tensor_transport`` and ``explain()`` call it.
    capabilities: what it can do.
    """

    name: str
    capabilities: Capabilities

    def viable(self) -> str | None:
        """Say why it cannot be used in this process: a library that is missing, say. ``None``: it can."""
        return None

    def accepts(self, tensor: Any) -> str | None:
        """Say why it cannot move a tensor, in words to follow "it": ``"is on device 'cuda:0'"``.
        ``None``: it can."""
        if tensor.device.type not in self.capabilities.devices:
            return f"is on device {str(tensor.device)!r}"
        return None

    @abstractmethod
    def open(self, wire: Wire) -> Endpoint:
        """Open this process's end for one edge. It must not wait for the others, which open theirs at any
        time."""
