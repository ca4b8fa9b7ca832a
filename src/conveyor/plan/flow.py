"""Flow of a graph's values: which task makes each and which tasks read it, in the Plan's numbers, without any
order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from conveyor.dag import (
    DAGNode,
    InputAttributeNode,
    InputNode,
    MethodNode,
    OutputElementNode,
    TransportHint,
)
from conveyor.dag.inputs import Key, key_label, key_of
from conveyor.dag.methods import Collective, label_of
from conveyor.dag.node import hint_of, upstream_of
from conveyor.dag.survey import Survey
from conveyor.plan.model import EXECUTOR, ActorInfo


class Part(NamedTuple):
    """A value that the executor gives: an argument of ``execute`` or a part of one, or (``None``) the
    whole input."""

    key: Key | None


class Made(NamedTuple):
    """A value that a task makes: its result, or one element of it."""

    task: int
    element: int | None


# These are no named tuples, which are equal to others with the same contents, whatever they mean.


class Start(Struct, frozen=True):
    """The news that an execution has begun, for ``actor``, which has a task that needs no value."""

    actor: int


class Items(Struct, frozen=True):
    """Items that a generator yields, each as it comes."""

    made: Made


class Done(Struct, frozen=True):
    """News that a task has run. The executor wants it of a task that runs for its effect."""

    made: Made


Value = Part | Made | Start


def value_label(value: Value, task_labels: Sequence[str]) -> str:
    """Name ``value`` in the user's words."""
    if isinstance(value, Part):
        return key_label(value.key, "input")
    if isinstance(value, Start):
        return "start"
    label = task_labels[value.task]
    return label if value.element is None else f"{label}[{value.element}]"


def few(items: Iterable[str], most: int = 6) -> str:
    """List ``items``, short even where there are many."""
    shown = list(items)
    return ", ".join(shown if len(shown) <= most else [*shown[: most - 1], "..."])


class Flow(Struct, frozen=True):
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
    needs: tuple[tuple[Value, ...], ...]
    readers: Mapping[Value, tuple[int, ...]]
    hints: Mapping[Value, tuple[TransportHint, ...]]
    outputs: tuple[Made, ...]
    effects: tuple[Made, ...]
    task_of: Mapping[MethodNode, int]

    def label(self, value: Value) -> str:
        """Name ``value`` in the user's words."""
        return value_label(value, self.labels)

    def summary(self, collective: Collective) -> str:
        """Describe what the ranks of a collective do together."""
        values = [self.label(self.value(node)) for node in collective.nodes]
        keys = {actor.key: actor.name for actor in self.actors}
        names = [keys[actor] for actor in collective.actors if actor in keys]
        return f"{collective.title} of {few(values)} on {few(names)}"

    def value(self, node: DAGNode) -> Value:
        """Find the value that ``node`` stands for."""
        return _value(node, self.task_of)


def flow_of(
    graph: Survey,
    placement: Mapping[MethodNode, Any],
    instead: Mapping[MethodNode, MethodNode] | None = None,
) -> Flow:
    """Follow the values of a graph from the tasks that make them to those that read them.

    ``placement``: the actors of functions that were bound to none. ``instead``: of nodes, the task that makes
    their values in their place.
    """
    task_of = {node: index for index, node in enumerate(graph.tasks)}
    task_of |= {node: task_of[task] for node, task in (instead or {}).items()}
    index_of: dict[Any, int] = {}
    actor_of = tuple(
        index_of.setdefault(placement.get(node, node.actor), len(index_of)) for node in graph.tasks
    )
    actors = _named(list(index_of))

    readers: dict[Value, set[int]] = {}
    hints: dict[Value, list[TransportHint]] = {}

    def read(node: DAGNode, reader: int) -> Value:
        value = _value(node, task_of)
        at = readers.setdefault(value, set())
        if reader != (actor_of[value.task] if isinstance(value, Made) else EXECUTOR):
            at.add(reader)
        hint = hint_of(node)
        if hint is not None:
            hints.setdefault(value, []).append(hint)
        return value

    needs = tuple(
        tuple(dict.fromkeys(read(node, actor) for node in upstream_of(task)))
        for task, actor in zip(graph.tasks, actor_of, strict=True)
    )
    needs = _started(needs, actor_of, readers)
    made = [n for n in graph.outputs if not isinstance(n, (InputNode, InputAttributeNode))]
    outputs = tuple(read(node, EXECUTOR) for node in made)
    effects = tuple(_value(task, task_of) for task in graph.effects)
    return Flow(
        actors=actors,
        nodes=graph.tasks,
        labels=_labels(graph.tasks, actor_of, actors),
        actor_of=actor_of,
        needs=needs,
        readers={value: tuple(sorted(at)) for value, at in readers.items()},
        hints={value: tuple(given) for value, given in hints.items()},
        outputs=tuple(value for value in outputs if isinstance(value, Made)),
        effects=tuple(value for value in effects if isinstance(value, Made)),
        task_of=task_of,
    )


def _started(
    needs: tuple[tuple[Value, ...], ...],
    actor_of: tuple[int, ...],
    readers: dict[Value, set[int]],
) -> tuple[tuple[Value, ...], ...]:
    """Give tasks that need no value one that starts them, and return ``needs`` with these values. It is an
    input that the task's actor gets anyway, or one that says nothing but to start."""
    if all(needs):
        return needs
    parts: dict[int, Value] = {}
    for wanted, actor in zip(needs, actor_of, strict=True):
        for value in wanted:
            if isinstance(value, Part):
                parts.setdefault(actor, value)
    begun: list[tuple[Value, ...]] = []
    for wanted, actor in zip(needs, actor_of, strict=True):
        if not wanted:
            value = parts.setdefault(actor, Start(actor))
            readers.setdefault(value, set()).add(actor)
            wanted = (value,)
        begun.append(wanted)
    return tuple(begun)


def _value(node: DAGNode, task_of: Mapping[MethodNode, int]) -> Value:
    if isinstance(node, InputNode):
        return Part(None)
    if isinstance(node, InputAttributeNode):
        return Part(key_of(node))
    if isinstance(node, OutputElementNode):
        return Made(task_of[node.task], node.index)
    assert isinstance(node, MethodNode)
    return Made(task_of[node], None)


def _named(actors: list[Any]) -> tuple[ActorInfo, ...]:
    """Give the actors names that differ: those that share one get their index with it."""
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
    """Call each task ``actor.method`` (or ``allreduce on actor``), with ``#2``, ``#3`` where it is bound
    again."""
    times: dict[str, int] = {}
    labels = []
    for node, actor in zip(nodes, actor_of, strict=True):
        name = actors[actor].name
        label = label_of(name, node.method, node.collective)
        times[label] = time = times.get(label, 0) + 1
        labels.append(label_of(name, node.method, node.collective, time))
    return tuple(labels)
