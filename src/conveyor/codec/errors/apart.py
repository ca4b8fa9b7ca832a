"""Exceptions taken apart (class, arguments, state) and put together without their constructors."""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import functools
import types
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from conveyor.codec.faults import shown
from conveyor.codec.pickling.pickler import dumps_by_value
from conveyor.codec.pickling.unpickler import loads
from conveyor.exceptions import TaskError

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


def afresh(error: ErrorT) -> ErrorT:
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
    """Pickles as the parts of an exception and of those that it refers to, and loads as that exception.

    All of them are made before any gets its arguments and attributes, so they may refer to each other in
    cycles. With ``lost``: parts that cannot be pickled are left out, and named there.
    """

    def __init__(self, error: BaseException, lost: list[str] | None = None) -> None:
        self.lost = lost
        self.made: list[_Made] = []  # each may refer to more
        self.by_id: dict[int, _Made] = {}
        self.root = self.stand_in(error)

    def __reduce__(self) -> Any:
        parts: list[tuple[_Made, tuple[Any, ...], dict[str, Any]]] = []
        for made in self.made:
            error = made.error
            args = tuple(
                self.carry(f"args[{i}]", arg, partial(shown, longest=1000))
                for i, arg in enumerate(args_of(error))
            )
            state = {
                name: self.carry(f".{name}", value) for name, value in attributes_of(error).items()
            }
            if _is_group(error):  # takes its members when it is made, and never again
                made.args = args
            else:
                made.args = tuple(None if _refers(arg) else arg for arg in args)
            parts.append((made, args, _without_missing(state)))
        return _fill_all, (self.root, parts)

    def stand_in(self, error: BaseException) -> _Made:
        made = self.by_id.get(id(error))
        if made is None:
            made = self.by_id[id(error)] = _Made(error)
            self.made.append(made)
        return made

    def carry(self, name: str, value: Any, instead: Callable[[Any], Any] | None = None) -> Any:
        if isinstance(value, TaskError):
            return value  # knows how to travel
        if isinstance(value, BaseException):
            return self.stand_in(value)
        kind = type(value)
        if kind in (list, tuple) and any(isinstance(v, BaseException) for v in value):
            return kind(self.carry(f"{name}[{i}]", v) for i, v in enumerate(value))
        if kind is dict and any(isinstance(v, BaseException) for v in value.values()):
            return {k: self.carry(f"{name}[{shown(k, 100)}]", v) for k, v in value.items()}
        if self.lost is not None:
            try:
                dumps_by_value(value)
            except Exception:
                self.lost.append(name)
                return instead(value) if instead else _Missing
        return value


class _Made:
    """Pickles as an exception that has nothing yet but its class."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.args: tuple[Any, ...] = ()

    def __reduce__(self) -> Any:
        return _new, (type(self.error), self.args)


def _refers(value: Any) -> bool:
    if type(value) is dict:
        value = value.values()
    elif type(value) not in (list, tuple):
        return type(value) is _Made
    return any(type(v) is _Made for v in value)


def _fill_all(
    root: BaseException, parts: list[tuple[BaseException, tuple[Any, ...], dict[str, Any]]]
) -> BaseException:
    for made, args, state in parts:
        _fill(made, args, state)
    return root


class _Missing:
    pass


def _without_missing(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if value is not _Missing}


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
#: Flag of a type that was made by a ``class`` statement, or may change otherwise.
_HEAP_TYPE = 1 << 9


def load_first(forms: tuple[bytes, ...]) -> BaseException | None:
    for form in forms:
        try:
            loaded = loads(form)
        except Exception:
            continue
        if isinstance(loaded, BaseException):
            return loaded
    return None


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
    return bool(kind.__flags__ & 1 << 9)
