"""Random graphs: as data, as nodes of conveyor, and evaluated in plain Python."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeAlias

from chaos_actors import AsyncChaos, Chaos, Step, Strikes
from chaos_collectives import Meeting, bind, met, random_meeting
from chaos_values import MB, Pair, Payload, digest, make, random_payload

from conveyor.dag import InputNode, MultiOutputNode
from conveyor.dag.inputs import InputData


@dataclass(frozen=True)
class In:
    """The input (no key), an argument of it, or a part of one."""

    key: tuple[int | str, ...]


@dataclass(frozen=True)
class Out:
    """A task's result, or one element of it."""

    task: int
    element: int | None = None


@dataclass(frozen=True)
class Task:
    actor: int  # among the actors of the round
    method: str
    step: Step
    args: tuple[Any, ...]  # with In and Out in them
    kwargs: Mapping[str, Any]
    meeting: Meeting | None = None


#: Methods whose items are a result of the graph.
STREAMING = ("items", "aitems")


@dataclass(frozen=True)
class Graph:
    name: str
    tasks: tuple[Task, ...]
    outputs: Any  # one Out, or a structure with leaves
    effects: tuple[int, ...]
    positional: int
    keywords: tuple[str, ...]
    inputs: tuple[Payload, ...]
    seed: int
    depth: int
    executions: int

    #: Items of its generators that may be on their way.
    credit: int = 64
    #: Tasks whose tensors go by a transport: by its name, or "communicator".
    routes: Mapping[int, str] = field(default_factory=dict)
    #: The executions of which a transfer fails, by the name of the transport; those in which one is stuck.
    broken: Mapping[str, frozenset[int]] = field(default_factory=dict)
    stuck: frozenset[int] = frozenset()

    @property
    def actors(self) -> set[int]:
        return {task.actor for task in self.tasks}

    @property
    def streams(self) -> list[int]:
        """The places of streams among the results."""
        results = list(flatten(self.outputs, self.outputs))
        return [
            place
            for place, leaf in enumerate(results)
            if isinstance(leaf, Out) and self.tasks[leaf.task].method in STREAMING
        ]

    @property
    def roomy(self) -> bool:
        """Whether its generators never wait until their items are taken, so that results may be got in
        any order. Items that nobody has taken count as long as their streams are there."""
        items = [task.step.items for task in self.tasks if task.method in STREAMING]
        # Two more to see that it has come back.
        return (self.executions + 2) * max(items, default=0) <= self.credit


@dataclass(frozen=True)
class Failed:
    """Instead of a value: the tasks (with the kind of exception) one of which is to blame."""

    blamed: frozenset[tuple[int, str]]


@dataclass(frozen=True)
class Stream:
    """The digests of a stream's items, and what is raised after them, if anything is."""

    items: tuple[int, ...]
    failed: Failed | None


#: What a result must be: a digest, a failure, or a stream.
Expected: TypeAlias = "int | Failed | Stream"


def fill(structure: Any, leaf: Callable[[Any], Any]) -> Any:
    """``structure`` with ``leaf(x)`` for every In and Out."""
    if isinstance(structure, (In, Out)):
        return leaf(structure)
    if isinstance(structure, (list, tuple)):
        return type(structure)(fill(item, leaf) for item in structure)
    if isinstance(structure, dict):
        return {key: fill(item, leaf) for key, item in structure.items()}
    if isinstance(structure, Pair):
        return Pair(fill(structure.left, leaf), fill(structure.right, leaf))
    return structure


def leaves(structure: Any) -> list[Any]:
    found: list[Any] = []
    fill(structure, found.append)
    return found


def flatten(structure: Any, like: Any) -> Iterator[Any]:
    """What stands in ``structure`` where ``like``, of the same shape, has an In, an Out or a constant;
    what has neither In nor Out in it is one constant."""
    if isinstance(like, (In, Out)) or not leaves(like):
        yield structure
    elif isinstance(like, (list, tuple)):
        assert len(structure) == len(like)
        for item, other in zip(structure, like, strict=True):
            yield from flatten(item, other)
    else:
        assert list(structure) == list(like)
        for key, other in like.items():
            yield from flatten(structure[key], other)


