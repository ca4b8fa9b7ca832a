"""The connection between the writer of an edge and one of its readers, and the thread that uses it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from conveyor.futures import Future
from conveyor.transport.base import Wire
from conveyor.transport.gloo.rendezvous import Rendezvous, Way


class Lost(NamedTuple):
    """What the reader tells where the connection is lost: the writer's end may not have noticed."""

    why: str


class Mover(Protocol):
    """What an end moves bytes with, on the thread of its link."""

    def send(self, buffer: Any) -> None:
        """Send what is in a buffer."""

    def receive(self, buffer: Any) -> None:
        """Fill a buffer."""

    def cut(self) -> None:
        """Have whoever waits at either end stop at once, with an error. From any thread."""

    def close(self) -> None:
        """Let go of everything."""


class Link:
    """One end. Transfers go one after the other, on a thread that ends by itself.

    Rank 0 of the pair listens and tells where; rank 1 connects, and tells when it has. Either can be told to
    end at any time: who waits for the other's word can be interrupted, and gloo itself waits for nobody. The
    writer is mostly rank 0. Where it is rank 1, the reader waits to be told that a connection is wanted.

    generation: how many there have been between these two before.
    """

    def __init__(
        self,
        wire: Wire,
        other: int,
        generation: int,
        theirs: Mapping[str, bytes] | None = None,
        *,
        way: Way,
        make_pair: Callable[[Rendezvous, Way], Mover],
        thread: str,
    ) -> None:
        """Get ready for the end whose rank is ``other``. The reader is given what the writer has told.
        ``make_pair`` is called on a thread of that name.

        Raises whatever keeps the writer from listening.
        """
        self.generation = generation
        self._other = wire.members[other]
        self._writes = wire.rank == 0
        self._way = way
        self._ring = wire.ring
        self._grace = wire.known_dead_within
        listens = way.rank == 0
        # A conduit that has opened can be listened for later: the writer's own waits for that.
        self._rendezvous = Rendezvous(
            self._tell_where if listens and not self._writes else lambda: None
        )
        # By itself: a condition's entering is Python's, and a signal handler that raises then leaves it held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: What is to be moved, and who waits for it. The first of them is under way.
        self._jobs: deque[tuple[Any, Future[Any]]] = deque()
        #: Why nothing moves any more.
        self._ended: BaseException | None = None
        #: Nothing more can be moved, though what is under way may not have been told so yet.
        self._lost = False
        #: Nobody wants anything of this link any more.
        self._let_go = False
        self._pair: Mover | None = None
        self._make_pair = make_pair
        #: What the other end has not been told yet.
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
        """Whether nothing can be moved over it any more."""
        with self._lock:
            return self._lost or self._ended is not None

    def lose(self) -> None:
        """The other end has lost the connection: this one may wait for long until it notices."""
        with self._lock:
            self._lost = True

    def to_tell(self) -> dict[str, bytes] | str | Lost | None:
        """Give the addresses that the other end has to be told now, once, or why there will be none, or what
        has become of the connection."""
        with self._lock:
            addresses, self._untold = self._untold, None
            return addresses

    def meet(self, addresses: Mapping[str, bytes]) -> None:
        """The other end has told its addresses: where it listens, or that it is connected."""
        self._rendezvous.meet(addresses)

    def move(self, buffer: Any) -> Future[Any]:
        """Send what is in a tensor of bytes, or receive what comes into it. The future gives it back."""
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
        """The thread."""
        pair = None
        try:
            pair = self._make_pair(self._rendezvous, self._way)
            with self._lock:
                self._pair = pair
            if self._way.rank == 1:
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
                # At once, and so before anybody is told that something has failed: what comes after that goes
                # over another connection.
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
        """Have the conduit's thread tell the other end."""
        with self._lock:
            self._untold = untold
        self._ring()

    def _next(self) -> Any:
        """Wait for something to move. ``None``: there is nothing more."""
        with self._lock:
            self._changed.wait_for(lambda: self._jobs or self._let_go)
            return None if self._let_go else self._jobs[0][0]

    def _moved(self) -> None:
        """The first of the jobs is done."""
        with self._lock:
            if not self._jobs:  # it was told to have failed meanwhile
                return
            buffer, moved = self._jobs.popleft()
        moved.set_result(buffer)

    def _break(self, why: str) -> None:
        """Something has failed."""
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
