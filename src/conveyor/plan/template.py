"""Container arguments and constants: written down in the Plan, and made anew for each execution.

What cannot be changed is decided by type, and is the same object in every execution.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from conveyor.dag import DAGNode
from conveyor.dag.containers import is_named_tuple, rebuild_tuple, replace_nodes, with_fields
from conveyor.plan.model import Argument, Const, Fields, Nested, Reg, Task


def template(
    value: Any,
    register: Callable[[DAGNode], Reg],
    constant: Callable[[Any], Any] | None = None,
) -> Any:
    """Copy the container ``value`` with each node replaced by its register, and each part without nodes
    by what ``constant`` makes of it."""
    return replace_nodes(value, register, constant or _constant, _fields)


def fill(template: Any, regs: Sequence[Any]) -> Any:
    """Make a new container after ``template``, with the values of ``regs`` in place of ``Reg``."""
    kind = type(template)
    if kind is Reg:
        return regs[template.index]
    if kind is list:
        return [fill(item, regs) for item in template]
    if kind is dict:
        return {key: fill(item, regs) for key, item in template.items()}
    if kind is Const:
        return template.value
    if kind is Fields:
        changed = {name: fill(item, regs) for name, item in template.changed}
        return with_fields(template.instance, changed)
    if isinstance(template, tuple):
        return rebuild_tuple(kind, [fill(item, regs) for item in template])
    return template


def registers(argument: Argument) -> list[int]:
    """List the registers in an argument, in order."""
    if isinstance(argument, Reg):
        return [argument.index]
    found: list[int] = []
    stack: list[Any] = [argument.template] if isinstance(argument, Nested) else []
    while stack:
        value = stack.pop()
        if isinstance(value, Reg):
            found.append(value.index)
        elif isinstance(value, Nested):
            stack.append(value.template)
        elif isinstance(value, Fields):
            stack += [item for _, item in reversed(value.changed)]
        elif isinstance(value, (list, tuple)):
            stack += reversed(value)
        elif isinstance(value, dict):
            stack += reversed(value.values())
    return found


def constants(argument: Argument) -> Iterator[tuple[str, Any]]:
    """List the constants in an argument, each with its path inside the argument (``""``: the whole
    argument)."""
    if isinstance(argument, Const):
        yield "", argument.value
    elif isinstance(argument, Nested):
        yield from _constants(argument.template, "")


def _constants(template: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(template, Const):
        yield path, template.value
    elif isinstance(template, Fields):
        yield path, template.instance  # which has nothing in the fields that are changed
        for name, item in template.changed:
            yield from _constants(item, f"{path}.{name}")
    elif isinstance(template, (list, tuple)):
        for index, item in enumerate(template):
            yield from _constants(item, f"{path}[{index}]")
    elif isinstance(template, dict):
        for key, item in template.items():
            yield from _constants(item, f"{path}[{key!r}]")
    elif not isinstance(template, Reg):
        yield path, template


def _constant(value: Any) -> Any:
    # A value that `fill` would take for a part of the template has to be marked as a value.
    return (
        Const(value)
        if isinstance(value, (list, tuple, dict, Reg, Const, Nested, Fields))
        else value
    )


def _fields(instance: Any, changed: dict[str, Any]) -> Fields:
    return Fields(with_fields(instance, dict.fromkeys(changed)), tuple(changed.items()))


#: Types of values that nobody can change. Functions are among them, though one may have attributes.
_ATOMS = frozenset(
    {
        *(type(None), type(...), type(NotImplemented)),
        *(bool, int, float, complex, str, bytes, range),
        *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID, re.Pattern),
    }
)
_KINDS = (type, enum.Enum, datetime.tzinfo, pathlib.PurePath)
#: Lists and dicts below so many others are not taken apart.
_DEEP = 50


def immutable(value: Any) -> bool:
    """Whether no method can change ``value``. Handles and references count as such."""
    rest = [value]  # constants may be deeper than Python recurses
    while rest:
        one = rest.pop()
        if _is_atom(one):
            continue
        kind = type(one)
        if kind in (tuple, frozenset) or is_named_tuple(kind):
            rest += one
        elif dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            rest += _field_values(one).values()
        else:
            return False
    return True


def _is_atom(value: Any) -> bool:
    kind = type(value)
    if kind in _ATOMS or isinstance(value, _KINDS) or str(kind.__module__).startswith("conveyor."):
        return True
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.dtype)):
        return not isinstance(value, numpy.void)  # a record is changed by item
    return torch is not None and isinstance(value, (torch.dtype, torch.device, torch.Size))


def with_fresh(task: Task, first: int) -> tuple[Task, list[Any]]:
    """Copy a task with registers, from ``first`` on, in place of values that are to be made anew; list these
    values.

    Lists and dicts are taken apart, since handles inside of them need no copy. One that stands in several
    places is not: it shall be one object in each execution, too.
    """
    arguments = [*task.args, *(argument for _, argument in task.kwargs)]
    repeated = _repeated([value for one in arguments for _, value in constants(one)])
    found: list[Any] = []

    def renewed(value: Any, depth: int = 0) -> Any:
        """The template of a constant."""
        if immutable(value):
            return Const(value)
        if id(value) not in repeated and depth < _DEEP:
            if type(value) is list:
                return [renewed(item, depth + 1) for item in value]
            if type(value) is dict:
                return {key: renewed(item, depth + 1) for key, item in value.items()}
        found.append(value)
        return Reg(first + len(found) - 1)

    def rebuilt(part: Any) -> Any:
        """The template of a part of a template."""
        kind = type(part)
        if kind is Reg:
            return part
        if kind is Const:
            return renewed(part.value)
        if kind is list:
            return [rebuilt(item) for item in part]
        if kind is dict:
            return {key: rebuilt(item) for key, item in part.items()}
        if kind is Fields:
            changed = {name: rebuilt(item) for name, item in part.changed}
            for name, value in _field_values(part.instance).items():
                if name not in changed and not immutable(value):
                    changed[name] = renewed(value)
            return Fields(part.instance, tuple(changed.items()))
        if isinstance(part, tuple):
            return rebuild_tuple(kind, [rebuilt(item) for item in part])
        return renewed(part)

    def argument(given: Argument) -> Argument:
        if isinstance(given, Reg):
            return given
        made = renewed(given.value) if isinstance(given, Const) else rebuilt(given.template)
        return made if isinstance(made, (Reg, Const)) else Nested(made)

    args = tuple(argument(one) for one in task.args)
    kwargs = tuple((name, argument(one)) for name, one in task.kwargs)
    return replace(task, args=args, kwargs=kwargs), found


def _repeated(values: list[Any]) -> set[int]:
    """The ids of lists and dicts that stand in several places of ``values``, or in themselves."""
    seen: set[int] = set()
    repeated: set[int] = set()
    rest = list(values)
    while rest:
        one = rest.pop()
        if type(one) not in (list, dict):
            continue
        if id(one) in seen:
            repeated.add(id(one))
            continue
        seen.add(id(one))
        rest += one.values() if type(one) is dict else one
    return repeated


def _field_values(instance: Any) -> dict[str, Any]:
    return {f.name: getattr(instance, f.name, None) for f in dataclasses.fields(instance)}
