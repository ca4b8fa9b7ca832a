"""Several results of one graph, in any shape, and effects that no result needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

from conveyor.dag.containers import find_nodes, replace_nodes
from conveyor.dag.hints import TransportHint
from conveyor.dag.methods import MethodNode, OutputElementNode
from conveyor.dag.node import DAGNode, Record, assign, record_of
from conveyor.exceptions import GraphError
from conveyor.typevars import ResultT

ElementT = TypeVar("ElementT")
KeyT = TypeVar("KeyT")


class MultiOutputNode(DAGNode[ResultT]):
    """The end of a graph with several results, in the shape given.

    ``execute`` gives one reference for each result, in the same shape: a list for a list, a dict for
    a dict, a dataclass for a dataclass, also nested. A result is what a method makes, a part of the
    input, or a constant; the same may stand there more than once. ::

        dag = MultiOutputNode({"loss": loss, "parts": [left, right]}, effects=[log.write.bind(loss)])

    effects: tasks that run at each execution although no result needs them. Their values are not
    sent anywhere; an error of theirs is raised by ``get`` of any result of that execution, which
    waits for them.
    """

    __slots__ = ("_effects", "_nodes", "_structure")

    ends_graph = True

    # The results in order, and the shape they stand in.
    _nodes: tuple[DAGNode, ...]
    _structure: Any
    _effects: tuple[MethodNode, ...]

    @overload
    def __init__(
        self: MultiOutputNode[list[ElementT]],
        nodes: Sequence[DAGNode[ElementT]],
        effects: Iterable[DAGNode] = (),
    ) -> None: ...
    @overload
    def __init__(
        self: MultiOutputNode[dict[KeyT, ElementT]],
        nodes: Mapping[KeyT, DAGNode[ElementT]],
        effects: Iterable[DAGNode] = (),
    ) -> None: ...
    @overload
    def __init__(self, nodes: Any, effects: Iterable[DAGNode] = ()) -> None: ...

    def __init__(self, nodes: Any, effects: Iterable[DAGNode] = ()) -> None:
        """``nodes``: a list, tuple, dict or dataclass."""
        plain = isinstance(nodes, (list, tuple, dict))
        if not plain and (isinstance(nodes, type) or not dataclasses.is_dataclass(nodes)):
            raise GraphError(
                f"MultiOutputNode takes a list, tuple, dict or dataclass of results, not "
                f"{type(nodes).__name__}; a single result needs none"
            )
        if plain and not nodes:
            raise GraphError(
                f"MultiOutputNode({nodes!r}): a graph needs at least one result, through which the "
                f"errors of its executions are heard of; where there are only effects, let them be "
                f"results, or write MultiOutputNode([None], effects=[...])"
            )
        for node in find_nodes(nodes, "MultiOutputNode"):
            if node.ends_graph:
                raise GraphError(
                    "MultiOutputNode holds a MultiOutputNode, which only ends a graph: put a list or "
                    "dict of its nodes there instead"
                )
        found: list[DAGNode] = []

        def keep(node: DAGNode) -> DAGNode:
            found.append(node)
            return node

        structure = replace_nodes(nodes, keep)
        chosen = tuple(_effect(node) for node in _listed(effects))
        for node in (*found, *chosen):
            record_of(node).ends_graph = True
        if not found and not chosen:
            raise GraphError(
                "MultiOutputNode holds no node: a graph needs at least one output or effect"
            )
        assign(
            self,
            _hint=None,
            _record=Record("output"),
            _nodes=tuple(found),
            _structure=structure,
            _effects=tuple(dict.fromkeys(chosen)),
        )

    @property
    def nodes(self) -> tuple[DAGNode, ...]:
        """The results that are nodes, in order."""
        return self._nodes

    @property
    def structure(self) -> Any:
        """The results in their shape."""
        return self._structure

    @property
    def effects(self) -> tuple[MethodNode, ...]:
        """The tasks that run for their effect."""
        return self._effects

    def __repr__(self) -> str:
        effects = f", effects={list(self._effects)!r}" if self._effects else ""
        return f"MultiOutputNode({self._structure!r}{effects})"

    def _set_hint(self, hint: TransportHint) -> None:
        # The node has no value of its own that could travel: the hint is for its elements.
        for node in self._nodes:
            node._set_hint(hint)

    def _upstream(self) -> tuple[DAGNode, ...]:
        return tuple(dict.fromkeys([*self._nodes, *self._effects]))


def _listed(effects: Any) -> Iterable[Any]:
    if not isinstance(effects, Iterable) or isinstance(effects, (str, bytes, DAGNode)):
        raise GraphError(f"effects are a list of bound methods, not {effects!r}")
    return effects


def _effect(node: Any) -> MethodNode:
    if isinstance(node, OutputElementNode):
        node = node.task
    if not isinstance(node, MethodNode):
        raise GraphError(f"effects are bound methods; one is {node!r}")
    if not node.use_value():
        raise GraphError(
            f"{node.label} is a generator, and as an effect nobody would take its items: make it a result"
        )
    return node
