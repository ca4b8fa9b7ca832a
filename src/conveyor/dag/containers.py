"""Nodes inside the containers that users pass as arguments.

Nodes are looked for in lists, tuples, named tuples, the values of dicts and the fields of
dataclasses, at any depth. Anything else is a constant and stays untouched, as do containers without
a node in them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from conveyor.dag.node import DAGNode
from conveyor.exceptions import GraphError


def find_nodes(value: Any, where: str = "the argument") -> list[DAGNode]:
    """Return the nodes in ``value`` in order, each once; ``where`` names the value in errors.

    Raises:
        GraphError: a node is where it cannot be filled in at execution: in a set, a dict's key, a
            subclass of a container, or in a container that contains itself.
    """
    return list(_scan(value, where)[0])


def replace_nodes(
    value: Any,
    on_node: Callable[[DAGNode], Any],
    on_constant: Callable[[Any], Any] = lambda constant: constant,
    on_dataclass: Callable[[Any, dict[str, Any]], Any] | None = None,
) -> Any:
    """Return ``value`` with every node replaced by ``on_node(node)``.

    Containers with nodes in them are rebuilt; the parts without are what ``on_constant`` is called
    with, each as large as possible. A dataclass is rebuilt by ``on_dataclass``, from itself and its
    fields that changed (``with_fields`` if left out).
    """
    rebuild_dataclass = on_dataclass or with_fields
    if isinstance(value, DAGNode):
        return on_node(value)
    _, holders = _scan(value, "the argument")

    def rebuild(part: Any) -> Any:
        if isinstance(part, DAGNode):
            return on_node(part)
        if id(part) not in holders:
            return on_constant(part)
        if isinstance(part, dict):
            return {key: rebuild(item) for key, item in part.items()}
        if dataclasses.is_dataclass(part):
            held = ((f.name, getattr(part, f.name, None)) for f in dataclasses.fields(part))
            return rebuild_dataclass(
                part,
                {
                    name: rebuild(item)
                    for name, item in held
                    if isinstance(item, DAGNode) or id(item) in holders
                },
            )
        items = [rebuild(item) for item in part]
        return items if isinstance(part, list) else rebuild_tuple(type(part), items)

    return rebuild(value)


def with_fields(instance: Any, changed: dict[str, Any]) -> Any:
    """A copy of a dataclass's ``instance`` with other values in some fields.

    Not ``dataclasses.replace``: that runs ``__init__`` again, which may check, convert or count.
    """
    made = copy.copy(instance)
    for name, value in changed.items():
        object.__setattr__(made, name, value)  # frozen ones too
    return made


def rebuild_tuple(kind: type, items: Iterable[Any]) -> Any:
    """A tuple or named tuple of type ``kind``."""
    return tuple(items) if kind is tuple else kind._make(items)  # type: ignore[attr-defined]


def is_named_tuple(kind: type) -> bool:
    """Whether ``kind`` was made by ``namedtuple`` or ``NamedTuple``."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")


def _scan(value: Any, where: str) -> tuple[dict[DAGNode, None], set[int]]:
    """Return the nodes in ``value``, and the ids of all containers that have one somewhere inside.

    A loop with its own stack: constants may be deeper than Python recurses, or contain themselves.
    """
    nodes: dict[DAGNode, None] = {}
    holders: set[int] = set()
    if isinstance(value, DAGNode):
        return {value: None}, holders
    children = _children(value, where)
    if children is None:
        return nodes, holders
    # The way from the outermost container to the one being read. Ids stay valid while the search
    # runs, because what they belong to is held by `value`, or (what was only made for the search)
    # by `read`.
    path = [(value, iter(children))]
    open_ids = {id(value)}
    seen = {id(value)}
    read: list[Any] = [children]
    in_itself: list[Any] = []

    def hold() -> None:
        for container, _ in path:
            if not _fillable(type(container)):
                raise GraphError(
                    f"{where} has a graph node inside a {type(container).__name__}; nodes can be "
                    f"inside lists, tuples, named tuples, the values of dicts and dataclasses"
                )
            holders.add(id(container))

    while path:
        container, items = path[-1]
        for item in items:
            if isinstance(item, DAGNode):
                nodes[item] = None
                hold()
                continue
            children = _children(item, where)
            if children is None:
                continue
            if id(item) not in seen:
                seen.add(id(item))
                open_ids.add(id(item))
                read.append(children)
                path.append((item, iter(children)))
                break
            if id(item) in open_ids:
                in_itself.append(item)
            elif id(item) in holders:
                hold()
        else:
            path.pop()
            open_ids.discard(id(container))
    for container in in_itself:
        if id(container) in holders:
            raise GraphError(
                f"{where} has a graph node inside a {type(container).__name__} that contains itself"
            )
    return nodes, holders


def _children(value: Any, where: str) -> Iterable[Any] | None:
    """Return what is directly inside a container, or ``None`` for any other value."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, dict):
        for key in value:
            # A key can only hold a node if it is hashable and still a container.
            if isinstance(key, (DAGNode, tuple, frozenset)) and _scan(key, where)[0]:
                raise GraphError(f"{where} has a graph node in the key of a dict")
        return value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None


def _fillable(kind: type) -> bool:
    return kind in (list, tuple, dict) or is_named_tuple(kind) or dataclasses.is_dataclass(kind)
