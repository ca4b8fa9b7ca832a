"""Pickled refs: tokens that can be loaded in any process of the session.

The driver is the rendezvous. It has an entry for every ref that was pickled, wherever that was made,
and the entry gets the outcome when it is there. An entry is kept as long as anybody may ask for it:

- a process that holds the ref, or a copy that it has loaded (one count for each process);
- a pickle that was made and not loaded yet (a *ticket*; at most `MAX_TICKETS`, the oldest are
  forgotten), so that a ref may be garbage at its maker before it arrives.

Actors tell it by messages on a connection of their own. It ends with the actor, and with it what the
actor held.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from conveyor import _core
from conveyor.channel import SentDefinitions, decode_error, encode_error
from conveyor.exceptions import ConveyorError, RuntimeStateError, SerializationError
from conveyor.runtime import context, threads
from conveyor.runtime.refs import EMPTY, Ref
from conveyor.runtime.waiting import wait_until
from conveyor.runtime.watcher import Watcher
from conveyor.runtime.wire import SHARE_FROM, Wire, received

#: Pickles of refs that nobody has loaded yet and whose results are kept.
MAX_TICKETS = 10_000

ExportId = tuple[int, int]
"""The process that made the ref (an actor's number, 0 for the driver), and a number there."""


class Table(Protocol):
    """What a process knows of exported refs."""

    session: str

    def export(self, ref: Ref) -> tuple[ExportId, int]:
        """The id of ``ref`` for a new pickle of it, and the pickle's ticket."""
        ...

    def load(self, export: ExportId, ticket: int) -> Ref:
        """The ref that a pickle stands for: the original, or a copy."""
        ...


def pickled(ref: Ref) -> tuple[Callable[..., Ref], tuple[Any, ...]]:
    """What ``__reduce__`` of a ref returns."""
    runtime = context.running()
    if runtime is None:
        raise RuntimeStateError(f"{ref!r} cannot be pickled: its session has ended")
    table = runtime.exports
    if isinstance(ref, ImportedRef) and ref._source is not table:
        raise RuntimeStateError(f"{ref!r} cannot be pickled: it is of an earlier session")
    return load, (table.session, *table.export(ref))


def load(session: str, export: ExportId, ticket: int) -> Ref:
    """Load a pickled ref. ``RuntimeStateError`` outside its session, and when it is not kept any more."""
    runtime = context.running()
    if runtime is None or runtime.exports.session != session:
        raise RuntimeStateError(
            "a pickled ref can only be loaded by the driver and the actors of the session that it "
            "was made in; this process "
            + ("belongs to no session" if runtime is None else "belongs to another session")
            + ": send the value (conveyor.get(ref)) instead"
        )
    return runtime.exports.load(export, ticket)


class ImportedRef(Ref):
    """A copy of a ref whose original is elsewhere, or gone."""

    __slots__ = ("_parcel", "export")

    def __init__(self, table: Imports, export: ExportId) -> None:
        super().__init__(table, -1)
        self.export = export
        self._parcel: Outcome | None = None

    def _settle(self, timeout: float | None) -> Any:
        # Any number of threads may decode it: the first one's counts.
        try:
            value = self._source.wait_for(self, timeout)
            if self._outcome is EMPTY:
                self._arrived(value)
        except SerializationError as error:
            self._fail(error)
        except ImportFailed as ended:
            self._fail(ended.error)
        return self._outcome


class ImportFailed(Exception):
    """The outcome of an imported ref is ``error``."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Outcome:
    """What a ref has come to, as it travels."""

    __slots__ = ("ok", "snapshot")

    def __init__(self, ok: bool, snapshot: _core.Snapshot) -> None:
        self.ok = ok
        self.snapshot = snapshot

    @classmethod
    def of(cls, ref: Ref) -> Outcome:
        """Of a ref that is done."""
        try:
            return cls(True, _core.Snapshot(ref.get(), SentDefinitions(), SHARE_FROM))
        except Exception as error:
            return cls.failed(error)

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        error = error.with_traceback(None)
        try:
            snapshot = _core.Snapshot(error, SentDefinitions(), SHARE_FROM)
        except SerializationError:
            carried = decode_error(encode_error(error, "", ""))
            snapshot = _core.Snapshot(carried, SentDefinitions(), SHARE_FROM)
        return cls(False, snapshot)

    def get(self) -> Any:
        value = self.snapshot.decode()
        if not self.ok:
            raise ImportFailed(value)
        return value


class Imports:
    """The copies that this process has loaded, each once; the source of them."""

    #: For `Ref`: what it waits for comes by messages.
    gate: Any = None

    def __init__(self, session: str, inbox: _core.Inbox, ring: Callable[[], object]) -> None:
        self.session = session
        self._inbox = inbox
        self.ring = ring
        # Reentrant: a copy may become garbage in the middle of anything.
        self.lock = threading.RLock()
        self._copies: weakref.WeakValueDictionary[ExportId, ImportedRef] = (
            weakref.WeakValueDictionary()
        )
        self._originals: weakref.WeakValueDictionary[ExportId, Ref] = weakref.WeakValueDictionary()
        self._ids: weakref.WeakKeyDictionary[Ref, ExportId] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(1)

    @property
    def known_count(self) -> int:
        """Refs that were pickled or loaded here and still exist."""
        return len(self._originals) + len(self._copies)

    def known(self, export: ExportId) -> Ref | None:
        return self._originals.get(export) or self._copies.get(export)

    def identify(self, ref: Ref, process: int) -> tuple[ExportId, bool]:
        """The id of a ref, and whether it is new."""
        if isinstance(ref, ImportedRef):
            return ref.export, False
        found = self._ids.get(ref)
        if found is not None:
            return found, False
        export = (process, next(self._numbers))
        self._ids[ref] = export
        self._originals[export] = ref
        return export, True

    def copy(self, export: ExportId, dropped: Callable[[ExportId], object]) -> ImportedRef:
        ref = ImportedRef(self, export)
        self._copies[export] = ref
        weakref.finalize(ref, dropped, export).atexit = False
        return ref

    def arrived(self, export: ExportId, outcome: Outcome) -> None:
        with self.lock:
            ref = self._copies.get(export)
        if ref is not None and ref._parcel is None:
            ref._parcel = outcome
            self.ring()

    def all_fail(self, error: BaseException) -> None:
        """Nothing will come any more."""
        with self.lock:
            waiting = [ref for ref in self._copies.values() if ref._parcel is None]
        if waiting:
            outcome = Outcome.failed(error)
            for ref in waiting:
                ref._parcel = outcome
            self.ring()

    # Source of the copies

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        assert isinstance(ref, ImportedRef)
        wait_until(
            self._inbox,
            lambda: ref._parcel is not None,
            timeout,
            lambda: self.describe(ref),
            lambda: "it is made in another process",
        )
        assert ref._parcel is not None
        return ref._parcel.get()

    def is_ready(self, ref: Ref) -> bool:
        return ref._parcel is not None  # type: ignore[attr-defined]

    def cancel(self, ref: Ref) -> bool:
        raise RuntimeStateError(f"{ref!r} can only be cancelled in the process that made it")

    def stopped(self, ref: Ref, overdue: bool) -> BaseException:
        raise AssertionError("errors of imported refs come as they are")

    def describe(self, ref: Ref) -> str:
        process, number = ref.export  # type: ignore[attr-defined]
        return (
            f"a pickled ref (number {number} of {f'actor {process}' if process else 'the driver'})"
        )

    def doing(self) -> str:
        return "the process that pickled it does not have it yet"


class Entry:
    """What the driver keeps of one exported ref."""

    __slots__ = ("holders", "outcome", "owner", "ref", "subscribers", "tickets", "watched")

    def __init__(self, owner: Peer | None, ref: Ref | None) -> None:
        self.owner = owner
        self.ref = ref  # the original, if it is the driver's, until the outcome is here
        self.outcome: Outcome | None = None
        self.holders: set[Peer | None] = set()  # None: the driver
        self.tickets: set[int] = set()
        self.subscribers: list[Peer] = []
        self.watched = False


class Exports(Imports):
    """The driver's."""

    def __init__(
        self, session: str, inbox: _core.Inbox, ring: Callable[[], object], watcher: Watcher
    ) -> None:
        super().__init__(session, inbox, ring)
        self._watcher = watcher
        self._entries: dict[ExportId, Entry] = {}
        self._tickets: OrderedDict[int, ExportId] = OrderedDict()
        self._ticket_numbers = itertools.count(1)
        self._collecting = threading.local()
        self._closed = False

    def export(self, ref: Ref) -> tuple[ExportId, int]:
        with self.lock:
            export, _ = self.identify(ref, 0)
            if export not in self._entries:
                self._entries[export] = Entry(None, ref)
            return export, self._new_ticket(export)

    def load(self, export: ExportId, ticket: int) -> Ref:
        with self.lock:
            ref = self.known(export)
            if ref is None:
                entry = self._entries.get(export)
                if entry is None:
                    raise _gone()
                ref = self.copy(export, self._dropped_here)
                entry.holders.add(None)
                assert isinstance(ref, ImportedRef)
                ref._parcel = entry.outcome
                if entry.outcome is None:
                    self._watch(export, entry)
            self._use(ticket)
            return ref

    def _dropped_here(self, export: ExportId) -> None:
        with self.lock:
            if export not in self._copies:  # it was not loaded again meanwhile
                self._let_go(export, None)

    # Tickets

    @contextmanager
    def collecting(self) -> Iterator[list[int]]:
        """The tickets of what is pickled inside, on this thread."""
        made: list[int] = []
        self._collecting.made = made
        try:
            yield made
        finally:
            self._collecting.made = None

    def _new_ticket(self, export: ExportId) -> int:
        ticket = next(self._ticket_numbers)
        self._tickets[ticket] = export
        self._entries[export].tickets.add(ticket)
        made = getattr(self._collecting, "made", None)
        if made is not None:
            made.append(ticket)
        while len(self._tickets) > MAX_TICKETS:
            self._use(next(iter(self._tickets)))
        return ticket

    def outstanding(self, ticket: int) -> bool:
        return ticket in self._tickets

    def revoke(self, tickets: list[int]) -> None:
        """Nobody will load these pickles."""
        with self.lock:
            for ticket in tickets:
                self._use(ticket)

    def _use(self, ticket: int) -> None:
        export = self._tickets.pop(ticket, None)
        entry = self._entries.get(export) if export is not None else None
        if entry is not None and export is not None:
            entry.tickets.discard(ticket)
            self._release(export, entry)

    # Keeping

    def _let_go(self, export: ExportId, holder: Peer | None) -> None:
        entry = self._entries.get(export)
        if entry is not None:
            entry.holders.discard(holder)
            if holder is not None and holder in entry.subscribers:
                entry.subscribers.remove(holder)
            self._release(export, entry)

    def _release(self, export: ExportId, entry: Entry) -> None:
        if entry.holders or entry.tickets:
            return
        del self._entries[export]
        if entry.owner is not None:
            entry.owner.wire.send(("forget", export))

    def _watch(self, export: ExportId, entry: Entry) -> None:
        ref = entry.ref
        if ref is None or entry.watched:
            return
        entry.watched = True
        self._watcher.watch(ref, lambda: self._due(export))

    def _due(self, export: ExportId) -> None:
        with self.lock:
            entry = self._entries.get(export)
            if entry is not None and entry.ref is not None and not self._closed:
                # Not here: encoding it may take long, and the watcher has others to serve.
                threads.start(self._settle, "export", export, entry.ref)

    def _settle(self, export: ExportId, ref: Ref) -> None:
        self.settled(export, Outcome.of(ref))

    def settled(self, export: ExportId, outcome: Outcome) -> None:
        """The outcome of an exported ref has come."""
        with self.lock:
            entry = self._entries.get(export)
            if entry is None or entry.outcome is not None:
                return
            entry.outcome = outcome
            entry.ref = None
            subscribers, entry.subscribers = entry.subscribers, []
            for peer in subscribers:
                peer.push(export, outcome)
        self.arrived(export, outcome)

    # Actors

    def peer_exports(self, peer: Peer, export: ExportId) -> int:
        """An actor pickles a ref: one of its own, or a copy that it holds."""
        with self.lock:
            if export not in self._entries:
                original = self._originals.get(export)
                if original is None and export[0] != peer.number:
                    raise _gone()
                self._entries[export] = Entry(None if original is not None else peer, original)
            if export[0] == peer.number:
                self._entries[export].holders.add(peer)
            return self._new_ticket(export)

    def peer_loads(self, peer: Peer, export: ExportId, ticket: int, original: bool) -> None:
        with self.lock:
            entry = self._entries.get(export)
            if entry is None:
                ref = self._originals.get(export)
                if ref is None:
                    peer.push(export, Outcome.failed(_gone()))
                    return
                entry = self._entries[export] = Entry(None, ref)
            if not original:
                entry.holders.add(peer)
                if entry.outcome is not None:
                    peer.push(export, entry.outcome)
                else:
                    entry.subscribers.append(peer)
                    self._watch(export, entry)
            self._use(ticket)

    def peer_drops(self, peer: Peer, export: ExportId) -> None:
        with self.lock:
            self._let_go(export, peer)

    def peer_ended(self, peer: Peer, death: Callable[[], ConveyorError]) -> None:
        with self.lock:
            mine = [
                (e, x) for e, x in self._entries.items() if peer in x.holders or x.owner is peer
            ]
        for export, entry in mine:
            if entry.owner is peer and entry.outcome is None:
                self.settled(export, Outcome.failed(death()))
            self.peer_drops(peer, export)

    def close(self, error: BaseException) -> None:
        """The session is over, with ``error`` for who still waits."""
        with self.lock:
            self._closed = True
        self.all_fail(error)

    @property
    def kept(self) -> int:
        """Entries that there are."""
        return len(self._entries)


class Peer:
    """The driver's end of one actor's connection."""

    def __init__(
        self, exports: Exports, number: int, sock: Any, death: Callable[[], ConveyorError]
    ) -> None:
        self.number = number
        self._exports = exports
        self._death = death
        self.wire = Wire(sock, "refs", self._on_message, self._on_end)

    def push(self, export: ExportId, outcome: Outcome) -> None:
        self.wire.send_snapshot(("outcome", export, outcome.ok), outcome.snapshot)

    def _on_message(self, message: Any, fds: list[int]) -> None:
        operation, export, *rest = message
        exports = self._exports
        if operation == "export":
            try:
                ticket: Any = exports.peer_exports(self, export)
            except RuntimeStateError as error:
                ticket = error
            self.wire.send(("ticket", rest[0], ticket))
        elif operation == "load":
            exports.peer_loads(self, export, *rest)
        elif operation == "drop":
            exports.peer_drops(self, export)
        else:
            ok, parts = rest
            exports.settled(export, Outcome(ok, received(parts, fds)))

    def _on_end(self) -> None:
        self._exports.peer_ended(self, self._death)


class ActorExports(Imports):
    """An actor's."""

    def __init__(
        self,
        session: str,
        number: int,
        inbox: _core.Inbox,
        ring: Callable[[], object],
        watcher: Callable[[], Watcher],
        connect: Callable[[], Any],
    ) -> None:
        """``connect()`` gives the socket of a new connection to the driver."""
        super().__init__(session, inbox, ring)
        self._number = number
        self._watcher = watcher
        self._connect = connect
        self._wire: Wire | None = None
        self._connecting = threading.Lock()
        # Own refs that others may wait for, until the driver has their outcome or forgets them.
        self._needed: dict[ExportId, Ref] = {}
        self._answers: dict[int, Any] = {}
        self._requests = itertools.count(1)

    def export(self, ref: Ref) -> tuple[ExportId, int]:
        with self.lock:
            export, new = self.identify(ref, self._number)
            if new:
                self._needed[export] = ref
                weakref.finalize(ref, self._dropped, export).atexit = False
        ticket = self._ask("export", export)
        if new:
            self._watcher().watch(ref, lambda: threads.start(self._tell, "export", export))
        return export, ticket

    def _tell(self, export: ExportId) -> None:
        ref = self._needed.pop(export, None)
        if ref is not None:  # else nobody wants it
            outcome = Outcome.of(ref)
            self._open().send_snapshot(("outcome", export, outcome.ok), outcome.snapshot)

    def load(self, export: ExportId, ticket: int) -> Ref:
        wire = self._open()
        with self.lock:
            ref = self.known(export)
            # In one go: messages about one export leave in the order of what happens to it.
            if ref is not None:
                wire.send(("load", export, ticket, True))
                return ref
            ref = self.copy(export, self._dropped)
            wire.send(("load", export, ticket, False))
            return ref

    def _dropped(self, export: ExportId) -> None:
        wire = self._wire
        with self.lock:
            if wire is not None and self.known(export) is None:
                wire.send(("drop", export))

    def _ask(self, operation: str, export: ExportId) -> Any:
        wire = self._open()
        number = next(self._requests)
        wire.send((operation, export, number))
        wait_until(
            self._inbox,
            lambda: number in self._answers or wire.ended,
            None,
            lambda: "the driver to take note of a pickled ref",
            lambda: "it does not answer",
        )
        if number not in self._answers:
            raise RuntimeStateError("a ref cannot be pickled: the driver is gone")
        answer = self._answers.pop(number)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _open(self) -> Wire:
        with self._connecting:
            if self._wire is None:
                self._wire = Wire(self._connect(), "refs", self._on_message, self._on_end)
            return self._wire

    def _on_message(self, message: Any, fds: list[int]) -> None:
        operation, *rest = message
        if operation == "ticket":
            number, answer = rest
            self._answers[number] = answer
            self.ring()
        elif operation == "forget":
            self._needed.pop(rest[0], None)
        else:
            export, ok, parts = rest
            self.arrived(export, Outcome(ok, received(parts, fds)))

    def _on_end(self) -> None:
        self.all_fail(RuntimeStateError("the driver is gone"))
        self.ring()


def _gone() -> RuntimeStateError:
    return RuntimeStateError(
        "this pickled ref cannot be loaded any more: a result is kept as long as its ref, a loaded "
        "copy, or a pickle that was never loaded exists, and all of them are gone"
    )
