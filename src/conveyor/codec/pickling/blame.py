"""Search for the part of a value that cannot be pickled: for the error message, after pickling has failed."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from conveyor import _core
from conveyor.codec.faults import is_fault, shown, type_name
from conveyor.exceptions import ConveyorError

_SECONDS = 0.5
_DEPTH = 50
_BREADTH = 10_000
#: Steps of a path that are written out, at its beginning and at its end, where it has more.
_SHOWN = (8, 3)

WhyNot: TypeAlias = Callable[[Any], "BaseException | None"]
"""Why a value cannot be pickled; ``None``: it can be."""


class Given(NamedTuple):
    """Something of the user's that is sent among other things.

    ``name`` is what it is, as in "argument 1 of Echo.echo". ``path`` is how it is written: "args[1]".
    """

    name: str
    path: str
    value: Any

    @classmethod
    def argument(cls, key: int | str, label: str, value: Any) -> Given:
        """Describe an argument of ``label`` by its position or name."""
        path = f"args[{key}]" if isinstance(key, int) else f"kwargs[{key!r}]"
        a_snapshot = type(value) is _core.Snapshot  # of what was referred to, which nobody here has
        what = "the value of a reference" if a_snapshot else f"a {type_name(type(value))}"
        return cls(f"argument {key!r} of {label}, {what},", path, value)

    def part(self, steps: str) -> Given:
        """Narrow this to the part of the argument that ``steps`` lead to."""
        if not steps:
            return self
        return self._replace(name=f"part {steps} of {self.name}", path=self.path + steps)

    @classmethod
    def definition(cls, what: str, value: Any) -> Given:
        """Describe a class or a function that travels with a call."""
        name = getattr(value, "__name__", type_name(type(value)))
        return cls(f"{what} {name}", name, value)

    @classmethod
    def result(cls, what: str, value: Any) -> Given:
        """Describe a result of user code."""
        return cls(f"{what}, a {type_name(type(value))},", "", value)


def cannot_send(value: Any, error: BaseException, why_not: WhyNot) -> str:
    """The message for a ``value`` that failed with ``error``."""
    return _text(Given(f"a value of type {type_name(type(value))}", "", value), error, why_not)


def cannot_send_given(given: Iterable[Given], why_not: WhyNot) -> str | None:
    """The message for the first of ``given`` that cannot be sent; ``None`` if each of them can."""
    for one in given:
        error = why_not(one.value)
        if error is not None:
            return _text(one, error, why_not)
    return None


def _text(given: Given, error: BaseException, why_not: WhyNot) -> str:
    what = f"{given.name} cannot be sent"
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return (
            f"{what}: it is nested too deeply to be pickled (maximum recursion depth exceeded). Make it "
            "flatter, or raise sys.setrecursionlimit() in the process that sends it"
        )
    path, culprit, error = _find(given.value, error, why_not)
    if path:
        what += f": its part {given.path}{_written(path)} is of type {type_name(type(culprit))}"
    what += f": {type(error).__name__}: {error}"
    if isinstance(error, ConveyorError):
        return what  # it says what to do
    if isinstance(culprit, (types.GeneratorType, types.AsyncGeneratorType)):
        return (
            f"{what}. To stream its items, have a method return it that is declared with "
            "@conveyor.method(num_returns='streaming'); else return a list of them"
        )
    return (
        f"{what}. Leave the part out of the value, give its class a __reduce__ or __getstate__, or make "
        "the object in the actor that uses it"
    )


def _written(path: list[str]) -> str:
    first, last = _SHOWN
    if len(path) <= first + last:
        return "".join(path)
    ends = ", where the search ends" if len(path) == _DEPTH else ""
    return f"{''.join(path[:first])}…{''.join(path[-last:])} ({len(path)} levels deep{ends})"


def _find(
    value: Any, error: BaseException, why_not: WhyNot
) -> tuple[list[str], Any, BaseException]:
    """The path to the innermost part that still fails, as far as it is found in a short time, with its
    error."""
    deadline = _core.monotonic() + _SECONDS
    path: list[str] = []
    seen = {id(value)}
    while len(path) < _DEPTH and not _refuses(value):
        for count, (step, part) in enumerate(_parts(value)):
            if count > _BREADTH or _core.monotonic() > deadline:
                return path, value, error
            if id(part) in seen:
                continue
            why = why_not(part)
            if why is not None:
                if step:
                    path.append(step)
                value, error = part, why
                seen.add(id(part))
                break
        else:
            break
    return path, value, error


def _refuses(value: Any) -> bool:
    """Whether it is the value itself that refuses, whatever it is made of."""
    for owner in type(value).__mro__:
        if owner.__flags__ & _HEAP_TYPE and _REDUCTIONS & vars(owner).keys():
            try:
                value.__reduce_ex__(5)
            except BaseException as error:
                if not is_fault(error):
                    raise
                return True
            return False
    return False


_HEAP_TYPE = 1 << 9
_REDUCTIONS = {"__reduce__", "__reduce_ex__", "__getstate__"}


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        if isinstance(value, dict):
            for key, part in value.items():
                yield f"[{shown(key, 40)}]", part
            for key in value:
                yield f".key({shown(key, 40)})", key
        elif isinstance(value, (list, tuple)):
            for index, part in enumerate(value):
                yield f"[{index}]", part
        elif isinstance(value, (set, frozenset)):
            for part in value:
                yield f".element({shown(part, 40)})", part
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
    except BaseException as error:  # a property or an iteration of the user's that fails
        if not is_fault(error):
            raise
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
