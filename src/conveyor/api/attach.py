"""Actors, and graphs, of a Ray program in a session on Ray."""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from conveyor.api.actors import ActorHandle
from conveyor.api.methods import make_table
from conveyor.dag import DAGNode, InputNode, MultiOutputNode
from conveyor.driver.driver import Driver
from conveyor.exceptions import ActorDiedError, ActorStartError, RuntimeStateError
from conveyor.flag import Flag
from conveyor.later import LaterModule, import_later
from conveyor.runtime import context
from conveyor.runtime.protocol import Attached, MethodInfo

# There where the engine is Ray.
ray_actor: Any = LaterModule("ray.actor")
ray_dag: Any = LaterModule("ray.dag")


def converted(root: Any, attach: Callable[[Any], Any]) -> DAGNode:
    """The graph that ends in Ray's node ``root``; ``attach`` gives our handle of an actor of Ray's.

    Raises:
        NotImplementedError: it has what has no counterpart here.
    """
    kinds = ray_dag
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
        if not isinstance(handle, ray_actor.ActorHandle):
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


_log = logging.getLogger("conveyor")

#: Seconds after which the log says what is waited for.
_SAID_AFTER = 10.0


def attach(what: Any) -> Any:
    """Have actors that the program has started with ``ray.remote`` take part in this session. ::

        stage = Stage.remote()  # a class under @ray.remote
        with InputNode() as inp:  # conveyor.dag.InputNode
            dag = conveyor.attach(stage).run.bind(inp)

        graph = conveyor.attach(rays_dag).compile()  # where it was rays_dag.experimental_compile()

    The actor stays Ray's: nothing here ends it, and its own calls go on, beside the methods that the session
    runs, as in Ray's compiled graphs. It takes part until the session ends, or until ``conveyor.kill`` takes
    it out. An actor that was attached before is the same one again.

    Args:
        what: the handle of an actor of Ray's, or a graph that was made with ``ray.dag``, whose actors are
            attached.

    Returns:
        An ``ActorHandle``, or the node that the graph ends in.

    Raises:
        RuntimeStateError: the session is not on Ray, or is not this process's own; the actor belongs to
            another cluster than that of the session, or does not have this version of the library.
        ActorDiedError: the actor is dead.
        ActorStartError: it cannot take part: it is in another session, or its node cannot be reached.
        NotImplementedError: it has async methods; the graph has what has no counterpart here.
        TypeError: ``what`` is neither.
    """
    driver = context.current()
    if not isinstance(driver, Driver) or not driver.places:
        raise RuntimeStateError(
            'attach is for the process that has started a session on Ray: conveyor.init(engine="ray"). '
            "Handles that it returns can be passed on to actors"
        )
    ray = import_later("ray")
    if isinstance(what, ray.actor.ActorHandle):
        return _attach(driver, ray, what)
    if isinstance(what, ray_dag.DAGNode):
        return converted(what, lambda handle: _attach(driver, ray, handle))
    raise TypeError(
        f"attach takes the handle of an actor of Ray's, or a node of ray.dag, not {type(what).__name__}"
    )


def _attach(driver: Driver, ray: Any, handle: Any) -> ActorHandle:
    name = _name(ray, handle)
    methods = _described(driver, ray, handle, name)
    key = handle._ray_actor_id.hex()
    actor = driver.attach(Attached(key, name, methods, handle))
    return ActorHandle(driver, name, make_table(methods), actor)


def _name(ray: Any, handle: Any) -> str:
    """Return the actor's name. Raises where Ray would wait for ever for an answer of the actor, or end the
    process."""
    if handle._ray_cluster_and_job != ray._private.worker.global_worker.current_cluster_and_job:
        raise RuntimeStateError(
            f"{handle!r} cannot be attached: it belongs to another cluster than the session's, or to a "
            "connection to Ray that has ended. Get a handle by the connection that there is: ray.get_actor"
        )
    # Nothing is known yet of an actor that has just been made.
    known = import_later("ray._private.state").actors(handle._ray_actor_id.hex())
    name = known.get("Name") or handle._ray_actor_creation_function_descriptor.class_name
    name = str(name).rpartition(".")[2]
    if known.get("State") == "DEAD":
        raise ActorDiedError(f"actor {name} of Ray is dead, and cannot be attached", name)
    return name


def _described(driver: Driver, ray: Any, handle: Any, name: str) -> dict[str, MethodInfo]:
    """Ask the actor for its methods. Raises if the actor cannot take part."""
    system_calls = import_later("conveyor.engines.ray.attached").SYSTEM_CALLS
    requested = handle.__ray_call__.options(concurrency_group=system_calls).remote(_describing())
    try:
        said, version, methods = _answer(driver, requested.future(), name)
    # This is a RayActorError, too, and the actor may be alive.
    except ray.exceptions.ActorUnavailableError as error:
        raise ActorStartError(
            f"cannot attach actor {name} of Ray: its node cannot be reached just now ({error}). It may be "
            "tried again"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise ActorDiedError(
            f"actor {name} of Ray is dead, and cannot be attached: {error}", name
        ) from error
    except ray.exceptions.RayError as error:  # it has raised that, or Ray cannot place it
        raise ActorStartError(f"cannot attach actor {name} of Ray: {error}") from error
    own = import_later("conveyor.engines.ray.bootstrap").version()
    if said or version != own:
        raise RuntimeStateError(
            f"cannot attach actor {name} of Ray: its process {said or f'has {version}'}, and the driver has "
            f"{own}. Its environment (runtime_env) must have the same"
        )
    described: dict[str, MethodInfo] | None = pickle.loads(methods)
    if described is None:
        raise NotImplementedError(
            f"cannot attach actor {name} of Ray: it has async methods, which run on Ray's event loop; those "
            "of a class under @conveyor.remote may be async"
        )
    return described


def _answer(driver: Driver, answer: Future[Any], name: str) -> Any:
    """Wait for the actor's answer and return it. Raises if the session ends before: Ray may never place the
    actor."""
    either = Flag()
    answer.add_done_callback(lambda _: either.set())
    with driver.table.until_closed(either.set):
        if not either.wait(_SAID_AFTER):
            _log.warning(
                "actor %s of Ray does not answer yet: it is not placed, or its constructor runs, or holds "
                "the interpreter",
                name,
            )
            either.wait(interruptible=True)
    if not answer.done():
        driver.table.check_open()
    return answer.result()


def _describing() -> Callable[[Any], tuple[str, str, bytes]]:
    """Return the function that the actor is asked to run. The function travels by value, since the actor's
    process may not have this library."""

    def describe(made: Any) -> tuple[str, str, bytes]:
        try:
            from conveyor.api.methods import described_here
            from conveyor.engines.ray.bootstrap import version
        except ImportError as error:
            return f"cannot import this version of conveyor ({error})", "", b""
        return "", version(), described_here(made)

    return describe
