"""Running a graph once through ordinary actor calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from conveyor.dag.containers import find_nodes, replace_nodes, with_fields
from conveyor.dag.functions import Function
from conveyor.dag.inputs import InputAttributeNode, InputNode, key_of
from conveyor.dag.methods import MethodNode, OutputElementNode
from conveyor.dag.node import ActorRef, DAGNode
from conveyor.dag.parts import InputData, Key, Path, given
from conveyor.dag.survey import Survey, survey
from conveyor.exceptions import ArgumentsError


class ActorCalls(Protocol):
    """What can be done with actors and refs, in the process that executes."""

    def check(self, owner: object) -> None:
        """Raise if the actor that ``owner`` (a node's handle) stands for is not usable here."""
        ...

    def call(
        self,
        actor: ActorRef,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_returns: int,
    ) -> Any:
        """Start an ordinary actor call: one ref, or a list of refs for ``num_returns > 1``."""
        ...

    def stream(
        self,
        actor: ActorRef,
        method: str,
        is_async: bool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Start an ordinary call of a generator method; the ref of its items."""
        ...

    def call_function(
        self,
        function: Function,
        owner: object,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_returns: int,
    ) -> Any:
        """Start an ordinary call of ``function``, in the actor that ``owner`` stands for or in a worker
        (``None``)."""
        ...

    def put(self, value: Any) -> Any:
        """A ref to ``value``, which is there already; ``value`` itself if it is one."""
        ...

    def value(self, value: Any) -> Any:
        """The value of a ref, which is waited for; anything else as it is."""
        ...

    def itself(self, value: Any) -> Any:
        """``value``, to be an argument of a call as it is, even if it is a ref."""
        ...

    def get(self, refs: Sequence[Any]) -> list[Any]:
        """The values of ``refs``."""
        ...


def execute(
    root: DAGNode, calls: ActorCalls, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Execute the graph that ends in ``root`` by ``calls``; a reference, or a list of them.

    Results in a shape give references in the same shape; effects are started and not waited for.
    """
    shape = survey(root)
    parts = _match(shape, calls, args, kwargs)
    for owner in {id(task.owner): task.owner for task in shape.tasks}.values():
        calls.check(owner)

    made: dict[MethodNode, Any] = {}

    def reference(node: DAGNode) -> Any:
        if isinstance(node, OutputElementNode):
            return made[node.task][node.index]
        assert isinstance(node, MethodNode)
        return made[node]

    def resolve(value: Any) -> Any:
        if isinstance(value, InputNode):
            return parts[None]
        if isinstance(value, InputAttributeNode):
            return parts[key_of(value)]
        if isinstance(value, DAGNode):
            return reference(value)
        nested = find_nodes(value)
        if not nested:
            return value
        tasks = [n for n in nested if not isinstance(n, (InputNode, InputAttributeNode))]
        values: dict[DAGNode, Any] = {}
        if tasks:
            values.update(zip(tasks, calls.get([reference(n) for n in tasks]), strict=True))
        return replace_nodes(
            value, lambda node: values[node] if node in values else calls.value(resolve(node))
        )

    for task in shape.tasks:
        given_args = tuple(resolve(value) for value in task.args)
        given_kwargs = {name: resolve(value) for name, value in task.kwargs.items()}
        if task.function is not None:
            made[task] = calls.call_function(
                task.function, task.owner, given_args, given_kwargs, task.num_returns or 1
            )
        elif task.streams:
            made[task] = calls.stream(
                task.actor, task.method, task.is_async, given_args, given_kwargs
            )
        else:
            made[task] = calls.call(
                task.actor, task.method, given_args, given_kwargs, task.num_returns or 1
            )

    def result(node: DAGNode) -> Any:
        if isinstance(node, (InputNode, InputAttributeNode)):
            return calls.put(resolve(node))
        return reference(node)

    if not shape.multi_output:
        return result(root)
    return replace_nodes(shape.structure, result, calls.put, with_fields)


def _match(
    shape: Survey, calls: ActorCalls, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[Key | None, Any]:
    """The value of each used part of the input; the whole input's key is ``None``."""
    positional, names = shape.parameters
    if len(args) != positional:
        raise ArgumentsError(
            f"execute() takes {_count(positional, 'positional argument')} for this graph, but "
            f"{len(args)} {'was' if len(args) == 1 else 'were'} given"
        )
    for name in names:
        if name not in kwargs:
            raise ArgumentsError(f"execute() lacks the argument {name!r}, which this graph uses")
    for name in kwargs:
        if name not in names:
            raise ArgumentsError(
                f"execute() got the argument {name!r}, which this graph does not use"
            )
    used: list[Key | None] = [*shape.keys]
    if shape.whole:
        used.append(None)

    def part(key: Key | None) -> Any:
        if isinstance(key, Path):
            # A reference is an argument's value; one that is found inside is a part like any other.
            root = calls.value(args[key.root] if isinstance(key.root, int) else kwargs[key.root])
            return calls.itself(key.pick(root))
        value = given(key, args, kwargs)
        if isinstance(value, InputData):
            values = {name: calls.value(a) for name, a in value.kwargs.items()}
            return InputData(tuple(map(calls.value, value.args)), values)
        return value

    return {key: part(key) for key in used}


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
