"""Refs that were pickled in another process and loaded here, and the messages with their rendezvous."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from conveyor import _core
from conveyor.codec import Reader, SentDefinitions, borrows, decode_error, encode_error
from conveyor.exceptions import OutOfMemoryError, RuntimeStateError, SerializationError
from conveyor.refs.ref import EMPTY, DeferredValue, Ref, blockers_of, usable_remotely
from conveyor.runtime import context
from conveyor.runtime.messages import SHARE_FROM, Connection, Message, received
from conveyor.runtime.wait_graph import Again, Blockers, tell_another
from conveyor.runtime.waiting import TimeLimit, wait_within
from conveyor.weak import WeakKeys, WeakValues

ExportId = tuple[int, int]
"""The process that made the ref (an actor's number, 0 for the driver), and a number there."""

#: A snapshot as it travels: what it is made of, and its body unless that comes as a file.
Parts = tuple[int, int, int, "bytes | None"]


class ToRendezvous(Message, frozen=True):
    """Message from an actor to the driver."""


class Export(ToRendezvous, frozen=True):
    """Notice that a ref has been pickled for ``readers``, with that borrow. Answered by :class:`Refused`, if
    at all."""

    export: ExportId
    borrow_id: int
    readers: tuple[Reader, ...]


class Confirm(ToRendezvous, frozen=True):
    """Answered by :class:`Confirmed` once all that was said before has been noted."""

    number: int


class Load(ToRendezvous, frozen=True):
    """Notice that a pickle has been loaded. ``original``: the ref is there already, and needs no outcome."""

    export: ExportId
    borrow_id: int
    original: bool


class Drop(ToRendezvous, frozen=True):
    """Notice that nothing is left of the ref in this process."""

    export: ExportId


class GiveUp(ToRendezvous, frozen=True):
    """Notice that ``readers`` (``None``: this process) will not come with the borrow."""

    borrow_id: int
    readers: tuple[Reader, ...] | None


class Ask(ToRendezvous, frozen=True):
    """Question of who has to do something before the ref is done. Answered by :class:`Answer`."""

    export: ExportId
    question: int


class Tell(ToRendezvous, frozen=True):
    """Answer to :class:`Whom`, for the actor ``asker``."""

    export: ExportId
    question: int
    asker: int
    blockers: Blockers


class Made(ToRendezvous, frozen=True):
    """Outcome of this actor's own ref."""

    export: ExportId
    ok: bool
    parts: Parts


class Dry(ToRendezvous, frozen=True):
    """Answer to question ``question`` (see :class:`conveyor.worker.messages.Drain`): all that has come
    from these processes was loaded or given up, and nothing more of theirs comes."""

    question: int


class FromRendezvous(Message, frozen=True):
    """Message from the driver to an actor."""


class Refused(FromRendezvous, frozen=True):
    """Notice that nobody can load a pickle with that borrow, and why."""

    borrow_id: int
    error: RuntimeStateError


class Confirmed(FromRendezvous, frozen=True):
    """Answer to :class:`Confirm` ``number``."""

    number: int


class Forget(FromRendezvous, frozen=True):
    """Notice that nobody wants the outcome of the actor's own ref any more."""

    export: ExportId


class Whom(FromRendezvous, frozen=True):
    """Question of the actor ``asker``: who has to do something before this actor's own ref is done."""

    export: ExportId
    question: int
    asker: int


class Answer(FromRendezvous, frozen=True):
    """Answer to :class:`Ask`: who has to do something before a ref is done."""

    export: ExportId
    question: int
    blockers: Any


class Arrived(FromRendezvous, frozen=True):
    """Outcome of a ref that was loaded here."""

    export: ExportId
    ok: bool
    parts: Parts


class Requested:
    """About one ref, by this process."""

    __slots__ = ("_answered", "_blockers", "_callbacks", "_last")

    def __init__(self) -> None:
        #: The last question, and to which one the answer is.
        self._last = self._answered = -1
        self._blockers: Blockers = ()
        self._callbacks: list[tuple[int, Again]] = []

    def known(self, question: int) -> Blockers | None:
        """Return the answer, if it is there. Several threads may wait for the ref: the answer to a later
        question is as good."""
        return self._blockers if self._answered >= question else None

    def begin(self, question: int) -> bool:
        """Whether the question is to be sent."""
        if self._last >= question:
            return False
        self._last = question
        return True

    def tell(self, question: int, again: Again) -> None:
        """Have ``again`` called when that question is answered, or need not be."""
        self._callbacks.append((question, again))

    def answer(self, question: int, blockers: Blockers) -> Sequence[Again]:
        """Note an answer, and return the functions to call now."""
        if self._answered < question:
            self._blockers, self._answered = blockers, question
        callbacks = [again for of, again in self._callbacks if of <= question]
        self._callbacks = [(of, again) for of, again in self._callbacks if of > question]
        return callbacks

    def end(self) -> Sequence[Again]:
        """End the questions, as the ref is done; returns the functions to call now."""
        callbacks, self._callbacks = self._callbacks, []
        return [again for _, again in callbacks]


def tell_of(ref: Ref | None, tell: Callable[[Blockers], object]) -> None:
    """Tell ``tell``, now or later, on any thread, who has to do something before this process's ref is done.
    ``None``: the ref is not needed any more."""
    if ref is None:
        tell(())
    else:
        tell_another(
            partial(blockers_of, ref), context.current().wait_registry.next_question(), tell
        )


#: Bytes of a value that travels with its ref.
_SMALL = 4096

Borrow = tuple[str, ExportId, int]
"""Content of a pickled ref: its session, its id, and the borrow that keeps it until then."""


def new_borrow(ref: Ref, readers: Sequence[Reader]) -> Borrow:
    """Make the borrow for a pickle of ``ref`` that each of ``readers`` loads once. Empty: one unknown reader
    loads it."""
    table = _table_of(ref)
    return (table.session, *table.export(ref, readers))


def _table_of(ref: Ref) -> Any:
    runtime = context.running()
    if runtime is None:
        raise RuntimeStateError(f"{ref!r} cannot be pickled: its session has ended")
    table = runtime.exports
    if isinstance(ref, ImportedRef) and ref._source is not table:
        raise RuntimeStateError(f"{ref!r} cannot be pickled: it is of an earlier session")
    return table


def reduce_done(ref: Ref) -> tuple[Any, ...] | None:
    """Return how ``ref`` is pickled if it has come to a small value: the value travels along, and nobody need
    be asked for it, or keep it meanwhile. ``None`` for all others, which are pickled with a
    :func:`new_borrow`."""
    value = _value_at_hand(ref, _SMALL)
    if value is EMPTY:
        return None
    table = _table_of(ref)
    with table.lock:
        export = table.identify(ref)
    if type(value) is _core.Snapshot:
        return load_small, (table.session, export, value.parts)
    return load_done, (table.session, export, value)


def _value_at_hand(ref: Ref, most: int) -> Any:
    """Return the ref's value, if it can travel with the ref; else ``EMPTY``. It has at most ``most`` bytes,
    its encoding runs none of the user's code, and nothing is kept for it."""
    value = ref._outcome
    if (
        value is EMPTY
        and type(ref) is ImportedRef
        and ref._node_message is not None
        and ref._node_message.ok
    ):
        value = ref._node_message.snapshot
    kind = type(value)
    if kind is _core.Snapshot:
        small = value.size <= most and value.goes_as_it_is
    elif kind is int:
        small = value.bit_length() <= 8 * most
    elif kind is str or kind is bytes:
        small = len(value) <= most
    else:
        small = value is None or kind is bool or kind is float
    return value if small else EMPTY


class BorrowDirectory(borrows.ReferenceDirectory):
    """Keeper of borrows for ``codec.borrows``."""

    def confirm(self, borrows: Sequence[Borrow]) -> None:
        runtime = context.running()
        if runtime is not None:
            session = runtime.exports.session
            runtime.exports.confirm([borrow_id for s, _, borrow_id in borrows if s == session])

    def take(self, borrows: Sequence[Borrow]) -> list[Ref]:
        refs = []
        for one in borrows:
            with suppress(RuntimeStateError):  # whoever decodes it is told
                refs.append(load(*one))
        return refs

    def give_up(self, borrows: Sequence[Borrow]) -> None:
        self._give_up(borrows, None)

    def withdraw(self, borrows: Sequence[Borrow], readers: Sequence[Reader]) -> None:
        self._give_up(borrows, readers)

    def _give_up(self, borrows: Sequence[Borrow], readers: Sequence[Reader] | None) -> None:
        runtime = context.running()
        if runtime is not None:
            table = runtime.exports
            ours = [(e, borrow_id) for session, e, borrow_id in borrows if session == table.session]
            table.give_up(ours, readers)


def load(session: str, export: ExportId, borrow_id: int) -> Ref:
    """Load a pickled ref. ``RuntimeStateError`` outside its session, and when it is not kept any more."""
    ref: Ref = _table_for(session).load(export, borrow_id)
    return ref


def load_done(session: str, export: ExportId, value: Any) -> Ref:
    """Load a ref whose value has come with it."""
    ref: Ref = _table_for(session).load_done(export, value)
    return ref


def load_small(session: str, export: ExportId, parts: Parts) -> Ref:
    """Load a ref whose encoded value has come with it."""
    return load_done(session, export, _core.Snapshot.received(*parts, -1))


def _table_for(session: str) -> Any:
    runtime = context.running()
    if runtime is None or runtime.exports.session != session:
        raise RuntimeStateError(
            "a pickled ref can only be loaded by the driver and the actors of the session that it "
            "was made in; this process "
            + ("belongs to no session" if runtime is None else "belongs to another session")
            + ": send the value (conveyor.get(ref)) instead"
        )
    return runtime.exports


def load_pickled(session: str, export: ExportId, borrow_id: int) -> Ref:
    """Load a ref whose pickle was made for nobody in particular. If this process died before the driver knew,
    nobody would ever use the borrow up."""
    ref = load(session, export, borrow_id)
    context.current().exports.see_out()
    return ref


class ImportedRef(Ref):
    """A copy of a ref whose original is elsewhere, or gone."""

    __slots__ = ("_node_message", "export", "requested")

    def __init__(self, table: Imports, export: ExportId) -> None:
        super().__init__(table, -1)
        self.export = export
        self._node_message: Outcome | None = None
        self.requested = Requested()

    def to_send(self) -> Any:
        sent = super().to_send()
        if type(sent) is _core.Snapshot and sent.keeps:
            return DeferredValue(self, sent)  # which keeps what the value needs, by its borrow
        return sent

    def _resolve(self, timeout: float | None) -> Any:
        # Any number of threads may come here: the first one's counts.
        node_message = self._source.wait_for(self, timeout)
        if self._outcome is EMPTY:
            if node_message.ok:
                self._arrived(node_message.snapshot)
            else:
                self._fail(node_message.error(), node_message.error)
        return self._outcome


class Outcome:
    """Outcome of a ref, as it travels."""

    __slots__ = ("_inner", "ok", "snapshot")

    #: Where there is no memory to say what has happened.
    _unsaid: ClassVar[_core.Snapshot | None] = None

    def __init__(self, ok: bool, snapshot: Any) -> None:
        """``snapshot``: of the value, or of the error; the value itself where it has come with its ref."""
        self.ok = ok
        self.snapshot = snapshot
        self._inner: Sequence[Ref] = ()

    def hold(self) -> None:
        """Keep the refs that the value refers to as long as this."""
        if self.snapshot.has_refs:
            self._inner = borrows.take(self.snapshot.meta)

    def give_up(self) -> None:
        """Give up the borrows of the outcome: nobody wants it."""
        if self.snapshot.has_refs:
            borrows.give_up(self.snapshot.meta)

    @classmethod
    def of(cls, ref: Ref) -> Outcome:
        """Make the outcome of a ref that is done."""
        try:
            return cls(True, _core.Snapshot(ref.to_send(), SentDefinitions(), SHARE_FROM))
        except Exception as error:
            return cls.failed(error)

    @classmethod
    def at_hand(cls, ref: Ref) -> Outcome | None:
        """Make the outcome of a ref that is done and whose value goes in a message, if none of the user's
        code runs for that, as it does to load an error. Else ``None``."""
        if not ref.done() or ref.has_failed():
            return None
        try:
            ref._resolved_now()
        except Exception:  # whoever encodes it on a thread of its own finds out what for
            return None
        return None if _value_at_hand(ref, SHARE_FROM) is EMPTY else cls.of(ref)

    @property
    def usable_remotely(self) -> bool:
        """Whether the outcome can go to another node as it is: all that it keeps can be fetched from
        there."""
        return usable_remotely(self.snapshot)

    def whole(self, readers: tuple[Reader, ...] = ()) -> Outcome:
        """Return the outcome for ``readers`` on another node. Values that they could not fetch from where
        they were made are fetched here, now."""
        if self.usable_remotely:
            return self
        sent = SentDefinitions(readers, lambda: "another host")
        try:
            return Outcome(True, _core.Snapshot(self.snapshot.decode(), sent, SHARE_FROM))
        except Exception as error:
            return Outcome.failed(error)

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        error = error.with_traceback(None)
        try:
            try:
                snapshot = _core.Snapshot(error, SentDefinitions(), SHARE_FROM)
            except SerializationError:
                carried = decode_error(encode_error(error, "", ""))
                snapshot = _core.Snapshot(carried, SentDefinitions(), SHARE_FROM)
        except (MemoryError, OSError):
            if cls._unsaid is None:
                raise
            snapshot = cls._unsaid
        return cls(False, snapshot)

    @classmethod
    def prepare(cls) -> None:
        """Prepare an outcome to send when there is no memory left to make any."""
        if cls._unsaid is None:
            text = "there was no memory left to pass on the outcome of a pickled ref"
            cls._unsaid = _core.Snapshot(OutOfMemoryError(text), SentDefinitions(), SHARE_FROM)

    @classmethod
    def received(cls, message: Made | Arrived, fds: list[int]) -> Outcome:
        """Rebuild the outcome that ``send`` has sent."""
        try:
            return cls(message.ok, received(message.parts, fds))
        except Exception as error:  # it cannot be mapped
            return cls.failed(error)

    def send(self, connection: Connection, kind: type[Made | Arrived], export: ExportId) -> None:
        """Send it as the outcome of that ref."""
        connection.send(kind(export, self.ok, self.snapshot.parts), self.snapshot)

    def error(self) -> BaseException:
        """The error, where it is one: not ``ok``."""
        try:
            error: BaseException = self.snapshot.decode()
        except SerializationError as unknown:
            return unknown
        return error


class Imports:
    """Directory of the exported refs that a process knows, and the source of the copies that it has loaded,
    each once."""

    #: For `Ref`: what it waits for comes by messages.
    window: Any = None
    cancel_with_await = False
    get_timeout: float | None = None
    #: This process, in ids: an actor's number.
    _process = 0

    def __init__(self, session: str, inbox: _core.Inbox, ring: Callable[[], object]) -> None:
        Outcome.prepare()
        self.session = session
        self._inbox = inbox
        self.notify = ring
        # Reentrant: a copy may become garbage in the middle of anything.
        self.lock = threading.RLock()
        self._copies: WeakValues[ExportId, ImportedRef] = WeakValues()
        self._originals: WeakValues[ExportId, Ref] = WeakValues()
        self._ids: WeakKeys[Ref, ExportId] = WeakKeys()
        #: The ids of refs that have been named and not pickled.
        self._named: WeakKeys[Ref, ExportId] = WeakKeys()
        self._numbers = itertools.count(1)
        self._finalizers: WeakKeys[Ref, _core.Finalizer] = WeakKeys()

    @property
    def known_count(self) -> int:
        """Refs that were pickled or loaded here and still exist."""
        return len(self._originals) + len(self._copies)

    def known(self, export: ExportId) -> Ref | None:
        original = self._originals.get(export)
        return self._copies.get(export) if original is None else original

    def is_held(self, export: ExportId) -> bool:
        """Whether the driver keeps the outcome for a ref that is here: not where the value came along."""
        ref = self.known(export)
        return ref is not None and self._finalizers.get(ref) is not None

    def identify(self, ref: Ref) -> ExportId:
        """Return the id of a ref that is pickled."""
        if isinstance(ref, ImportedRef):
            return ref.export
        found = self._ids.get(ref)
        if found is not None:
            return found
        export = self._named.pop(ref) or (self._process, next(self._numbers))
        self._ids[ref] = export
        self._originals[export] = ref
        return export

    def name(self, ref: Ref) -> ExportId:
        """Return the id that a ref has, or will have when it is pickled."""
        with self.lock:
            if isinstance(ref, ImportedRef):
                return ref.export
            found = self._ids.get(ref) or self._named.get(ref)
            if found is None:
                found = self._named[ref] = (self._process, next(self._numbers))
            return found

    def copy(self, export: ExportId) -> ImportedRef:
        ref = ImportedRef(self, export)
        self._copies[export] = ref
        self._finalizers[ref] = self.finalizer(export)
        return ref

    def load_done(self, export: ExportId, value: Any) -> Ref:
        """Load a ref whose value has come along: nobody is told of the copy, or has to keep anything."""
        outcome = Outcome(True, value)
        with self.lock:
            ref = self.known(export)
            if ref is None:
                ref = ImportedRef(self, export)
                ref._node_message, ref._outcome = outcome, value
                self._copies[export] = ref  # when it is whole: Ctrl-C may come in between
        if type(ref) is ImportedRef and ref._node_message is None:
            self.arrived(export, outcome)
        return ref

    def export(self, ref: Ref, readers: Sequence[Reader]) -> tuple[ExportId, int]:
        """Return the id of ``ref`` for a new pickle of it, and the pickle's borrow, good for one load by each
        of ``readers``, or by one that is not known if there are none."""
        raise NotImplementedError

    def confirm(self, borrow_ids: Sequence[int]) -> None:
        """Return when pickles with these borrows, which were made here just now, can be loaded. Raises
        ``RuntimeStateError`` where one cannot."""
        raise NotImplementedError

    def give_up(
        self, borrows: list[tuple[ExportId, int]], readers: Sequence[Reader] | None = None
    ) -> None:
        """Note that ``readers`` (``None``: this process) will not come with these borrows. Called by
        finalizers: takes no lock."""
        raise NotImplementedError

    def load(self, export: ExportId, borrow_id: int) -> Ref:
        """Return the ref that a pickle stands for: the original, or a copy."""
        raise NotImplementedError

    def see_out(self) -> None:
        """Return when the loads that there were are known to the driver, or will be whatever becomes of this
        process."""
        raise NotImplementedError

    def finalizer(self, export: ExportId) -> _core.Finalizer:
        """Have the driver told, soon after the returned object has ended with its ref, that nobody has that
        ref here any more."""
        raise NotImplementedError

    def arrived(self, export: ExportId, outcome: Outcome) -> None:
        with self.lock:
            ref = self._copies.get(export)
            if ref is None or ref._node_message is not None:
                return
            ref._node_message = outcome
            callbacks = ref.requested.end()
        self.notify()
        for again in callbacks:
            again()

    def all_fail(self, error: BaseException) -> None:
        """Fail all copies without an outcome: nothing will come any more."""
        with self.lock:
            waiting = [ref for ref in self._copies.values() if ref._node_message is None]
        if waiting:
            outcome = Outcome.failed(error)
            for ref in waiting:
                self.arrived(ref.export, outcome)

    # Source of the copies

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        assert isinstance(ref, ImportedRef)
        runtime = context.running()
        if (
            ref._node_message is None
            and context.inherited()
            and getattr(runtime, "exports", None) is not self
        ):
            # Its outcome comes to the parent: a wait here would never end.
            raise RuntimeStateError(f"{ref!r} belongs to the process that this one was forked from")
        time_limit, wait_registry = TimeLimit(timeout), context.current().wait_registry
        ask = partial(self.blockers, ref)
        with wait_registry.waiting(ask, True, time_limit.bounded) as wait:
            wait_within(
                self._inbox,
                lambda: ref._node_message is not None,
                time_limit,
                lambda: self.describe(ref),
                lambda: "it is made in another process",
                wait,
            )
        assert ref._node_message is not None
        return ref._node_message

    def blockers(self, ref: Ref, question: int, again: Again | None = None) -> Blockers | None:
        """Return the answer of the process that made the ref. It comes after the outcome, if that is
        there."""
        assert isinstance(ref, ImportedRef)
        said = ref.requested.known(question)
        if said is None and again is not None:
            with self.lock:  # so nothing comes in between
                said = () if ref._node_message is not None else ref.requested.known(question)
                if said is None:
                    ref.requested.tell(question, again)
        if said is None and ref.requested.begin(question):
            self.ask(ref.export, question)
        return said

    def ask(self, export: ExportId, question: int) -> None:
        """Ask who has to do something before that ref is done; :meth:`answered` takes the answer."""
        raise NotImplementedError

    def answered(self, export: ExportId, question: int, blockers: Blockers) -> None:
        """Note the answer to a question."""
        with self.lock:
            ref = self._copies.get(export)
            callbacks = ref.requested.answer(question, blockers) if ref is not None else ()
        self.notify()
        for again in callbacks:
            again()

    def is_ready(self, ref: Ref) -> bool:
        return ref._node_message is not None  # type: ignore[attr-defined]

    def has_failed(self, ref: Ref) -> bool:
        node_message: Outcome | None = ref._node_message  # type: ignore[attr-defined]
        return node_message is not None and not node_message.ok

    def cancel(self, ref: Ref) -> bool:
        raise RuntimeStateError(f"{ref!r} can only be cancelled in the process that made it")

    def why_not_run(self, ref: Ref, overdue: bool) -> BaseException:
        raise AssertionError("errors of imported refs come as they are")

    def describe(self, ref: Ref) -> str:
        process, number = ref.export  # type: ignore[attr-defined]
        return (
            f"a pickled ref (number {number} of {f'actor {process}' if process else 'the driver'})"
        )

    def doing(self) -> str:
        return "the process that pickled it does not have it yet"


def gone() -> RuntimeStateError:
    return RuntimeStateError(
        "this pickled ref cannot be loaded any more: a result is kept as long as its ref, a loaded "
        "copy, or a pickle that was never loaded exists, and all of them are gone"
    )
