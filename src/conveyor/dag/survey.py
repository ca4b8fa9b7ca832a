"""The shape of a graph, seen from its end: its input, its tasks in bind order, its results."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.dag.inputs import InputAttributeNode, InputNode
from conveyor.dag.methods import MethodNode
from conveyor.dag.node import DAGNode, Record, origin, record_of, upstream_of
from conveyor.dag.outputs import MultiOutputNode
from conveyor.exceptions import GraphError


@dataclass(frozen=True, slots=True)
class Survey:
    """What ``survey`` found.

    input: the graph's input; ``None`` if nothing in it takes one.
    keys: the parts of the input that are used: positions in order, then names as they were bound.
    whole: the input is used whole (then ``keys`` is empty).
    tasks: every method call that the results need, in bind order.
    outputs: the results in order, as given (hinted views included).
    multi_output: whether a list of results is asked for, even of one.
    unused: tasks bound to this graph's nodes that no result needs, and that nothing uses.
    """

    input: InputNode | None
    keys: tuple[int | str, ...]
    whole: bool
    tasks: tuple[MethodNode, ...]
    outputs: tuple[DAGNode, ...]
    multi_output: bool
    unused: tuple[Record, ...]

    @property
    def parameters(self) -> tuple[int, tuple[str, ...]]:
        """How many positional arguments ``execute`` takes, and which keyword arguments."""
        if self.whole:
            return 1, ()
        positions = [key for key in self.keys if isinstance(key, int)]
        return max(positions, default=-1) + 1, tuple(k for k in self.keys if isinstance(k, str))


def survey(root: DAGNode) -> Survey:
    """Look at the graph that ends in ``root``.

    Raises:
        GraphError: it has two inputs, takes its input whole and in parts, or has it as an output.
    """
    multi_output = isinstance(root, MultiOutputNode)
    outputs = root.nodes if isinstance(root, MultiOutputNode) else (root,)

    inputs: dict[InputNode, None] = {}
    parts: dict[int | str, InputAttributeNode] = {}
    tasks: dict[MethodNode, None] = {}
    # Who uses the input whole, who in parts; for the message if both do.
    whole_users: list[DAGNode] = []
    part_users: list[tuple[DAGNode, InputAttributeNode]] = []

    seen: set[DAGNode] = {root}
    stack: list[DAGNode] = [root]
    while stack:  # no recursion: chains of any length are fine
        node = stack.pop()
        base = origin(node)
        if isinstance(base, InputNode):
            inputs[base] = None
        elif isinstance(base, MethodNode):
            tasks[base] = None
        for needed in upstream_of(base):
            if not isinstance(base, InputAttributeNode):
                if isinstance(needed, InputNode):
                    whole_users.append(base)
                elif isinstance(needed, InputAttributeNode):
                    part_users.append((base, needed))
                    parts.setdefault(needed.key, needed)
            if needed not in seen:
                seen.add(needed)
                stack.append(needed)

    if len(inputs) > 1:
        raise GraphError(
            f"the graph has {len(inputs)} InputNodes, but takes its input from one: make one "
            f"InputNode() and bind parts of it (inp[0], inp[1], inp.name) where there are several "
            f"inputs"
        )
    if whole_users and part_users:
        user, part = min(part_users, key=lambda entry: _number(entry[0]))
        whole_user = min(whole_users, key=_number)
        raise GraphError(
            f"the graph takes its input whole ({_who(whole_user)}) as well as in parts "
            f"({_name(part.key)}, {_who(user)}): bind either the InputNode itself or parts of it"
        )

    for node in outputs:
        if isinstance(node, (InputNode, InputAttributeNode)):
            name = "inp" if isinstance(node, InputNode) else _name(node.key)
            raise GraphError(
                f"the graph's input ({name}) is passed straight to its output: an output is what a "
                f"bound method makes, so bind a method to it or leave it out"
            )

    in_order = tuple(sorted(tasks, key=_number))
    return Survey(
        input=next(iter(inputs), None),
        keys=_sorted_keys(in_order, parts),
        whole=bool(whole_users),
        tasks=in_order,
        outputs=outputs,
        multi_output=multi_output,
        unused=_unused([*inputs, *in_order], {task.number for task in in_order}),
    )


def _sorted_keys(
    tasks: tuple[MethodNode, ...], parts: dict[int | str, InputAttributeNode]
) -> tuple[int | str, ...]:
    """Positions in order, then names in the order of their first use."""
    names: dict[str, None] = {}
    for task in tasks:
        for node in upstream_of(task):
            if isinstance(node, InputAttributeNode) and isinstance(node.key, str):
                names[node.key] = None
    names.update((key, None) for key in parts if isinstance(key, str))
    return (*sorted(key for key in parts if isinstance(key, int)), *names)


def _unused(nodes: list[InputNode | MethodNode], used: set[int]) -> tuple[Record, ...]:
    """The ends of what was bound to ``nodes`` without reaching a result, in bind order."""
    ends: dict[int, Record] = {}
    seen: set[int] = set()
    stack = [record_of(node) for node in nodes]
    while stack:
        for task in stack.pop().consumers.copy():
            if task.number in seen:
                continue
            seen.add(task.number)
            stack.append(task)
            if not task.consumers and task.number not in used:
                ends[task.number] = task
    return tuple(ends[number] for number in sorted(ends))


def _number(node: DAGNode) -> int:
    return record_of(node).number


def _who(node: DAGNode) -> str:
    return f"by {node.label}" if isinstance(node, MethodNode) else "as an output"


def _name(key: int | str) -> str:
    return f"inp[{key!r}]"
