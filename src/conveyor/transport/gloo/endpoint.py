"""Connection between the writer of an edge and one of its readers, and the thread that uses it.

The writer has a :class:`Connection` to each reader, so that no reader waits for another one. A transfer is
one message of bytes. Messages on the wire: the address at which the listening end of a link listens; that a
connection is wanted, where the reader listens (no address); the other end's addresses once it is connected;
and from the writer each transfer's size. Gloo moves nothing before both ends want it, so the wire can be read
at any time.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from conveyor.futures import Future
from conveyor.transport.base import Endpoint, Sending, TensorSpec, Wire
from conveyor.transport.gloo.pairs import Pair, PairAddresses, Rendezvous, addresses_to
from conveyor.transport.packing import Layout
from conveyor.transport.pool import Pool
from conveyor.transport.transfers import PendingTransfers


class Lost(NamedTuple):
    """Message of a reader that has lost the connection: the writer's end may not have noticed."""

    why: str


class Mover(Protocol):
    """Object that moves bytes for an end of a link, on the thread of that link."""

    def send(self, buffer: Any) -> None:
        """Send the bytes in a buffer."""

    def receive(self, buffer: Any) -> None:
        """Fill a buffer."""

    def cut(self) -> None:
        """Make both ends' waits stop at once, with an error. Any thread may call this."""

    def close(self) -> None:
        """Let go of everything."""


