"""A communicator of the user's as a transport: it moves tensors among a fixed set of actors.

A send and its receive block until both are called, and each process calls one at a time; so all processes
must agree on the order. The end with the lower rank begins, when its operation is the next in its process,
and tells the other end, which then queues its own. The ranks enter a collective one after the other
(``gathering``). An operation waits only for higher ranks, so no waits form a cycle.

If something fails in a communicator, all of its processes make it anew: messages still on their way in the
old one could be taken for others. Nothing begins with a process that has not said that its old one is gone.

An operation blocks until all ranks have called it, and each process calls one at a time. So the ranks enter
it one after the other: the first when its thread is free, each other one when all before it have entered. A
rank in an operation waits only for higher ranks, so no waits form a cycle, whichever graphs use the
communicator and in whatever order they are executed.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import Struct

from conveyor.codec.frames import Sealed
from conveyor.exceptions import SystemLimitError, TransportError
from conveyor.flag import Flag
from conveyor.futures import Future
from conveyor.transport.base import Capabilities, Endpoint, Sending, TensorSpec, Transport, Wire
from conveyor.weak import WeakValues

if TYPE_CHECKING:
    import torch


class Communicator(ABC):
    """Moves tensors among a fixed set of actors, each of which has a rank.

    One is made where the graph is compiled, and named by ``with_tensor_transport(transport=...)`` or as the
    graph's ``default_communicator``. Every actor that takes part in such an edge gets a copy of it (so it is
    pickled, as it was before :meth:`initialize`), which is initialized, used and destroyed there, by one
    thread that does nothing else. All of these may block: only transfers wait for them. ``destroy`` alone may
    be called by another thread while one of the others blocks, which it should make raise.

    ``send`` and ``recv`` are called in matching order at both ends, one at a time in each process. One that
    raises fails its execution. Both ends then have a new copy initialized, and go on with that.

    ``collective.allreduce.bind(..., transport=communicator)`` and its like call ``allreduce``,
    ``allgather`` and ``reducescatter``, of all actors, in one order in all of them. For these, each actor
    has one more copy, which all graphs that name the communicator share.
    """

    @abstractmethod
    def initialize(self, rank: int) -> None:
        """Begin, as the actor with that rank. It is called in the actors that need it, when the first tensor
        is moved, so it must not wait for all ranks."""

    @abstractmethod
    def get_actor_handles(self) -> Sequence[Any]:
        """List the actors."""

    @abstractmethod
    def get_rank(self, actor: Any) -> int:
        """Return the rank of one of the actors."""

    @abstractmethod
    def get_self_rank(self) -> int | None:
        """Return the rank of this process's actor; ``None`` before :meth:`initialize`."""

    @abstractmethod
    def send(self, value: torch.Tensor, peer_rank: int) -> None:
        """Send a contiguous tensor. It may be written to once this has returned."""

    @abstractmethod
    def recv(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        peer_rank: int,
        allocator: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    ) -> torch.Tensor:
        """Receive a tensor; ``allocator`` makes one to receive into, on the kind of device
        where the sender has its."""

    @abstractmethod
    def destroy(self) -> None:
        """Let go of everything, and have what blocks raise. It is called once for each initialization."""

    def get_world_size(self) -> int:
        """Count the actors."""
        return len(self.get_actor_handles())

    def get_transport_name(self) -> str:
        """Name it, for ``explain()`` and errors."""
        return type(self).__name__

    @classmethod
    def generate_communicator_id(cls) -> str:
        """Make a name that no other communicator has."""
        return os.urandom(16).hex()

    # Called by the collectives of graphs. A missing method fails the execution.

    def allreduce(self, send_buf: torch.Tensor, recv_buf: torch.Tensor, op: Any = None) -> None:
        """Reduce a tensor of every rank; every rank gets the result. ``op`` is a
        ``conveyor.experimental.collective.ReduceOp``."""
        raise NotImplementedError(f"{self.get_transport_name()} has no allreduce")

    def allgather(self, send_buf: torch.Tensor, recv_buf: torch.Tensor) -> None:
        """Join the tensors of all ranks along dimension 0, in the order of ranks, at every rank."""
        raise NotImplementedError(f"{self.get_transport_name()} has no allgather")

    def reducescatter(self, send_buf: torch.Tensor, recv_buf: torch.Tensor, op: Any = None) -> None:
        """Reduce a tensor of every rank; every rank gets its part along dimension 0, the first the first."""
        raise NotImplementedError(f"{self.get_transport_name()} has no reducescatter")


