"""NIXL's agents: a process has one that offers memory, and one that reads what others offer.

They are two, so that who offers something never waits for what is being read. Neither has NIXL's own thread,
which would keep a core busy as long as there is an agent. What goes between hosts has two more: which network
an agent can use is settled when it starts, and one that has none but loopback is all that a host needs.

The writer copies the tensors to memory that readers may read, and tells on the wire where. Each reader tells
the writer when it no longer needs that memory; then the writer uses it again.
"""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import itertools
import logging
import mmap
import os
import threading
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from conveyor import _core
from conveyor.futures import Future
from conveyor.transport.base import Endpoint, Sending, TensorSpec, Wire
from conveyor.transport.network_interfaces import LOOPBACK, interface_of, rdma_ports
from conveyor.transport.packing import Layout
from conveyor.transport.pool import Pool, fits, new_memory
from conveyor.transport.transfers import PendingTransfers

_numbers = itertools.count()

_DEVICES = "UCX_NET_DEVICES"
#: What UCX and NIXL are told, unless the environment says something else: that a process dies is for
#: Conveyor's handlers to tell; no notices of what goes well. Where sockets listen is said beside them.
_SETTINGS = {"UCX_ERROR_SIGNALS": "", "NIXL_LOG_LEVEL": "WARN"}


def address_of(wire: Wire) -> str:
    """Return the IP address at which this end of a wire has to be reached. Empty: all ends are on this
    node."""
    addresses = [host.address for host in wire.hosts]
    # Nodes at loopback addresses are on one machine, and UCX takes loopback and other interfaces for two
    # networks.
    loopback = next((one for one in addresses if ipaddress.ip_address(one).is_loopback), None)
    return loopback or (addresses[wire.rank] if addresses else "")


