"""Memory that other processes may read: copies of tensors that are being sent."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from conveyor.transport.nixl.agents import make_agent
from conveyor.transport.pool import fits, new_memory

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
    """Memory that this process offers to readers. Used on the thread of its conduits; it has a thread of its
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

    def give_back(self, region: Region, *, unread: bool = False) -> None:
        """Take back a stretch that is needed no more. ``unread``: readers may still be reading it, and nobody
        waits for them. The bytes that they find do not matter, but the memory must exist: so the stretch can
        be used again, and is released only with the agent."""
        with self._lock:
            self._offered.pop(region.address, None)
        if unread:
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
