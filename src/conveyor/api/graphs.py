"""Graphs in this process: what a node's ``compile`` and ``execute`` reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from conveyor.api.actors import ActorHandle, check_owner
from conveyor.api.remote_function import call_function, start_worker
from conveyor.config import Config
from conveyor.dag import node as hooks
from conveyor.dag.containers import find_nodes, replace_nodes, with_fields
from conveyor.dag.inputs import InputAttributeNode, InputData, InputNode, Key, Path, given, key_of
from conveyor.dag.methods import MethodNode, OutputElementNode
from conveyor.dag.node import DAGNode
from conveyor.dag.survey import Survey, survey
from conveyor.exceptions import ArgumentsError
from conveyor.later import import_later
from conveyor.refs.ref import Itself, Ref
from conveyor.runtime import context
from conveyor.runtime.protocol import ActorId
from conveyor.system_limits import cores

if TYPE_CHECKING:
    from conveyor.plan.lower import Worker


def execute(root: DAGNode, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Execute the graph that ends in ``root`` by ordinary calls. Returns a reference, or a list of them.

    Results in a shape give references in the same shape; effects are started and not waited for.
    """
    shape = survey(root)
    parts = _match(shape, args, kwargs)
    for owner in {id(task.owner): task.owner for task in shape.tasks}.values():
        check_owner(owner)
    runtime = context.current()

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
            values.update(zip(tasks, runtime.get([reference(n) for n in tasks], None), strict=True))
        return replace_nodes(
            value, lambda node: values[node] if node in values else _value(resolve(node))
        )

    for task in shape.tasks:
        given_args = tuple(resolve(value) for value in task.args)
        given_kwargs = {name: resolve(value) for name, value in task.kwargs.items()}
        if task.function is not None:
            owner = cast("ActorHandle | None", task.owner)
            made[task] = call_function(
                task.function, owner, given_args, given_kwargs, task.num_returns or 1
            )
            continue
        actor = cast(ActorId, task.actor)  # which nodes that are bound through a handle have
        if task.streams:
            made[task] = runtime.stream(actor, task.method, task.is_async, given_args, given_kwargs)
        else:
            made[task] = runtime.call(
                actor, task.method, given_args, given_kwargs, task.num_returns or 1
            )

    def put(value: Any) -> Any:
        return value if isinstance(value, Ref) else runtime.keep(value)

    def result(node: DAGNode) -> Any:
        if isinstance(node, (InputNode, InputAttributeNode)):
            return put(resolve(node))
        return reference(node)

    if not shape.multi_output:
        return result(root)
    return replace_nodes(shape.structure, result, put, with_fields)


def _match(
    shape: Survey, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[Key | None, Any]:
    """Return the value of each used part of the input; the whole input's key is ``None``."""
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
            root = _value(args[key.root] if isinstance(key.root, int) else kwargs[key.root])
            return Itself.of(key.pick(root))
        value = given(key, args, kwargs)
        if isinstance(value, InputData):
            values = {name: _value(a) for name, a in value.kwargs.items()}
            return InputData(tuple(map(_value, value.args)), values)
        return value

    return {key: part(key) for key in used}


def _value(value: Any) -> Any:
    """Wait for the value of a reference and return it. Return anything else as it is."""
    return value.get() if isinstance(value, Ref) else value


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _compile(root: DAGNode, config: Config) -> Any:
    # Imported here: who only calls actors does not need it.
    place = import_later("conveyor.plan.lower").place

    # An actor's index means another actor in another session: look before anything is deployed.
    shape = survey(root)
    for task in shape.tasks:
        check_owner(task.owner)
    workers: dict[Worker, ActorHandle] = {}
    placement: dict[MethodNode, ActorId] = {}
    for task, worker in place(shape, config.function_workers or cores()).items():
        if worker not in workers:
            assert task.function is not None
            workers[worker] = start_worker(task.function.is_async, task.function.options)
        placement[task] = workers[worker]._id
    # The graph keeps its workers; they end with it.
    return context.current().compile(root, config, placement)


def install() -> None:
    """Let graphs run on this process's runtime."""
    hooks.install(hooks.Runners(_compile, execute))