def make_agent(purpose: str, address: str = "") -> Any:
    """Start an agent that any thread may use, under a name that no other process has. It takes half a
    second. ``address``: where other hosts reach it; empty: none do.

    Raises:
        ConnectionError: this machine has no network interface with that address.

    And whatever NIXL raises.
    """
    with _settings({**_SETTINGS, _DEVICES: _devices(address)}) as ours:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        if "NIXL_LOG_LEVEL" in ours:  # it may have been imported before, and knows one by then
            logging.getLogger("nixl").setLevel(logging.WARNING)
        name = f"{purpose}-{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"
        config = nixl_agent_config(
            enable_prog_thread=False,
            backends=["UCX"],
            sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        agent = nixl_agent(name, config)
    if "UCX" not in agent.backends:
        raise RuntimeError("this build of NIXL has no UCX")
    return agent


def _devices(address: str) -> str:
    """Return the network devices that UCX may use: the interface with the address, on which it listens, and
    all for RDMA, which have no sockets. UCX may always use host memory, which is not such a device."""
    if not address:
        return LOOPBACK
    name = interface_of(address)
    if name is None:
        raise ConnectionError(f"no network interface of this machine has the address {address}")
    return ",".join([name, *rdma_ports()])


@contextmanager
def _settings(wanted: dict[str, str]) -> Iterator[dict[str, str]]:
    """UCX reads the environment when it is loaded, and when an agent starts."""
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield ours
    finally:
        for name in ours:
            os.environ.pop(name, None)


#: Number of stretches of memory that are kept for their next use.
_SPARE = 3
#: How long the thread sleeps, in seconds, while readers may need it: at first, and at most.
_SHORT, _LONG = 0.0002, 0.001


class Region(NamedTuple):
    """A stretch of memory that readers may read.

    address: where it begins, in this process.
    tensor: all of it, as bytes.
    """

    address: int
    tensor: Any
    memory: mmap.mmap
    registered: Any


class Offers:
    """Memory that this process offers to readers. Used on the thread of its endpoints; it has a thread of its
    own beside that.

    Readers connect with its agent. Where UCX cannot read another process's memory, readers send the agent
    requests for the bytes. The agent answers them only when it is called, so the thread calls it while
    something is offered.

    agent: the name of its agent.
    metadata: the information that a reader needs to read the memory that is offered now.
    version: how often the metadata has changed.
    failed: why nobody can read any more.
    """

    def __init__(
        self, start_thread: Callable[[Callable[[], object], str], None], address: str = ""
    ) -> None:
        """``address``: where other nodes reach it; empty: none do."""
        self._agent: Any = make_agent("offers", address)
        self.agent: str = self._agent.name
        self.metadata: bytes = self._agent.get_agent_metadata()
        self.version = 0
        self.failed: Exception | None = None
        # Entered in place of the condition: that would run Python code, and a signal handler that raises in
        # there would leave the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._spare: list[Region] = []
        #: Addresses of stretches that cannot be released before the agent.
        self._lasting: set[int] = set()
        #: Futures of the offered stretches, by address; and how many stretches have been offered so far.
        self._offered: dict[int, futures.Future[None]] = {}
        self._taken = 0
        self._closed = False
        start_thread(self._run, "nixl-offers")

    def take(self, size: int, done: futures.Future[None]) -> Region:
        """Take a stretch of at least ``size`` bytes, to offer it. ``done`` fails if nobody can read any more.

        Raises:
            MemoryError: there is none.
        """
        for index, region in enumerate(self._spare):
            if fits(len(region.memory), size):
                del self._spare[index]
                break
        else:
            region = self._new(size)
        with self._lock:
            if self.failed is None:
                self._offered[region.address] = done
                self._taken += 1
                self._changed.notify()
                return region
        self._spare.append(region)
        raise self.failed

    def give_back(self, region: Region, *, in_use: bool = False) -> None:
        """Take back a stretch that is needed no more. ``in_use``: readers may still be reading it, and nobody
        waits for them. The bytes that they find do not matter, but the memory must exist: so the stretch can
        be used again, and is released only with the agent."""
        with self._lock:
            self._offered.pop(region.address, None)
        if in_use:
            self._lasting.add(region.address)
        self._spare.insert(0, region)
        going = [one for one in self._spare[_SPARE:] if one.address not in self._lasting]
        for one in going:
            self._spare.remove(one)
            self._agent.deregister_memory(one.registered)
        if going:
            self._tell()

    def close(self) -> None:
        """Offer nothing any more. The thread releases everything."""
        with self._lock:
            self._closed = True
            self._changed.notify()

    def _new(self, size: int) -> Region:
        memory = new_memory(max(size, mmap.PAGESIZE))
        bytes_of_it = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
        address = ctypes.addressof(bytes_of_it)
        tensor = torch.frombuffer(bytes_of_it, dtype=torch.uint8)
        registered = self._agent.register_memory([(address, len(memory), 0, "")], "DRAM")
        self._tell()
        return Region(address, tensor, memory, registered)

    def _tell(self) -> None:
        """Renew the metadata, since the registered memory has changed."""
        self.metadata = self._agent.get_agent_metadata()
        self.version += 1

    def _run(self) -> None:
        """Let the agent answer readers while something is offered. Runs as a thread."""
        try:
            pause, taken = _SHORT, 0
            while True:
                with self._lock:
                    self._changed.wait_for(lambda: self._offered or self._closed)
                    self._changed.wait_for(lambda: self._closed, pause)
                    if self._closed:
                        break
                    pause = _SHORT if taken != self._taken else min(2 * pause, _LONG)
                    taken = self._taken
                self._agent.get_new_notifs()
        except Exception as error:
            self._fail(RuntimeError(f"NIXL does not go on: {error}"))
        self._agent = None
        self._spare = []  # not before: readers find memory as long as there is an agent

    def _fail(self, error: Exception) -> None:
        """Fail all transfers that wait for readers, and wait until the offers are closed."""
        with self._lock:
            self.failed = error
            waiting = list(self._offered.values())
        for done in waiting:
            with suppress(futures.InvalidStateError):
                done.set_exception(error)
        with self._lock:
            self._changed.wait_for(lambda: self._closed)


logger = logging.getLogger("conveyor")

#: Seconds that the thread sleeps between polls of transfers that are no plain copy.
_POLL = 0.0001


class Offer(NamedTuple):
    """Place where another process offers bytes to read.

    agent, metadata, version: see :class:`conveyor.transport.nixl.endpoint.Offers`.
    address, size: in the other process.
    """

    agent: str
    metadata: bytes
    version: int
    address: int
    size: int


@dataclass(eq=False)
class Fetch:
    """Transfer to be read: it fills ``buffer``, a tensor of bytes, and ``done`` gives that buffer. An error
    is told only after ``grace`` seconds, within which a death of ``writer`` becomes known: the death says
    more than the error."""

    offer: Offer
    buffer: Any
    writer: str
    grace: float
    done: Future[Any] = field(default_factory=Future)
    handle: Any = None
    registered: Any = None


class Fetcher:
    """Reader of other processes' memory, for all endpoints of this process. A transfer under way cannot be
    cancelled: its memory is held until UCX is done with it, or gone, even if nobody waits for it any more."""

    def __init__(
        self, start_thread: Callable[[Callable[[], object], str], None], address: str = ""
    ) -> None:
        """Start the thread. ``address``: where other nodes reach this one; empty: none do.

        Raises the error that keeps NIXL from working here.
        """
        # Entered in place of the condition: that would run Python code, and a signal handler that raises in
        # there would leave the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._new: deque[Fetch] = deque()
        self._closed = False
        #: Why nothing can be read any more.
        self._failed: Exception | None = None
        #: Number of endpoints that read from each agent, and the agents that have no reader any more.
        self._readers: Counter[str] = Counter()
        self._left: deque[str] = deque()
        # Used by the thread alone: the agent, the versions of metadata that it has, transfers.
        self._address = address
        self._agent: Any = None
        self._known: dict[str, int] = {}
        self._under_way: list[Fetch] = []
        #: Buffers that cannot be used for anything else before the agent is gone.
        self._lasting: list[Any] = []
        self._failing: list[tuple[float, Fetch, BaseException]] = []
        ready: Future[None] = Future()
        start_thread(lambda: self._run(ready), "nixl")
        ready.result()

    def fetch(self, fetch: Fetch) -> None:
        """Read a transfer on the thread."""
        with self._lock:
            failed = self._failed
            if failed is None:
                self._new.append(fetch)
                self._changed.notify()
        if failed is not None:
            fetch.done.set_exception(failed)

    def join(self, agent: str) -> None:
        """Note that one more endpoint reads from ``agent``."""
        with self._lock:
            self._readers[agent] += 1

    def leave(self, agent: str) -> None:
        """Note that an endpoint reads from ``agent`` no more. After the last one, the agent is forgotten."""
        with self._lock:
            self._readers[agent] -= 1
            if not self._readers[agent]:
                del self._readers[agent]
                self._left.append(agent)
                self._changed.notify()

    def close(self) -> None:
        """End the thread, and release all that it holds."""
        with self._lock:
            self._closed = True
            self._changed.notify()

    def _run(self, ready: Future[None]) -> None:
        """Make the agent, and read transfers until the fetcher is closed. Runs as a thread."""
        try:
            self._agent = make_agent("reads", self._address)
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while self._run_once():
                pass
        except Exception as error:
            self._fail(RuntimeError(f"NIXL does not go on: {error}"))
        for fetch in self._under_way:
            with suppress(Exception):  # the agent's end is the end of it anyway
                self._agent.release_xfer_handle(fetch.handle)
        self._agent = None
        self._under_way.clear()  # not before: UCX may write to what they hold
        self._lasting.clear()

    def _run_once(self) -> bool:
        """Sleep until there is work, and do it. Returns whether there can be more."""
        with self._lock:
            self._changed.wait_for(
                lambda: self._new or self._left or self._closed, self._time_to_sleep()
            )
            if self._closed:
                return False
            new, left = list(self._new), list(self._left)
            self._new.clear()
            self._left.clear()
        for agent in left:
            self._forget(agent)
        for fetch in new:
            self._step(fetch, self._begin)
        for fetch in [one for one in self._under_way if one not in new]:
            self._step(fetch, lambda one: self._agent.check_xfer_state(one.handle))
        now = _core.monotonic()
        decided = [one for one in self._failing if one[0] <= now]
        self._failing = [one for one in self._failing if one[0] > now]
        for _, fetch, error in decided:
            with suppress(InvalidStateError):  # aborted
                fetch.done.set_exception(error)
        return True

    def _fail(self, error: Exception) -> None:
        """Fail all transfers with ``error``, and wait until the fetcher is closed."""
        with self._lock:
            self._failed = error
            waiting = [*self._new, *self._under_way, *[fetch for _, fetch, _ in self._failing]]
        for fetch in waiting:
            with suppress(InvalidStateError):  # aborted
                fetch.done.set_exception(error)
        with self._lock:
            self._changed.wait_for(lambda: self._closed)

    def _time_to_sleep(self) -> float | None:
        if self._under_way:
            return _POLL
        if self._failing:
            return max(0.0, min(self._failing, key=itemgetter(0))[0] - _core.monotonic())
        return None

    def _begin(self, fetch: Fetch) -> str:
        """Start a transfer, and return its state. If UCX can copy out of the other process's memory, the
        transfer is done at once."""
        offer, agent = fetch.offer, self._agent
        if self._known.get(offer.agent, -1) < offer.version:
            agent.add_remote_agent(offer.metadata)
            self._known[offer.agent] = offer.version
        here = fetch.buffer.data_ptr()
        # Anew each time. That is quick for memory of the CPU, and lets the pool give it back when it likes.
        fetch.registered = agent.register_memory([(here, offer.size, 0, "")], "DRAM")
        fetch.handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs([(here, offer.size, 0)], "DRAM"),
            agent.get_xfer_descs([(offer.address, offer.size, 0)], "DRAM"),
            offer.agent,
        )
        self._under_way.append(fetch)
        return str(agent.transfer(fetch.handle))

    def _step(self, fetch: Fetch, step: Callable[[Fetch], Any]) -> None:
        """Advance a transfer by ``step``, and complete or fail its future if it has ended."""
        try:
            state = step(fetch)
            if state == "PROC":
                return
            if state != "DONE":
                raise ConnectionError(f"the transfer ended as {state!r}")
        except BaseException as error:
            # As text: its frames would keep the memory.
            words = f"the memory of {fetch.writer} cannot be read: {error}"
            self._failing.append((_core.monotonic() + fetch.grace, fetch, ConnectionError(words)))
            self._end(fetch)
            self._forget(fetch.offer.agent)  # it is connected anew by what comes next
            return
        self._end(fetch)
        with suppress(InvalidStateError):  # aborted
            fetch.done.set_result(fetch.buffer)

    def _end(self, fetch: Fetch) -> None:
        """Release the handle and the registered memory of a transfer that has ended."""
        with suppress(Exception):  # of a connection that is gone
            if fetch.handle is not None:
                self._agent.release_xfer_handle(fetch.handle)
        try:
            if fetch.registered is not None:
                self._agent.deregister_memory(fetch.registered)
        except Exception as error:  # it harms no other transfer, as long as its memory stays
            self._lasting.append(fetch.buffer)
            logger.warning("NIXL does not let go of %d bytes: %s", fetch.offer.size, error)
        fetch.handle = fetch.registered = None
        if fetch in self._under_way:
            self._under_way.remove(fetch)

    def _forget(self, agent: str) -> None:
        if self._known.pop(agent, None) is not None:
            with suppress(Exception):  # NIXL has done so itself
                self._agent.remove_remote_agent(agent)


