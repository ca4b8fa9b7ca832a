"""Queue of the operations on a communicator, in one process.

A send and its receive block until both are called, and each process calls one at a time; so all processes
must agree on the order. The end with the lower rank begins, when its operation is the next in its process,
and tells the other end, which then queues its own. The ranks enter a collective one after the other
(``gathering``). An operation waits only for higher ranks, so no waits form a cycle.

If something fails in a communicator, all of its processes make it anew: messages still on their way in the
old one could be taken for others. Nothing begins with a process that has not said that its old one is gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from conveyor.codec.frames import Sealed
from conveyor.exceptions import TransportError
from conveyor.futures import Future
from conveyor.transport.base import Wire
from conveyor.transport.communicator.abstract import Communicator
from conveyor.transport.communicator.thread import CommunicatorThread
from conveyor.weak import WeakValues


class Job(Struct, eq=False):
    """Operation with one peer, for one transfer.

    owner: the conduit that it belongs to.
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


class Line:
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
        #: Open conduits: the function that tells a generation to its peers, and the one that wakes it.
        self._conduits: dict[object, tuple[Callable[[int], None], Callable[[], None]]] = {}
        #: Errors of a conduit that occurred during another one's call, which must not fail for them.
        self._faults: dict[object, Exception] = {}
        self._waiting: list[Job] = []
        self._under_way: tuple[Job, Future[Any]] | None = None
        self._worker: CommunicatorThread | None = None
        #: The generation that begins when the old worker has ended.
        self._coming = generation

    @property
    def closed(self) -> bool:
        """Whether no conduit uses it any more."""
        return not self._conduits

    @property
    def settled(self) -> bool:
        """Whether no new generation is about to begin. When one begins, every peer is told."""
        return self._coming == self.generation

    def join(
        self, conduit: object, renewed: Callable[[int], None], ring: Callable[[], None]
    ) -> None:
        """Add a conduit that is opened. ``renewed`` tells its peers of a generation, ``ring`` has it look
        again."""
        self._conduits[conduit] = renewed, ring

    def leave(self, conduit: object) -> None:
        """Remove a conduit that is closed, and forget its jobs. If one of them is under way, make the
        communicator anew; after the last conduit, end its thread."""
        self._conduits.pop(conduit, None)
        self._faults.pop(conduit, None)
        self._waiting = [job for job in self._waiting if job.owner is not conduit]
        if not self._conduits:
            self._under_way = None
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.end(_nothing)
        elif self._under_way is not None and self._under_way[0].owner is conduit:
            # The peer may never answer it.
            self.renew(self._coming + 1, "an edge was closed")

    def add(self, job: Job) -> None:
        """Do ``job`` when it has its turn."""
        self._waiting.append(job)
        self.advance()

    def check(self, conduit: object) -> None:
        """Raise the error that was noted for ``conduit`` during another one's call, if any."""
        fault = self._faults.pop(conduit, None)
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
                for conduit, (renewed, _) in list(self._conduits.items()):
                    self._for(conduit, functools.partial(renewed, self.generation))
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
            _, ring = self._conduits[ready.owner]
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
            rings = [ring for _, ring in self._conduits.values()]
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

    def _for(self, conduit: object, do: Callable[[], object]) -> None:
        """Call ``do`` on behalf of ``conduit``. An error is noted for that conduit, and does not reach the
        caller."""
        try:
            do()
        except Exception as error:
            if conduit in self._conduits:
                self._faults.setdefault(conduit, error)
                _, ring = self._conduits[conduit]
                ring()

    def _may_begin(self, job: Job) -> bool:
        if job.generation is None:
            return job.may_begin()
        return job.generation == self.generation


def _nothing() -> None:
    pass


#: By domain, the queue of a communicator in this process, for the edges of all graphs. The conduits hold it.
_lines: WeakValues[str, Line] = WeakValues()


def line_of(domain: str, name: str, sealed: Sealed, rank: int, wire: Wire) -> Line:
    """Return the queue of a domain, and create it if it is missing or closed."""
    line = _lines.get(domain)
    if line is None or line.closed:
        # A restarted process has a later generation than all others, so they all make their copies anew:
        # connections to its predecessor are of no use. The driver counts the generations, since clocks of
        # nodes cannot be compared.
        line = _lines[domain] = Line(name, sealed, rank, wire.start_thread, wire.laid)
    return line