class Connection:
    """End of a connection. Transfers go one after the other, on a thread that ends by itself.

    Rank 0 of the pair listens and tells where; rank 1 connects, and tells when it has. Either can be told to
    end at any time: a wait for the other end's message can be interrupted, and gloo itself waits for nobody.
    The writer is mostly rank 0. Where it is rank 1, the reader waits to be told that a connection is wanted.

    generation: how many connections there have been between these two before.
    """

    def __init__(
        self,
        wire: Wire,
        other: int,
        generation: int,
        theirs: Mapping[str, bytes] | None = None,
        *,
        pair_addresses: PairAddresses,
        make_pair: Callable[[Rendezvous, PairAddresses], Mover],
        thread: str,
    ) -> None:
        """Get ready for the end whose rank is ``other``. The reader is given what the writer has told.
        ``make_pair`` is called on a thread of that name.

        Raises whatever keeps the writer from listening.
        """
        self.generation = generation
        self._other = wire.members[other]
        self._writes = wire.rank == 0
        self._pair_addresses = pair_addresses
        self._notify = wire.notify
        self._grace = wire.known_dead_within
        listens = pair_addresses.rank == 0
        # A reader's end tells its addresses later: only a writer's waits for them while it is opened.
        self._rendezvous = Rendezvous(
            self._tell_where if listens and not self._writes else lambda: None
        )
        # Entered in place of the condition: that would run Python code, and a signal handler that raises in
        # there would leave the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: Buffers to move, and their futures. The first one is under way.
        self._jobs: deque[tuple[Any, Future[Any]]] = deque()
        #: Why nothing moves any more.
        self._ended: BaseException | None = None
        #: Nothing more can be moved, though the transfers under way may not have failed yet.
        self._lost = False
        #: The link is not needed any more.
        self._let_go = False
        self._pair: Mover | None = None
        self._make_pair = make_pair
        #: The message that the other end has not been sent yet.
        self._untold: dict[str, bytes] | str | Lost | None = None
        if theirs is not None:
            self._rendezvous.meet(theirs)
        wire.start_thread(self._run, thread)
        if not self._writes:
            return
        if not listens:
            self._untold = {}  # the reader does
            return
        try:
            self._untold = self._rendezvous.addresses()
        except BaseException as error:
            self.end(error)
            raise

    @property
    def broken(self) -> bool:
        """Whether the connection can move nothing any more."""
        with self._lock:
            return self._lost or self._ended is not None

    def lose(self) -> None:
        """Note that the other end has lost the connection: this end may take long to notice."""
        with self._lock:
            self._lost = True

    def to_tell(self) -> dict[str, bytes] | str | Lost | None:
        """Return, once, the message that the other end needs now: addresses, why there will be none, or that
        the connection is lost. ``None``: there is none."""
        with self._lock:
            addresses, self._untold = self._untold, None
            return addresses

    def meet(self, addresses: Mapping[str, bytes]) -> None:
        """Take the addresses of the other end, which listens there, or is connected."""
        self._rendezvous.meet(addresses)

    def move(self, buffer: Any) -> Future[Any]:
        """Send a tensor of bytes as the writer, or fill it as a reader. The future gives it back."""
        moved: Future[Any] = Future()
        with self._lock:
            if self._ended is None:
                self._jobs.append((buffer, moved))
                self._changed.notify_all()
                return moved
            error = self._ended
        moved.set_exception(error)
        return moved

    def end(self, reason: BaseException) -> None:
        """Have everything that is under way fail with ``reason``, without waiting."""
        with self._lock:
            self._let_go = True
            self._changed.notify_all()
            pair = self._pair
        self._fail(reason)
        self._rendezvous.end(reason)
        if pair is not None:
            pair.cut()

    def _run(self) -> None:
        """Connect, and move buffers until the link ends or fails. Runs as a thread."""
        pair = None
        try:
            pair = self._make_pair(self._rendezvous, self._pair_addresses)
            with self._lock:
                self._pair = pair
            if self._pair_addresses.rank == 1:
                self._tell_where()
            while (buffer := self._next()) is not None:
                if self._writes:
                    pair.send(buffer)
                else:
                    pair.receive(buffer)
                self._moved()
        except BaseException as error:
            # As text: its frames would keep the group.
            words = str(error).partition("This is typically")[0].strip() or type(error).__name__
            if not self._writes:
                # At once, and so before any future fails: later transfers go over another connection.
                self._tell(words if pair is None else Lost(words))
            self._break(f"the connection with {self._other} is lost: {words}")
        finally:
            if pair is not None:
                with self._lock:
                    self._pair = None
                pair.close()

    def _tell_where(self) -> None:
        self._tell(self._rendezvous.both()[0])

    def _tell(self, untold: dict[str, bytes] | str | Lost) -> None:
        """Have the endpoint's thread tell the other end."""
        with self._lock:
            self._untold = untold
        self._notify()

    def _next(self) -> Any:
        """Wait for something to move. ``None``: there is nothing more."""
        with self._lock:
            self._changed.wait_for(lambda: self._jobs or self._let_go)
            return None if self._let_go else self._jobs[0][0]

    def _moved(self) -> None:
        """Complete the first job."""
        with self._lock:
            if not self._jobs:  # it was told to have failed meanwhile
                return
            buffer, moved = self._jobs.popleft()
        moved.set_result(buffer)

    def _break(self, why: str) -> None:
        """Fail all jobs with a connection error, after leaving the graph time to name a better cause."""
        lost = ConnectionError(why)
        self._rendezvous.end(lost)
        with self._lock:
            self._lost = True
            self._changed.wait_for(lambda: self._let_go, self._grace)
        self._fail(lost)

    def _fail(self, reason: BaseException) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = reason
            jobs, self._jobs = self._jobs, deque()
        for _, moved in jobs:
            moved.set_exception(reason)


#: Number of stretches of memory that an end keeps for its next transfers.
_SPARE = 3


class _Addresses(NamedTuple):
    """Addresses that gloo needs of one end of a link to the reader with rank ``reader``. Instead of them: why
    that reader could not connect, or that it has lost the connection."""

    reader: int
    generation: int
    addresses: dict[str, bytes] | str | Lost


class _Announced(NamedTuple):
    """Announcement of the next transfer on the links to all readers. ``generations`` are the links'."""

    transfer: int
    size: int
    generations: tuple[int, ...]