# Making


def random_graph(
    rng: Random, name: str, asynchronous: Sequence[bool], counted: bool, crowd: int,
    pauses: Sequence[float] = (0, 0, 0, 0, 0, 0, 0.001, 0.005),
) -> Graph:  # fmt: skip
    """A graph over actors of which ``asynchronous`` says which have coroutines. Not ``counted``: its
    results do not depend on the order of executions. ``crowd``: about how many executions."""
    mode = rng.choice(["whole", "whole", "parts", "parts", "both", "none"])
    whole, parts = [In(())], [In((0, "a")), In((0, "b", 1)), In((0,)), In((1,)), In(("x",))]
    pool: list[Any] = {"whole": whole, "parts": parts, "both": whole + parts, "none": []}[mode]
    if parts and mode in ("parts", "both"):
        pool = rng.sample(pool, rng.randint(1, len(pool)))
    unused: list[Any] = list(pool)
    uses: dict[Any, int] = {}
    large = 2

    def pick() -> Any:
        if unused and rng.random() < 0.6:
            leaf = unused.pop(rng.randrange(len(unused)))
        else:
            leaf = rng.choice(pool)
            if leaf in unused:
                unused.remove(leaf)
        uses[leaf] = uses.get(leaf, 0) + 1
        return leaf

    def argument(depth: int = 0) -> Any:
        kind = rng.randrange(9 if depth < 2 else 4)
        if kind <= 3 and pool:
            return pick()
        if kind <= 4:
            return rng.choice([None, 3, "text", b"bytes", [1, (2,)], {"k": []}])
        inside = [argument(depth + 1) for _ in range(rng.randint(0, 3))]
        if kind == 5:
            return inside
        if kind == 6:
            return tuple(inside)
        if kind == 7:
            return {f"k{i}": part for i, part in enumerate(inside)}
        return Pair(inside, argument(depth + 1))

    tasks: list[Task] = []
    streams: list[Any] = []
    streaming = rng.random() < 0.4
    meets = rng.random() < 0.4
    for _ in range(rng.randint(1, 10)):
        number = len(tasks)
        if meets and rng.random() < 0.3:
            ends = _meeting(rng, name, tasks, len(asynchronous), counted, argument)
            pool += ends
            unused += rng.sample(ends, rng.randint(1, len(ends)))
            continue
        actor = rng.randrange(len(asynchronous))
        if streaming and rng.random() < 0.3:
            args = tuple(argument() for _ in range(rng.randint(0, 2)))
            tasks.append(_generator(rng, name, number, actor, asynchronous[actor], counted, args))
            streams.append(Out(number))
            continue
        methods = ["mix", "mix", "mix", "split2", "split3", "forward"]
        method = rng.choice(methods + ["amix"] * 6 * asynchronous[actor])
        args = tuple(argument() for _ in range(rng.randint(0, 3)))
        kwargs = {key: argument() for key in "xyz" if rng.random() < 0.15}
        payload = random_payload(rng, 4 * MB if large else 8000)
        large -= payload.size >= 64 << 10
        pause = rng.choice(pauses)
        step = Step(name, number, payload, counted, rng.random() < 0.5, pause)
        tasks.append(Task(actor, method, step, args, kwargs))
        elements = {"split2": 2, "split3": 3}.get(method)
        if elements is None:
            pool.append(Out(number))
            unused.append(Out(number))
        else:
            pool += [Out(number, i) for i in range(elements)]
            unused.append(Out(number, rng.randrange(elements)))
    # What nobody has used is a result, or there for its effect; parts of the input need a task.
    left = [leaf for leaf in unused if isinstance(leaf, In)]
    if left:
        tasks.append(_last(rng, name, len(tasks), "mix", asynchronous, counted, left))
        unused.append(Out(len(tasks) - 1))
    used = {leaf.task for task in tasks for leaf in _of_tasks(task)}
    ends = [leaf for leaf in unused if isinstance(leaf, Out) and leaf.task not in used]
    effects: list[int] = []
    if len(ends) > 1 and rng.random() < 0.3:
        effects = [ends.pop().task]
    if rng.random() < 0.2:
        some = rng.sample(pool, min(len(pool), 2))
        tasks.append(_last(rng, name, len(tasks), "note", asynchronous, counted, some))
        effects.append(len(tasks) - 1)
    ends += streams
    ends += [leaf for leaf in rng.sample(pool, min(2, len(pool))) if rng.random() < 0.3]
    outputs: Any = ends
    if len(ends) == 1 and not effects and rng.random() < 0.7 and isinstance(ends[0], Out):
        outputs = ends[0]
    else:
        rng.shuffle(ends)
        shape = rng.randrange(4)
        if shape == 1:
            outputs = {f"k{i}": end for i, end in enumerate(ends)}
        elif shape == 2:
            again = tuple(leaf for leaf in ends if leaf not in streams)[:1]
            outputs = {"all": ends, "constant": [5], "again": again}
        elif shape == 3:
            outputs = [ends[0], tuple(ends[1:]), "constant"] if len(ends) > 1 else ends
    tasks = _without_disturbing(tasks, outputs)
    every = [leaf for task in tasks for leaf in leaves((task.args, dict(task.kwargs)))]
    roots = {leaf.key[0] for leaf in every + leaves(outputs) if isinstance(leaf, In) and leaf.key}
    taken_whole = any(isinstance(leaf, In) and not leaf.key for leaf in every + leaves(outputs))
    positional = max([root + 1 for root in roots if isinstance(root, int)], default=0)
    keywords = tuple(sorted(root for root in roots if isinstance(root, str)))
    if taken_whole and not roots:
        positional = 1
    weight = sum(task.step.payload.size * max(task.step.items, 1) for task in tasks) + 1
    pauses = sum(task.step.pause + task.step.items * 0.00003 for task in tasks) + 0.0003
    executions = min(crowd, 32 * MB // weight + 1, int(0.06 / pauses) + 1)
    return Graph(
        name,
        tuple(tasks),
        outputs,
        tuple(effects),
        positional,
        keywords,
        tuple(random_payload(rng, 512 << 10 if large > 0 else 8000) for _ in range(5)),
        rng.randrange(1 << 32),
        rng.choice([1, 2, 3, 5, 16]),
        rng.randint(1, executions),
        rng.choice([1, 2, 4, 16, 64]),
    )


def _meeting(
    rng: Random, name: str, tasks: list[Task], actors: int, counted: bool,
    argument: Callable[[], Any],
) -> list[Any]:  # fmt: skip
    """Add a collective to ``tasks``, with what its ranks put in; what the ranks get."""
    ranks = rng.sample(range(actors), rng.randint(1, min(actors, 4)))
    first = len(tasks) + len(ranks)
    meetings, size = random_meeting(rng, len(ranks), first)
    given = tuple(Out(len(tasks) + rank) for rank in range(len(ranks)))
    for actor in ranks:
        step = Step(name, len(tasks), Payload("array", size), counted, False, 0)
        tasks.append(Task(actor, "mix", step, (argument(),), {}))
    for actor, meeting in zip(ranks, meetings, strict=True):
        step = Step(name, len(tasks), Payload("array", size * len(ranks)), counted, False, 0)
        tasks.append(Task(actor, meeting.operation, step, given, {}, meeting))
    return [Out(first + rank) for rank in range(len(ranks))]


def _generator(
    rng: Random, name: str, number: int, actor: int, asynchronous: bool, counted: bool,
    args: tuple[Any, ...],
) -> Task:  # fmt: skip
    items = rng.choice([0, 1, 3, 20, 100])
    payload = random_payload(rng, (1 << 20) // (items + 1))
    pause = rng.choice((0, 0, 0.001))
    step = Step(name, number, payload, counted, rng.random() < 0.5, pause, items)
    return Task(actor, rng.choice(STREAMING) if asynchronous else "items", step, args, {})


def _last(
    rng: Random, name: str, number: int, method: str, asynchronous: Sequence[bool], counted: bool,
    args: list[Any],
) -> Task:  # fmt: skip
    step = Step(name, number, Payload("int", 8), counted, False, 0)
    return Task(rng.randrange(len(asynchronous)), method, step, tuple(args), {})


def _of_tasks(task: Task) -> list[Out]:
    return [x for x in leaves((task.args, dict(task.kwargs))) if isinstance(x, Out)]


def _without_disturbing(tasks: list[Task], outputs: Any) -> list[Task]:
    """A task may overwrite only arguments that a `mix` of another actor made for it alone: values
    between tasks of one actor are the same objects."""
    uses: dict[int, int] = {}
    for leaf in [leaf for task in tasks for leaf in _of_tasks(task)] + leaves(outputs):
        if isinstance(leaf, Out):
            uses[leaf.task] = uses.get(leaf.task, 0) + 1
    checked = []
    for task in tasks:
        found = leaves((task.args, dict(task.kwargs)))
        alone = all(
            isinstance(leaf, Out)
            and uses[leaf.task] == 1
            and tasks[leaf.task].method in ("mix", "amix")
            and tasks[leaf.task].actor != task.actor
            for leaf in found
        )
        overwrites = task.step.overwrites and alone and task.method != "forward"
        checked.append(replace(task, step=replace(task.step, overwrites=overwrites)))
    return checked


def chain(
    name: str, actors: Sequence[int], executions: int, counted: bool = True,
    size: int = 4000, given: int = 5000,
) -> Graph:  # fmt: skip
    """One task on each actor, each after the other. ``size``: bytes of each result; ``given``: of the
    input."""
    tasks: list[Task] = []
    for number, actor in enumerate(actors):
        step = Step(name, number, Payload("array", size), counted, False, 0)
        source = Out(number - 1) if number else In((0, "a"))
        tasks.append(Task(actor, "mix", step, (source,), {}))
    payloads = (Payload("bytes", given), *(Payload("int", 8),) * 4)
    last = Out(len(actors) - 1)
    return Graph(name, tuple(tasks), last, (), 1, (), payloads, 1, 2, executions)


# Using


def build(graph: Graph, handles: Sequence[Any], communicator: Any = None) -> Any:
    """The graph as conveyor's nodes. ``communicator``: what its routes call so."""
    inp = InputNode()
    made: list[Any] = []

    def node(leaf: Any) -> Any:
        if isinstance(leaf, Out):
            return made[leaf.task] if leaf.element is None else made[leaf.task][leaf.element]
        at: Any = inp
        for key in leaf.key:
            at = at[key]
        return at

    meetings: dict[int, list[Any]] = {}
    for task in graph.tasks:
        if task.meeting is not None:
            if task.meeting.rank == 0:
                nodes = [made[rank.task] for rank in task.args]
                meetings[task.meeting.first] = bind(task.meeting, nodes)
            made.append(meetings[task.meeting.first][task.meeting.rank])
            continue
        method = getattr(handles[task.actor], task.method)
        kwargs = {key: fill(value, node) for key, value in task.kwargs.items()}
        bound = method.bind(task.step, *fill(task.args, node), **kwargs)
        route = graph.routes.get(task.step.task)
        if route is not None:
            bound.with_tensor_transport(communicator if route == "communicator" else route)
        made.append(bound)
    if isinstance(graph.outputs, Out):
        return node(graph.outputs)
    effects = [made[task] for task in graph.effects]
    effects = [bound[0] if isinstance(bound, tuple) else bound for bound in effects]
    return MultiOutputNode(fill(graph.outputs, node), effects=effects)


def arguments(graph: Graph, execution: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to give to ``execute``."""
    seeds = [zlib.crc32(b"%d %d %d" % (graph.seed, execution, i)) for i in range(5)]
    a, b, c, d, x = (make(p, s) for p, s in zip(graph.inputs, seeds, strict=True))
    args = ({"a": a, "b": [b, c]}, d)[: graph.positional]
    return args, dict.fromkeys(graph.keywords, x)


def evaluate(graph: Graph, objects: Mapping[int, Chaos], executions: int) -> list[list[Expected]]:
    """For each execution the digest of each result in order (or of what failed instead)."""
    return [_execution(graph, objects, i) for i in range(executions)]


def plain_objects(strikes: Mapping[int, Strikes], actors: set[int]) -> dict[int, Chaos]:
    """What stands for the actors of a round in plain Python."""
    objects: dict[int, Chaos] = {}
    for actor in actors:
        objects[actor] = AsyncChaos()
        objects[actor].begin(strikes.get(actor, {}))
    return objects


def _execution(graph: Graph, objects: Mapping[int, Chaos], number: int) -> list[Expected]:
    args, kwargs = arguments(graph, number)
    made: list[Any] = []

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Out):
            whole = made[leaf.task]
            return (
                whole if leaf.element is None or isinstance(whole, Failed) else whole[leaf.element]
            )
        if not leaf.key:
            return args[0] if len(args) == 1 and not kwargs else InputData(args, kwargs)
        first, *rest = leaf.key
        at = args[first] if isinstance(first, int) else kwargs[first]
        for key in rest:
            at = at[key]
        return at

    for task in graph.tasks:
        given = [value(leaf) for leaf in leaves((task.args, dict(task.kwargs)))]
        blamed = frozenset[tuple[int, str]]().union(
            *(item.blamed for item in given if isinstance(item, Failed))
        )
        if blamed:
            failed = Failed(blamed)
            made.append(Stream((), failed) if task.method in STREAMING else failed)
            continue
        filled = fill(task.args, value)
        if task.meeting is not None:
            made.append(met(task.meeting, filled))
            continue
        method = getattr(objects[task.actor], task.method)
        named = {key: fill(item, value) for key, item in task.kwargs.items()}
        if task.method in STREAMING:
            made.append(_all_items(method(task.step, *filled, **named), task.step.task))
            continue
        try:
            result = method(task.step, *filled, **named)
            if inspect.iscoroutine(result):
                result = _run_now(result)
            made.append(result)
        except Exception as error:
            made.append(Failed(frozenset({(task.step.task, type(error).__name__)})))
    effects = [made[task] for task in graph.effects]
    failed = frozenset[tuple[int, str]]().union(
        *(item.blamed for item in effects if isinstance(item, Failed))
    )
    results: list[Expected] = []
    for leaf in flatten(graph.outputs, graph.outputs):
        result = value(leaf) if isinstance(leaf, (In, Out)) else leaf
        if isinstance(result, Stream):
            late = Failed(failed) if failed else None
            results.append(replace(result, failed=result.failed or late))
        elif isinstance(result, Failed):
            results.append(result)
        elif failed:
            results.append(Failed(failed))
        else:
            results.append(digest(result))
    return results


def _all_items(generator: Any, task: int) -> Stream:
    found: list[int] = []
    try:
        if inspect.isasyncgen(generator):
            generator = _one_by_one(generator)
        for item in generator:
            found.append(digest(item))
    except Exception as error:
        return Stream(tuple(found), Failed(frozenset({(task, type(error).__name__)})))
    return Stream(tuple(found), None)


def _one_by_one(generator: Any) -> Iterator[Any]:
    while True:
        try:
            item = _run_now(generator.__anext__())
        except StopAsyncIteration:
            return
        yield item


def _run_now(coroutine: Any) -> Any:
    """Run a coroutine that only gives way, without an event loop."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as stop:
        return stop.value
