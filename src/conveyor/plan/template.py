"""Container arguments with nodes inside are written down, and filled in again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from conveyor.dag import DAGNode
from conveyor.dag.containers import rebuild_tuple, replace_nodes, with_fields
from conveyor.plan.model import Argument, Const, Fields, Nested, Reg


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
