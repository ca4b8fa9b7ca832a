"""Endpoint of an edge whose tensors readers fetch by NIXL.

The writer copies the tensors to memory that readers may read, and tells on the wire where. Each reader tells
the writer when it no longer needs that memory; then the writer uses it again.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from conveyor.futures import Future
from conveyor.transport.asked import Asked
from conveyor.transport.base import Conduit, Sending, TensorSpec, Wire
from conveyor.transport.nixl.agents import address_of
from conveyor.transport.nixl.fetcher import Fetch, Fetcher, Offer
from conveyor.transport.nixl.offers import Offers, Region
from conveyor.transport.packing import Layout
from conveyor.transport.pool import Pool

T = TypeVar("T")

#: Number of stretches of memory that a reader keeps for its next transfers.
_SPARE = 3


class _Offered(NamedTuple):
    """Message that tensors can be read, and where. ``metadata`` is ``None`` if it has not changed."""

    transfer: int
    agent: str
    version: int
    metadata: bytes | None
    address: int
    size: int


class _Taken(NamedTuple):
    """Message that a reader no longer needs a transfer's memory."""

    transfer: int


class _Shared(Generic[T]):
    """Objects that this process's conduits share, as long as there are any, by the address at which the
    conduits are reached."""

    def __init__(
        self, make: Callable[[Callable[[Callable[[], object], str], None], str], T]
    ) -> None:
        self._make = make
        #: By address, the object and how many conduits use it.
        self._made: dict[str, tuple[T, int]] = {}

    def join(self, wire: Wire) -> T:
        """Return the shared object for one more conduit, and make it for the first one."""
        address = address_of(wire)
        made, users = self._made.get(address) or (self._make(wire.start_thread, address), 0)
        self._made[address] = made, users + 1
        return made

    def leave(self, wire: Wire) -> bool:
        """Remove one conduit. Returns whether it was the last."""
        address = address_of(wire)
        made, users = self._made.pop(address)
        if users > 1:
            self._made[address] = made, users - 1
        return users == 1


_offers = _Shared(Offers)
_fetchers = _Shared(Fetcher)


class NixlConduit(Conduit):
    """Common part of the writer's and a reader's endpoint."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._over: BaseException | None = None

    def send(self, tensors: Sequence[Any], transfer: int) -> Sending:
        """Refuse to send; the writer overrides this."""
        raise TypeError("this end reads")

    def receive(self, specs: Sequence[TensorSpec], note: bytes, transfer: int) -> Future[list[Any]]:
        """Refuse to receive; readers override this."""
        raise TypeError("this end writes")

    @abstractmethod
    def progress(self) -> None:
        """Handle the messages of the other ends."""


@dataclass(eq=False)
class _Sent:
    """A transfer that some readers have not taken yet."""

    region: Region
    readers: set[int]
    done: Future[None]


class Writer(NixlConduit):
    """Writer's endpoint: offers copies of tensors to its readers."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self._offers = _offers.join(wire)
        self._told = -1
        self._sent: dict[int, _Sent] = {}

    def send(self, tensors: Sequence[Any], transfer: int) -> Sending:
        """Prepare to offer a copy of the tensors."""
        layout = Layout.of([TensorSpec.of(tensor) for tensor in tensors])
        return Sending(lambda: self._begin(layout, tensors, transfer))

    def progress(self) -> None:
        """Release the memory of transfers that all readers have taken. Raises an error if no reader can read
        any more."""
        if self._offers.failed is not None:
            raise self._offers.failed
        for rank, message in self._wire.receive():
            sent = self._sent.get(message.transfer)
            if sent is not None:
                sent.readers.discard(rank)
                if not sent.readers:
                    del self._sent[message.transfer]
                    self._offers.give_back(sent.region)
                    with suppress(InvalidStateError):  # it has failed
                        sent.done.set_result(None)

    def abort(self, reason: BaseException) -> None:
        """Fail all transfers under way. Their memory stays readable."""
        self._over = reason
        while self._sent:
            _, sent = self._sent.popitem()
            self._offers.give_back(sent.region, unread=True)
            with suppress(InvalidStateError):  # it has failed
                sent.done.set_exception(reason)

    def close(self) -> None:
        """Leave the shared offers, and close them after the last conduit."""
        if _offers.leave(self._wire):
            self._offers.close()

    def _begin(self, layout: Layout, tensors: Sequence[Any], transfer: int) -> Future[None]:
        if self._over is not None:
            raise self._over
        offers = self._offers
        done: Future[None] = Future()
        region = offers.take(layout.size, done)
        try:
            layout.fill(region.tensor, tensors)
            metadata = offers.metadata if offers.version != self._told else None
            offered = _Offered(
                transfer, offers.agent, offers.version, metadata, region.address, layout.size
            )
            self._wire.send(offered)
        except BaseException:
            offers.give_back(region, unread=True)
            raise
        self._told = offers.version
        self._sent[transfer] = _Sent(region, set(range(1, len(self._wire.members))), done)
        return done


