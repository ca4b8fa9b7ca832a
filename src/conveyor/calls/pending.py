"""Calls that could not be sent at once: their arguments with the refs among them, and how they are sent."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from conveyor import _core
from conveyor.calls.call import (
    ASYNC_FUNCTION,
    FUNCTION,
    OPEN_FUNCTION,
    START,
    Call,
    with_arguments,
)
from conveyor.codec import SentDefinitions, borrows
from conveyor.codec.frames import encode
from conveyor.codec.pickling.definitions import entry_of
from conveyor.exceptions import SerializationError
from conveyor.refs import values
from conveyor.refs.ref import Ref, Source, located, shared_at
from conveyor.runtime import threads
from conveyor.runtime.process import Process
from conveyor.user_frames import Site, users_site

_CONSTANTS = frozenset((type(None), bool, int, float, complex, str, bytes))

#: Where a call has a function or a class among its arguments. A link defines it once, and not in each frame.
_DEFINED = {FUNCTION: 0, ASYNC_FUNCTION: 0, OPEN_FUNCTION: 1, START: 0}


def is_constant(value: Any) -> bool:
    """Whether nobody can change ``value``."""
    kind = type(value)
    return kind in _CONSTANTS or (kind is tuple and all(map(is_constant, value)))


def _is_fixed(argument: Any) -> bool:
    return isinstance(argument, Ref) or is_constant(argument)


class Taken(Struct, frozen=True):
    """The arguments of one call, encoded when the call was made.

    keys: positions and names of the arguments that come later: refs, which stand for their values, and
        definitions.
    inner: the refs inside of the other arguments.
    """

    frame: _core.Snapshot
    keys: tuple[int | str, ...]
    inner: Sequence[Any]

    def with_later(self, call: Call) -> Any:
        """Return what is sent for ``call``, whose arguments are those that have come later."""
        return _Filled(self, call[1]) if self.keys else self.frame


class _Filled:
    """Arrives as the call with all its arguments."""

    __slots__ = ("taken", "values")

    def __init__(self, taken: Taken, values: tuple[Any, ...]) -> None:
        self.taken = taken
        self.values = values

    def __reduce__(self) -> Any:
        return _fill, (self.taken.frame, self.taken.keys, self.values)


def _fill(call: Call, keys: tuple[int | str, ...], values: tuple[Any, ...]) -> Call:
    args, kwargs = list(call[1]), dict(call[2] or {})
    for key, value in zip(keys, values, strict=True):
        if isinstance(key, int):
            args[key] = value
        else:
            kwargs[key] = value
    return with_arguments(call, tuple(args), kwargs)


def take(call: Call) -> tuple[Call, Taken | None]:
    """Take the arguments of ``call`` as they are now. Returns the call with those that come later, and the
    rest; ``None``: nobody can change the rest, and the call has it as it was.

    Raises what keeps them from being encoded.
    """
    name, args, kwargs, result_spec, what = call
    defined = _DEFINED.get(what)
    if defined is not None and entry_of(args[defined]) is None:
        encode(args[defined], SentDefinitions())  # it is as it is now, whenever it is sent
    elif not kwargs and all(map(_is_fixed, args)):
        return call, None
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs or {})
    later = {k: v for k, v in given.items() if isinstance(v, Ref) or k == defined}
    if all(k in later or is_constant(v) for k, v in given.items()):
        return call, None
    rest = tuple([None if i in later else arg for i, arg in enumerate(args)])
    named = {k: None if k in later else v for k, v in (kwargs or {}).items()}
    frame = _core.Snapshot((name, rest, named or None, result_spec, what), SentDefinitions())
    inner = borrows.take(frame.meta) if frame.has_refs else ()
    waiting: Call = name, tuple(later.values()), None, result_spec, what
    return waiting, Taken(frame, tuple(later), inner)


def take_result(result: Any) -> tuple[_core.Snapshot, Sequence[Any]]:
    """Take a result that has to wait while others may change it. Returns what is sent in its place, and what
    is to be held until then."""
    frame = _core.Snapshot(result, SentDefinitions())
    return frame, borrows.take(frame.meta) if frame.has_refs else ()


def lacked(call: Call) -> Ref | None:
    """Return the first ref among the arguments that is not done, or whose result some thread is just taking.
    The sender has the link's lock, for which that thread may wait."""
    args, kwargs = call[1], call[2]
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Ref) and not values.at_hand(value):
            return value
    return None


