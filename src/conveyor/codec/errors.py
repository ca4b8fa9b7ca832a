"""Errors as values: a user's exception with its traceback, from the actor to the caller.

An exception is taken apart (class, arguments, state) and put together without its constructor,
which may want other arguments than ``args`` or do things that must not be done twice. Its class
travels by value if it must. What comes out is an instance of ``TaskError`` and of that class.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import errno
import functools
import os
import pickle
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard, TypeVar

import conveyor.exceptions
from conveyor import _core
from conveyor.codec.encoded import pack
from conveyor.codec.faults import is_fault, is_of_value, message_of, shown, type_name
from conveyor.codec.pickling.definitions import SentDefinitions
from conveyor.codec.pickling.pickler import dumps_by_value
from conveyor.codec.pickling.unpickler import cannot_rebuild, loads
from conveyor.exceptions import (
    ArenaFullError,
    ConstructorError,
    Held,
    OutOfMemoryError,
    SerializationError,
    TaskError,
)
from conveyor.weak import WeakKeys

if TYPE_CHECKING:
    from conveyor._core import Holding


#: Flag of a type that was made by a ``class`` statement, or may change otherwise.
_HEAP_TYPE = 1 << 9

#: Lines of the message, at most.
_LINES = 20

#: Cap of an error whose value is larger than any cap (``ArenaFull::Cap``).
_NOTHING_WOULD_DO = 0


def refused(number: int, what: str) -> Exception:
    """Make the exception for the error ``number`` of a system call; ``what`` names the call and the error."""
    if number == errno.ENOMEM:
        return OutOfMemoryError(
            f"this process has no memory, or no addresses, left for a value ({what}). Let go of values "
            "that are held, or raise its limit: of addresses (ulimit -v), of mappings "
            "(vm.max_map_count), or of its cgroup"
        )
    if number in (errno.EPROTO, errno.EFAULT):
        return SerializationError(f"{what} (was shared memory overwritten?)")
    return OSError(number, what)


def arena_full(message: str, holdings: list[Holding], cap: int) -> ArenaFullError:
    """Make the error of the cap. ``holdings``, ``cap``: as the native core has found them."""
    held = [
        Held(process, graph or None, edge if graph else None, channel, tuple(sorted(numbers)), size)
        for process, graph, edge, channel, size, numbers in holdings
    ]
    held.sort(key=lambda one: -one.bytes)
    lines = [_line(one) for one in held[:_LINES]]
    if len(held) > _LINES:
        rest = sum(one.bytes for one in held[_LINES:])
        lines.append(f"  and {len(held) - _LINES} more channels, {in_mib(rest)}")
    if not held and cap != _NOTHING_WOULD_DO:
        lines.append(
            "Others hold their values: a program the results that it has got, or has not got yet, "
            "actors what they have received and keep"
        )
    if held or cap != _NOTHING_WOULD_DO:
        lines.append(
            "Let go of what is not needed, copy what is kept for long, or raise the cap (of a graph: "
            "memory_bytes, of the session: CONVEYOR_ARENA_BYTES). CONVEYOR_DEBUG=1 says where in the "
            "program results were got"
        )
    error = ArenaFullError("\n".join([message, *lines]), tuple(held))
    error._cap = cap
    return error


def _line(held: Held) -> str:
    what = "calls" if held.graph is None else "executions"
    count = len(held.executions)
    return (
        f"  {held.process} holds {count} value{'s' * (count != 1)} ({in_mib(held.bytes)}) of "
        f"{held.channel}: {what} {ranges(held.executions)}"
    )


def in_mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def ranges(numbers: Iterable[int], most: int = 12) -> str:
    """``0-3, 7``: numbers in order, neighbours together; ``most`` of them, then dots."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    parts = [f"{first}" if first == last else f"{first}-{last}" for first, last in found]
    return ", ".join(parts[:most] + ["..."] * (len(parts) > most))


def notes_of(error: BaseException) -> tuple[str, ...]:
    try:
        return tuple(str(note) for note in getattr(error, "__notes__", ()))
    except BaseException as failure:
        if not is_fault(failure):
            raise
        return ()


