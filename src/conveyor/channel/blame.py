"""Which part of a value cannot be pickled: for the error message, after it has failed."""

from __future__ import annotations

import dis
import functools
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["cannot_send", "cannot_send_argument"]

_SECONDS = 0.5
_DEPTH = 50
_BREADTH = 10_000


def cannot_send(value: Any, error: BaseException, can_pickle: Callable[[Any], bool]) -> str:
    """The message for a ``value`` that failed with ``error``."""
    return _text(f"a value of type {_name(type(value))} cannot be sent", value, error, can_pickle)


def cannot_send_argument(
    label: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    error: BaseException,
    can_pickle: Callable[[Any], bool],
) -> str | None:
    """The message for a call of ``label`` that failed with ``error``; ``None`` if each of its arguments
    can be sent."""
    named = [(str(place), value) for place, value in enumerate(args)]
    named += [(repr(name), value) for name, value in kwargs.items()]
    for name, value in named:
        if not can_pickle(value):
            what = f"argument {name} of {label}, a {_name(type(value))}, cannot be sent"
            return _text(what, value, error, can_pickle)
    return None


def _text(what: str, value: Any, error: BaseException, can_pickle: Callable[[Any], bool]) -> str:
    path, culprit = _find(value, can_pickle)
    if path:
        what += f": its part {path} is of type {_name(type(culprit))}"
    return (
        f"{what}: {type(error).__name__}: {error}. Leave the part out of the value, give its class "
        "a __reduce__ or __getstate__, or make the object in the actor that uses it"
    )


def _find(value: Any, can_pickle: Callable[[Any], bool]) -> tuple[str, Any]:
    """The path to the innermost part that still fails, as far as it is found in a short time."""
    deadline = time.monotonic() + _SECONDS
    path = ""
    seen = {id(value)}
    for _ in range(_DEPTH):
        for count, (step, part) in enumerate(_parts(value)):
            if count > _BREADTH or time.monotonic() > deadline:
                return path, value
            if id(part) not in seen and not can_pickle(part):
                path += step
                value = part
                seen.add(id(part))
                break
        else:
            break
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        if isinstance(value, dict):
            for key, part in value.items():
                yield f"[{_short(key)}]", part
            for key in value:
                yield f".key({_short(key)})", key
        elif isinstance(value, (list, tuple)):
            for index, part in enumerate(value):
                yield f"[{index}]", part
        elif isinstance(value, (set, frozenset)):
            for part in value:
                yield f".element({_short(part)})", part
        elif isinstance(value, types.FunctionType):
            yield from _parts_of_function(value)
        elif isinstance(value, types.MethodType):
            yield ".__self__", value.__self__
            yield ".__func__", value.__func__
        elif isinstance(value, functools.partial):
            yield ".func", value.func
            yield ".args", value.args
            yield ".keywords", value.keywords
        elif isinstance(value, (staticmethod, classmethod)):
            yield "", value.__func__
        elif isinstance(value, property):
            for accessor in (value.fget, value.fset, value.fdel):
                if accessor is not None:
                    yield "", accessor
        if isinstance(value, type):
            for name, part in vars(value).items():
                if name not in ("__dict__", "__weakref__"):
                    yield f".{name}", part
            return
        for name, part in getattr(value, "__dict__", {}).items():
            yield f".{name}", part
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield f".{name}", getattr(value, name)
        if type(value).__qualname__ and type(value).__module__ not in ("builtins",):
            yield ".__class__", type(value)
    except Exception:  # a property or an iteration of the user's that fails
        return


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f".<variable {name}>", cell.cell_contents
        except ValueError:  # not set yet
            continue
    for name in sorted(_global_names(function.__code__)):
        if name in function.__globals__:
            yield f".<global {name}>", function.__globals__[name]
    for index, part in enumerate(function.__defaults__ or ()):
        yield f".<default {index}>", part
    for name, part in (function.__kwdefaults__ or {}).items():
        yield f".<default {name}>", part


def _global_names(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _name(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else (f"{kind.__module__}.{kind.__qualname__}")
    )


def _short(key: Any) -> str:
    try:
        text = repr(key)
    except Exception:
        text = f"<{type(key).__name__}>"
    return text if len(text) <= 40 else text[:37] + "..."
