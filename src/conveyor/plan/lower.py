"""The user's graph becomes a Plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from conveyor.config import Config
from conveyor.dag import DAGNode, InputAttributeNode, InputNode, MethodNode
from conveyor.dag.inputs import key_of
from conveyor.dag.methods import UNPLACED, OutputElementNode
from conveyor.dag.node import upstream_of
from conveyor.dag.survey import Survey, survey
from conveyor.device import base as devices
from conveyor.exceptions import GraphError
from conveyor.plan.channels import Channels
from conveyor.plan.flow import Done, Items, flow_of
from conveyor.plan.model import EXECUTOR, Const, Leaf, Passed, Plan, Reg, Shape
from conveyor.plan.schedule import make_schedule
from conveyor.plan.template import template

Worker = tuple[Hashable, int]
"""Worker of a function: its options, and its number among the workers with these."""


def place(graph: Survey, limit: int) -> Mapping[MethodNode, Worker]:
    """Choose the worker of every function that was not bound to an actor.

    A function goes where one was made of whose result it is the first user, so that a chain stays in
    one process; others get a worker of their own, up to ``limit`` of a kind, and from there on the one
    that has the least to do.
    """
    placed: dict[MethodNode, Worker] = {}
    load: dict[Worker, int] = {}
    taken: set[MethodNode] = set()
    for task in graph.tasks:
        if task.actor is not UNPLACED or task.function is None:
            continue
        kind = task.function.worker
        worker = None
        for producer in _producers(task):
            if producer in placed and producer not in taken and placed[producer][0] == kind:
                worker = placed[producer]
                taken.add(producer)
                break
        if worker is None:
            own = [w for w in load if w[0] == kind]
            worker = (
                (kind, len(own)) if len(own) < limit else min(own, key=lambda w: (load[w], w[1]))
            )
        placed[task] = worker
        load[worker] = load.get(worker, 0) + 1
    return placed


def _producers(task: MethodNode) -> list[MethodNode]:
    """Find the tasks whose results ``task`` uses."""
    producers = []
    for node in upstream_of(task):
        base = node.task if isinstance(node, OutputElementNode) else node
        if isinstance(base, MethodNode):
            producers.append(base)
    return producers


def lower(
    root: DAGNode,
    config: Config,
    placement: Mapping[MethodNode, Any] | None = None,
    hosts_of: Callable[[Sequence[Any]], Sequence[Hashable]] | None = None,
    have_gpus: Callable[[Sequence[Any]], bool] | None = None,
) -> Plan:
    """Make the Plan of the graph that ends in ``root``.

    Args:
        placement: the actors of its functions that were bound to none.
        hosts_of: says on which hosts actors are; ``None``: all are on one.
        have_gpus: says whether any of some actors may have a GPU, whatever this process has; ``None``: all
            are in this process.

    Raises:
        GraphError: the graph is not valid. Nothing has been touched then.
    """
    graph = survey(root)
    _check(graph, config)
    instead: Mapping[MethodNode, MethodNode] = {}
    if hosts_of is not None and any(task.collective is not None for task in graph.tasks):
        from conveyor.dag.collective.spreading import by_host  # few programs need it

        spread, instead = by_host(graph.tasks, hosts_of)
        graph = replace(graph, tasks=spread)
    flow = flow_of(graph, placement or {}, instead)

    @functools.cache
    def is_remote() -> frozenset[str]:
        if have_gpus is None:
            return frozenset()
        gpus = have_gpus([actor.key for actor in flow.actors])
        return frozenset([kind for kind in devices.kinds() if kind != "cuda" or gpus])

    channels = Channels(flow, graph.keys, config, is_remote)
    edge_of = channels.edge_of
    order, tasks, programs = make_schedule(flow, channels, config.overlap)
    positional, keywords = graph.parameters
    return Plan(
        actors=flow.actors,
        tasks=tasks,
        edges=tuple(channels.edges),
        programs=programs,
        order=order,
        inputs=channels.inputs,
        outputs=tuple(edge_of[value, EXECUTOR] for value in flow.outputs),
        multi_output=graph.multi_output,
        positional=positional,
        keywords=keywords,
        whole_input=graph.whole
        and not graph.keys
        and all(bundle.keys == (None,) for bundle in channels.inputs),
        depth=config.depth,
        shape=_shape(graph),
        effects=tuple(edge_of[Done(value), EXECUTOR] for value in flow.effects),
        streams=tuple(
            (edge_of[items.made, EXECUTOR], edge)
            for (items, _), edge in edge_of.items()
            if isinstance(items, Items)
        ),
        overlap=config.overlap,
    )


def _check(graph: Survey, config: Config) -> None:
    """Refuse a valid graph that cannot be compiled."""
    if graph.unused and not config.ignore_unused:
        names = ", ".join(dict.fromkeys(record.label for record in graph.unused))
        verb = "does" if len(graph.unused) == 1 else "do"
        raise GraphError(
            f"{names} {verb} not reach the output of the graph and would not run: if it is to run "
            f"for its effect, end the graph with MultiOutputNode([...], effects=[...]); if it "
            f"belongs to another graph, compile with ignore_unused=True"
        )


def _shape(graph: Survey) -> Shape | None:
    """Return the shape of the results, or ``None`` if they are just a list of task results, or one of
    them."""
    plain = not graph.multi_output or type(graph.structure) in (list, tuple)
    items = graph.structure if graph.multi_output and plain else [graph.structure]
    if plain and all(_is_made(item) for item in items):
        return None
    leaves: list[Leaf] = []
    made = 0

    def leaf(node: DAGNode) -> Reg:
        nonlocal made
        if _is_made(node):
            leaves.append(made)
            made += 1
        else:
            leaves.append(Passed(key_of(node) if isinstance(node, InputAttributeNode) else None))
        return Reg(len(leaves) - 1)

    def constant(value: object) -> Reg:
        leaves.append(Const(value))
        return Reg(len(leaves) - 1)

    return Shape(template(graph.structure, leaf, constant), tuple(leaves))


def _is_made(item: object) -> bool:
    return isinstance(item, DAGNode) and not isinstance(item, (InputNode, InputAttributeNode))
