"""Pickled refs: tokens that can be loaded in any process of the session.

The driver is the rendezvous. It has an entry for every ref that was pickled, wherever that was made,
and the entry gets the outcome when it is there. An entry is kept as long as anybody may ask for it:

- a process that holds the ref, or a copy that it has loaded (one count for each process);
- a pickle that was made and not loaded yet (a *borrow*; at most `MAX_PENDING_BORROWS`, the oldest are
  forgotten), so that a ref may be garbage at its owner before it arrives. It ends when each of the
  processes that it was made for has loaded it, has given it up, or is dead; where they are not known,
  with the first load;
- an outcome that refers to it.

Actors tell it by messages on a connection of their own. It ends with the actor, and with it what the
actor held.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from conveyor import _core
from conveyor.codec import Reader
from conveyor.exceptions import ConveyorError, RuntimeStateError, SystemLimitError
from conveyor.refs.imports import (
    Answer,
    Arrived,
    Ask,
    Confirm,
    Confirmed,
    Drop,
    Dry,
    Export,
    ExportId,
    Forget,
    GiveUp,
    ImportedRef,
    Imports,
    Load,
    Made,
    Outcome,
    Refused,
    Tell,
    ToRendezvous,
    Whom,
    gone,
    tell_of,
)
from conveyor.refs.ref import Ref
from conveyor.refs.watcher import Watcher
from conveyor.runtime import threads
from conveyor.runtime.messages import Connection, Node
from conveyor.runtime.wait_graph import Blockers

if TYPE_CHECKING:
    from conveyor.runtime.cleanup import Cleanup


#: Have a process say :class:`~conveyor.refs.imports.Dry`, with that number, once it has
#: nothing left of what these have sent.
AskReader: TypeAlias = Callable[[Reader, int, tuple[Reader, ...]], object]

#: Whether something that ``sender``, which is dead and was on that node (0: the driver's), has sent may still
#: be on its way to that reader's node. Where it may, :meth:`Orphans.look` is called when that has changed.
Arrives: TypeAlias = Callable[[int, Reader, Reader], bool]


class Orphans:
    """Borrows of dead senders, at the rendezvous: their pickles may never have come to their readers."""

    def __init__(
        self, borrows: PendingBorrows, lock: threading.RLock, gone: Callable[[int, int], bool]
    ) -> None:
        """``lock``: of all that has to do with the borrows. ``gone(*process)``: whether one is dead."""
        self._borrows, self._lock, self._gone = borrows, lock, gone
        self._ask: AskReader | None = None
        self._arrives: Arrives = lambda _node, _sender, _reader: True
        self._questions: dict[int, tuple[Reader, set[int]]] = {}
        self._numbers = itertools.count(1)

    def begin(self, arrives: Arrives, ask: AskReader) -> None:
        """Begin to ask readers."""
        self._arrives, self._ask = arrives, ask

    def look(self) -> None:
        """Ask the readers whom there is something to ask now: some process has ended."""
        if self._ask is None:
            return
        with self._lock:
            found = self._new()
        for reader, (number, senders) in found.items():
            self._ask(reader, number, tuple(senders))

    def _new(self) -> dict[Reader, tuple[int, set[Reader]]]:
        requested = {(reader, one) for reader, ones in self._questions.values() for one in ones}
        borrow_ids: dict[Reader, set[int]] = {}
        senders: dict[Reader, set[Reader]] = {}
        for borrow_id, sender, readers in self._borrows.made_by_actors():
            if not (sender.ended and self._gone(*sender.reader)):
                continue
            node_number = 0 if sender.node is None else sender.node.number
            for reader in readers:
                if (reader, borrow_id) in requested or self._arrives(
                    node_number, sender.reader, reader
                ):
                    continue
                borrow_ids.setdefault(reader, set()).add(borrow_id)
                senders.setdefault(reader, set()).add(sender.reader)
        found = {}
        for reader, these in borrow_ids.items():
            number = next(self._numbers)
            self._questions[number] = reader, these
            found[reader] = number, senders[reader]
        return found

    def answered(self, question: int, reader: Reader) -> None:
        """Use up the borrows of a question that is answered: nobody comes with them."""
        with self._lock:
            requested, borrow_ids = self._questions.get(question, (None, ()))
            if requested != reader:
                return
            del self._questions[question]
            for borrow_id in borrow_ids:
                self._borrows.use(borrow_id, (reader,))

    def reader_ended(self, reader: Reader) -> None:
        """Forget the questions to a dead reader, which answers nothing. Called with the lock."""
        for number in [n for n, (requested, _) in self._questions.items() if requested == reader]:
            del self._questions[number]


#: Pickles of refs that nobody has loaded yet and whose results are kept.
MAX_PENDING_BORROWS = 10_000


class PendingBorrows:
    """Collection of all borrows. The owner holds a lock while anything is called here."""

    def __init__(
        self, gone: Callable[[int, int], bool], on_used: Callable[[ExportId, int], object]
    ) -> None:
        """``gone(*reader)``: whether one is dead. ``on_used(export, borrow_id)``: nobody comes with it any
        more."""
        self._gone = gone
        self._on_used = on_used
        self._exports: OrderedDict[int, ExportId] = OrderedDict()
        # Readers that may still come with a borrow, for borrows whose readers are known.
        self._readers: dict[int, set[Reader]] = {}
        # Process that made the pickle of each borrow, if an actor has made it.
        self._senders: dict[int, Peer] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._exports)

    def __iter__(self) -> Iterator[int]:
        return iter(self._exports)

    def add(
        self,
        export: ExportId,
        readers: Sequence[Reader],
        noted: set[int],
        sender: Peer | None = None,
        number: int = 0,
    ) -> int:
        """Create a borrow for these readers (empty: one unknown reader). It is one of ``noted`` first.
        ``sender``: the actor that makes the pickle, which has given it that ``number``."""
        borrow_id = number or next(self._numbers)
        self._exports[borrow_id] = export
        noted.add(borrow_id)
        if readers:
            self._readers[borrow_id] = set(readers)
            if sender is not None:
                self._senders[borrow_id] = sender
            # Of a death before this, ``reader_ended`` was told too early; a later one waits for the lock.
            self.use(borrow_id, [reader for reader in readers if self._gone(*reader)])
        while len(self._exports) > MAX_PENDING_BORROWS:
            self._end(next(iter(self._exports)))
        return borrow_id

    def made_by_actors(self) -> Iterator[tuple[int, Peer, set[Reader]]]:
        """Iterate over the borrows of actors with known readers: number, sender, and readers that may still
        come."""
        for borrow_id, sender in self._senders.items():
            yield borrow_id, sender, self._readers[borrow_id]

    def reader_ended(self, reader: Reader) -> None:
        """Use up the borrows of a reader that is dead, for everybody."""
        for borrow_id in list(self._readers):
            if reader in self._readers.get(borrow_id, ()):
                self.use(borrow_id, (reader,))

    def use(self, borrow_id: int, readers: Iterable[Reader]) -> None:
        """Note that these readers have loaded the pickle, or will not. It may be called for the same reader
        again, for another reason. The same goes for a reader that the pickle was not made for, and that has
        got it from another reader."""
        awaited = self._readers.get(borrow_id)
        if awaited is not None:
            awaited.difference_update(readers)
            if awaited:
                return
        self._end(borrow_id)

    def _end(self, borrow_id: int) -> None:
        self._readers.pop(borrow_id, None)
        self._senders.pop(borrow_id, None)
        export = self._exports.pop(borrow_id, None)
        if export is not None:
            self._on_used(export, borrow_id)


class Peer:
    """The driver's end of one actor's connection."""

    def __init__(
        self,
        exports: Exports,
        number: int,
        reader: Reader,
        sock: Any,
        death: Callable[[str], ConveyorError],
        node: Node | None = None,
    ) -> None:
        """``number``: the actor's; ``reader``: its process that has connected. ``death(why)``: what has
        become of the actor; ``why`` says it if the connection has broken here. ``node``: its node, where
        that is another one."""
        self.number = number
        self.reader = reader
        self._exports = exports
        self._death = death
        self.node = node
        #: All that it has said was heard.
        self.ended = False
        self.connection = Connection(sock, "refs", self._on_message, self._on_end)

    def push(self, export: ExportId, outcome: Outcome) -> None:
        if self.node is None:
            outcome.send(self.connection, Arrived, export)
        elif not outcome.usable_remotely:  # it is fetched, which may take long
            try:
                threads.start(self._push_whole, "export", export, outcome)
            except SystemLimitError:
                # The lock is held here, which everybody needs: what goes to this actor waits for it instead.
                self.connection.soon(lambda: self._push_whole(export, outcome))
        else:
            if outcome.snapshot.fd >= 0:
                self.node.hold(outcome.snapshot.fd)
            outcome.send(self.connection, Arrived, export)

    def _push_whole(self, export: ExportId, outcome: Outcome) -> None:
        outcome.whole((self.reader,)).send(self.connection, Arrived, export)

    def answer(self, export: ExportId, question: int, said: Blockers) -> None:
        self.connection.send(Answer(export, question, said))

    def _on_message(self, message: ToRendezvous, fds: list[int]) -> None:
        self.handlers[type(message)](self, message, fds)

    def _export(self, message: Export, _fds: list[int]) -> None:
        try:
            self._exports.peer_exports(self, message.export, message.borrow_id, message.readers)
        except RuntimeStateError as error:
            self.connection.send(Refused(message.borrow_id, error))

    def _confirm(self, message: Confirm, _fds: list[int]) -> None:
        self.connection.send(Confirmed(message.number))

    def _load(self, message: Load, _fds: list[int]) -> None:
        self._exports.peer_loads(self, message.export, message.borrow_id, message.original)

    def _drop(self, message: Drop, _fds: list[int]) -> None:
        self._exports.peer_drops(self, message.export)

    def _give_up(self, message: GiveUp, _fds: list[int]) -> None:
        self._exports.peer_gives_up(self, message.borrow_id, message.readers)

    def _ask(self, message: Ask, _fds: list[int]) -> None:
        self._exports.peer_asks(self, message.export, message.question)

    def _tell(self, message: Tell, _fds: list[int]) -> None:
        requested = message.export, message.question, message.asker
        self._exports.peer_answers(*requested, message.blockers)

    def _made(self, message: Made, fds: list[int]) -> None:
        self._exports.resolved(message.export, Outcome.received(message, fds))

    def _dry(self, message: Dry, _fds: list[int]) -> None:
        self._exports.orphans.answered(message.question, self.reader)

    def _on_end(self) -> None:
        self.ended = True
        self._exports.peer_ended(self, lambda: self._death(self.connection.broken))

    #: Handler for each kind of message.
    handlers: ClassVar[Mapping[type[ToRendezvous], Callable[[Peer, Any, list[int]], None]]] = {
        Export: _export,
        Confirm: _confirm,
        Load: _load,
        Drop: _drop,
        GiveUp: _give_up,
        Ask: _ask,
        Tell: _tell,
        Made: _made,
        Dry: _dry,
    }


class Exported:
    """Entry of one exported ref."""

    __slots__ = ("borrow_ids", "holders", "outcome", "owner", "ref", "subscribers", "watched")

    def __init__(self, owner: Peer | None, ref: Ref | None) -> None:
        self.owner = owner
        self.ref = ref  # the original, if it is the driver's, until the outcome is here
        self.outcome: Outcome | None = None
        self.holders: set[Peer | None] = set()  # None: the driver
        self.borrow_ids: set[int] = set()
        self.subscribers: list[Peer] = []
        self.watched = False


_Tell: TypeAlias = "Callable[[ExportId, int, Blockers], object]"


class Exports(Imports):
    """Directory of exported refs in the driver."""

    def __init__(
        self,
        session: str,
        inbox: _core.Inbox,
        ring: Callable[[], object],
        watcher: Watcher,
        me: Reader,
        gone: Callable[[int, int], bool],
        cleanup: Cleanup,
    ) -> None:
        """``me``: this process, as a reader; ``gone(*reader)``: whether one is dead."""
        super().__init__(session, inbox, ring)
        self._me = me
        self._watcher = watcher
        self._cleanup = cleanup
        self._given_up: deque[tuple[int, Sequence[Reader]]] = deque()
        self._entries: dict[ExportId, Exported] = {}
        self._borrows = PendingBorrows(gone, self._used)
        #: Borrows of pickles that may never have come to their readers.
        self.orphans = Orphans(self._borrows, self.lock, gone)
        # Functions that are told the answers to questions, by the number of the actor that has asked.
        self._askers: dict[int, _Tell] = {}
        self._closed = False

    def export(self, ref: Ref, readers: Sequence[Reader]) -> tuple[ExportId, int]:
        self.tidy()
        with self.lock:
            export = self.identify(ref)
            if export not in self._entries:
                self._entries[export] = Exported(None, ref)
            return export, self._borrows.add(export, readers, self._entries[export].borrow_ids)

    def confirm(self, borrow_ids: Sequence[int]) -> None:
        """Return at once: the driver pickles here, and has noted them itself."""

    def give_up(
        self, borrows: list[tuple[ExportId, int]], readers: Sequence[Reader] | None = None
    ) -> None:
        whose = (self._me,) if readers is None else readers
        self._given_up.extend((borrow_id, whose) for _, borrow_id in borrows)
        self._cleanup.soon(self.tidy)

    def load(self, export: ExportId, borrow_id: int) -> Ref:
        self.tidy()
        with self.lock:
            ref = self.known(export)
            if ref is None:
                entry = self._entries.get(export)
                if entry is None:
                    raise gone()
                ref = self.copy(export)
                entry.holders.add(None)
                assert isinstance(ref, ImportedRef)
                ref._node_message = entry.outcome
                if entry.outcome is None:
                    self._watch(export, entry)
            self._borrows.use(borrow_id, (self._me,))
            return ref

    def see_out(self) -> None:
        """Return at once: the process that loads here is the driver."""

    def finalizer(self, export: ExportId) -> _core.Finalizer:
        return self._cleanup.finalizer(partial(self._dropped, export))

    def _dropped(self, export: ExportId) -> None:
        with self.lock:
            if not self.is_held(export):  # it was not loaded again meanwhile
                self._let_go(export, None)

    def tidy(self) -> None:
        """Take back the borrows that have been given up."""
        while self._given_up:
            with self.lock, suppress(IndexError):
                self._borrows.use(*self._given_up.popleft())

    # Borrows

    def actor_ended(self, reader: Reader) -> None:
        """Note that a process of an actor is dead, for everybody: ``gone`` says so already."""
        with self.lock:
            self._borrows.reader_ended(reader)
            self.orphans.reader_ended(reader)
        self.orphans.look()

    def _used(self, export: ExportId, borrow_id: int) -> None:
        entry = self._entries.get(export)
        if entry is not None:
            entry.borrow_ids.discard(borrow_id)
            self._release(export, entry)

    # Keeping

    def _let_go(self, export: ExportId, holder: Peer | None) -> None:
        entry = self._entries.get(export)
        if entry is not None:
            entry.holders.discard(holder)
            self._look_at_node(entry, holder)
            if holder is not None and holder in entry.subscribers:
                entry.subscribers.remove(holder)
            self._release(export, entry)

    def _look_at_node(self, entry: Exported, left: Peer | None) -> None:
        """Look whether anybody else on its node still has the ref, now that ``left`` has nothing of it."""
        if left is None or left.node is None or entry.outcome is None:
            return
        nodes = [holder.node for holder in entry.holders if holder is not None]
        if left.node not in nodes and entry.outcome.snapshot.fd >= 0:
            left.node.let_go(entry.outcome.snapshot.fd)

    def _release(self, export: ExportId, entry: Exported) -> None:
        if entry.holders or entry.borrow_ids:
            return
        del self._entries[export]
        if entry.owner is not None:
            entry.owner.connection.send(Forget(export))

    def _look(self, export: ExportId, entry: Exported) -> None:
        """Take the outcome now, where that costs nothing."""
        if entry.outcome is None and entry.ref is not None:
            outcome = Outcome.at_hand(entry.ref)
            if outcome is not None:
                self.resolved(export, outcome)

    def _watch(self, export: ExportId, entry: Exported) -> None:
        ref = entry.ref
        if ref is None or entry.watched:
            return
        self._watcher.watch(ref, lambda: self._due(export))
        entry.watched = True

    def _due(self, export: ExportId) -> None:
        with self.lock:
            entry = self._entries.get(export)
            if entry is not None and entry.ref is not None and not self._closed:
                ref = entry.ref
            else:
                return
        outcome = Outcome.at_hand(ref)
        if outcome is not None:
            self.resolved(export, outcome)
            return
        # Not here: encoding it may take long, and the watcher has others to serve.
        threads.start_or_run(self._resolve, "export", export, ref)

    def _resolve(self, export: ExportId, ref: Ref) -> None:
        self.resolved(export, Outcome.of(ref))

    def resolved(self, export: ExportId, outcome: Outcome) -> None:
        """Note that the outcome of an exported ref has come."""
        with self.lock:
            entry = self._entries.get(export)
            if entry is None or entry.outcome is not None:
                outcome.give_up()
                return
            try:
                outcome.hold()
            except Exception as error:
                outcome = Outcome.failed(error)
            entry.outcome = outcome
            entry.ref = None
            subscribers, entry.subscribers = entry.subscribers, []
            for peer in subscribers:
                peer.push(export, outcome)
        self.arrived(export, outcome)

    # Actors

    def peer_exports(
        self, peer: Peer, export: ExportId, borrow_id: int, readers: Sequence[Reader]
    ) -> None:
        """Export a ref that an actor pickles: one of its own, or a copy that it holds. ``borrow_id``: a
        number that no other pickle of the session has."""
        with self.lock:
            if export not in self._entries:
                original = self._originals.get(export)
                if original is None and export[0] != peer.number:
                    raise gone()
                self._entries[export] = Exported(None if original is not None else peer, original)
            if export[0] == peer.number:
                self._entries[export].holders.add(peer)
            noted = self._entries[export].borrow_ids
            self._borrows.add(export, readers, noted, peer, borrow_id)

    def peer_gives_up(self, peer: Peer, borrow_id: int, readers: Sequence[Reader] | None) -> None:
        with self.lock:
            self._borrows.use(borrow_id, (peer.reader,) if readers is None else readers)

    def peer_loads(self, peer: Peer, export: ExportId, borrow_id: int, original: bool) -> None:
        with self.lock:
            if not original and not self._subscribe(peer, export):
                return
            self._borrows.use(borrow_id, (peer.reader,))

    def _subscribe(self, peer: Peer, export: ExportId) -> bool:
        """Have ``peer``, which has a copy from now on, told the outcome. Returns whether the outcome is
        still to be had."""
        entry = self._entries.get(export)
        if entry is None:
            ref = self._originals.get(export)
            if ref is None:
                peer.push(export, Outcome.failed(gone()))
                return False
            entry = self._entries[export] = Exported(None, ref)
        entry.holders.add(peer)
        self._look(export, entry)
        if entry.outcome is not None:
            peer.push(export, entry.outcome)
            return True
        entry.subscribers.append(peer)
        try:
            self._watch(export, entry)
        except SystemLimitError as error:  # nobody would ever tell them
            subscribers, entry.subscribers = entry.subscribers, []
            for subscriber in subscribers:
                subscriber.push(export, Outcome.failed(error))
        return True

    def peer_drops(self, peer: Peer, export: ExportId) -> None:
        with self.lock:
            self._let_go(export, peer)

    def peer_asks(self, peer: Peer, export: ExportId, question: int) -> None:
        """Find out, for an actor that waits, who has to do something before a ref is done."""
        self._pass_on(export, question, peer.number, peer.answer)

    def ask(self, export: ExportId, question: int) -> None:
        self._pass_on(export, question, self._process, self.answered)

    def _pass_on(self, export: ExportId, question: int, asker: int, tell: _Tell) -> None:
        """Pass a question of ``asker`` on to the process that has made the ref."""
        with self.lock:
            entry = self._entries.get(export)
            if entry is not None and entry.owner is not None and entry.outcome is None:
                self._askers[asker] = tell
                entry.owner.connection.send(Whom(export, question, asker))
                return
            own = entry.ref if entry is not None else None
        tell_of(own, partial(tell, export, question))

    def peer_answers(self, export: ExportId, question: int, asker: int, said: Blockers) -> None:
        tell = self._askers.get(asker)
        if tell is not None:
            tell(export, question, said)

    def peer_ended(self, peer: Peer, death: Callable[[], ConveyorError]) -> None:
        with self.lock:
            if self._askers.get(peer.number) == peer.answer:
                del self._askers[peer.number]
            mine = [
                (e, x) for e, x in self._entries.items() if peer in x.holders or x.owner is peer
            ]
        failed = None
        for export, entry in mine:
            if entry.owner is peer and entry.outcome is None:
                failed = failed or Outcome.failed(death())
                self.resolved(export, failed)
            self.peer_drops(peer, export)
        self.orphans.look()

    def close(self, error: BaseException) -> None:
        """End the directory with the session; ``error`` is for whoever still waits."""
        with self.lock:
            self._closed = True
        self.all_fail(error)

    @property
    def entry_count(self) -> int:
        """Number of entries."""
        return len(self._entries)
