"""Results that are on their way: what ``execute`` and ``.remote()`` return."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from functools import partial
from types import GenericAlias, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

from conveyor import _core
from conveyor.callers import trimmed
from conveyor.checks import check_timeout
from conveyor.codec import Reader, claims, decode_error, drop_picklers
from conveyor.exceptions import SerializationError
from conveyor.later import import_later
from conveyor.refs.holding import Holding
from conveyor.refs.outcome import Failure
from conveyor.refs.placed import Placed, may_have_stayed
from conveyor.runtime import context, ending
from conveyor.runtime.waiting.patience import Patience, passing_on, wait_patiently
from conveyor.runtime.waiting.works import Again, Blockers
from conveyor.system_limits import explained
from conveyor.typevars import ValueT

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
    def gate(self) -> _core.Gate:
        """Gate that results are taken out of; ``None`` where they are there from the beginning."""
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
        """Wait for the result, and return it as the gate gave it; raises what ended the wait instead. The
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

    def stopped(self, ref: Ref, overdue: bool) -> BaseException:
        """Make the error of work that was not run: it was cancelled, or its deadline had passed."""
        ...

    def blockers(self, ref: Ref, question: int, again: Again | None = None) -> Blockers | None:
        """Return who has to do something before ``ref``, which is not done, is; see ``waiting.works``."""
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
        super().__init__(source, source.gate, number, reader)

    if TYPE_CHECKING:

        def get(self, timeout: float | None = None) -> ValueT:
            """The result; waits for it.

            timeout: seconds (``None`` or -1: no limit). Raises ``WaitTimeoutError`` when it is over,
            and then can be tried again; ``TaskError`` (also an instance of the user's exception) if
            the method raised; ``ActorDiedError`` if an actor it needs is gone.
            """

    def done(self) -> bool:
        """Whether ``get`` would return at once."""
        return self._outcome is not EMPTY or self._source.is_ready(self)

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
        made: Future[ValueT] = import_later("conveyor.refs.future").future_of(self)
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
        from conveyor.exceptions import ExecutionCancelledError

        return isinstance(outcome.error, ExecutionCancelledError)

    def has_failed(self) -> bool:
        """Whether ``get`` would raise at once, as far as can be told without decoding anything."""
        outcome = self._outcome
        return type(outcome) is Failure if outcome is not EMPTY else self._source.has_failed(self)

    def parts(self) -> tuple[Ref, ...]:
        """The refs that this one's result is made of: itself, where it comes from one channel."""
        return (self,)

    def _settled(self, timeout: float | None) -> Any:
        """Wait for the outcome, as by ``get``, and return it as it is kept."""
        timeout = check_timeout(timeout)
        outcome = self._outcome
        return self._settle(timeout) if outcome is EMPTY else outcome

    def _unfetched(self) -> Any:
        """Return the value, which is there, with ``Unfetched`` in the place of each part that has stayed
        elsewhere."""
        return self._value_of(self._settled(None), False)

    def _get(self, timeout: float | None) -> Any:
        __tracebackhide__ = True  # by pytest
        try:
            if self._is_received():
                return self._received(timeout)
            return self._value_of(self._settled(timeout), True)
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
        return import_later("conveyor.direct.into").receive_set(self, self._targets, timeout)

    def _error_of(self, outcome: Failure) -> BaseException:
        if outcome.may_have_others:
            self._gate.hear()
        return outcome.to_raise()

    def _hold(self, snapshot: _core.Snapshot) -> None:
        # What the value refers to must be there whenever it is decoded.
        if snapshot.has_refs and self._inner is None:
            self._inner = claims.take(snapshot.meta)

    def to_send(self) -> Any:
        """Return the object to send for this ref, which is done: its value, or the frame of the value.
        Raises as ``get``."""
        outcome = self._settled_now()
        if outcome is EMPTY:
            outcome = self._settle(None)
        if type(outcome) is Failure:
            raise self._error_of(outcome)
        if type(outcome) is _Snapshot and outcome.has_refs:
            self._hold(outcome)
            return Holding(self, outcome)
        return outcome

    def _settle(self, timeout: float | None) -> Any:
        if timeout is None:
            timeout = self._source.get_timeout
        # One thread takes the result out of the channel; others who want it wait for that one. Who has the
        # claim is told by an object of its own: a signal handler may raise before it is known here.
        by = object()
        try:
            if not self._claim(by):
                timeout = self._wait_for_others(by, timeout)
            while self._outcome is EMPTY:
                try:
                    value = self._source.wait_for(self, timeout)
                    # It may have been cancelled just now.
                    if value is not EMPTY and self._outcome is EMPTY:
                        self._arrived(value)
                except SerializationError as error:
                    self._fail(error)
                except _Final as ended:
                    self._fail(ended.error)
            return self._outcome
        finally:
            self._unclaim(by)

    def _wait_for_others(self, by: object, timeout: float | None) -> float | None:
        """Wait until the outcome or the claim is here. Returns what is left of the timeout."""
        patience = Patience(timeout)
        runtime = context.running()
        if runtime is None:  # the session has ended, and none begins because of its refs
            raise ending.ended()
        ask = partial(blockers_of, self)
        with runtime.lanes.waiting(ask, True, patience.bounded) as wait:
            wait_patiently(
                runtime.inbox,
                lambda: self._outcome is not EMPTY or self._claim(by),
                patience,
                lambda: self._source.describe(self),
                lambda: "another thread of this process is getting it",
                wait,
            )
        return patience.left()

    def _arrived(self, value: Any) -> None:
        """Set the outcome to a value that came out of the channel, as it is kept."""
        if type(value) is ErrorFrame:
            meta = value.meta
            if meta in (_CANCELLED, _OVERDUE):
                value = Failure(self._source.stopped(self, meta == _OVERDUE))
            else:
                value = Failure(decode_error(meta), partial(decode_error, meta), value)
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
        if may_have_stayed(self):
            when_there = import_later("conveyor.direct.awaiting").when_there
            return cast("ValueT", (yield from when_there(self.get).__await__()))
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
        from conveyor.refs.pickled.imports import load_pickled, reduce_done  # above

        done = reduce_done(self)
        if done is not None:
            return done
        made = self.claim(())
        claims.confirm([made])
        return load_pickled, made

    def claim(self, readers: Sequence[Reader]) -> tuple[Any, ...]:
        """Make the claim that this ref is loaded with, once by each of ``readers``. Empty: by one unknown
        reader."""
        from conveyor.refs.pickled.imports import claim

        return claim(self, readers)

    def hex(self) -> str:
        """Return a name of the ref, which no other one of the session has but its copies in other
        processes."""
        process, number = context.current().exports.name(self)
        return f"{process:08x}{number:016x}"

    def __getitem__(self, index: Any) -> Ref[Any]:
        """Return a ref to ``value[index]``, a part of the value. Of an array or a tensor that has stayed on
        its actor only the part is fetched."""
        part: Ref[Any] = import_later("conveyor.refs.derived").PartRef(self, index)
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
    """Import ``waiting.aio``: the import of asyncio is slow, and rarely needed."""
    try:
        from conveyor.runtime.waiting import aio
    except OSError:  # no descriptor was left to read it with
        with explained("await anything in this event loop"):
            raise
    return aio


def blockers_of(ref: Ref, question: int, again: Again | None = None) -> Blockers | None:
    """Return who has to do something before ``ref`` is done; nobody, if it is. See ``waiting.works``."""
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
    from conveyor.exceptions import ExecutionCancelledError  # slow to import, and rarely needed

    return ExecutionCancelledError(f"{what} was cancelled")