def await_soon(first: Ref | None, seconds: float) -> None:
    """Wait a little for an argument that a call lacks. It spares what a possibly long wait costs: to
    prepare, be described, and take part in finding deadlocks. That costs more than most arguments take to
    come."""
    if first is None:
        return
    window: _core.InFlightWindow | None = first._window
    if window is not None and first._number >= 0:
        window.await_ready(first, seconds)


def with_values(
    call: Call, actor: tuple[int, int], process: Process, site: Site | None = None
) -> Call:
    """``call`` of ``actor``, with the values of its refs, which are done. ``site``: the line that has made
    it, if that is not the one that the thread is in. Raises ``RefFailed``."""
    args, kwargs = values.with_values(
        call[1], call[2], on_other_node=process.may_be_remote(actor[0])
    )
    for given, sent in zip(call[1], args, strict=True):
        if sent is not given:
            _warn_of_sharing(given, sent, actor, site)
    for key, given in (call[2] or {}).items():
        if kwargs[key] is not given:
            _warn_of_sharing(given, kwargs[key], actor, site)
    return with_arguments(call, args, kwargs)


#: To whom a value that has stayed where it was made was passed: the actor that has it, and another one.
_OWN, _OTHER = 1, 2


def _warn_of_sharing(ref: Ref, sent: object, actor: tuple[int, int], site: Site | None) -> None:
    """Warn, once, where a value is passed both to the actor that has it, which gets the very object, and
    to another one, which gets what is in it then."""
    holder = shared_at(sent)
    if holder is None:
        return
    before = ref._passed
    ref._passed = passed = before | (_OWN if holder == actor else _OTHER)
    if passed == _OWN | _OTHER != before:
        where = located(sent)
        assert where is not None
        # It names no ref: Python keeps each text of a warning for ever.
        (site or users_site()).warn(
            f"a value is being passed back to the actor that created it, {where.holder}, and to another one "
            f"as well. Its tensors and arrays have stayed there: what {where.holder} writes to them is seen "
            "by whoever fetches them afterwards. Write to a copy, or wait with "
            "conveyor.experimental.wait_tensor_freed"
        )


