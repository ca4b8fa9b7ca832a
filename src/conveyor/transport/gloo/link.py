"""Connection between the writer of an edge and one of its readers, and the thread that uses it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from conveyor.futures import Future
from conveyor.transport.base import Wire
from conveyor.transport.gloo.rendezvous import Rendezvous, Way


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


class Link:
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