_PACKAGE = os.path.dirname(os.path.abspath(conveyor.exceptions.__file__))
# Frames of these are the way to the user's code, the same in every traceback.
_FOLDERS = ("calls", "driver", "engines", "graph", "refs", "runtime", "worker")
_OURS = tuple(os.path.join(_PACKAGE, folder, "") for folder in _FOLDERS)
_LONGEST = 100_000
_MOST_TEXTS = 128


def format_traceback(error: BaseException) -> str:
    try:
        # Looking a frame up asks the file system, so ours on the way to the user's code are not.
        users = error.__traceback__
        while users is not None and users.tb_frame.f_code.co_filename.startswith(_OURS):
            users = users.tb_next
        said = _last_line(error)
        stack = _stack_of(users) if users is not None and _is_alone(error) else None
        if stack is not None:
            text = f"Traceback (most recent call last):\n{stack}{said}"
        else:
            summary = traceback.TracebackException(type(error), error, users or error.__traceback__)
            _trim(summary, set())
            text = "".join(summary.format())
        # A message of many lines stands before the traceback already.
        first, _, rest = said.partition("\n")
        if rest.count("\n") > 1 and text.endswith(said) and not isinstance(error, SyntaxError):
            text = f"{text.removesuffix(said)}{first} [...]\n"
    except BaseException as failure:
        if not is_fault(failure):
            raise
        text = _of_it_alone(error, type(failure).__name__)
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    return text


#: Errors that have fields beside their arguments, or whose last line says more.
_WITH_MORE = (
    AttributeError,
    ImportError,
    NameError,
    OSError,
    StopIteration,
    SyntaxError,
    SystemExit,
    UnicodeError,
)
_PLAIN = frozenset(
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type)
    and issubclass(kind, BaseException)
    and not kind.__flags__ & _HEAP_TYPE  # what a program has put there
    and not issubclass(kind, _WITH_MORE)
)
_CONSTANTS = frozenset((type(None), bool, int, float, str))


def _is_plain(error: BaseException) -> bool:
    """Whether ``error``, as most, is one of Python's own and has nothing but texts and numbers."""
    kind = type(error)
    return (
        kind in _PLAIN
        and not error.__dict__
        and all(type(arg) in _CONSTANTS for arg in error.args)
        and kind not in copyreg.dispatch_table  # somebody else pickles it in his way
    )


def _last_line(error: BaseException) -> str:
    if not _is_plain(error):
        return "".join(traceback.format_exception_only(type(error), error))
    said = message_of(error)
    return f"{type(error).__name__}: {said}\n" if said else f"{type(error).__name__}\n"


def _of_it_alone(error: BaseException, failure: str) -> str:
    """Return the frames of ``error`` without those that it came from, which cannot be printed with them: a
    class of theirs fails at it, or they are too many."""
    stack = ""
    with contextlib.suppress(Exception):
        frames = traceback.extract_tb(error.__traceback__)
        users = [frame for frame in frames if not frame.filename.startswith(_OURS)]
        stack = "".join(["Traceback (most recent call last):\n", *traceback.format_list(users)])
    said = first_line(message_of(error))
    said = f"{type_name(type(error))}: {said}" if said else type_name(type(error))
    return f"{stack}{said}\n<the rest cannot be printed: {failure}>\n"


def _is_alone(error: BaseException) -> bool:
    """Whether the traceback of ``error`` tells of no other one."""
    unseen = error.__context__ is None or error.__suppress_context__
    return error.__cause__ is None and unseen and not _is_group(error)


#: The text of a frame where it stands (an instruction of its code). Making one reads the file and parses the
#: line, which was two thirds of what it cost to send an error.
_texts: dict[tuple[int, int, int], tuple[types.CodeType, str]] = {}


def _stack_of(users: types.TracebackType) -> str | None:
    """Return what ``traceback`` prints of the users' frames; ``None`` where that is more than a text for
    each of them."""
    lines: list[str] = []
    tb: types.TracebackType | None = users
    while tb is not None:
        code = tb.tb_frame.f_code
        if not code.co_filename.startswith(_OURS):
            key = (id(code), tb.tb_lasti, tb.tb_lineno)
            known = _texts.get(key)
            if known is None:
                text = "".join(traceback.extract_tb(tb, limit=1).format())
                if len(_texts) >= _MOST_TEXTS:
                    _texts.clear()
                known = _texts[key] = (code, text)
            lines.append(known[1])
        tb = tb.tb_next
    return "".join(lines) if len(lines) == len(set(lines)) else None  # repeated lines are counted


