"""Results that are on their way: what ``execute`` and ``.remote()`` return."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Generator, Hashable, Sequence
from functools import partial
from pickle import PickleBuffer
from types import GenericAlias, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

from conveyor import _core, exceptions
from conveyor.checks import check_timeout
from conveyor.codec import (
    SENT,
    Reader,
    add_reducers,
    add_sibling,
    borrows,
    completed,
    copy_to_raise,
    decode_error,
    direct,
    drop_picklers,
)
from conveyor.codec.direct import Located, Unfetched, keep_out_of_band
from conveyor.codec.encoded import DIRECT
from conveyor.codec.errors import constructor_failure
from conveyor.codec.frames import decode
from conveyor.exceptions import ConstructorError, SerializationError, SessionEndedError
from conveyor.later import LaterModule, import_later
from conveyor.runtime import context, ending
from conveyor.runtime.wait_graph import Again, Blockers
from conveyor.runtime.waiting import TimeLimit, passing_on, wait_within
from conveyor.system_limits import explained
from conveyor.typevars import ValueT
from conveyor.user_frames import trimmed

# Rarely needed and slow to import, or of a higher layer.
fetching: Any = LaterModule("conveyor.direct.fetching")
future: Any = LaterModule("conveyor.refs.future")
imports: Any = LaterModule("conveyor.refs.imports")
into: Any = LaterModule("conveyor.direct.into")
listing: Any = LaterModule("conveyor.direct.listing")


class Unseen:
    """An error that is logged once it is garbage, unless somebody has got it by then."""

    __slots__ = ("error", "got")

    def __init__(self, error: BaseException) -> None:
        self.error = error.with_traceback(None)
        self.got = False

    def __del__(self) -> None:
        if not (self.got or sys.is_finalizing()):
            tell_unseen(self.error)


def tell_unseen(error: BaseException) -> None:
    """Log ``error``, which nobody gets any more."""
    runtime = context.running()
    if runtime is not None:
        runtime.process.sweeper.log_soon(error)


class Failure:
    """An outcome that is an exception."""

    __slots__ = ("_again", "_frame", "error", "unseen")

    def __init__(
        self,
        error: BaseException,
        again: Callable[[], BaseException] | None = None,
        frame: _core.ErrorFrame | None = None,
    ) -> None:
        """``again`` makes what a task has raised anew for each ``get``: it may change as any other value may,
        and it holds the frames that it was raised in. ``frame`` is what it came as, which knows what else
        has failed in its execution."""
        self.error = error.with_traceback(None)
        self._again = again
        self._frame = frame
        #: Object that logs the error, where nothing else does; several outcomes may have the same.
        self.unseen: Unseen | None = None

    @property
    def may_have_others(self) -> bool:
        """Whether more may have failed in its execution."""
        return self._frame is not None and self._frame.others is not None

    def to_raise(self) -> BaseException:
        if self.unseen is not None:
            self.unseen.got = True
        if isinstance(self.error, ConstructorError) and (runtime := context.running()) is not None:
            runtime.process.sweeper.known_failures.append(constructor_failure(self.error))
        if self._again is None:
            self.error = completed(self.error)
            if type(self.error) is SessionEndedError:
                return ending.ended()
            return copy_to_raise(self.error)
        error = self._again()
        for other in (self._frame and self._frame.others) or ():
            add_sibling(error, other)
        return error


def failure_of(outcome: Any) -> BaseException | None:
    """Return the error, if ``outcome`` is one."""
    return outcome.error if type(outcome) is Failure else None


class DeferredValue:
    """Received value of a ref as an argument, for a value that refers to other refs, or is kept elsewhere
    for this one. It is encoded later; until then the ref may be garbage to everybody else."""

    __slots__ = ("ref", "snapshot")

    def __init__(self, ref: Any, snapshot: _core.Snapshot) -> None:
        self.ref = ref
        self.snapshot = snapshot

    def __reduce__(self) -> Any:
        return same, (self.snapshot,)


def same(value: Any) -> Any:
    """Return ``value``: a pickle calls this to put one object in the place of another."""
    return value


class Placed:
    """Mixin of refs that tells where the value is. All of its methods wait until the value is there."""

    __slots__ = ()

    def route(self) -> str:
        """Return how this process gets the value, which is waited for:

        - ``"frame"``: it came with the ref;
        - ``"here"``: it has stayed, in this very process;
        - ``"read"``: it has stayed elsewhere, and is read there;
        - ``"network"``: it has stayed on another node, which sends its memory;
        - ``"ipc"``: it has tensors of a device, whose memory is opened;
        - ``"host"``: such tensors come by way of the host's memory, since this process does not see the
        device;
        - the name of a user's transport;
        - ``"lost"``: it had stayed with a process that is dead.
        """
        found: str = listing.route_of(self)
        return found

    def tensor_transport(self) -> str | None:
        """Return the transport with which the value has stayed where it was made; ``None``: it came with the
        ref. Waits until the value is there."""
        found: str | None = listing.transport_of(self)
        return found

    def value_id(self) -> str | None:
        """Return the ``id`` of the value among :func:`conveyor.objects`; ``None``: it came with the ref.
        Refs that name the same value have the same id. Waits until the value is there."""
        found: str | None = listing.value_id_of(self)
        return found


def may_need_fetch(ref: Any) -> bool:
    """Whether something of the value of a ref that is done may have to be fetched."""
    outcome = ref._resolved_now()
    if outcome is _core.EMPTY:
        outcome = ref._resolved(None)
    return type(outcome) is _core.Snapshot and (outcome.codec == DIRECT or outcome.keeps)


def located(sent: Any) -> Located | None:
    """Return the place of a value that has stayed where it was made, from the object that is sent for it.
    ``None`` for any other."""
    if type(sent) is Unfetched:
        return sent.where
    snapshot = sent.snapshot if type(sent) is DeferredValue else sent
    if type(snapshot) is not _core.Snapshot or not snapshot.keeps or snapshot.codec != DIRECT:
        return None
    return Located.unpack(snapshot.meta)


def shared_at(sent: Any) -> tuple[int, int] | None:
    """Return slot and incarnation of the process that a value has stayed in, from the object that is sent
    for it. ``None`` for any other, and for a snapshot, which nobody writes to."""
    if type(sent) is Unfetched:
        where = sent.where
        return None if where.snapshot else (where.slot, where.incarnation)
    snapshot = sent.snapshot if type(sent) is DeferredValue else sent
    return snapshot.shared_at if type(snapshot) is _core.Snapshot else None


def usable_remotely(sent: Any) -> bool:
    """Whether ``sent`` is as good on another node: it keeps nothing, or a value of which all can be fetched
    from there."""
    snapshot = sent.snapshot if type(sent) is DeferredValue else sent
    if type(snapshot) is _core.Snapshot and not snapshot.keeps:
        return True
    if type(sent) is not Unfetched and type(snapshot) is not _core.Snapshot:
        return True
    where = located(sent)
    return where is not None and not where.out_of_band


if TYPE_CHECKING:
    from concurrent.futures import Future
    from typing import Generic

    class _RefCore(_core.RefCore, Generic[ValueT]): ...

else:
    # For hints: concurrent.futures is slow to import.
    Future = type("Future", (), {"__class_getitem__": classmethod(GenericAlias)})
    # A native class has one base only, which this is where it stands for one.
    _RefCore = GenericAlias(_core.RefCore, ValueT)

_RefT = TypeVar("_RefT", bound="Ref[Any]")

EMPTY = _core.EMPTY
_CANCELLED = _core.CANCELLED
_OVERDUE = _core.OVERDUE
ErrorFrame = _core.ErrorFrame
_Snapshot = _core.Snapshot


class Source(Protocol):
    """Source of a ref's result: a graph, or a caller's link to an actor."""

    @property
    def window(self) -> _core.InFlightWindow:
        """InFlightWindow that results are taken out of; ``None`` where they are there from the beginning."""
        ...

    @property
    def cancel_with_await(self) -> bool:
        """Whether the result is cancelled with the last task that awaits it."""
        ...

    @property
    def get_timeout(self) -> float | None:
        """Seconds that ``get`` waits where it is not said; ``None``: as long as it takes."""
        ...

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        """Wait for the result, and return it as the window gave it; raises what ended the wait instead. The
        slow path. ``EMPTY`` if the ref may have got its outcome meanwhile in another way: look again."""
        ...

    def is_ready(self, ref: Ref) -> bool:
        """Whether ``get`` would return (or raise) without waiting."""
        ...

    def has_failed(self, ref: Ref) -> bool:
        """Whether an error has come for ``ref``, as far as can be told without decoding it."""
        ...

    def cancel(self, ref: Ref) -> bool:
        """Cancel the execution or call of ``ref``, which is not done. False if that cannot be."""
        ...

    def why_not_run(self, ref: Ref, overdue: bool) -> BaseException:
        """Make the error of work that was not run: it was cancelled, or its deadline had passed."""
        ...

    def blockers(self, ref: Ref, question: int, again: Again | None = None) -> Blockers | None:
        """Return who has to do something before ``ref``, which is not done, is; see
        ``runtime.wait_graph``."""
        ...

    def describe(self, ref: Ref) -> str: ...

    def doing(self) -> str:
        """Describe what the processes that make the result are doing now."""
        ...


class Ref(_RefCore[ValueT], Placed):
    """The result of one execution or call, which may not be there yet; ``Ref[int]`` gives an ``int``.

    It can be got any number of times, awaited, and waited for together with others
    (:func:`conveyor.wait`). It keeps what has come as it came, and every ``get`` gives a value of its
    own. Dropping it costs nothing and blocks nothing.
    """

    # What is taken from the channel at once is got in the native part; see ``RefCore.get``.
    __slots__ = ()
    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        drop_picklers()  # reducers go by the exact type

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a reference is neither true nor false, its value may be: get the value first, with "
            "conveyor.get(ref), or in a coroutine await ref; `ref is None` tells whether there is one"
        )

    def __init__(self, source: Source, number: int, reader: int = 0) -> None:
        super().__init__(source, source.window, number, reader)

    if TYPE_CHECKING:

        def get(self, timeout: float | None = None) -> ValueT:
            """The result; waits for it.

            timeout: seconds (``None`` or -1: no limit). Raises ``WaitTimeoutError`` when it is over,
            and then can be tried again; ``TaskError`` (also an instance of the user's exception) if
            the method raised; ``ActorDiedError`` if an actor it needs is gone.
            """

    def done(self) -> bool:
        """Whether ``get`` would return at once."""
        if self._outcome is not EMPTY or self._source.is_ready(self):
            return True
        # Another thread may have taken it from the source meanwhile.
        return self._outcome is not EMPTY

    def fileno(self) -> int:
        """A descriptor that polls readable once the ref is done: for ``select``, ``poll``, ``epoll``
        and event loops other than asyncio.

        It is made when it is first asked for and closed when the ref is garbage; neither read nor
        close it.
        """
        return context.current().watcher.fileno(self)

    def future(self) -> Future[ValueT]:
        """A ``concurrent.futures.Future`` of the result. Its callbacks run on a thread of the library's, one
        after the other; its ``cancel`` is :meth:`cancel`."""
        made: Future[ValueT] = future.future_of(self)
        return made

    def cancel(self) -> bool:
        """Cancel the execution, or the call, that this is a result of. False if it is done already.

        From now on every ref of the execution that has not been got raises
        ``ExecutionCancelledError``. Tasks that have not begun are skipped, a coroutine that runs is
        cancelled; a method that runs is not interrupted, but nobody hears of what it returns.
        """
        return not self.done() and self._source.cancel(self)

    def cancelled(self) -> bool:
        """Whether ``get`` raises because of a :meth:`cancel`."""
        outcome = self._outcome
        if type(outcome) is not Failure:
            return False
        return isinstance(outcome.error, exceptions.ExecutionCancelledError)

    def has_failed(self) -> bool:
        """Whether ``get`` would raise at once, as far as can be told without decoding anything."""
        if self._outcome is EMPTY:
            failed: bool = self._source.has_failed(self)
            # Else another thread has taken it from the source meanwhile.
            if self._outcome is EMPTY:
                return failed
        return type(self._outcome) is Failure

    def parts(self) -> tuple[Ref, ...]:
        """The refs that this one's result is made of: itself, where it comes from one channel."""
        return (self,)

    def _latest_try(self) -> Ref:
        """Return the ref of the last try of a call that is made again if it fails; itself for others."""
        return self

    def _resolved(self, timeout: float | None) -> Any:
        """Wait for the outcome, as by ``get``, and return it as it is kept."""
        timeout = check_timeout(timeout)
        outcome = self._outcome
        return self._resolve(timeout) if outcome is EMPTY else outcome

    def _unfetched(self) -> Any:
        """Return the value, which is there, with ``Unfetched`` in the place of each part that has stayed
        elsewhere."""
        return self._value_of(self._resolved(None), False)

    def _get(self, timeout: float | None) -> Any:
        __tracebackhide__ = True  # by pytest
        try:
            if self._is_received():
                return self._received(timeout)
            return self._value_of(self._resolved(timeout), True)
        except Exception as error:
            raise trimmed(error)  # noqa: B904

    def _value_of(self, outcome: Any, fetches: bool) -> Any:
        if type(outcome) is Failure:
            raise self._error_of(outcome)
        if type(outcome) is not _Snapshot:
            return outcome
        self._hold(outcome)
        return outcome.decode(fetches)

    def _is_received(self) -> bool:
        """Whether ``get`` gives its value in memory that was named before (``set_target_for_ref``)."""
        return self._targets is not None and not passing_on()

    def _received(self, timeout: float | None) -> Any:
        return into.receive_set(self, self._targets, timeout)

    def _error_of(self, outcome: Failure) -> BaseException:
        if outcome.may_have_others:
            self._window.hear()
        return outcome.to_raise()

    def _hold(self, snapshot: _core.Snapshot) -> None:
        # What the value refers to must be there whenever it is decoded.
        if snapshot.has_refs and self._inner is None:
            self._inner = borrows.take(snapshot.meta)

    def to_send(self) -> Any:
        """Return the object to send for this ref, which is done: its value, or the frame of the value.
        Raises as ``get``."""
        outcome = self._resolved_now()
        if outcome is EMPTY:
            outcome = self._resolve(None)
        if type(outcome) is Failure:
            raise self._error_of(outcome)
        if type(outcome) is _Snapshot and outcome.has_refs:
            self._hold(outcome)
            return DeferredValue(self, outcome)
        return outcome

    def _resolve(self, timeout: float | None) -> Any:
        if timeout is None:
            timeout = self._source.get_timeout
        # One thread takes the result out of the channel; others who want it wait for that one. Who has the
        # borrow is told by an object of its own: a signal handler may raise before it is known here.
        by = object()
        try:
            if not self._begin_resolve(by):
                timeout = self._wait_for_others(by, timeout)
            while self._outcome is EMPTY:
                try:
                    value = self._source.wait_for(self, timeout)
                    # It may have been cancelled just now.
                    if value is not EMPTY and self._outcome is EMPTY:
                        self._arrived(value)
                except (SerializationError, _Final) as ended:
                    if self._outcome is EMPTY:
                        self._fail(ended.error if isinstance(ended, _Final) else ended)
            return self._outcome
        finally:
            if self._end_resolve(by) and (runtime := context.running()) is not None:
                runtime.process.notify()

    def _wait_for_others(self, by: object, timeout: float | None) -> float | None:
        """Wait until the outcome is here, or this thread may resolve the ref. Returns what is left of the
        timeout."""
        time_limit = TimeLimit(timeout)
        runtime = context.running()
        if runtime is None:  # the session has ended, and none begins because of its refs
            raise ending.ended()
        ask = partial(blockers_of, self)
        with runtime.wait_registry.waiting(ask, True, time_limit.bounded) as wait:
            wait_within(
                runtime.inbox,
                lambda: self._outcome is not EMPTY or self._begin_resolve(by),
                time_limit,
                lambda: self._source.describe(self),
                lambda: "another thread of this process is getting it",
                wait,
            )
        return time_limit.left()

    def _arrived(self, value: Any) -> None:
        """Set the outcome to a value that came out of the channel, as it is kept."""
        if type(value) is ErrorFrame:
            meta = value.meta
            if meta in (_CANCELLED, _OVERDUE):
                value = Failure(self._source.why_not_run(self, meta == _OVERDUE))
            else:
                value = Failure(decode_error(meta), partial(decode_error, meta), value)
        if self._outcome is EMPTY:  # else it was cancelled meanwhile
            self._outcome = value

    def _fail(self, error: BaseException, again: Callable[[], BaseException] | None = None) -> None:
        """Set the outcome to ``error``; ``again()`` makes another one like it."""
        self._outcome = Failure(error, again)

    def __await__(self) -> Generator[Any, None, ValueT]:
        __tracebackhide__ = True  # by pytest
        if not self.done():
            ask = partial(blockers_of, self)
            awaited = asyncio_waits().wait_or_cancel(
                self.done, ask, self._awaited_as(), self._abandon
            )
            yield from awaited.__await__()
        if may_need_fetch(self):
            return cast("ValueT", (yield from fetching.when_there(self.get).__await__()))
        return self.get()

    def _awaited_as(self) -> Hashable:
        """Return a key that is the same for all refs that are cancelled together."""
        return id(self)

    def _abandon(self) -> None:
        """Cancel the execution or call where the source wants it: the last task that awaited this has been
        cancelled."""
        if self._source.cancel_with_await:
            self.cancel()

    def __reduce__(self) -> Any:
        done = imports.reduce_done(self)
        if done is not None:
            return done
        made = self.new_borrow(())
        borrows.confirm([made])
        return imports.load_pickled, made

    def new_borrow(self, readers: Sequence[Reader]) -> tuple[Any, ...]:
        """Make the borrow that this ref is loaded with, once by each of ``readers``. Empty: by one unknown
        reader."""
        borrow: tuple[Any, ...] = imports.new_borrow(self, readers)
        return borrow

    def hex(self) -> str:
        """Return a name of the ref, which no other one of the session has but its copies in other
        processes."""
        process, number = context.current().exports.name(self)
        return f"{process:08x}{number:016x}"

    def __getitem__(self, index: Any) -> Ref[Any]:
        """Return a ref to ``value[index]``, a part of the value. Of an array or a tensor that has stayed on
        its actor only the part is fetched."""
        part: Ref[Any] = PartRef(self, index)
        return part

    #: It has parts, and is no sequence of them.
    __iter__: Any = None

    def __copy__(self: _RefT) -> _RefT:
        return self

    def __deepcopy__(self: _RefT, memo: dict[int, Any]) -> _RefT:
        return self

    def __repr__(self) -> str:
        try:
            state = "done" if self.done() else "pending"
        except Exception:  # of an earlier session, or of a forked child's parent
            state = "pending"
        return f"<{type(self).__name__} {self._source.describe(self)}, {state}>"


def _refuse_operators(cls: type[Ref]) -> None:
    """Let arithmetic and comparisons of references raise with a hint. Type checkers see no such operators."""

    def operator(sign: str) -> Callable[..., NoReturn]:
        def refuse(self: Ref, *others: Any) -> NoReturn:
            raise TypeError(
                f"{sign} is not for references, which stand for values: get the value first, with "
                "conveyor.get(ref), or in a coroutine await ref"
            )

        return refuse

    binary = {"add": "+", "sub": "-", "mul": "*", "matmul": "@", "truediv": "/", "floordiv": "//"}
    binary |= {"mod": "%", "pow": "**", "lshift": "<<", "rshift": ">>", "and": "&", "or": "|"}
    binary["xor"] = "^"
    for name, sign in binary.items():
        for form in (f"__{name}__", f"__r{name}__"):
            setattr(cls, form, operator(sign))
    others = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neg": "-", "pos": "+", "invert": "~"}
    for name, sign in others.items():
        setattr(cls, f"__{name}__", operator(sign))


_refuse_operators(Ref)


def asyncio_waits() -> ModuleType:
    """Import ``runtime.aio``: the import of asyncio is slow, and rarely needed."""
    try:
        aio = import_later("conveyor.runtime.aio")
    except OSError:  # no descriptor was left to read it with
        with explained("await anything in this event loop"):
            raise
    return aio


def blockers_of(ref: Ref, question: int, again: Again | None = None) -> Blockers | None:
    """Return who has to do something before ``ref`` is done; nobody, if it is. See ``runtime.wait_graph``."""
    for part in ref.parts():
        if not part.done():
            source: Source = part._source
            return source.blockers(part, question, again)
    return ()


class _Final(Exception):
    """Raised with an error that is the ref's outcome, now and for ever (an actor died, say)."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def final(error: BaseException) -> Exception:
    """Wrap ``error`` so that the ref keeps it as its outcome."""
    return _Final(error)


def cancelled_error(what: str) -> BaseException:
    """Make the error for whoever wants the result of ``what``."""
    return exceptions.ExecutionCancelledError(f"{what} was cancelled")


class DerivedRef(Ref):
    """A ref that is resolved as ``whole`` is, and gives what ``_unfetched`` makes of its value."""

    __slots__ = ("_whole",)

    def __init__(self, whole: Ref) -> None:
        super().__init__(whole._source, -1)
        self._whole = whole

    def get(self, timeout: float | None = None) -> Any:
        return _core.with_fetch_limit(timeout, self._got, timeout)

    def _got(self, timeout: float | None) -> Any:
        raise NotImplementedError

    def _unfetched(self) -> Any:
        raise NotImplementedError

    def to_send(self) -> Any:
        self._resolved(None)
        value = self._unfetched()
        if isinstance(value, direct.Unfetched):  # whoever gets it fetches it
            return value.with_holder(self._whole)
        return Itself.of(value)

    def _resolved(self, timeout: float | None) -> Any:
        return self._whole._resolved(timeout)

    def _resolved_now(self) -> Any:
        return self._whole._resolved_now()

    def done(self) -> bool:
        return self._whole.done()

    def has_failed(self) -> bool:
        return self._whole.has_failed()

    def cancel(self) -> bool:
        return self._whole.cancel()

    def cancelled(self) -> bool:
        return self._whole.cancelled()

    def _awaited_as(self) -> Hashable:
        return self._whole._awaited_as()


class Itself:
    """A ref that, as an argument, does not stand for its value."""

    __slots__ = ("_ref",)

    def __init__(self, ref: Ref) -> None:
        self._ref = ref

    @classmethod
    def of(cls, value: Any) -> Any:
        """``value``, to be an argument as it is."""
        return cls(value) if isinstance(value, Ref) else value

    def __reduce__(self) -> Any:
        return same, (self._ref,)


def _unshared(index: Any) -> Any:
    """``index``, or a copy where it is a list or an array."""
    if isinstance(index, (int, str, slice)):
        return index
    is_fixed = isinstance(index, Hashable) and not hasattr(index, "__array__")
    return index if is_fixed else copy.deepcopy(index)


class PartRef(DerivedRef):
    """``ref[index]``: of an array or a tensor that has stayed where it was made, only the part is fetched."""

    __slots__ = ("_index",)

    def __init__(self, whole: Ref, index: Any) -> None:
        super().__init__(whole)
        # It is looked at later, and lists and arrays may be changed until then.
        several = index if isinstance(index, tuple) else (index,)
        self._index = tuple([_unshared(one) for one in several])

    def _got(self, timeout: float | None) -> Any:
        if self._is_received():
            return self._received(timeout)
        self._resolved(timeout)  # before: who waits may be doing something else meanwhile
        value = self._whole._unfetched()
        if isinstance(value, direct.Unfetched):
            return value.part(self._index)
        return self._of(value)

    def _unfetched(self) -> Any:
        value = self._whole._unfetched()
        if isinstance(value, direct.Unfetched):
            part = value.where_part(self._index)
            if part is not None:
                return value.moved(part)
            value = value.fetch()
        return self._of(value)

    def _of(self, value: Any) -> Any:
        index = self._index
        return value[index[0] if len(index) == 1 else index]

    def __repr__(self) -> str:
        return f"<PartRef {self._index!r} of {self._whole!r}>"

    def parts(self) -> tuple[Ref, ...]:
        return self._whole.parts()


class DeferredRef(DerivedRef):
    """Stands in the place of ``whole`` among the arguments of a call."""

    __slots__ = ()

    def to_send(self) -> Any:
        sent = self._whole.to_send()
        return sent if located(sent) is None else _Deferred(sent)

    def get(self, timeout: float | None = None) -> Any:
        return self._whole.get(timeout)

    def _unfetched(self) -> Any:
        return self._whole._unfetched()

    def parts(self) -> tuple[Ref, ...]:
        return self._whole.parts()


class _Deferred:
    """Value to send for a ref whose value has stayed elsewhere."""

    __slots__ = ("sent",)

    def __init__(self, sent: Any) -> None:
        self.sent = sent


class DeferredArgument:
    """Argument that has not been fetched. It keeps the value until :meth:`fetched`.

    value: the stand-in for the value.
    """

    __slots__ = ("_frame", "value")

    def __init__(self, meta: bytes, frame: Any) -> None:
        self.value = Unfetched(meta, decode)
        self._frame = frame

    def fetched(self) -> None:
        """Let go of the value: it is needed no more."""
        self._frame = None


def _make_reducers(notes: dict[Any, Any]) -> dict[type, Any]:
    def reduce(deferred: _Deferred) -> Any:
        sent = notes.get(SENT)
        what = deferred.sent
        if sent is None or sent.in_band or (sent.is_remote() and not usable_remotely(what)):
            return same, (what,)  # nobody would keep it, or its readers cannot get all of it
        # The object that keeps the value, where the frame does not do so by itself.
        if type(what) is Unfetched:
            holder, meta = what._holder, what.meta
        elif type(what) is DeferredValue:
            holder, meta = what.ref, what.snapshot.meta
        else:
            assert type(what) is _core.Snapshot
            holder, meta = what, what.meta
        keep_out_of_band(notes, holder)
        # Memory of the frame: who has it, has the frame.
        return DeferredArgument, (meta, PickleBuffer(bytes(8)))

    return {_Deferred: reduce}


add_reducers(_make_reducers)


def elements_of(whole: Ref, count: int) -> Any:
    """Return the refs of ``count`` results: ``whole`` itself, where there is one."""
    return whole if count == 1 else [ElementRef(whole, i) for i in range(count)]


class ElementRef(DerivedRef):
    """Ref of one of several results."""

    __slots__ = ("_index",)

    def __init__(self, whole: Ref, index: int) -> None:
        super().__init__(whole)
        self._index = index

    def _got(self, timeout: float | None) -> Any:
        if self._is_received():
            return self._received(timeout)
        self._resolved(timeout)  # before: who waits may be doing something else meanwhile
        return direct.fetched(self._unfetched())

    def _unfetched(self) -> Any:
        return self._whole._unfetched()[self._index]

    def parts(self) -> tuple[Ref, ...]:
        return (self._whole,)

    def __repr__(self) -> str:
        return f"<ElementRef {self._index} of {self._whole!r}>"
