"""Who makes which value, and who reads it: the graph in the Plan's numbers, without any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from conveyor.dag import (
    DAGNode,
    InputAttributeNode,
    InputNode,
    MethodNode,
    OutputElementNode,
    TransportHint,
)
from conveyor.dag.inputs import key_of
from conveyor.dag.node import hint_of, upstream_of
from conveyor.dag.parts import Key, key_label
from conveyor.dag.survey import Survey
from conveyor.plan.model import DRIVER, ActorInfo


class Part(NamedTuple):
    """A value from the driver: an argument of ``execute`` or a part of one, or (``None``) its whole
    input."""

    key: Key | None


class Start(NamedTuple):
    """That an execution has begun, for ``actor``, which has a task that needs no value."""

    actor: int


class Made(NamedTuple):
    """A value made by a task: its result, or one element of it."""

    task: int
    element: int | None


Source = Part | Made | Start


# No named tuples: those are equal when their contents are, whatever they mean.


@dataclass(frozen=True, slots=True)
class Items:
    """What a generator yields, as it comes."""

    made: Made


@dataclass(frozen=True, slots=True)
class Done:
    """That a task has run, which the driver wants to hear of one that runs for its effect."""

    made: Made


@dataclass(frozen=True, slots=True)
class Flow:
    """The values of a graph.

    actors: in the order of their first task.
    nodes, labels, actor_of, needs: for each task its node, its name for people, its actor, and the
        values among its arguments, each once.
    readers: for each value that is used at all, the other processes that read it, sorted; none if
        only its own actor does.
    hints: the transport hints that readers of a value were given.
    outputs: the results that tasks make.
    effects: the tasks that run for their effect.
    """

    actors: tuple[ActorInfo, ...]
    nodes: tuple[MethodNode, ...]
    labels: tuple[str, ...]
    actor_of: tuple[int, ...]
    needs: tuple[tuple[Source, ...], ...]
    readers: Mapping[Source, tuple[int, ...]]
    hints: Mapping[Source, tuple[TransportHint, ...]]
    outputs: tuple[Made, ...]
    effects: tuple[Made, ...]
    task_of: Mapping[MethodNode, int]

    def label(self, source: Source) -> str:
        """``source`` in the user's words."""
        if isinstance(source, Part):
            return key_label(source.key, "input")
        if isinstance(source, Start):
            return "start"
        label = self.labels[source.task]
        return label if source.element is None else f"{label}[{source.element}]"

    def source(self, node: DAGNode) -> Source:
        """The value that ``node`` stands for."""
        return _source(node, self.task_of)


def trace(shape: Survey, placement: Mapping[MethodNode, Any]) -> Flow:
    """Follow the values of a graph from those who make them to those who read them.

    ``placement``: the actors of functions that were bound to none.
    """
    task_of = {node: index for index, node in enumerate(shape.tasks)}
    index_of: dict[Any, int] = {}
    actor_of = tuple(
        index_of.setdefault(placement.get(node, node.actor), len(index_of)) for node in shape.tasks
    )
    actors = _named(list(index_of))

    readers: dict[Source, set[int]] = {}
    hints: dict[Source, list[TransportHint]] = {}

    def read(node: DAGNode, reader: int) -> Source:
        source = _source(node, task_of)
        at = readers.setdefault(source, set())
        if reader != (actor_of[source.task] if isinstance(source, Made) else DRIVER):
            at.add(reader)
        hint = hint_of(node)
        if hint is not None:
            hints.setdefault(source, []).append(hint)
        return source

    needs = tuple(
        tuple(dict.fromkeys(read(node, actor) for node in upstream_of(task)))
        for task, actor in zip(shape.tasks, actor_of, strict=True)
    )
    needs = _started(needs, actor_of, readers)
    made = [n for n in shape.outputs if not isinstance(n, (InputNode, InputAttributeNode))]
    outputs = tuple(read(node, DRIVER) for node in made)
    effects = tuple(_source(task, task_of) for task in shape.effects)
    return Flow(
        actors=actors,
        nodes=shape.tasks,
        labels=_labels(shape.tasks, actor_of, actors),
        actor_of=actor_of,
        needs=needs,
        readers={source: tuple(sorted(at)) for source, at in readers.items()},
        hints={source: tuple(given) for source, given in hints.items()},
        outputs=tuple(source for source in outputs if isinstance(source, Made)),
        effects=tuple(source for source in effects if isinstance(source, Made)),
        task_of=task_of,
    )


def _started(
    needs: tuple[tuple[Source, ...], ...],
    actor_of: tuple[int, ...],
    readers: dict[Source, set[int]],
) -> tuple[tuple[Source, ...], ...]:
    """``needs``, with what begins an execution of the tasks that need no value: some input that
    their actor gets anyway, or one that says nothing but that."""
    parts: dict[int, Source] = {}
    for wanted, actor in zip(needs, actor_of, strict=True):
        for source in wanted:
            if isinstance(source, Part):
                parts.setdefault(actor, source)
    begun: list[tuple[Source, ...]] = []
    for wanted, actor in zip(needs, actor_of, strict=True):
        if not wanted:
            source = parts.setdefault(actor, Start(actor))
            readers.setdefault(source, set()).add(actor)
            wanted = (source,)
        begun.append(wanted)
    return tuple(begun)


def _source(node: DAGNode, task_of: Mapping[MethodNode, int]) -> Source:
    if isinstance(node, InputNode):
        return Part(None)
    if isinstance(node, InputAttributeNode):
        return Part(key_of(node))
    if isinstance(node, OutputElementNode):
        return Made(task_of[node.task], node.index)
    assert isinstance(node, MethodNode)
    return Made(task_of[node], None)


def _named(actors: list[Any]) -> tuple[ActorInfo, ...]:
    """The actors with names that differ: those that share one get their index with it."""
    shared = Counter(actor.name for actor in actors)
    return tuple(
        ActorInfo(
            index=place,
            key=actor,
            name=actor.name if shared[actor.name] == 1 else f"{actor.name}[{actor.index}]",
        )
        for place, actor in enumerate(actors)
    )


def _labels(
    nodes: tuple[MethodNode, ...], actor_of: tuple[int, ...], actors: tuple[ActorInfo, ...]
) -> tuple[str, ...]:
    """``actor.method`` for each task, with ``#2``, ``#3`` where it is bound again."""
    times: Counter[str] = Counter()
    labels = []
    for node, actor in zip(nodes, actor_of, strict=True):
        label = f"{actors[actor].name}.{node.method}"
        times[label] += 1
        labels.append(label if times[label] == 1 else f"{label}#{times[label]}")
    return tuple(labels)
