"""Graphs: nodes and how they are bound. Immutable; knows no process.

A graph is written by calling ``bind`` where an eager program calls ``remote``::

    with InputNode() as inp:
        x = encoder.encode.bind(inp)
        dag = MultiOutputNode([left.score.bind(x), right.score.bind(x)])

    graph = dag.compile()

Nodes know what they need (their upstream) and nothing else: binding changes no node, so one graph
can be compiled, extended and executed eagerly as often as one likes, from any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from conveyor.dag.hints import TransportHint
from conveyor.dag.inputs import InputAttributeNode, InputData, InputNode
from conveyor.dag.methods import MethodNode, OutputElementNode
from conveyor.dag.node import ActorRef, DAGNode
from conveyor.dag.outputs import MultiOutputNode
from conveyor.later import names_later

if TYPE_CHECKING:
    from conveyor.dag.node import DAGContext

# Ray's name for the same thing, for code that imports it.
ClassMethodNode = MethodNode

__all__ = [
    "ActorRef",
    "ClassMethodNode",
    "DAGContext",
    "DAGNode",
    "InputAttributeNode",
    "InputData",
    "InputNode",
    "MethodNode",
    "MultiOutputNode",
    "OutputElementNode",
    "TransportHint",
]

# Only programs that were written for Ray have it.
__getattr__, __dir__ = names_later(globals(), {"DAGContext": "conveyor.dag.node"})
