"""Each function of a graph gets a worker that runs it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from conveyor.dag import MethodNode
from conveyor.dag.methods import UNPLACED, OutputElementNode
from conveyor.dag.node import upstream_of
from conveyor.dag.survey import Survey

Worker = tuple[Hashable, int]
"""One of the workers with the same options: those options, and its number."""


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
        for maker in _makers(task):
            if maker in placed and maker not in taken and placed[maker][0] == kind:
                worker = placed[maker]
                taken.add(maker)
                break
        if worker is None:
            own = [w for w in load if w[0] == kind]
            worker = (
                (kind, len(own)) if len(own) < limit else min(own, key=lambda w: (load[w], w[1]))
            )
        placed[task] = worker
        load[worker] = load.get(worker, 0) + 1
    return placed


def _makers(task: MethodNode) -> list[MethodNode]:
    """Find the tasks whose results ``task`` uses."""
    makers = []
    for node in upstream_of(task):
        base = node.task if isinstance(node, OutputElementNode) else node
        if isinstance(base, MethodNode):
            makers.append(base)
    return makers
