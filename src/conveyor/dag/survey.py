"""The shape of a graph, seen from its end: its input, its tasks in bind order, its results."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from conveyor.dag.inputs import InputAttributeNode, InputNode, Key, Path, key_of, root_of
from conveyor.dag.methods import MethodNode
from conveyor.dag.node import DAGNode, Record, record_of, upstream_of
from conveyor.dag.outputs import MultiOutputNode
from conveyor.exceptions import GraphError


class Survey(Struct, frozen=True):
    """Result of ``survey``.

    keys: the parts of the input that are used: by position, then by name as they were bound.
    whole: the input is used whole.
    tasks: every method call that the results and the effects need, in bind order.
    outputs: the results that are nodes, in order, as given (hinted views included).
    structure: the shape that the results stand in; the one node itself if there is no shape.
    multi_output: whether results in a shape are asked for, even if it is a list of one.
    effects: the tasks that run for their effect.
    unused: tasks bound to this graph's nodes that no result needs, that nothing uses, and that end
        no other graph.
    """

    keys: tuple[Key, ...]
    whole: bool
    tasks: tuple[MethodNode, ...]
    outputs: tuple[DAGNode, ...]
    structure: Any
    multi_output: bool
    effects: tuple[MethodNode, ...]
    unused: tuple[Record, ...]

    @property
    def parameters(self) -> tuple[int, tuple[str, ...]]:
        """How many positional arguments ``execute`` takes, and which keyword arguments."""
        if self.whole and not self.keys:
            return 1, ()
        roots = list(dict.fromkeys(root_of(key) for key in self.keys))
        positions = [root for root in roots if isinstance(root, int)]
        return max(positions, default=-1) + 1, tuple(r for r in roots if isinstance(r, str))


def survey(root: DAGNode) -> Survey:
    """Look at the graph that ends in ``root``.

    Raises:
        GraphError: it has two inputs, or no task.
    """
    multi_output = isinstance(root, MultiOutputNode)
    outputs = root.nodes if isinstance(root, MultiOutputNode) else (root,)

    inputs: dict[InputNode, None] = {}
    parts: dict[Key, None] = {}
    tasks: dict[MethodNode, None] = {}
    whole = isinstance(root, InputNode)

    seen: set[DAGNode] = {root}
    stack: list[DAGNode] = [root]
    while stack:  # no recursion: chains of any length are fine
        node = stack.pop()
        if isinstance(node, InputNode):
            inputs[node] = None
        elif isinstance(node, InputAttributeNode):
            parts[key_of(node)] = None
        elif isinstance(node, MethodNode):
            tasks[node] = None
        for needed in upstream_of(node):
            if isinstance(needed, InputNode) and not isinstance(node, InputAttributeNode):
                whole = True
            if needed not in seen:
                seen.add(needed)
                stack.append(needed)

    if len(inputs) > 1:
        raise GraphError(
            f"the graph has {len(inputs)} InputNodes, but takes its input from one: make one "
            f"InputNode() and bind parts of it (inp[0], inp[1], inp.name) where there are several "
            f"inputs"
        )
    if not tasks:
        raise GraphError(
            "the graph has no task, so nothing would run: an output or an effect must be what a bound "
            "method makes"
        )
    in_order = tuple(sorted(tasks, key=_number))
    return Survey(
        keys=_sorted_keys(in_order, parts),
        whole=whole,
        tasks=in_order,
        outputs=outputs,
        structure=root.structure if isinstance(root, MultiOutputNode) else root,
        multi_output=multi_output,
        effects=root.effects if isinstance(root, MultiOutputNode) else (),
        unused=_unused([*inputs, *in_order], {task.number for task in in_order}),
    )


def _sorted_keys(tasks: tuple[MethodNode, ...], parts: dict[Key, None]) -> tuple[Key, ...]:
    """Sort the keys by position, then by name in the order of first use, a whole argument before its
    parts."""
    used: dict[Key, None] = {}
    for task in tasks:
        used.update(
            (key_of(n), None) for n in upstream_of(task) if isinstance(n, InputAttributeNode)
        )
    used.update(parts)
    names: dict[str, int] = {}
    for key in used:
        root = root_of(key)
        if isinstance(root, str):
            names.setdefault(root, len(names))

    def place(key: Key) -> tuple[bool, int, bool]:
        root = root_of(key)
        if isinstance(root, str):
            return True, names[root], isinstance(key, Path)
        return False, root, isinstance(key, Path)

    return tuple(sorted(used, key=place))


def _unused(nodes: list[InputNode | MethodNode], used: set[int]) -> tuple[Record, ...]:
    """Return the ends of all that was bound to ``nodes`` without reaching a result, in bind order."""
    ends: dict[int, Record] = {}
    seen: set[int] = set()
    stack = [record_of(node) for node in nodes]
    while stack:
        for task in stack.pop().consumers.copy():
            if task.number in seen:
                continue
            seen.add(task.number)
            stack.append(task)
            if not any(
                one.consumers or one.ends_graph or one.number in used
                for one in (task, *task.together)
            ):
                ends[task.number] = task
    return tuple(ends[number] for number in sorted(ends))


def _number(node: DAGNode) -> int:
    return record_of(node).number