class GlooEndpoint(Endpoint):
    """Endpoint of an edge over gloo, the writer's or a reader's.

    Subclasses can replace the means of moving bytes, and the memory for them: ``transport/nccl/`` does.
    """

    #: Name of the links' threads.
    thread = "gloo"

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        #: Links, by the rank of the reader.
        self._links: dict[int, Connection] = {}
        self._over: BaseException | None = None
        self._pool = Pool(keep=_SPARE)
        # Of a reader: the transfers to come over the link, in order, and those that somebody waits for.
        self._announced: dict[int, _Announced] = {}
        self._requested = PendingTransfers()
        if wire.rank != 0:
            return
        try:
            for reader in range(1, len(wire.members)):
                self._listen(reader, 0)
        except BaseException as error:
            self.abort(error)
            raise

    def send(self, tensors: Sequence[Any], transfer: int) -> Sending:
        """Prepare to send tensors over the links to all readers."""
        layout = Layout.of([TensorSpec.of(tensor) for tensor in tensors])
        return Sending(lambda: self._begin(layout, tensors, transfer))

    def receive(self, specs: Sequence[TensorSpec], note: bytes, transfer: int) -> Future[list[Any]]:
        """Ask for a transfer. Its tensors come in memory made by :meth:`allocate`."""
        requested = self._requested.ask(specs, transfer)
        if not requested.done():
            self.progress()
        return requested

    def drop(self, transfer: int) -> None:
        """Forget a transfer that was asked for. Its bytes are still received."""
        self._requested.drop(transfer)

    def progress(self) -> None:
        """Handle the messages of the other ends, and receive the transfers that are next."""
        for rank, message in self._wire.receive():
            if isinstance(message, _Announced):
                self._announced[message.transfer] = message
            elif self._wire.rank == 0:
                self._writer_hears(rank, message)
            elif message.reader == self._wire.rank:
                self._reader_hears(message)
        for reader in self._links:
            self._tell(reader)
        for transfer in self._requested.decided(self._announced):
            self._take(self._announced.pop(transfer))

    def abort(self, reason: BaseException) -> None:
        """End all links, and fail all transfers that are asked for."""
        self._over = reason
        for link in self._links.values():
            link.end(reason)
        self._requested.end(reason)

    def close(self) -> None:
        """Release the links and the pool's memory."""
        self._links.clear()
        self._announced.clear()
        self._pool.close()

    # The memory that links move.

    def stage(self, layout: Layout, tensors: Sequence[Any]) -> Any:
        """Copy tensors to a buffer that a link sends."""
        staged = self._pool.take(layout.size)
        layout.fill(staged, tensors)
        return staged

    def allocate(self, size: int) -> Any:
        """Make a buffer that a link fills."""
        return self._pool.take(size)

    def open(self, layout: Layout, buffer: Any) -> Any:
        """Make the reader's tensors from a filled buffer. The thread of a link calls this."""
        return layout.open(buffer)

    def _hand_over(self, layout: Layout, future: Future[Any], moved: Future[Any]) -> None:
        """Give the reader a transfer that has come, on the link's thread or the one that ends it."""
        error = moved.exception()
        if error is not None:
            future.set_exception(error)
            return
        try:
            tensors = self.open(layout, moved.result())
        except Exception as failed:
            future.set_exception(failed)
        else:
            future.set_result(tensors)

    def make_pair(self, rendezvous: Rendezvous, pair_addresses: PairAddresses) -> Mover:
        """Make the object that moves bytes for one end of a link. The link's thread calls this."""
        return Pair(rendezvous, pair_addresses)

    def addresses_to(self, other: int) -> PairAddresses:
        """Find the way to another end, by its rank."""
        return addresses_to(self._wire, other)

    def _link(
        self, other: int, generation: int, theirs: dict[str, bytes] | None = None
    ) -> Connection:
        pair_addresses, made, thread = self.addresses_to(other), self.make_pair, self.thread
        return Connection(
            self._wire,
            other,
            generation,
            theirs,
            pair_addresses=pair_addresses,
            make_pair=made,
            thread=thread,
        )

    # The writer.

    def _begin(self, layout: Layout, tensors: Sequence[Any], transfer: int) -> Future[None]:
        """Copy the tensors, announce the transfer to the readers, and send the copy to each."""
        if self._over is not None:
            raise self._over
        # A copy, since gloo reads the tensors for as long as it sends.
        staged = self.stage(layout, tensors)
        for reader, link in self._links.items():
            if link.broken:
                lost = f"the connection with {self._wire.members[reader]} is lost"
                link.end(ConnectionError(lost))
                self._listen(reader, link.generation + 1)
        links = list(self._links.values())
        generations = tuple([link.generation for link in links])
        self._wire.send(_Announced(transfer, layout.size, generations))
        if not layout.size:
            links = []
        return _all([link.move(staged) for link in links])

    def _listen(self, reader: int, generation: int) -> None:
        self._links[reader] = self._link(reader, generation)
        self._tell(reader)

    def _writer_hears(self, rank: int, message: _Addresses) -> None:
        link = self._links[rank]
        if message.generation != link.generation:
            return
        if isinstance(message.addresses, Lost):
            link.lose()
        elif isinstance(message.addresses, str):
            who = self._wire.members[rank]
            link.end(ConnectionError(f"{who} could not connect: {message.addresses}"))
        else:
            link.meet(message.addresses)

    # A reader.

    def _reader_hears(self, message: _Addresses) -> None:
        """Handle addresses of the writer. It listens, or wants this end to listen, possibly anew after a lost
        connection; or it is connected."""
        if self._over is not None:
            return
        me = self._wire.rank
        assert isinstance(message.addresses, dict)  # a writer that cannot listen sends nothing
        if me in self._links:
            if self._links[me].generation == message.generation:
                self._links[me].meet(message.addresses)
                return
            words = f"the connection with {self._wire.members[0]} is made anew"
            self._links[me].end(ConnectionError(words))
        self._links[me] = self._link(0, message.generation, message.addresses)

    def _take(self, announced: _Announced) -> None:
        """Receive the next transfer on the link, wanted or not."""
        me = self._wire.rank
        link = self._links[me]
        layout, future = self._requested.take(announced.transfer)
        if announced.generations[me - 1] != link.generation:
            if future is not None:
                future.set_exception(ConnectionError("the connection was lost before it came"))
            return
        try:
            buffer = self.allocate(announced.size)
        except Exception as error:
            # The next bytes on the link are this transfer's, and must not be taken for another one's.
            link.end(error)
            if future is not None:
                future.set_exception(error)
            return
        moved = link.move(buffer) if announced.size else _done(buffer)
        if layout is None or future is None:
            return
        if layout.size == announced.size:
            moved.add_done_callback(functools.partial(self._hand_over, layout, future))
        else:
            words = f"{layout.size} bytes were asked for, and {announced.size} come"
            future.set_exception(ValueError(words))

    def _tell(self, reader: int) -> None:
        """Send the other end of a link the addresses that it needs by now, if there are any."""
        link = self._links.get(reader)
        if link is not None and (addresses := link.to_tell()) is not None:
            self._wire.send(_Addresses(reader, link.generation, addresses))


def _done(value: Any) -> Future[Any]:
    made: Future[Any] = Future()
    made.set_result(value)
    return made


def _all(futures: Sequence[Future[Any]]) -> Future[None]:
    """Make a future that is done when all of ``futures`` are."""
    last: Future[None] = Future()
    failed: list[BaseException] = []
    # The future that finds nothing to pop is the last one.
    others = [None] * (len(futures) - 1)

    def one(future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            failed.append(error)
        try:
            others.pop()
        except IndexError:
            if failed:
                last.set_exception(failed[0])
            else:
                last.set_result(None)

    for future in futures:
        future.add_done_callback(one)
    if not futures:
        last.set_result(None)
    return last
