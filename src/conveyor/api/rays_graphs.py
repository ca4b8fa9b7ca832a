"""Graphs that were made with Ray's ``ray.dag``, as graphs of ours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from conveyor.dag import DAGNode, InputNode, MultiOutputNode
from conveyor.later import import_later


def converted(root: Any, attach: Callable[[Any], Any]) -> DAGNode:
    """The graph that ends in Ray's node ``root``; ``attach`` gives our handle of an actor of Ray's.

    Raises:
        NotImplementedError: it has what has no counterpart here.
    """
    kinds = import_later("ray.dag")
    made: dict[str, Any] = {}
    inputs = InputNode()
    actors: dict[str, Any] = {}

    def value(given: Any) -> Any:
        if isinstance(given, kinds.DAGNode):
            return made[given.get_stable_uuid()]
        if type(given) in (list, tuple):
            return type(given)([value(part) for part in given])
        if type(given) is dict:
            return {key: value(part) for key, part in given.items()}
        return given

    def convert(node: Any) -> Any:
        if isinstance(node, kinds.InputNode):
            return inputs
        if isinstance(node, kinds.InputAttributeNode):
            return inputs[node.key]
        if isinstance(node, kinds.MultiOutputNode):
            return MultiOutputNode([value(part) for part in node.get_args()])
        if type(node) is not kinds.ClassMethodNode:
            raise NotImplementedError(
                f"a graph of Ray's with {type(node).__name__} cannot be attached: bind it with conveyor.dag"
            )
        if node.is_class_method_output:
            return made[node.class_method_call.get_stable_uuid()][node.output_idx]
        handle = node._parent_class_node
        if not isinstance(handle, import_later("ray.actor").ActorHandle):
            raise NotImplementedError(
                f"{node.get_method_name()} is bound to a class, and its actor is not started: start it with "
                "remote(), and bind the method of the actor"
            )
        key = handle._ray_actor_id.hex()
        if key not in actors:
            actors[key] = attach(handle)
        method = getattr(actors[key], node.get_method_name())
        if node.num_returns != 1:
            method = method.options(num_returns=node.num_returns)
        args = [value(argument) for argument in node.get_args()]
        return method.bind(*args, **{k: value(v) for k, v in node.get_kwargs().items()})

    for node in _in_order(root, kinds):
        new = convert(node)
        _hint(node, new)
        made[node.get_stable_uuid()] = new
    found: DAGNode = made[root.get_stable_uuid()]
    return found


def _in_order(root: Any, kinds: Any) -> list[Any]:
    """Return all nodes, each behind those that it needs, and the tasks of an actor as they were bound."""
    nodes: dict[str, Any] = {}
    needs: dict[str, set[str]] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        key = node.get_stable_uuid()
        if key not in nodes:
            nodes[key] = node
            before = list(_needed(node, kinds))
            needs[key] = {other.get_stable_uuid() for other in before}
            waiting.extend(before)
    bound: dict[str, list[Any]] = {}
    for node in nodes.values():
        if type(node) is kinds.ClassMethodNode and not node.is_class_method_output:
            handle = node._parent_class_node
            if hasattr(handle, "_ray_actor_id"):
                bound.setdefault(handle._ray_actor_id.hex(), []).append(node)
    for tasks in bound.values():
        tasks.sort(key=lambda task: task._get_bind_index())
        for first, second in itertools.pairwise(tasks):
            needs[second.get_stable_uuid()].add(first.get_stable_uuid())
    order: list[Any] = []
    done: set[str] = set()
    while len(order) < len(nodes):
        ready = [key for key in nodes if key not in done and needs[key] <= done]
        if not ready:  # handles of one actor that count on their own
            raise NotImplementedError(
                "the methods of one actor were bound through several handles of it, whose order Ray does not "
                "know: bind them through one"
            )
        order.extend(nodes[key] for key in ready)
        done.update(ready)
    return order


def _needed(node: Any, kinds: Any) -> Iterable[Any]:
    def among(given: Any) -> Iterable[Any]:
        if isinstance(given, kinds.DAGNode):
            yield given
        elif type(given) in (list, tuple):
            for part in given:
                yield from among(part)
        elif type(given) is dict:
            yield from among(list(given.values()))

    yield from among(list(node.get_args()))
    yield from among(node.get_kwargs())
    if isinstance(node, kinds.InputAttributeNode):
        yield node._dag_input_node
    if type(node) is kinds.ClassMethodNode and node.is_class_method_output:
        yield node.class_method_call


def _hint(node: Any, new: Any) -> None:
    """Give the new node the transport that Ray's program has hinted at for the same value."""
    hint = node.type_hint
    if hint.get_custom_communicator() is not None:
        raise NotImplementedError(
            f"{node!r} names a communicator of Ray's, which processes of the session do not have: name one "
            "with with_tensor_transport of the attached graph"
        )
    accelerated = hint.requires_accelerator()
    device = getattr(getattr(hint, "device", None), "value", "default")
    if accelerated or device != "default":
        new.with_tensor_transport("accelerator" if accelerated else "auto", device=device)
