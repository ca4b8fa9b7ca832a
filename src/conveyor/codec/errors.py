"""Errors as values: a user's exception with its traceback, from the actor to the caller.

An exception is taken apart (class, arguments, state) and put together without its constructor,
which may want other arguments than ``args`` or do things that must not be done twice. Its class
travels by value if it must. What comes out is an instance of ``TaskError`` and of that class.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import os
import pickle
import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import conveyor.exceptions
from conveyor import _core
from conveyor.codec.definitions import KnownDefinitions
from conveyor.codec.faults import is_fault
from conveyor.codec.pickling import dumps_by_value, loads
from conveyor.exceptions import ConstructorError, OutOfMemoryError, SerializationError, TaskError

__all__ = ["append_to_message", "decode_error", "encode_error", "read_error"]


class _Frame(NamedTuple):
    """What an error frame holds. Only strings and bytes: reading it cannot fail."""

    type_name: str
    message: str
    actor: str
    node: str
    remote_traceback: str
    #: Pickles of the exception, the best first. The reader takes the first that it can load.
    forms: tuple[bytes, ...]
    lost: tuple[str, ...]
    notes: tuple[str, ...]
    #: Whether an actor's constructor has failed with it.
    constructor: bool = False


def encode_error(
    error: BaseException, actor: str, node: str, *, constructor: bool = False
) -> bytes:
    """``error`` as it was caught in ``node`` of ``actor``. Never fails: where there is no memory, that
    is what it says. ``constructor``: the actor cannot be used because of it.

    A ``TaskError`` that travels on keeps its first origin, and ``actor`` and ``node`` are not used.
    """
    try:
        return _encode_error(error, actor, node, constructor)
    except MemoryError:
        return _core.UNSAID


def _encode_error(error: BaseException, actor: str, node: str, constructor: bool) -> bytes:
    if isinstance(error, TaskError) and "_origin" in error.__dict__:
        frame = _travelling(error)
        frame = frame._replace(constructor=constructor or frame.constructor)
        return pickle.dumps(tuple(frame), 5)
    lost: list[str] = []
    frame = _Frame(
        type_name=_type_name(type(error)),
        message=_message(error),
        actor=actor,
        node=node,
        remote_traceback=_format_traceback(error),
        forms=_forms(error, lost),
        lost=tuple(dict.fromkeys(lost)),  # each form has met them
        notes=_notes(error),
        constructor=constructor,
    )
    return pickle.dumps(tuple(frame), 5)


def decode_error(meta: bytes) -> TaskError:
    """The error to raise at the caller. Never fails."""
    frame = read_error(meta)
    cause = _load_first(frame.forms)
    error = None
    if cause is not None:
        error = _both(cause, ConstructorError if frame.constructor else TaskError)
    if error is None:
        message = f"{frame.type_name}: {frame.message}" if frame.message else frame.type_name
        error = (ConstructorError if frame.constructor else TaskError)(message)
    else:
        message = frame.message
    if frame.lost:
        kept_back = ", ".join(frame.lost)
        message += f"\n(of the exception this is not carried over, since it cannot be pickled: {kept_back})"
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
    _core.BROKEN: lambda: SerializationError(
        "a result has come that cannot be read (was shared memory overwritten?)"
    ),
}


def read_error(meta: bytes) -> _Frame:
    """The texts of an error, as they were sent."""
    if meta in _STAND_INS:
        meta = _encode_error(_STAND_INS[meta](), "", "", False)
    return _Frame(*pickle.loads(meta))


def append_to_message(error: TaskError, text: str) -> None:
    """Let ``error`` say ``text`` as well, on lines of its own."""
    if text:
        message, *rest = error._origin
        error.__dict__["_origin"] = (f"{message}\n{text}", *rest)


def _travelling(error: TaskError) -> _Frame:
    frame: _Frame | None = error.__dict__.get("_frame")
    if frame is not None:
        return frame._replace(notes=_notes(error))
    message, cause, actor, node, remote_traceback = error._origin
    lost: list[str] = []
    forms = () if cause is None else _forms(cause, lost)
    name = "" if cause is None else _type_name(type(cause))
    return _Frame(name, message, actor, node, remote_traceback, forms, tuple(lost), _notes(error))


def _reduce(error: TaskError) -> tuple[Callable[[bytes], TaskError], tuple[bytes]]:
    return decode_error, (encode_error(error, "", ""),)


# ``exceptions`` knows of no pickling; the classes made below have this as their __reduce__.
for _kind in (TaskError, ConstructorError):
    copyreg.pickle(_kind, _reduce)


# The texts.


def _type_name(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as failure:
        if not is_fault(failure):
            raise
        return f"<str() of the exception failed: {type(failure).__name__}>"


def _notes(error: BaseException) -> tuple[str, ...]:
    try:
        return tuple(str(note) for note in getattr(error, "__notes__", ()))
    except BaseException as failure:
        if not is_fault(failure):
            raise
        return ()


_PACKAGE = os.path.dirname(os.path.abspath(conveyor.exceptions.__file__))
# Frames of these are the way to the user's code, the same in every traceback.
_OURS = tuple(os.path.join(_PACKAGE, room, "") for room in ("runtime", "engine"))
_LONGEST = 100_000


def _format_traceback(error: BaseException) -> str:
    try:
        summary = traceback.TracebackException.from_exception(error)
        _trim(summary, set())
        text = "".join(summary.format())
        # A message of many lines stands before the traceback already.
        said = "".join(summary.format_exception_only())
        first, _, rest = said.partition("\n")
        if rest.count("\n") > 1 and text.endswith(said) and not isinstance(error, SyntaxError):
            text = f"{text.removesuffix(said)}{first} [...]\n"
    except BaseException as failure:
        if not is_fault(failure):
            raise
        return f"{_type_name(type(error))}: <no traceback: {type(failure).__name__}>\n"
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    return text


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


# Taking apart.


def _forms(error: BaseException, lost: list[str]) -> tuple[bytes, ...]:
    forms: list[bytes] = []
    if _has_own_reduction(type(error)):
        with contextlib.suppress(Exception):
            forms.append(dumps_by_value(error))
    try:
        forms.append(dumps_by_value(_Apart(error)))
    except Exception:
        if not forms:
            try:
                forms.append(dumps_by_value(_Apart(error, lost)))
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


class _Apart:
    """Pickles as the parts of an exception, and loads as that exception.

    With ``lost``: parts that cannot be pickled are left out, and named there.
    """

    def __init__(self, error: BaseException, lost: list[str] | None = None) -> None:
        self.error = error
        self.lost = lost

    def __reduce__(self) -> Any:
        error = self.error
        args: tuple[Any, ...] = tuple(error.args)
        if _is_group(error):
            args = (error.message, list(error.exceptions))  # type: ignore[attr-defined]
        args = tuple(self.carry(f"args[{i}]", arg, _short) for i, arg in enumerate(args))
        state = {name: self.carry(f".{name}", value) for name, value in _attributes(error).items()}
        return _put_together, (type(error), args, _without_missing(state))

    def carry(self, name: str, value: Any, instead: Callable[[Any], Any] | None = None) -> Any:
        if isinstance(value, TaskError):
            return value  # knows how to travel
        if isinstance(value, BaseException):
            return _Apart(value, self.lost)
        if isinstance(value, list) and any(isinstance(v, BaseException) for v in value):
            return [self.carry(f"{name}[{i}]", v) for i, v in enumerate(value)]
        if self.lost is not None:
            try:
                dumps_by_value(value)
            except Exception:
                self.lost.append(name)
                return instead(value) if instead else _Missing
        return value


class _Missing:
    pass


def _without_missing(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if value is not _Missing}


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except BaseException as failure:
        if not is_fault(failure):
            raise
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 1000 else text[:997] + "..."


_Group: Any = getattr(builtins, "BaseExceptionGroup", None)  # since Python 3.11


def _is_group(error: BaseException) -> Any:
    return _Group is not None and isinstance(error, _Group)


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


def _attributes(error: BaseException) -> dict[str, Any]:
    """What an exception has beside ``args``: fields of its C struct, slots, and ``__dict__``."""
    found: dict[str, Any] = {}
    for owner in type(error).__mro__:
        for name, descriptor in vars(owner).items():
            if (
                isinstance(descriptor, _Field)
                and name not in _NOT_STATE
                and (owner, name) not in _LEFT_OUT
            ):
                try:
                    value = descriptor.__get__(error)
                except Exception:  # not set
                    continue
                if value is not None:
                    found[name] = value
    found.update((k, v) for k, v in error.__dict__.items() if k not in _NOT_STATE)
    return found


# Putting together.


def _load_first(forms: tuple[bytes, ...]) -> BaseException | None:
    for form in forms:
        try:
            # The definitions live as long as the exception does; nobody else counts on them.
            loaded = loads(form, KnownDefinitions())
        except Exception:
            continue
        if isinstance(loaded, BaseException):
            return loaded
    return None


def _put_together(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    made = _new(kind, args)
    _set_args(made, args)
    for name, value in state.items():
        for owner in kind.__mro__:
            field = vars(owner).get(name)
            if isinstance(field, _Field):
                with contextlib.suppress(Exception):  # read-only: it came with the arguments
                    field.__set__(made, value)
                break
        else:
            made.__dict__[name] = value
    return made


# Not by assignment: a frozen dataclass, say, has a __setattr__ that refuses.
_set_args = BaseException.__dict__["args"].__set__
_set_cause = BaseException.__dict__["__cause__"].__set__


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
    return bool(kind.__flags__ & 1 << 9)


def _both(cause: BaseException, ours: type[TaskError]) -> TaskError | None:
    """An instance of ``ours`` that is of ``cause``'s class too; ``None`` where it must not or cannot be."""
    kind = type(cause)
    if not isinstance(cause, Exception) or isinstance(cause, (StopIteration, StopAsyncIteration)):
        return None  # raising these would do something else than tell of an error
    args: tuple[Any, ...] = cause.args
    state = _attributes(cause)
    if isinstance(state.get("__notes__"), list):
        state["__notes__"] = state["__notes__"].copy()
    if _is_group(cause):
        args = (cause.message, list(cause.exceptions))  # type: ignore[attr-defined]
    try:
        made = _put_together(ours if issubclass(ours, kind) else _dual(kind, ours), args, state)
    except BaseException as failure:  # the class allows no subclass, or has a constructor in C
        if not is_fault(failure):
            raise
        return None
    return made if isinstance(made, TaskError) else None


# Both sides weak: a class made for one exception is not to outlive it.
_Duals: TypeAlias = "weakref.WeakKeyDictionary[type, weakref.ref[type[TaskError]]]"
_duals: dict[type[TaskError], _Duals] = {
    ours: weakref.WeakKeyDictionary() for ours in (TaskError, ConstructorError)
}


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