def _trim(summary: traceback.TracebackException, seen: set[int]) -> None:
    if id(summary) in seen:
        return
    seen.add(id(summary))
    users = [frame for frame in summary.stack if not frame.filename.startswith(_OURS)]
    if users:
        summary.stack = traceback.StackSummary.from_list(users)
    for other in (
        summary.__cause__,
        summary.__context__,
        *(getattr(summary, "exceptions", None) or ()),
    ):
        if other is not None:
            _trim(other, seen)


ErrorT = TypeVar("ErrorT", bound=BaseException)


#: Attribute of an error that had to be given early: a function that returns a better one, for whoever keeps
#: the error.
_LATER = "_conveyor_later"


def set_later(error: BaseException, later: Callable[[], BaseException | None]) -> None:
    """Have whoever keeps ``error`` ask ``later()``, which returns a better one once that is known."""
    error.__dict__[_LATER] = later


def completed(error: ErrorT) -> ErrorT:
    """Return ``error`` as it is known by now."""
    later = error.__dict__.get(_LATER)
    return error if later is None else (later() or error)


def copy_to_raise(error: ErrorT) -> ErrorT:
    """Copy ``error``, so that whoever keeps it can raise the copy in its place.

    A raised error refers to the frames that it passes, and they to all that their functions have. An error
    that is kept and raised would keep the streams, refs and tensors of whoever has caught it.
    """
    made = put_together(type(error), args_of(error), attributes_of(error))
    assert isinstance(made, type(error))
    made.__dict__.update(error.__dict__)  # also what does not travel with it
    made.__dict__.pop(_LATER, None)
    made.__cause__ = error.__cause__
    made.__context__ = error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made


def forms_of(error: BaseException, lost: list[str]) -> tuple[bytes, ...]:
    if _is_plain(error):
        return (pack((), pickle.dumps(error, 5)),)
    forms: list[bytes] = []
    if _has_own_reduction(type(error)):
        with contextlib.suppress(Exception):
            forms.append(dumps_by_value(error))
    try:
        forms.append(_Dissected(error).dumps())
    except Exception:
        if not forms:
            try:
                forms.append(_Dissected(error, lost).dumps())
            except Exception:  # the class itself
                lost.clear()
    return tuple(forms)


def _has_own_reduction(kind: type[BaseException]) -> bool:
    """Whether somebody wrote down how to pickle it; the built-in ways call the constructor."""
    if kind in copyreg.dispatch_table:
        return True
    for name in ("__reduce_ex__", "__reduce__", "__getstate__"):
        for owner in kind.__mro__:
            if name in owner.__dict__:
                if _is_heap_type(owner):
                    return True
                break
    return False


