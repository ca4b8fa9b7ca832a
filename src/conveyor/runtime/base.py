"""What the driver's and the actors' runtimes share: calls, results, and calls that wait their turn."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.channel import SentDefinitions
from conveyor.exceptions import ConveyorError
from conveyor.runtime import threads
from conveyor.runtime.calls.generators import CallStream, Key
from conveyor.runtime.calls.links import Link
from conveyor.runtime.graph.results import get_all
from conveyor.runtime.process import Process
from conveyor.runtime.protocol import ActorId
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.waiting.patience import Patience, outstanding
from conveyor.runtime.waiting.watcher import Watcher

if TYPE_CHECKING:
    from conveyor.runtime.graph.gots import Gots


class PutRef(Ref):
    """A value that was put: a snapshot, decoded by who gets it."""

    __slots__ = ("_snapshot",)

    def __init__(self, snapshot: _core.Snapshot) -> None:
        super().__init__(_NOWHERE, -1)
        self._snapshot = snapshot

    def get(self, timeout: float | None = None) -> Any:
        return self._snapshot.decode()

    def done(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "<PutRef>"


class _Nowhere:
    """The source of refs that were never on their way."""

    gate: Any = None

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        raise AssertionError("a put value is always there")

    def is_ready(self, ref: Ref) -> bool:
        return True

    def cancel(self, ref: Ref) -> bool:
        return False

    def stopped(self, ref: Ref, overdue: bool) -> BaseException:
        raise AssertionError("a put value is always there")

    def describe(self, ref: Ref) -> str:
        return "put"

    def doing(self) -> str:
        return "nobody makes it"


_NOWHERE = _Nowhere()


class Pump:
    """Sends calls that could not be sent at once (an argument was not there, the mailbox was full),
    when nobody else is waiting who would. One thread, there only while there is something to do."""

    def __init__(self, inbox: _core.Inbox, ring: Callable[[], object]) -> None:
        self._inbox = inbox
        self._ring = ring  # wakes those who wait for the inbox
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, link: Link) -> None:
        with self._lock:
            self._links.add(link)
            if self._thread is None and not self._closed:
                self._thread = threads.start(self._run, "pump")

    def close(self) -> None:
        """Send nothing more. What the thread refers to is free when this returns."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._ring()
            thread.join()

    def _run(self) -> None:
        while True:
            seen = self._inbox.count
            with self._lock:
                links = list(self._links)
            flushed = [link for link in links if not self._closed and link.flush()]
            with self._lock:
                self._links.difference_update(link for link in flushed if not link.has_pending)
                if not self._links or self._closed:
                    self._thread = None
                    return
            self._inbox.wait(seen)


class CallingRuntime:
    """Calls and results, the same in the driver and in an actor."""

    def __init__(self, process: Process) -> None:
        self.process = process

        def ring() -> None:
            process.board.ring(process.slot, _core.ATTENTION_BIT)

        self.pump = Pump(process.inbox, ring)
        self.watcher = Watcher(process.inbox, ring)
        #: By the number of the actor.
        self.links: dict[int, Link] = {}
        self._gots: Gots | None = None
        #: Handles of workers for functions called here, by their options.
        self.function_workers: dict[Hashable, list[Any]] = {}
        self.stream_numbers = itertools.count()
        self._dropped_streams: deque[tuple[ActorId, str, Key]] = deque()

    @property
    def inbox(self) -> _core.Inbox:
        return self.process.inbox

    def link(self, actor: ActorId) -> Link:
        """A link to the process that ``actor`` has now; raises its death if there is none."""
        raise NotImplementedError

    def call(
        self,
        actor: ActorId,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_returns: int,
    ) -> Any:
        link = self.links.get(actor.index)
        if link is None or link.gone:
            link = self.link(actor)
        return link.call(method, args, kwargs, num_returns)

    def is_alive(self, actor: ActorId) -> bool:
        """False if a call would raise that ``actor`` has died."""
        raise NotImplementedError

    def outstanding(self, actor: ActorId) -> int:
        """How many calls from here ``actor`` has not answered yet."""
        link = self.links.get(actor.index)
        return 0 if link is None else link.outstanding

    def stream(
        self,
        actor: ActorId,
        method: str,
        is_async: bool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> CallStream:
        self.close_dropped_streams()
        return CallStream(self, actor, method, is_async, args, kwargs)

    def drop_stream(self, actor: ActorId, method: str, key: Key) -> None:
        """Nobody takes the items any more. Called by a finalizer: only notes it."""
        self._dropped_streams.append((actor, method, key))

    def close_dropped_streams(self) -> None:
        """Close the generators whose references have become garbage."""
        while self._dropped_streams:
            try:
                actor, method, key = self._dropped_streams.popleft()
            except IndexError:
                return
            with suppress(ConveyorError):  # its actor is gone, and the generator with it
                self.call(actor, f"{method}#close", (key,), {}, 1)

    def allocate(self, size: int) -> _core.Buffer:
        return self.process.arena.allocate(size)

    def get(self, refs: Any, timeout: float | None) -> Any:
        return get_all(refs, timeout)

    def put(self, value: Any) -> Ref:
        if isinstance(value, Ref):
            raise TypeError("put takes a value, not a ref")
        return PutRef(_core.Snapshot(value, SentDefinitions()))

    def gots(self) -> Gots:
        """Where results were got; of graphs in debug mode."""
        if self._gots is None:
            from conveyor.runtime.graph.gots import Gots

            self._gots = Gots()
        return self._gots

    def keep(self, value: Any) -> Ref:
        """Like ``put``; refs in ``value``, or in place of it, are kept as their values."""
        return PutRef(_core.Snapshot(value, SentDefinitions(values=True)))

    def wait(
        self, refs: Sequence[Any], num_returns: int, timeout: float | None
    ) -> tuple[list[Any], list[Any]]:
        refs = list(refs)
        for ref in refs:
            if not isinstance(ref, Ref):
                raise TypeError(f"wait takes a list of refs; one is a {type(ref).__name__}")
        if len(set(map(id, refs))) != len(refs):
            raise ValueError("wait takes each ref once")
        if not 0 < num_returns <= len(refs):
            raise ValueError(f"num_returns must be from 1 to {len(refs)}, not {num_returns}")
        if timeout is not None and timeout < 0:
            timeout = None
        patience = Patience(timeout)
        while True:
            seen = self.process.inbox.count
            done = [ref for ref in refs if ref.done()][:num_returns]
            over = timeout is not None and patience.over()
            if len(done) >= num_returns or over:
                chosen = set(map(id, done))
                return done, [ref for ref in refs if id(ref) not in chosen]
            if not self.process.inbox.wait(seen, patience.step()) and timeout is None:
                patience.check(
                    lambda: f"{num_returns} of {len(refs)} results", lambda: outstanding(refs)
                )
