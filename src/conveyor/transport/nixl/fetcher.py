"""Thread that reads other processes' memory."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from conveyor import _core
from conveyor.futures import Future
from conveyor.transport.nixl.agents import make_agent

logger = logging.getLogger("conveyor")

#: Seconds that the thread sleeps between polls of transfers that are no plain copy.
_POLL = 0.0001


class Offer(NamedTuple):
    """Place where another process offers bytes to read.

    agent, metadata, version: see :class:`conveyor.transport.nixl.offers.Offers`.
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
    """Reader of other processes' memory, for all conduits of this process. A transfer under way cannot be
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
        #: Number of conduits that read from each agent, and the agents that have no reader any more.
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
        """Note that one more conduit reads from ``agent``."""
        with self._lock:
            self._readers[agent] += 1

    def leave(self, agent: str) -> None:
        """Note that a conduit reads from ``agent`` no more. After the last one, the agent is forgotten."""
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
            while self._turn():
                pass
        except Exception as error:
            self._fail(RuntimeError(f"NIXL does not go on: {error}"))
        for fetch in self._under_way:
            with suppress(Exception):  # the agent's end is the end of it anyway
                self._agent.release_xfer_handle(fetch.handle)
        self._agent = None
        self._under_way.clear()  # not before: UCX may write to what they hold
        self._lasting.clear()

    def _turn(self) -> bool:
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
        due = [one for one in self._failing if one[0] <= now]
        self._failing = [one for one in self._failing if one[0] > now]
        for _, fetch, error in due:
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