#: Name of its threads, after our own prefix.
_NAME = "communicator"

#: Seconds that a blocked call has to end when its communicator is destroyed.
_TIME_LIMIT = 0.5


class CommunicatorThread:
    """A communicator with its thread, from its initialization to its end."""

    def __init__(
        self, sealed: Sealed, rank: int, start: Callable[[Callable[[], object], str], None]
    ) -> None:
        """``start`` starts threads, as :meth:`conveyor.transport.Wire.start_thread` does."""
        self._sealed = sealed
        self._rank = rank
        self._start = start
        self._jobs: queue.SimpleQueue[tuple[Callable[[Communicator], Any], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        #: Whether the communicator is gone, or was given its time to end.
        self.over = False
        #: Guards the next two.
        self._lock = threading.Lock()
        self._communicator: Communicator | None = None
        self._ended = False
        self._gone = Flag()
        start(self._run, _NAME)

    def do(self, job: Callable[[Communicator], Any], future: Future[Any]) -> None:
        """Call ``job`` with the communicator, after what was given before."""
        self._jobs.put((job, future))

    def end(self, ended: Callable[[], object]) -> None:
        """Destroy the communicator and end the thread, without waiting for code of the user. ``ended`` is
        called, on any thread, once this is :attr:`over`."""
        with self._lock:
            self._ended = True
            communicator = self._communicator
        self._jobs.put(None)

        def watch() -> None:
            self._gone.wait(_TIME_LIMIT)
            self.over = True
            ended()

        if communicator is not None:
            # On another thread: it has to end a call in which the first thread may be blocked.
            destroy = communicator.destroy
            _quietly(lambda: self._start(lambda: _quietly(destroy), _NAME))
        try:
            self._start(watch, _NAME)
        except SystemLimitError:  # there is no thread to be had: it is given no time to end
            self.over = True
            ended()

    def _run(self) -> None:
        try:
            while (given := self._jobs.get()) is not None and not self._ended:
                job, future = given
                try:
                    made = job(self._open())
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(made)
                    del made
                del given, job, future  # tensors are let go of before the next wait
        finally:
            self._gone.set()

    def _open(self) -> Communicator:
        if self._communicator is None:
            communicator: Communicator = self._sealed.open()
            with self._lock:
                if self._ended:
                    raise RuntimeError("it is not needed any more")
                self._communicator = communicator
            communicator.initialize(self._rank)
        return self._communicator


def _quietly(destroy: Callable[[], None]) -> None:
    try:
        destroy()
    except Exception as error:
        # Nobody waits for it, and what it held ends with the process.
        import logging

        logging.getLogger("conveyor").warning("destroy() of a communicator has failed: %r", error)


class Job(Struct, eq=False):
    """Operation with one peer, for one transfer.

    owner: the endpoint that it belongs to.
    key: the transfer, and the peer's rank at the edge.
    call: performs the operation on the communicator.
    generation: the one in which the peer has begun it; ``None``: it begins here.
    may_begin: says whether the peer is ready for it.
    began: called when it has begun.
    ended: called with its result or its error, on the thread of the actor.
    """

    owner: object
    key: tuple[int, int]
    call: Callable[[Communicator], Any]
    generation: int | None
    may_begin: Callable[[], bool]
    began: Callable[[], None]
    ended: Callable[[Any, BaseException | None], None]


class OperationQueue:
    """Queue of the operations on one communicator, in one process. Only the thread of the actor's programs
    may use it.

    generation: how often the communicator has been made anew. why: the reason, the last time.
    """

    def __init__(
        self,
        name: str,
        sealed: Sealed,
        rank: int,
        start: Callable[[Callable[[], object], str], None],
        generation: int = 0,
    ) -> None:
        """``start`` starts threads, as :meth:`conveyor.transport.Wire.start_thread` does. ``generation`` is
        the one to begin with."""
        self.name = name
        self._start = start
        self.generation = generation
        self.why = ""
        self._rank = rank
        self._sealed = sealed
        #: Open endpoints: the function that tells a generation to its peers, and the one that wakes it.
        self._endpoints: dict[object, tuple[Callable[[int], None], Callable[[], None]]] = {}
        #: Errors of an endpoint that occurred during another one's call, which must not fail for them.
        self._faults: dict[object, Exception] = {}
        self._waiting: list[Job] = []
        self._under_way: tuple[Job, Future[Any]] | None = None
        self._worker: CommunicatorThread | None = None
        #: The generation that begins when the old worker has ended.
        self._coming = generation

    @property
    def closed(self) -> bool:
        """Whether no endpoint uses it any more."""
        return not self._endpoints

    @property
    def stable(self) -> bool:
        """Whether no new generation is about to begin. When one begins, every peer is told."""
        return self._coming == self.generation

    def join(
        self, endpoint: object, renewed: Callable[[int], None], ring: Callable[[], None]
    ) -> None:
        """Add an endpoint that is opened. ``renewed`` tells its peers of a generation, ``ring`` has it look
        again."""
        self._endpoints[endpoint] = renewed, ring

    def leave(self, endpoint: object) -> None:
        """Remove an endpoint that is closed, and forget its jobs. If one of them is under way, make the
        communicator anew; after the last endpoint, end its thread."""
        self._endpoints.pop(endpoint, None)
        self._faults.pop(endpoint, None)
        self._waiting = [job for job in self._waiting if job.owner is not endpoint]
        if not self._endpoints:
            self._under_way = None
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.end(_nothing)
        elif self._under_way is not None and self._under_way[0].owner is endpoint:
            # The peer may never answer it.
            self.renew(self._coming + 1, "an edge was closed")

    def add(self, job: Job) -> None:
        """Do ``job`` when it has its turn."""
        self._waiting.append(job)
        self.advance()

    def check(self, endpoint: object) -> None:
        """Raise the error that was noted for ``endpoint`` during another one's call, if any."""
        fault = self._faults.pop(endpoint, None)
        if fault is not None:
            raise fault

    def forget(self, owner: object, key: tuple[int, int], why: str) -> None:
        """Drop a job that the other end has given up. If it is under way, make the communicator anew."""
        if self._under_way is not None:
            job, _ = self._under_way
            if (job.owner, job.key) == (owner, key):
                self.renew(self._coming + 1, why)
                return
        self._waiting = [job for job in self._waiting if (job.owner, job.key) != (owner, key)]

    def advance(self) -> None:
        """Finish the operation that has ended, and begin the next ones."""
        while True:
            if self._coming != self.generation:
                if self._worker is not None and not self._worker.over:
                    return
                self._worker = None
                self.generation = self._coming
                for endpoint, (renewed, _) in list(self._endpoints.items()):
                    self._for(endpoint, functools.partial(renewed, self.generation))
            if self._under_way is not None:
                job, future = self._under_way
                if not future.done():
                    return
                self._under_way = None
                error = future.exception()
                if error is None:
                    self._end(job, future.result(), None)
                else:
                    # How much of it the other end has got is not known.
                    self._end(job, None, error)
                    self.renew(self._coming + 1, f"{type(error).__name__}: {error}")
                continue
            ready = next((job for job in self._waiting if self._may_begin(job)), None)
            if ready is None:
                return
            self._waiting.remove(ready)
            if self._worker is None:
                try:
                    self._worker = CommunicatorThread(self._sealed, self._rank, self._start)
                except Exception as error:  # there is no thread to be had
                    self._end(ready, None, error)
                    continue
            future = Future()
            _, ring = self._endpoints[ready.owner]
            future.add_done_callback(lambda _, ring=ring: ring())  # type: ignore[misc]
            self._under_way = ready, future
            self._worker.do(ready.call, future)
            # If this fails, the end is torn down, and the other end is told by that.
            self._for(ready.owner, ready.began)

    def renew(self, generation: int, why: str) -> None:
        """Make the communicator anew, as all other processes do. The operation under way fails."""
        if generation <= self._coming:
            return
        if self._coming == self.generation and self._worker is not None:
            rings = [ring for _, ring in self._endpoints.values()]
            self._worker.end(lambda: [ring() for ring in rings])
        self._coming, self.why = generation, why
        # The peer that has begun such a job has it fail, and says so.
        self._waiting = [job for job in self._waiting if job.generation is None]
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            text = f"the {self.name} was made anew while it was under way: {why}"
            self._end(under_way[0], None, TransportError(text))
        self.advance()

    def _end(self, job: Job, made: Any, error: BaseException | None) -> None:
        self._for(job.owner, lambda: job.ended(made, error))

    def _for(self, endpoint: object, do: Callable[[], object]) -> None:
        """Call ``do`` on behalf of ``endpoint``. An error is noted for that endpoint, and does not reach the
        caller."""
        try:
            do()
        except Exception as error:
            if endpoint in self._endpoints:
                self._faults.setdefault(endpoint, error)
                _, ring = self._endpoints[endpoint]
                ring()

    def _may_begin(self, job: Job) -> bool:
        if job.generation is None:
            return job.may_begin()
        return job.generation == self.generation


def _nothing() -> None:
    pass


#: By domain, the queue of a communicator in this process, for the edges of all graphs. The endpoints hold it.
_operation_queues: WeakValues[str, OperationQueue] = WeakValues()


def operations_of(domain: str, name: str, sealed: Sealed, rank: int, wire: Wire) -> OperationQueue:
    """Return the queue of a domain, and create it if it is missing or closed."""
    operations = _operation_queues.get(domain)
    if operations is None or operations.closed:
        # A restarted process has a later generation than all others, so they all make their copies anew:
        # connections to its predecessor are of no use. The driver counts the generations, since clocks of
        # nodes cannot be compared.
        operations = _operation_queues[domain] = OperationQueue(
            name, sealed, rank, wire.start_thread, wire.deployed
        )
    return operations


class Gathering(Endpoint):
    """Endpoint of the edge on which one rank, the writer, tells the others how far it is.

    Messages on the wire: ``("anew", generation, None, why)`` of a rank whose communicator is of that
    generation, ``("begun", generation, transfer, None)`` of a rank that has entered an operation, and
    ``("gone", generation, transfer, why)`` of a rank that has failed in it, or never enters it.

    rank: the writer's in the communicator. member: its actor's name.
    operations: this process's queue for the communicator.
    generation: the writer's; ``None``: it has not said.
    begun: the last transfer whose operation the writer has entered, and in which generation.
    gone: by transfer, why the writer has left it.
    broken: why nothing can be told any more.
    """

    def __init__(self, wire: Wire, rank: int, operations: OperationQueue) -> None:
        self._wire = wire
        self.rank = rank
        self.member = wire.members[0]
        self.operations = operations
        self.generation: int | None = None
        self.begun: tuple[int, int] | None = None
        self.gone: dict[int, str] = {}
        self.broken: BaseException | None = None
        operations.join(self, self._renewed, wire.notify)
        if operations.stable:
            self._renewed(operations.generation)

    def tell(self, what: str, transfer: int | None, why: str | None = None) -> None:
        """Tell all other ranks, as the writer."""
        self._wire.send((what, self.operations.generation, transfer, why))

    def notify(self) -> None:
        """Have the program look again."""
        self._wire.notify()

    def progress(self) -> None:
        """Note the writer's messages, and advance the communicator's queue. Raises an error that was noted
        for this end."""
        for _, (what, generation, transfer, why) in self._wire.receive():
            if what == "anew":
                self.generation = generation
                self.operations.renew(
                    generation, f"{self.member} has made it anew{why and ': '}{why}"
                )
            elif what == "begun":
                self.begun = transfer, generation
            else:
                self.gone[transfer] = why
        self.operations.advance()
        self.operations.check(self)

    def send(self, tensors: Sequence[Any], transfer: int) -> NoReturn:
        """Refuse to send: messages between the ranks have no tensors."""
        raise TransportError("no tensor goes by the collectives of a communicator")

    def receive(self, specs: Sequence[Any], note: bytes, transfer: int) -> NoReturn:
        """Refuse to receive: messages between the ranks have no tensors."""
        raise TransportError("no tensor goes by the collectives of a communicator")

    def abort(self, reason: BaseException) -> None:
        """Keep ``reason`` as ``broken``, and leave the communicator's queue."""
        self.broken = reason
        self.operations.leave(self)

    def close(self) -> None:
        """Leave the communicator's queue."""
        self.operations.leave(self)

    def _renewed(self, generation: int) -> None:
        if self._wire.rank == 0:
            self._wire.send(("anew", generation, None, self.operations.why))


class CommunicatorEndpoint(Endpoint):
    """Endpoint of an edge over a communicator. A reader asks for a transfer; then the end with the lower rank
    begins, see :class:`OperationQueue`.

    Messages on the wire: ``("ask", generation, transfer, reader)``, ``("go", ...)`` of the end that begins,
    ``("gone", ...)`` of an end that gives a transfer up, and ``("anew", generation, None, None)`` of an end
    that has made its communicator anew.
    """

    def __init__(self, wire: Wire, ranks: tuple[int, ...], operations: OperationQueue) -> None:
        """``ranks``: the communicator's ranks of all ends, by their rank at the edge."""
        self._wire = wire
        self._ranks = ranks
        self._operations = operations
        #: By transfer, at the writer: the tensors, the readers that have not got them, and the future.
        self._sent: dict[int, tuple[list[Any], set[int], Future[None]]] = {}
        #: By transfer, at a reader: what comes, and the future.
        self._requested: dict[int, tuple[Sequence[TensorSpec], Future[list[Any]]]] = {}
        #: By rank at the edge, the generation that the other ends have.
        self._generations = [0] * len(ranks)
        operations.join(self, self._renewed, wire.notify)
        if operations.stable:
            self._renewed(operations.generation)

    def send(self, tensors: Sequence[Any], transfer: int) -> Sending:
        """Prepare to send copies of the tensors, once the readers have asked for them."""

        def begin() -> Future[None]:
            # Copies are sent when the readers have asked, and the actor may write to the tensors before that.
            copies = [tensor.clone() for tensor in tensors]
            sent: Future[None] = Future()
            self._sent[transfer] = copies, set(range(1, len(self._ranks))), sent
            return sent

        return Sending(begin)

    def receive(self, specs: Sequence[TensorSpec], note: bytes, transfer: int) -> Future[list[Any]]:
        """Ask for a transfer: tell the writer, or begin here if this end has the lower rank."""
        requested: Future[list[Any]] = Future()
        self._requested[transfer] = specs, requested
        if self._begins(0):
            self._add(transfer, 0)
        else:
            self._tell("ask", transfer, self._wire.rank)
        return requested

    def progress(self) -> None:
        """Read the messages of the other ends, and advance the communicator's queue. Raises an error that was
        noted for this end."""
        for rank, (what, generation, transfer, addressee) in self._wire.receive():
            if what == "anew":
                self._generations[rank] = generation
                self._operations.renew(generation, f"{self._wire.members[rank]} has made it anew")
                continue
            if rank == 0 and addressee != self._wire.rank:  # it is another reader's
                continue
            known = transfer in (self._requested if rank == 0 else self._sent)
            if what == "gone":
                self._gone(transfer, rank)
            elif not known:
                self._tell("gone", transfer, rank or self._wire.rank)
            elif what == "ask":
                self._add(transfer, rank)
            else:
                self._add(transfer, rank, generation)
        self._operations.advance()
        self._operations.check(self)

    def abort(self, reason: BaseException) -> None:
        """Fail all transfers with ``reason``, and leave the communicator's queue."""
        while self._sent:
            _, (_, _, sent) = self._sent.popitem()
            if not sent.done():
                sent.set_exception(reason)
        while self._requested:
            _, (_, requested) = self._requested.popitem()
            requested.set_exception(reason)
        self._operations.leave(self)

    def close(self) -> None:
        """Leave the communicator's queue."""
        self._operations.leave(self)

    def _begins(self, peer: int) -> bool:
        """Return whether this end begins its transfers with ``peer``."""
        return self._ranks[self._wire.rank] < self._ranks[peer]

    def _add(self, transfer: int, peer: int, generation: int | None = None) -> None:
        """Queue this end's part of a transfer with ``peer``. ``generation``: the one in which the peer has
        begun it; ``None``: it begins here."""
        if generation is not None and generation != self._operations.generation:
            return  # who has begun it fails, since the communicator is made anew, and says so
        rank = self._ranks[peer]
        call: Callable[[Communicator], Any]
        if self._wire.rank == 0:
            call = functools.partial(_send, self._sent[transfer][0], rank)
        else:
            call = functools.partial(_receive, self._requested[transfer][0], rank)

        def may_begin() -> bool:
            return self._generations[peer] == self._operations.generation

        def began() -> None:
            if generation is None:
                self._tell("go", transfer, peer or self._wire.rank)

        ended = functools.partial(self._ended, transfer, peer)
        self._operations.add(Job(self, (transfer, peer), call, generation, may_begin, began, ended))

    def _ended(self, transfer: int, peer: int, made: Any, error: BaseException | None) -> None:
        """Finish a transfer with ``peer``, whose operation has returned ``made`` or failed with ``error``."""
        if error is not None:
            self._tell("gone", transfer, peer or self._wire.rank)
        if self._wire.rank == 0:
            self._served(transfer, peer, error)
        elif transfer in self._requested:
            _, requested = self._requested.pop(transfer)
            if error is None:
                requested.set_result(made)
            else:
                requested.set_exception(error)

    def _served(self, transfer: int, peer: int, error: BaseException | None) -> None:
        """Note that a reader has got the tensors, or never will."""
        if transfer not in self._sent:
            return
        _, missing, sent = self._sent[transfer]
        missing.discard(peer)
        if error is not None and not sent.done():
            sent.set_exception(error)
        if not missing:
            del self._sent[transfer]
            if not sent.done():
                sent.set_result(None)

    def _gone(self, transfer: int, peer: int) -> None:
        """Drop a transfer that the other end has given up."""
        why = f"{self._wire.members[peer]} has given up {self._wire.edge}"
        if self._wire.rank:
            self._requested.pop(transfer, None)  # why it does not come, the frames' own wire tells
        else:
            self._served(transfer, peer, None)
        self._operations.forget(self, (transfer, peer), why)

    def _renewed(self, generation: int) -> None:
        self._wire.send(("anew", generation, None, None))

    def _tell(self, what: str, transfer: int, reader: int) -> None:
        self._wire.send((what, self._operations.generation, transfer, reader))


def _send(tensors: Sequence[torch.Tensor], peer_rank: int, communicator: Communicator) -> None:
    for tensor in tensors:
        communicator.send(tensor, peer_rank)


def _receive(
    specs: Sequence[TensorSpec], peer_rank: int, communicator: Communicator
) -> list[torch.Tensor]:
    import torch

    made = []
    for spec in specs:
        device = spec.device.partition(":")[0]  # which one it is has no meaning in another process

        def allocate(
            shape: tuple[int, ...], dtype: torch.dtype, device: str = device
        ) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        dtype = getattr(torch, spec.dtype)
        made.append(communicator.recv(tuple(spec.shape), dtype, peer_rank, allocate))
    return made


__all__ = [
    "CollectiveTransport",
    "Communicator",
    "CommunicatorTransport",
    "ForCollectives",
    "is_one",
]


class CommunicatorTransport(Transport):
    """Drives ``send`` and ``recv`` of a communicator. In each process all that names it shares one copy, and
    one order of operations: edges and collectives, of all graphs.

    ranks: of the actors that take part, by their names.
    """

    capabilities = Capabilities(devices=frozenset({"cpu", "cuda"}), between_hosts=True)

    def __init__(
        self, name: str, sealed: Sealed, ranks: dict[str, int] | None = None, domain: str = ""
    ) -> None:
        """``sealed``: the communicator; who passes it on may not know its class. ``domain``: what all graphs
        know it by."""
        self.name = name
        self.ranks: dict[str, int] = {} if ranks is None else ranks
        self._sealed = sealed
        self._domain = domain

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self._sealed, self.ranks, self._domain)

    def open(self, wire: Wire) -> CommunicatorEndpoint | Gathering:
        """Open this process's end of an edge, as a user of the process's copy of the communicator."""
        return CommunicatorEndpoint(wire, self._ranks(wire), self._operations(wire))

    def _ranks(self, wire: Wire) -> tuple[int, ...]:
        return tuple([self.ranks[member] for member in wire.members])

    def _operations(self, wire: Wire) -> OperationQueue:
        return operations_of(
            self._domain, self.name, self._sealed, self._ranks(wire)[wire.rank], wire
        )


class ForCollectives:
    """Stand-in, in a transport hint, for a communicator that does collectives."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def get_transport_name(self) -> str:
        """Return the name of the communicator's transport, as :class:`Communicator` does."""
        return self.communicator.get_transport_name()


class CollectiveTransport(CommunicatorTransport):
    """Drives the collective operations of a communicator. On its edges the ranks only tell each other how far
    they are; no tensor goes over them."""

    def open(self, wire: Wire) -> Gathering:
        """Open this process's end of the edge on which one rank tells the others how far it is."""

        return Gathering(wire, self._ranks(wire)[0], self._operations(wire))


def is_one(value: Any) -> bool:
    """Whether ``value`` is a communicator, or stands for one in a hint."""
    return isinstance(value, (Communicator, ForCollectives))