class Reader(NixlConduit):
    """Reader's endpoint: reads tensors out of the writer's memory."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self._fetcher = _fetchers.join(wire)
        self._pool = Pool(keep=_SPARE)
        #: The writer's agent, and its last metadata.
        self._agent: str | None = None
        self._metadata = b""
        self._offered: dict[int, _Offered] = {}
        self._asked = Asked()
        self._fetching: dict[int, tuple[Fetch, Future[list[Any]]]] = {}
        #: Transfers that the writer may forget, put here by any thread.
        self._ended: deque[int] = deque()

    def receive(self, specs: Sequence[TensorSpec], note: bytes, transfer: int) -> Future[list[Any]]:
        """Ask for a transfer. Its tensors come in memory of this end's pool."""
        asked = self._asked.ask(specs, transfer)
        if not asked.done():
            self.progress()
        return asked

    def drop(self, transfer: int) -> None:
        """Forget a transfer that was asked for and is not being read yet."""
        self._asked.drop(transfer)

    def progress(self) -> None:
        """Handle the writer's offers, begin to read those that are wanted, and report the transfers that have
        ended."""
        for _, message in self._wire.receive():
            self._offered[message.transfer] = message
            if message.metadata is not None:
                self._metadata = message.metadata
            if self._agent is None:
                self._agent = message.agent
                self._fetcher.join(message.agent)
        for transfer in self._asked.due(self._offered):
            self._take(self._offered.pop(transfer))
        while self._ended:
            transfer = self._ended.popleft()
            self._fetching.pop(transfer, None)
            self._wire.send(_Taken(transfer))

    def abort(self, reason: BaseException) -> None:
        """Fail all transfers that are asked for or being read."""
        self._over = reason
        self._asked.end(reason)
        fetching, self._fetching = self._fetching, {}
        for _, future in fetching.values():
            with suppress(InvalidStateError):  # it is done
                future.set_exception(reason)

    def close(self) -> None:
        """Release the pool, leave the shared fetcher, and close it after the last conduit."""
        self._pool.close()
        if self._agent is not None:
            self._fetcher.leave(self._agent)
        if _fetchers.leave(self._wire):
            self._fetcher.close()

    def _take(self, offered: _Offered) -> None:
        """Begin to read an offered transfer, if the reader wants it."""
        layout, future = self._asked.take(offered.transfer)
        if layout is None or future is None:
            self._ended.append(offered.transfer)
            return
        if layout.size != offered.size:
            self._ended.append(offered.transfer)
            words = f"{layout.size} bytes were asked for, and {offered.size} are offered"
            future.set_exception(ValueError(words))
            return
        try:
            buffer = self._pool.take(offered.size)
        except BaseException as error:  # it is this transfer's, and the writer waits for nobody
            self._ended.append(offered.transfer)
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        if not offered.size:
            self._ended.append(offered.transfer)
            _give(future, layout, buffer)
            return
        offer = Offer(offered.agent, self._metadata, offered.version, offered.address, offered.size)
        fetch = Fetch(offer, buffer, self._wire.members[0], self._wire.known_dead_within)
        fetch.done.add_done_callback(
            functools.partial(self._fetched, offered.transfer, layout, future)
        )
        self._fetching[offered.transfer] = fetch, future
        self._fetcher.fetch(fetch)

    def _fetched(
        self, transfer: int, layout: Layout, future: Future[list[Any]], done: Future[Any]
    ) -> None:
        """Note that reading a transfer has ended. The fetcher's thread calls this."""
        self._ended.append(transfer)
        error = done.exception()
        if error is None:
            _give(future, layout, done.result())
        else:
            with suppress(InvalidStateError):  # aborted
                future.set_exception(error)


def _give(future: Future[list[Any]], layout: Layout, buffer: Any) -> None:
    """Resolve ``future`` with the tensors in ``buffer``, or with the error of making them."""
    try:
        tensors = layout.open(buffer)
    except Exception as error:
        with suppress(InvalidStateError):  # aborted
            future.set_exception(error)
    else:
        with suppress(InvalidStateError):
            future.set_result(tensors)