def outcome_of(error: BaseException) -> BaseException:
    """Return the error that the ref of a call raises if its arguments could not be sent. Errors that would
    interrupt or end the process are replaced, for whoever asks for the result."""
    if isinstance(error, values.RefFailed):
        return error.error
    if isinstance(error, Exception):
        return error
    wrapped = SerializationError(f"the arguments cannot be sent: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


_orders = itertools.count()


class CallRef(Ref):
    """The result of an actor call."""

    __slots__ = ("method", "order", "passes_on")

    #: The place of one that waits at its caller, among all that do.
    order: int
    #: Whether its arguments have come by refs: it takes their place (``_core.Arena.note_given``).
    passes_on: bool

    def __init__(self, source: Source, number: int, method: str) -> None:
        super().__init__(source, number)
        self.method = method

    @classmethod
    def waiting(cls, source: Source, method: str) -> CallRef:
        """Return that of a call that waits at its caller."""
        ref = cls(source, -1, method)
        ref.order = next(_orders)
        ref.passes_on = False
        return ref


class WaitingCall(Struct, eq=False):
    """Call that waits to be sent.

    ref: its result. call: with the arguments that come later. taken: the other ones. site: the line that has
    made it, as long as refs among its arguments stand for their values. again: whether it comes before all
    that are called from now on. sending: whether a thread is in the middle of sending it.
    """

    ref: CallRef
    call: Call
    taken: Taken | None = None
    site: Site | None = None
    again: bool = False
    sending: bool = False

    def become(self, ref: CallRef, call: Call, taken: Taken | None = None) -> None:
        """Have ``call``, which lacks nothing, be sent in the place of this one."""
        _let_go = self.call, self.taken, self.site, self.ref  # which may run any code: afterwards
        self.call, self.taken, self.site, self.ref = call, taken, None, ref


class WaitingCalls(deque[WaitingCall]):
    """The calls of one link, in the order in which they are to be sent.

    Code of an argument that is being sent, of signal handlers and of finalizers may change it at any time, on
    the thread that has the link's lock: so it is changed in single steps, and nobody iterates over it.
    """

    #: So many at the front come before all that are called from now on.
    _first = 0

    def put(self, entry: WaitingCall, again: bool) -> None:
        """Add a call. ``again``: it is made again, and comes before all that wait, but for others of its
        kind and the actor's constructor. Some of these calls may lack just that call's result."""
        if not again:
            self.append(entry)
            return
        entry.again = True
        if not self._first and self and self[0].call[4] == START:
            self[0].again = True
            self._first = 1
        self.insert(self._first, entry)
        self._first += 1

    def take_out(self, entry: WaitingCall) -> bool:
        """Remove a call, which waits no more. Whether it has waited."""
        try:
            self.remove(entry)
        except ValueError:
            return False
        self._first -= entry.again
        return True

    def find(self, ref: Ref) -> WaitingCall | None:
        """Return the call of ``ref``."""
        return next((one for one in list(self) if one.ref is ref), None)

    def first(self) -> WaitingCall | None:
        """Return the first call that nobody is in the middle of sending. None overtakes a constructor."""
        try:
            first = self[0]
        except IndexError:
            return None
        if not first.sending:
            return first
        if first.call[4] == START:
            return None
        return next((one for one in list(self) if not one.sending), None)


def first_lacked(waiting: WaitingCalls) -> Ref | None:
    """Return the argument that the first waiting call lacks, if it lacks one."""
    first = waiting.first()
    return None if first is None or first.site is None else lacked(first.call)


def lacked_now(waiting: WaitingCalls, lock: threading.RLock) -> Ref | None:
    """Like :func:`first_lacked`, without waiting for ``lock``: the thread that has it may wait itself.
    ``None`` then."""
    if not lock.acquire(blocking=False):
        return None
    try:
        return first_lacked(waiting)
    finally:
        lock.release()


def withdraw(waiting: WaitingCalls, ref: Ref) -> bool:
    """Whether the call of ``ref`` was waiting, and does no longer."""
    entry = waiting.find(ref)
    return entry is not None and waiting.take_out(entry)


@runtime_checkable
class Pending(Protocol):
    """Sender that has calls waiting to be sent."""

    actor_name: str

    @property
    def has_pending(self) -> bool: ...

    def flush(self) -> bool: ...

    def lacks(self) -> Ref | None:
        """Return the argument that the first waiting call lacks; nothing, if it lacks none."""

    def does(self) -> str:
        """Describe what the actor is doing."""


class Pump:
    """Sends calls that could not be sent at once: an argument was not there, or the mailbox was full.

    A thread that waits for the result of such a call sends it, and what waits before it. One thread of the
    pump's, which is there from the first such call on, sends where nobody waits, and sleeps otherwise.
    """

    def __init__(self, inbox: _core.Inbox) -> None:
        self._wait = _core.PumpWait(inbox)
        #: Reentrant: a signal handler may end the session in the middle of :meth:`add`.
        self.lock = threading.RLock()
        #: By what the native part calls them. It is changed in single steps, without the lock: who sends
        #: holds his own lock, and must wait for nobody.
        self._senders: dict[int, Pending] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, sender: Pending) -> None:
        """Note that ``sender`` has calls that wait. Afterwards the sender itself sends once more all that it
        can send by now.

        Raises:
            SystemLimitError: no thread is to be had, and the calls might wait for ever.
        """
        with self.lock:
            if self._thread is None and not self._closed:
                self._wait.open()
                threads.serve(self._run, "pump")
        self._note(sender)

    def knows(self, sender: Pending) -> bool:
        """Whether the pump sends the calls that wait in ``sender``."""
        return id(sender) in self._senders

    def sent(self, sender: Pending) -> None:
        """Note that no call of ``sender`` waits any more."""
        if id(sender) not in self._senders:
            return
        self._wait.end(id(sender))
        self._senders.pop(id(sender), None)
        # A signal handler's call may have been added in between.
        if sender.has_pending:
            self._note(sender)

    def attending(self, sender: Pending, does: bool) -> _core.Attending:
        """Return a context manager. If it ``does``, this thread waits in its body, and has the sender flush
        each time the inbox's doorbell has rung. That lasts until the end of the body, or until ``end`` of
        the manager is called."""
        return _core.Attending(self._wait, id(sender), does)

    def close(self) -> None:
        """Send nothing more. What the thread refers to is free when this returns."""
        with self.lock:
            self._closed = True
            thread = self._thread
        self._wait.close()
        # What it sends may run any code, also such that ends the session: then it ends when it is back.
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._wait.release()  # links that refs hold have this, too

    def _note(self, sender: Pending) -> None:
        self._senders[id(sender)] = sender
        self._wait.begin(id(sender))

    def _run(self) -> None:
        # Here, and not where it is started: a signal handler may raise there before it is noted.
        with self.lock:
            if self._thread is not None or self._closed:
                return
            self._thread = threading.current_thread()
        while self._wait.wait():
            self._flush()

    def _flush(self) -> None:
        """Send what can be sent. It is no part of the loop, whose frame would hold the last sender while the
        thread sleeps."""
        for sender in list(self._senders.values()):  # one step, whatever other threads do
            if not self._closed and sender.flush():
                self.sent(sender)
