"""Several results of one graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conveyor.dag.hints import TransportHint
from conveyor.dag.node import DAGNode, Record, assign
from conveyor.exceptions import GraphError


class MultiOutputNode(DAGNode):
    """The end of a graph with several results, in the order given.

    ``execute`` then gives one reference for each. The same node may stand there more than once.
    """

    __slots__ = ("_nodes",)

    _nodes: tuple[DAGNode, ...]

    def __init__(self, nodes: Sequence[DAGNode]) -> None:
        if not isinstance(nodes, (list, tuple)):
            raise GraphError(
                f"MultiOutputNode takes a list of nodes, not {type(nodes).__name__}; a single "
                f"result needs none"
            )
        if not nodes:
            raise GraphError("MultiOutputNode([]): a graph needs at least one output")
        for position, node in enumerate(nodes):
            if isinstance(node, (list, tuple)):
                raise GraphError(
                    f"element {position} of MultiOutputNode is a {type(node).__name__}: put the "
                    f"nodes in it into one flat list"
                )
            if isinstance(node, MultiOutputNode):
                raise GraphError(
                    f"element {position} of MultiOutputNode is a MultiOutputNode: put its nodes "
                    f"into one flat list"
                )
            if not isinstance(node, DAGNode):
                raise GraphError(
                    f"element {position} of MultiOutputNode is {node!r}, not a node: an output is "
                    f"what a bound method makes"
                )
        assign(self, _base=None, _hint=None, _record=Record("output"), _nodes=tuple(nodes))

    @property
    def nodes(self) -> tuple[DAGNode, ...]:
        """The results, in order."""
        return self._nodes

    def __repr__(self) -> str:
        return f"MultiOutputNode({list(self._nodes)!r})"

    def _hinted(self, hint: TransportHint) -> Any:
        # It has no value of its own that could travel: the hint is for its elements.
        return MultiOutputNode([node._hinted(hint) for node in self._nodes])

    def _upstream(self) -> tuple[DAGNode, ...]:
        return tuple(dict.fromkeys(self._nodes))
