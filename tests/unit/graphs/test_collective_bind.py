"""Binding collectives: the nodes, the plan, and what is refused before there is any process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from conveyor.config import Config
from conveyor.dag import InputNode, MethodNode, MultiOutputNode
from conveyor.dag.methods import UNPLACED, bind, function_of
from conveyor.exceptions import GraphError
from conveyor.experimental import collective
from conveyor.experimental.collective import ReduceOp
from conveyor.plan import explain, lower


@dataclass(frozen=True)
class Actor:
    index: int
    name: str


A, B, C = Actor(0, "a"), Actor(1, "b"), Actor(2, "c")


def call(actor: Actor, method: str, *args: Any, n: int = 1, **options: Any) -> Any:
    return bind(actor, method, args, {}, num_returns=n, **options)


def plan_of(root: Any) -> Any:
    return lower(root, Config())


def made_by(*actors: Actor) -> list[Any]:
    inp = InputNode()
    return [call(actor, method, inp) for actor, method in zip(actors, "xyz", strict=False)]


@pytest.fixture
def inputs():
    return made_by(A, B, C)


def test_there_is_a_node_for_each_actor_in_order(inputs):
    made = collective.allreduce.bind(inputs)
    assert [node.actor for node in made] == [A, B, C]
    assert all(isinstance(node, collective.CollectiveOutputNode) for node in made)
    assert all(isinstance(node, MethodNode) for node in made)
    assert repr(made[1]) == "<CollectiveOutputNode allreduce on b>"
    assert [node.actor for node in collective.allgather.bind(inputs)] == [A, B, C]
    assert collective.reduce.bind(inputs, root=2).actor == C
    assert collective.gather.bind(inputs, root=1).actor == B


def test_the_plan_says_what_the_ranks_do_together():
    summed = collective.allreduce.bind(made_by(A, B))
    least = collective.allreduce.bind(summed, op=ReduceOp.MIN)
    plan = plan_of(MultiOutputNode(least))
    assert [task.label for task in plan.tasks] == [
        "a.x",
        "b.y",
        "allreduce on a",
        "allreduce on b",
        "allreduce#2 on a",
        "allreduce#2 on b",
    ]
    text = explain(plan)
    assert text.count("call  allreduce(SUM) of a.x, b.y on a, b\n") == 2
    assert "call  allreduce(MIN) of allreduce on a, allreduce on b on a, b" in text
    # One value from each rank to the other, for each of the two; and two results.
    assert len(plan.edges) == 1 + 2 + 2 + 2


def test_two_rounds_have_one_more_task_and_edge_for_each_rank(inputs):
    once = plan_of(MultiOutputNode(collective.allreduce.bind(made_by(A, B, C))))
    twice = plan_of(MultiOutputNode(collective.allreduce.bind(inputs, rounds=2)))
    assert len(twice.tasks) == len(once.tasks) + 3
    assert len(twice.edges) == len(once.edges) + 3
    assert "a part of allreduce(SUM) of a.x, b.y, c.z on a, b, c" in explain(twice)


def test_from_eight_actors_on_there_are_two_rounds_unless_told():
    def tasks(ranks: int, **options: Any) -> int:
        inp = InputNode()
        nodes = [call(Actor(i, f"w{i}"), "x", inp) for i in range(ranks)]
        return len(plan_of(MultiOutputNode(collective.allreduce.bind(nodes, **options))).tasks)

    assert (tasks(7), tasks(7, rounds=2)) == (14, 21)
    assert (tasks(8), tasks(8, rounds=1)) == (24, 16)


def test_lists_travel_in_one_frame_for_each_rank():
    inp = InputNode()
    (a1, a2), (b1, b2) = call(A, "x", inp, n=2), call(B, "y", inp, n=2)
    made = collective.allreduce.bind([[a1, b1], [a2, b2]])
    assert [[node.task.actor for node in of_actor] for of_actor in made] == [[A, A], [B, B]]
    plan = plan_of(MultiOutputNode([*made[0], *made[1]]))
    between = [edge for edge in plan.edges if edge.writer >= 0 and -1 not in edge.readers]
    assert [edge.source for edge in between] == [
        "list for allreduce on a",
        "list for allreduce on b",
    ]
    assert "allreduce(SUM) of a.x[0], b.y[0], a.x[1], b.y[1] on a, b" in explain(plan)


def test_a_rank_that_is_not_used_is_not_computed_and_no_mistake():
    for rounds in (1, 2):
        used = collective.allreduce.bind(made_by(A, B, C), rounds=rounds)[1]
        labels = [task.label for task in plan_of(used).tasks]
        assert [label for label in labels if label.startswith("allreduce")] == ["allreduce on b"]
    assert len(plan_of(collective.barrier.bind(made_by(A, B, C))[0]).tasks) == 3 + 3 + 1
    lone = collective.allreduce.bind([made_by(A)])
    assert plan_of(lone[0][0]).tasks


def test_a_collective_of_which_nothing_is_used_is_a_mistake():
    nodes = made_by(A, B)
    collective.allreduce.bind(nodes)
    with pytest.raises(GraphError, match="allreduce on a, allreduce on b do not reach the output"):
        plan_of(MultiOutputNode(nodes))
    assert lower(MultiOutputNode(nodes), Config(ignore_unused=True)).tasks


def test_what_is_bound_to_a_rank_and_forgotten_is_a_mistake():
    first, second = collective.allreduce.bind(made_by(A, B))
    call(A, "log", first)
    with pytest.raises(GraphError, match=r"a\.log does not reach the output"):
        plan_of(second)


def refused(operation: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(GraphError) as caught:
        operation.bind(*args, **kwargs)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


ALL = [
    collective.allreduce,
    collective.allgather,
    collective.reducescatter,
    collective.reduce,
    collective.gather,
    collective.all_to_all,
    collective.barrier,
]


@pytest.mark.parametrize("operation", ALL)
def test_nodes_that_are_not_one_of_each_actor(operation, inputs):
    inp = InputNode()
    x, y, _ = inputs
    assert "the list of nodes is empty" in refused(operation, [])
    assert "takes a list of nodes, not <MethodNode a.x>" in refused(operation, x)
    assert "number 1 is 3, which is no node" in refused(operation, [x, 3])
    assert "<MethodNode a.x> is bound twice" in refused(operation, [x, y, x])
    both = refused(operation, [x, y, call(A, "other", inp)])
    assert "<MethodNode a.x> and <MethodNode a.other> are both on the actor a" in both
    assert "InputNode(), a part of the input, which is on no actor" in refused(operation, [x, inp])
    assert "InputNode()[0], a part of the input" in refused(operation, [inp[0], y])
    ended = MultiOutputNode([x])
    assert "which is on no actor" in refused(operation, [ended, y])
    function = call(UNPLACED, "f", inp, function=function_of(len, {}))
    assert "bound to no actor: say which with options(on=actor)" in refused(
        operation, [x, function]
    )
    items = call(B, "items", inp, generator=True)
    assert "what b.items yields" in refused(operation, [x, items])
    if operation is not collective.allreduce:
        assert "lists of nodes are for allreduce alone" in refused(operation, [[x], [y]])


def test_lists_that_do_not_fit_each_other(inputs):
    inp = InputNode()
    x, y, z = inputs
    more = [call(A, "x2", inp), call(B, "y2", inp), call(C, "z2", inp)]
    allreduce = collective.allreduce
    assert "list 0 has 2, list 1 has 1" in refused(allreduce, [[x, y], more[:1]])
    assert "list 0 is of a, b, list 1 of a, c" in refused(allreduce, [[x, y], [more[0], more[2]]])
    swapped = refused(allreduce, [[x, y], [more[1], more[0]]])
    assert "in the same order; list 0 is of a, b, list 1 of b, a" in swapped
    assert "<MethodNode a.x> is bound twice" in refused(allreduce, [[x, y], [x, more[1]]])
    assert "number 1 is <MethodNode b.y>" in refused(allreduce, [[x], y])
    assert "list 1, the list of nodes is empty" in refused(allreduce, [[], []]).replace("0", "1")
    assert "list 0, <MethodNode a.x> is bound twice" in refused(allreduce, [[x, x], [y, z]])
    assert "several lists are reduced in one round" in refused(allreduce, [[x, y]], rounds=2)


def test_other_arguments(inputs):
    for operation in (collective.allreduce, collective.reducescatter, collective.reduce):
        assert "op is 'sum', and must be one of ReduceOp.SUM, " in refused(
            operation, inputs, op="sum"
        )
    for operation in (collective.allreduce, collective.allgather, collective.reducescatter):
        assert "transport is 'nccl'; collectives go through host memory" in refused(
            operation, inputs, transport="nccl"
        )
        assert operation.bind(inputs, transport="shm")
    for operation in (collective.reduce, collective.gather):
        for root in (3, -1, "a", True):
            assert "number of a rank, from 0 to 2" in refused(operation, inputs, root=root)
    for rounds in (0, 3, True, "2"):
        assert "rounds is 1, 2 or None" in refused(collective.allreduce, inputs, rounds=rounds)


@pytest.mark.parametrize("operation", [collective.broadcast, collective.scatter])
def test_who_gets_a_value(operation, inputs):
    assert "takes one node" in refused(operation, inputs, [A])
    assert "only ends a graph" in refused(operation, MultiOutputNode(inputs), [A])
    assert "the list of handles of actors is empty" in refused(operation, inputs[0], [])
    assert "takes a list of handles of actors, not 3" in refused(operation, inputs[0], 3)
    assert "number 0 of the actors is 'b', which is no actor's handle" in refused(
        operation, inputs[0], ["b"]
    )


def test_a_rank_is_one_value(inputs):
    made = collective.allreduce.bind(inputs)
    with pytest.raises(TypeError, match="cannot be taken apart"):
        made[0][0]
