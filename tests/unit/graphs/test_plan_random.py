"""Random graphs: following their Plans gives what evaluating them gives, in every interleaving."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.config import Config
from conveyor.dag import (
    InputAttributeNode,
    InputNode,
    MethodNode,
    MultiOutputNode,
    OutputElementNode,
)
from conveyor.dag.containers import replace_nodes
from conveyor.dag.inputs import given as input_part
from conveyor.dag.inputs import key_of
from conveyor.dag.methods import bind
from conveyor.plan import EXECUTOR, Call, Nested, Plan, Recv, Reg, Send, explain, fill, lower
from conveyor.plan.reading import in_order


@dataclass(frozen=True)
class Actor:
    index: int
    name: str


class Stateful:
    """What runs on an actor: a result tells its arguments and how many calls came before it."""

    def __init__(self) -> None:
        self.calls = 0

    def run(self, method: str, args: Any, kwargs: Any, num_returns: int | None) -> Any:
        self.calls += 1
        result = f"{method}#{self.calls}({_text(args)}, {_text(sorted(kwargs.items()))})"
        return (
            result if num_returns is None else tuple(f"{result}[{i}]" for i in range(num_returns))
        )


def _text(value: Any) -> str:
    return f"<{hash(repr(value)) & 0xFFFFFFFF:x}>"


@st.composite
def graphs(draw: st.DrawFn) -> Any:
    """The root of a valid graph: everything bound reaches an output."""
    actors = [Actor(i, draw(st.sampled_from("ab"))) for i in range(draw(st.integers(1, 4)))]
    whole = draw(st.booleans())
    inp = InputNode()
    inputs = [inp] if whole else [inp[i] for i in range(3)] + [inp.left, inp["right"]]
    inputs = [node.with_tensor_transport() if draw(st.booleans()) else node for node in inputs]
    values: list[Any] = list(inputs)
    unused: dict[Any, None] = {}
    used: list[Any] = []

    def pick() -> Any:
        node = draw(st.sampled_from(values))
        used.append(node)
        return node.with_tensor_transport("shm") if draw(st.integers(0, 5)) == 0 else node

    def argument(depth: int = 0) -> Any:
        kind = draw(st.integers(0, 5 if depth < 2 else 2))
        if kind <= 1:
            return pick()
        if kind == 2:
            return draw(st.sampled_from([None, 3, "text", [1, (2,)], {"k": []}]))
        parts = [argument(depth + 1) for _ in range(draw(st.integers(0, 3)))]
        if kind == 3:
            return parts
        return tuple(parts) if kind == 4 else {f"k{i}": part for i, part in enumerate(parts)}

    for _ in range(draw(st.integers(1, 12))):
        used.clear()
        args = (pick(), *(argument() for _ in range(draw(st.integers(0, 3)))))
        kwargs = {name: argument() for name in draw(st.sets(st.sampled_from("xyz")))}
        returns = draw(st.integers(1, 3))
        bound = bind(
            draw(st.sampled_from(actors)),
            draw(st.sampled_from(["f", "g"])),
            args,
            kwargs,
            num_returns=returns,
        )
        made = list(bound) if isinstance(bound, tuple) else [bound]
        for node in used:
            unused.pop(_task(node), None)
        unused[_task(made[0])] = None
        values += made
    ends = [node for node in values if _task(node) in unused]
    # Of several returns, one is enough.
    kept = list({_task(node): node for node in ends}.values())
    made = [node for node in values if not isinstance(node, (InputNode, InputAttributeNode))]
    kept += draw(st.lists(st.sampled_from(made), max_size=3))
    kept = draw(st.permutations(kept))
    return kept[0] if len(kept) == 1 and draw(st.booleans()) else MultiOutputNode(list(kept))


def _task(node: Any) -> Any:
    base = node
    return base.task if isinstance(base, OutputElementNode) else base


def evaluate(root: Any, executions: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    """The results, by evaluating the graph node by node in bind order."""
    outputs = root.nodes if isinstance(root, MultiOutputNode) else (root,)
    tasks: dict[MethodNode, None] = {}
    stack = [_task(node) for node in outputs]
    while stack:
        task = stack.pop()
        if isinstance(task, MethodNode) and task not in tasks:
            tasks[task] = None
            stack += [_task(node) for node in task._upstream()]
    objects: dict[Actor, Stateful] = {}
    results = []
    for args, kwargs in executions:
        made: dict[MethodNode, Any] = {}

        def value(node: Any, args: Any = args, kwargs: Any = kwargs, made: Any = made) -> Any:
            base = node
            if isinstance(base, InputNode):
                return args[0]
            if isinstance(base, InputAttributeNode):
                return input_part(key_of(base), args, kwargs)
            if isinstance(base, OutputElementNode):
                return made[base.task][base.index]
            return made[base]

        for task in sorted(tasks, key=lambda task: task.number):
            made[task] = objects.setdefault(task.actor, Stateful()).run(
                task.method,
                tuple(replace_nodes(arg, value) for arg in task.args),
                {name: replace_nodes(arg, value) for name, arg in task.kwargs.items()},
                task.num_returns,
            )
        found = [value(node) for node in outputs]
        results.append(found if isinstance(root, MultiOutputNode) else found[0])
    return results


class Ring:
    """One edge: `depth` slots, each reader with a place of its own."""

    def __init__(self, depth: int, readers: tuple[int, ...]) -> None:
        self.depth = depth
        self.queues: dict[int, deque[Any]] = {reader: deque() for reader in readers}

    def write(self, value: Any) -> None:
        for queue in self.queues.values():
            assert len(queue) < self.depth, "depth is granted at submission: a send finds room"
            queue.append(value)


def simulate(
    plan: Plan, executions: list[tuple[tuple[Any, ...], dict[str, Any]]], rng: random.Random
) -> list[Any]:
    """The results, by following the programs step by step in a random interleaving."""
    rings = [Ring(edge.depth, edge.readers) for edge in plan.edges]
    objects = [Stateful() for _ in plan.actors]
    results: list[Any] = []
    submitted = 0
    done = [0] * len(plan.actors)  # executions that each actor has finished

    def actor(program: Any):
        me = program.actor
        for _ in executions:
            regs: list[Any] = [None] * program.registers
            for step in program.steps:
                if isinstance(step, Recv):
                    queue = rings[step.edge].queues[me]
                    while not queue:
                        yield False
                    frame = queue.popleft()
                    if step.spread is None:
                        regs[step.reg] = frame
                    else:
                        assert step.reg is None
                        assert len(step.spread) == len(frame)
                        for reg, part in zip(step.spread, frame, strict=True):
                            if reg is not None:
                                regs[reg] = part
                elif isinstance(step, Call):
                    task = plan.tasks[step.task]
                    assert task.actor == me

                    def value(argument: Any, regs: list[Any] = regs) -> Any:
                        if isinstance(argument, Reg):
                            assert regs[argument.index] is not None
                            return regs[argument.index]
                        if isinstance(argument, Nested):
                            return fill(argument.template, regs)
                        return argument.value

                    result = objects[me].run(
                        task.method,
                        tuple(value(argument) for argument in task.args),
                        {name: value(argument) for name, argument in task.kwargs},
                        task.num_returns,
                    )
                    if step.out is not None:
                        regs[step.out] = result
                    assert len(step.outs) == (task.num_returns or 0)
                    for reg, part in zip(step.outs, result if step.outs else (), strict=True):
                        if reg is not None:
                            regs[reg] = part
                else:
                    assert plan.edges[step.edge].writer == me
                    rings[step.edge].write(regs[step.reg])
                yield True
            done[me] += 1

    def driver():
        nonlocal submitted
        while len(results) < len(executions):
            finished = min([*done, len(results)])
            if (
                submitted < len(executions)
                and submitted - finished < plan.depth
                and rng.random() < 0.7
            ):
                args, kwargs = executions[submitted]
                for bundle in plan.inputs:
                    frame = tuple(
                        args[k] if isinstance(k, int) else kwargs[k]
                        for k in bundle.keys
                        if k is not None
                    )
                    rings[bundle.edge].write(args[0] if plan.whole_input else frame)
                submitted += 1
                yield True
            else:
                queues = {edge: rings[edge].queues[EXECUTOR] for edge in plan.outputs}
                if not all(queues.values()):
                    yield False
                    continue
                frames = {edge: queue.popleft() for edge, queue in queues.items()}
                found = [frames[edge] for edge in plan.outputs]
                results.append(found if plan.multi_output else found[0])
                yield True

    running = [driver(), *(actor(program) for program in plan.programs)]
    idle = 0
    while running:
        one = rng.choice(running)
        try:
            idle = 0 if next(one) else idle + 1
        except StopIteration:
            running.remove(one)
            idle = 0
        assert idle < 10_000, "no one can go on"
    assert not any(queue for ring in rings for queue in ring.queues.values()), "all was received"
    return results


@given(root=graphs(), depth=st.integers(1, 3), seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_following_the_plan_gives_what_evaluation_gives(root, depth, seed):
    plan = lower(root, Config(depth=depth))
    executions = [
        (
            tuple(f"in{n}.{i}" for i in range(plan.positional)),
            {name: f"in{n}.{name}" for name in plan.keywords},
        )
        for n in range(4)
    ]
    assert simulate(plan, executions, random.Random(seed)) == evaluate(root, executions)


@given(root=graphs())
@settings(max_examples=100, deadline=None)
def test_every_plan_is_consistent(root):
    plan = lower(root, Config())
    assert [edge.id for edge in plan.edges] == list(range(len(plan.edges)))
    assert [task.id for task in plan.tasks] == list(range(len(plan.tasks)))
    assert [program.actor for program in plan.programs] == list(range(len(plan.actors)))
    assert len({actor.name for actor in plan.actors}) == len(plan.actors)
    assert len({task.label for task in plan.tasks}) == len(plan.tasks)

    sent = [
        (program.actor, s.edge)
        for program in plan.programs
        for s in program.steps
        if isinstance(s, Send)
    ]
    sent += [(EXECUTOR, bundle.edge) for bundle in plan.inputs]
    received = [
        (s.edge, program.actor)
        for program in plan.programs
        for s in program.steps
        if isinstance(s, Recv)
    ]
    received += [(edge, EXECUTOR) for edge in set(plan.outputs)]
    # Every edge is written once by its writer, and read once by each of its readers.
    assert sorted(sent) == sorted((edge.writer, edge.id) for edge in plan.edges)
    assert sorted(received) == sorted((e.id, reader) for e in plan.edges for reader in e.readers)
    for edge in plan.edges:
        assert edge.readers == tuple(sorted(set(edge.readers) - {edge.writer}))
        assert edge.readers

    # Bind order, on each actor and as an order of all.
    called = [[s.task for s in p.steps if isinstance(s, Call)] for p in plan.programs]
    assert sorted(task for tasks in called for task in tasks) == list(range(len(plan.tasks)))
    for actor, tasks in enumerate(called):
        assert tasks == sorted(tasks)
        assert {plan.tasks[task].actor for task in tasks} == {actor}
    place = {task: i for i, task in enumerate(plan.order)}
    assert sorted(place) == list(range(len(plan.tasks)))
    for tasks in called:
        assert [place[task] for task in tasks] == sorted(place[task] for task in tasks)
    published = {bundle.edge for bundle in plan.inputs}
    for stage in in_order(plan):
        assert published.issuperset(step.edge for step in stage.receives)
        published.update(step.edge for step in stage.sends)
    assert published == {edge.id for edge in plan.edges}

    # Nothing is received before it is needed, and nothing is kept that could be sent.
    for program in plan.programs:
        for step, following in zip(program.steps, program.steps[1:], strict=False):
            assert not (isinstance(step, Recv) and isinstance(following, Send))
        assert not program.steps or not isinstance(program.steps[-1], Recv)

    assert lower(root, Config()) == plan
    text = explain(plan)
    assert all(task.label in text for task in plan.tasks)
    assert all(f"#{edge.id} " in text for edge in plan.edges)
