"""Errors as values: a user's exception with its traceback, from the actor to the caller.

An exception is taken apart (class, arguments, state) and put together without its constructor,
which may want other arguments than ``args`` or do things that must not be done twice. Its class
travels by value if it must. What comes out is an instance of ``TaskError`` and of that class.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from conveyor import _core
from conveyor.codec.errors.apart import args_of, attributes_of, forms_of, load_first, put_together
from conveyor.codec.errors.texts import format_traceback, message_of, notes_of
from conveyor.codec.faults import is_fault, type_name
from conveyor.exceptions import (
    ConstructorError,
    OutOfMemoryError,
    SerializationError,
    TaskError,
)
from conveyor.weak import WeakKeys

#: Characters of what an error says.
_MOST_TEXT = 500


def first_line(text: str) -> str:
    """The first line of what an error says; where that is not all, it says so."""
    first, _, more = text.partition("\n")
    return f"{first[:_MOST_TEXT]} [...]" if more or len(first) > _MOST_TEXT else first


def summarize_error(meta: bytes) -> str:
    """Summarize, on one line, the failure in an error that ``encode_error`` has encoded."""
    frame = read_error(meta)
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
    #: Whether an actor's constructor has failed with it.
    constructor: bool = False
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
    # Taken off: who gets it, and raises it in another method, has begun that.
    begun = not error.__dict__.pop(_NOT_BEGUN, False) and begun
    if isinstance(error, TaskError) and "_origin" in error.__dict__:
        frame = _travelling(error)
        frame = frame._replace(constructor=constructor or frame.constructor, begun=begun)
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
        constructor=constructor,
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
    kept = pickle.dumps(tuple(short), 5)
    return b"".join((meta, kept, len(kept).to_bytes(4, sys.byteorder)))


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


_set_cause = BaseException.__dict__["__cause__"].__set__  # whatever the class's __setattr__ says


def decode_error(meta: bytes) -> TaskError:
    """The error to raise at the caller. Never fails."""
    frame = read_error(meta)
    cause = load_first(frame.forms)
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
        if not is_fault(failure):
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