class _Dissected:
    """Pickles as the parts of an exception and of those that it refers to, and loads as that exception.

    Each is made with its class alone before any gets its arguments and attributes, so they may refer to each
    other, and be referred to by all that they have, in cycles. With ``lost``: parts that cannot be pickled
    are left out, and named there.
    """

    def __init__(self, error: BaseException, lost: list[str] | None = None) -> None:
        self.error = error
        self.lost = lost
        self.known: set[int] = set()  # by id: exceptions whose parts are in the pickle

    def dumps(self) -> bytes:
        return _dumps_with(self.reduce_exception, self)

    def __reduce__(self) -> Any:
        self.known.clear()  # one pickler has failed, and the next one tries
        return _same, (self.error,)

    def reduce_exception(self, error: BaseException) -> Any:
        kind = type(error)
        if _travels(error) or id(error) in self.known:
            return _reduce_bare(error)
        if self.lost is None and error is not self.error and _has_own_reduction(kind):
            reduce = copyreg.dispatch_table.get(kind)
            return error.__reduce_ex__(5) if reduce is None else reduce(error)
        # What it refers to goes with it, since pickling each within the one before would end a long chain at
        # the limit of recursion.
        self.known.add(id(error))
        found = [error]
        parts = []
        for one in found:  # grows
            args, state = self.parts_of(one)
            parts.append((one, args, state))
            for other in _exceptions_among((*args, *state.values())):
                if id(other) not in self.known:
                    self.known.add(id(other))
                    found.append(other)
        return (*_reduce_bare(error), parts, None, None, _fill_all)

    def parts_of(self, error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, state = args_of(error), attributes_of(error)
        if self.lost is None:
            return args, state
        return (
            tuple(
                arg if self.can_go(arg, f"args[{i}]") else shown(arg, longest=1000)
                for i, arg in enumerate(args)
            ),
            {name: value for name, value in state.items() if self.can_go(value, f".{name}")},
        )

    def can_go(self, value: Any, name: str) -> bool:
        assert self.lost is not None
        try:
            _dumps_with(_reduce_bare, value)
        except Exception:
            self.lost.append(name)
            return False
        return True


def _dumps_with(of_exceptions: Callable[[BaseException], Any], value: Any) -> bytes:
    sent = SentDefinitions()
    sent.of_exceptions = of_exceptions
    return dumps_by_value(value, sent)


def _same(value: Any) -> Any:
    return value


def _reduce_bare(error: BaseException) -> tuple[Callable[..., BaseException], tuple[Any, ...]]:
    """Reduce ``error`` to what its class makes of the arguments that cannot refer to it. A group takes its
    members when it is made, and never again; they cannot refer to it then."""
    if _travels(error):
        return _reduce(error)
    args = args_of(error)
    if not _is_group(error):
        args = tuple(arg if type(arg) in _CONSTANTS else None for arg in args)
    return _new, (type(error), args)


def _exceptions_among(values: Iterable[Any]) -> Iterator[BaseException]:
    for value in values:
        kind = type(value)
        inside = value.values() if kind is dict else value if kind in (list, tuple) else (value,)
        for one in inside:
            if isinstance(one, BaseException) and not _travels(one):
                yield one


def _travels(error: BaseException) -> TypeGuard[TaskError]:
    """Whether ``error`` has come from an actor, and knows how to travel on."""
    return isinstance(error, TaskError) and "_origin" in error.__dict__


def _fill_all(
    _: BaseException, parts: list[tuple[BaseException, tuple[Any, ...], dict[str, Any]]]
) -> None:
    for made, args, state in parts:
        _fill(made, args, state)


_Group: Any = getattr(builtins, "BaseExceptionGroup", None)  # since Python 3.11


def _is_group(error: Any) -> bool:
    return _Group is not None and isinstance(error, _Group)


def args_of(error: BaseException) -> tuple[Any, ...]:
    """Return the arguments to make an exception of the same class and kind with."""
    if _Group is not None and isinstance(error, _Group):
        return error.message, list(error.exceptions)
    return tuple(error.args)


#: Attributes that do not describe the exception.
_NOT_STATE = frozenset(
    {
        "__cause__",
        "__class__",
        "__context__",
        "__dict__",
        "__suppress_context__",
        "__traceback__",
        "__weakref__",
        "_frame",
        "_origin",
        "args",
    }
)
#: Fields of built-in exceptions that come with the arguments, or are not the exception's own:
#: what an attribute was looked up on is often the actor itself.
_LEFT_OUT = {(AttributeError, "obj"), (_Group, "message"), (_Group, "exceptions")}

_Field = (types.MemberDescriptorType, types.GetSetDescriptorType)


def attributes_of(error: BaseException) -> dict[str, Any]:
    """Return the state of an exception beside ``args``: fields of its C struct, slots, and ``__dict__``."""
    found: dict[str, Any] = {}
    for owner in type(error).__mro__:
        # A class that is Python's own has the same fields for ever.
        fields = _fields_of(owner) if owner.__flags__ & _HEAP_TYPE else _fields_of_own(owner)
        for name, descriptor in fields:
            try:
                value = descriptor.__get__(error)
            except Exception:  # not set
                continue
            if value is not None:
                found[name] = value
    found.update((k, v) for k, v in error.__dict__.items() if k not in _NOT_STATE)
    return found


def _fields_of(owner: type) -> list[tuple[str, Any]]:
    return [
        (name, descriptor)
        for name, descriptor in vars(owner).items()
        if isinstance(descriptor, _Field)
        and name not in _NOT_STATE
        and (owner, name) not in _LEFT_OUT
    ]


_fields_of_own = functools.cache(_fields_of)


def load_first(forms: tuple[bytes, ...]) -> tuple[BaseException | None, str]:
    """Return the exception of the first form that can be loaded, or ``None`` and why the last cannot be."""
    why = ""
    for form in forms:
        try:
            loaded = loads(form)
        except BaseException as failure:
            # SystemExit too: that an error is rebuilt must not end who asks for it.
            if not is_of_value(failure):
                raise
            known = isinstance(failure, SerializationError)
            why = str(failure) if known else cannot_rebuild(failure)
            continue
        if isinstance(loaded, BaseException):
            return loaded, ""
        why = f"it became a {type_name(type(loaded))}"
    return None, why


def put_together(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    made = _new(kind, args)
    _fill(made, args, state)
    return made


def _fill(made: BaseException, args: tuple[Any, ...], state: dict[str, Any]) -> None:
    _set_args(made, args)
    for name, value in state.items():
        for owner in type(made).__mro__:
            field = vars(owner).get(name)
            if isinstance(field, _Field):
                with contextlib.suppress(Exception):  # read-only: it came with the arguments
                    field.__set__(made, value)
                break
        else:
            made.__dict__[name] = value


# Not by assignment: a frozen dataclass, say, has a __setattr__ that refuses.
_set_args = BaseException.__dict__["args"].__set__


def _new(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An instance of ``kind`` for which none of the user's code has run."""
    # Not the first built-in class of the MRO: the one whose layout instances have.
    base: Any = kind
    while _is_heap_type(base):
        base = base.__base__
    made = base.__new__(kind, *args)
    assert isinstance(made, BaseException)
    return made


def _is_heap_type(kind: type) -> bool:
    return bool(kind.__flags__ & _HEAP_TYPE)


#: Characters of what an error says.
_MOST_TEXT = 500


def first_line(text: str) -> str:
    """The first line of what an error says; where that is not all, it says so."""
    first, _, more = text.partition("\n")
    return f"{first[:_MOST_TEXT]} [...]" if more or len(first) > _MOST_TEXT else first


def summarize_error(meta: bytes) -> str:
    """Summarize, on one line, the failure in an error that ``encode_error`` has encoded."""
    return _summary(read_error(meta))


def summary_of(error: BaseException) -> str:
    """Summarize an error on one line."""
    frame: _Frame | None = error.__dict__.get("_frame")
    if frame is not None:
        return _summary(frame)
    return f"{type(error).__name__}: {first_line(str(error))}"


def _summary(frame: _Frame) -> str:
    first = first_line(frame.message)
    text = f"{frame.type_name}: {first}" if first else frame.type_name
    where = [
        f"{kind} {name!r}" for kind, name in (("actor", frame.actor), ("node", frame.node)) if name
    ]
    return f"{text} (raised in {' and '.join(where)})" if where else text


def add_sibling(error: BaseException, meta: bytes) -> None:
    """Let ``error`` tell that the one in ``meta`` was raised in the same execution."""
    summary = summarize_error(meta)
    if isinstance(error, TaskError):
        append_to_message(error, f"also failed in this execution: {summary}")
    remote = read_error(meta).remote_traceback.rstrip("\n")
    note = f"Also failed in this execution: {summary}"
    # Not add_note(): that is new in Python 3.11, and a user's class may have one of its own.
    notes = error.__dict__.setdefault("__notes__", [])
    if isinstance(notes, list):
        notes.append(f"{note}; the traceback there:\n\n{remote}" if remote else note)


#: Characters of a text in the short form of a large error; more than a line of the log has.
_MOST_SHORT = 2000


class _Frame(NamedTuple):
    """Contents of an error frame. Only strings and bytes: reading it cannot fail."""

    type_name: str
    message: str
    actor: str
    node: str
    remote_traceback: str
    #: Pickles of the exception, the best first. The reader takes the first that it can load.
    forms: tuple[bytes, ...]
    lost: tuple[str, ...]
    notes: tuple[str, ...]
    #: Id of the failure of an actor's constructor; empty: no constructor has failed.
    constructor: bytes = b""
    #: Whether what was called had begun: it has not where its arguments, or the actor, could not be had.
    begun: bool = True


def encode_error(
    error: BaseException,
    actor: str,
    node: str,
    *,
    constructor: bool = False,
    begun: bool = True,
) -> bytes:
    """``error`` as it was caught in ``node`` of ``actor``. Never fails: where there is no memory, that
    is what it says. ``constructor``: the actor cannot be used because of it. ``begun``: see
    :func:`has_begun`.

    A ``TaskError`` that travels on keeps its first origin, and ``actor`` and ``node`` are not used.
    """
    try:
        return _encode_error(error, actor, node, constructor, begun)
    except MemoryError:
        return _core.UNSAID


def _encode_error(
    error: BaseException,
    actor: str,
    node: str,
    constructor: bool = False,
    begun: bool = True,
) -> bytes:
    # Not the actor's name, which a later actor may have.
    failed = os.urandom(8) if constructor else b""
    # Taken off: who gets it, and raises it in another method, has begun that.
    begun = not error.__dict__.pop(_NOT_BEGUN, False) and begun
    if _travels(error):
        frame = _travelling(error)
        frame = frame._replace(constructor=failed or frame.constructor, begun=begun)
        return _dumped(frame)
    lost: list[str] = []
    frame = _Frame(
        type_name=type_name(type(error)),
        message=message_of(error),
        actor=actor,
        node=node,
        remote_traceback=format_traceback(error),
        forms=forms_of(error, lost),
        lost=tuple(dict.fromkeys(lost)),  # each form has met them
        notes=notes_of(error),
        constructor=failed,
        begun=begun,
    )
    return _dumped(frame)


def _dumped(frame: _Frame) -> bytes:
    meta = pickle.dumps(tuple(frame), 5)
    if len(meta) <= _core.MOST_LOGGED:
        return meta
    # Too large for the log, should nobody get it: a short one for that stands behind it, and its size.
    short = frame._replace(
        type_name=frame.type_name[:_MOST_SHORT],
        message=frame.message[:_MOST_SHORT],
        remote_traceback="",
        forms=(),
        lost=(),
        notes=(),
    )
    logged = pickle.dumps(tuple(short), 5)
    return b"".join((meta, logged, len(logged).to_bytes(4, sys.byteorder)))


#: The attribute of what is raised before the method whose call it fails.
_NOT_BEGUN = "_conveyor_not_begun"


def note_not_begun(error: BaseException) -> None:
    """Mark ``error`` as raised in the place of a method, which will not run."""
    error.__dict__[_NOT_BEGUN] = True


def has_begun(error: TaskError) -> bool:
    """Whether what was called has run, and raised ``error``: otherwise its arguments could not be had where
    it should have run, or the actor has no instance."""
    frame: _Frame | None = error.__dict__.get("_frame")
    return frame is None or frame.begun


def constructor_failure(error: ConstructorError) -> bytes:
    """Return the id of the constructor's failure."""
    frame: _Frame | None = error.__dict__.get("_frame")
    return b"" if frame is None else frame.constructor


_set_cause = BaseException.__dict__["__cause__"].__set__  # whatever the class's __setattr__ says


def decode_error(meta: bytes) -> TaskError:
    """The error to raise at the caller. Never fails."""
    frame = read_error(meta)
    cause, why_not = load_first(frame.forms)
    error = None
    if cause is not None:
        error = _both(cause, ConstructorError if frame.constructor else TaskError)
    if error is None:
        message = f"{frame.type_name}: {frame.message}" if frame.message else frame.type_name
        error = (ConstructorError if frame.constructor else TaskError)(message)
    else:
        message = frame.message
    if why_not:
        message += f"\n(the exception itself has not come over: {why_not})"
    if frame.lost:
        not_carried = ", ".join(frame.lost)
        message += f"\n(of the exception this is not carried over, since it cannot be pickled: {not_carried})"
    state = error.__dict__
    state["_origin"] = (message, cause, frame.actor, frame.node, frame.remote_traceback)
    state["_frame"] = frame
    if frame.notes:
        state["__notes__"] = list(frame.notes)
    _set_cause(error, cause)
    return error


#: Errors for which nothing could be allocated where they came up.
_STAND_INS: dict[bytes, Callable[[], Exception]] = {
    _core.UNSAID: lambda: OutOfMemoryError(
        "a task has failed, and its process had no memory left to say why"
    ),
    _core.LARGE: lambda: RuntimeError(
        "its text, or what it refers to, is too large to be kept for the log"
    ),
    _core.BROKEN: lambda: SerializationError(
        "a result has come that cannot be read (was shared memory overwritten?)"
    ),
    _core.NOT_BETWEEN_HOSTS: lambda: SerializationError(
        "a value that refers to refs, or to what stays in its process, was sent to another host, where it "
        "means nothing: get the refs first, and send values"
    ),
    _core.HOST_IS_FULL: lambda: OutOfMemoryError(
        "the host of a value's reader had no memory left for it: let go of values there, or raise arena_bytes"
    ),
}


def read_error(meta: bytes) -> _Frame:
    """The texts of an error, as they were sent."""
    if meta in _STAND_INS:
        meta = _encode_error(_STAND_INS[meta](), "", "")
    return _Frame(*pickle.loads(meta))


def append_to_message(error: TaskError, text: str) -> None:
    """Let ``error`` say ``text`` as well, on lines of its own."""
    if text:
        message, *rest = error._origin
        error.__dict__["_origin"] = (f"{message}\n{text}", *rest)


def _travelling(error: TaskError) -> _Frame:
    frame: _Frame | None = error.__dict__.get("_frame")
    if frame is not None:
        return frame._replace(notes=notes_of(error))
    message, cause, actor, node, remote_traceback = error._origin
    lost: list[str] = []
    forms = () if cause is None else forms_of(cause, lost)
    name = "" if cause is None else type_name(type(cause))
    return _Frame(name, message, actor, node, remote_traceback, forms, tuple(lost), notes_of(error))


def _reduce(error: TaskError) -> tuple[Callable[[bytes], TaskError], tuple[bytes]]:
    return decode_error, (encode_error(error, "", ""),)


# ``exceptions`` knows of no pickling; the classes made below have this as their __reduce__.
for _kind in (TaskError, ConstructorError):
    copyreg.pickle(_kind, _reduce)


def _both(cause: BaseException, ours: type[TaskError]) -> TaskError | None:
    """An instance of ``ours`` that is of ``cause``'s class too; ``None`` where it must not or cannot be."""
    kind = type(cause)
    if not isinstance(cause, Exception) or isinstance(cause, (StopIteration, StopAsyncIteration)):
        return None  # raising these would do something else than tell of an error
    state = attributes_of(cause)
    if isinstance(state.get("__notes__"), list):
        state["__notes__"] = state["__notes__"].copy()
    try:
        made = put_together(
            ours if issubclass(ours, kind) else _dual(kind, ours), args_of(cause), state
        )
    except BaseException as failure:  # the class allows no subclass, or has a constructor in C
        if not is_of_value(failure):
            raise
        return None
    return made if isinstance(made, TaskError) else None


# Both sides weak: a class made for one exception is not to outlive it.
_Duals: TypeAlias = "WeakKeys[type, weakref.ref[type[TaskError]]]"
_duals: dict[type[TaskError], _Duals] = {ours: WeakKeys() for ours in (TaskError, ConstructorError)}


def _dual(kind: type[BaseException], ours: type[TaskError]) -> type[TaskError]:
    found = _duals[ours].get(kind)
    dual = None if found is None else found()
    if dual is None:
        name = f"{ours.__name__}({kind.__qualname__})"
        namespace = {
            "__module__": TaskError.__module__,
            "__qualname__": name,
            "__doc__": kind.__doc__,
            "__reduce__": _reduce,
            "__reduce_ex__": lambda self, protocol: _reduce(self),
        }
        dual = types.new_class(name, (ours, kind), exec_body=lambda ns: ns.update(namespace))
        _duals[ours][kind] = weakref.ref(dual)
    return dual