T = TypeVar("T")

#: Number of stretches of memory that a reader keeps for its next transfers.


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
    """Objects that this process's endpoints share, as long as there are any, by the address at which the
    endpoints are reached."""

    def __init__(
        self, make: Callable[[Callable[[Callable[[], object], str], None], str], T]
    ) -> None:
        self._make = make
        #: By address, the object and how many endpoints use it.
        self._made: dict[str, tuple[T, int]] = {}

    def join(self, wire: Wire) -> T:
        """Return the shared object for one more endpoint, and make it for the first one."""
        address = address_of(wire)
        made, users = self._made.get(address) or (self._make(wire.start_thread, address), 0)
        self._made[address] = made, users + 1
        return made

    def leave(self, wire: Wire) -> bool:
        """Remove one endpoint. Returns whether it was the last."""
        address = address_of(wire)
        made, users = self._made.pop(address)
        if users > 1:
            self._made[address] = made, users - 1
        return users == 1


_offers = _Shared(Offers)
_fetchers = _Shared(Fetcher)


class NixlEndpoint(Endpoint):
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


class Writer(NixlEndpoint):
    """Writer's endpoint: offers copies of tensors to its readers."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self._offers = _offers.join(wire)
        self._sent_version = -1
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
            self._offers.give_back(sent.region, in_use=True)
            with suppress(InvalidStateError):  # it has failed
                sent.done.set_exception(reason)

    def close(self) -> None:
        """Leave the shared offers, and close them after the last endpoint."""
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
            metadata = offers.metadata if offers.version != self._sent_version else None
            offered = _Offered(
                transfer, offers.agent, offers.version, metadata, region.address, layout.size
            )
            self._wire.send(offered)
        except BaseException:
            offers.give_back(region, in_use=True)
            raise
        self._sent_version = offers.version
        self._sent[transfer] = _Sent(region, set(range(1, len(self._wire.members))), done)
        return done


class Reader(NixlEndpoint):
    """Reader's endpoint: reads tensors out of the writer's memory."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self._fetcher = _fetchers.join(wire)
        self._pool = Pool(keep=_SPARE)
        #: The writer's agent, and its last metadata.
        self._agent: str | None = None
        self._metadata = b""
        self._offered: dict[int, _Offered] = {}
        self._requested = PendingTransfers()
        self._fetching: dict[int, tuple[Fetch, Future[list[Any]]]] = {}
        #: Transfers that the writer may forget, put here by any thread.
        self._ended: deque[int] = deque()

    def receive(self, specs: Sequence[TensorSpec], note: bytes, transfer: int) -> Future[list[Any]]:
        """Ask for a transfer. Its tensors come in memory of this end's pool."""
        requested = self._requested.ask(specs, transfer)
        if not requested.done():
            self.progress()
        return requested

    def drop(self, transfer: int) -> None:
        """Forget a transfer that was asked for and is not being read yet."""
        self._requested.drop(transfer)

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
        for transfer in self._requested.decided(self._offered):
            self._take(self._offered.pop(transfer))
        while self._ended:
            transfer = self._ended.popleft()
            self._fetching.pop(transfer, None)
            self._wire.send(_Taken(transfer))

    def abort(self, reason: BaseException) -> None:
        """Fail all transfers that are asked for or being read."""
        self._over = reason
        self._requested.end(reason)
        fetching, self._fetching = self._fetching, {}
        for _, future in fetching.values():
            with suppress(InvalidStateError):  # it is done
                future.set_exception(reason)

    def close(self) -> None:
        """Release the pool, leave the shared fetcher, and close it after the last endpoint."""
        self._pool.close()
        if self._agent is not None:
            self._fetcher.leave(self._agent)
        if _fetchers.leave(self._wire):
            self._fetcher.close()

    def _take(self, offered: _Offered) -> None:
        """Begin to read an offered transfer, if the reader wants it."""
        layout, future = self._requested.take(offered.transfer)
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
