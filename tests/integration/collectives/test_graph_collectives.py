"""Collectives in graphs, on both engines. How they end: test_graph_collectives_ends.py."""

from __future__ import annotations

import os
import sys
from typing import Any

import cloudpickle
import pytest
from integration_helpers import get
from nodes_apart import APART

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    GraphError,
    TaskError,
)
from conveyor.experimental import collective
from conveyor.experimental.collective import ReduceOp

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PRELOAD = ["torch"]


@conveyor.remote
class Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        torch.set_num_threads(1)

    def ramp(self, size: int) -> Any:
        return torch.arange(size, dtype=torch.float32) + self.rank

    def random(self, size: int) -> Any:
        return torch.rand(size, generator=torch.Generator().manual_seed(self.rank))

    def array(self, size: int) -> Any:
        return np.full(size, self.rank + 1.0)

    def one(self, x: Any) -> Any:
        """A tensor, or what an odd rank has of a pair; ``"fail"`` fails on rank 1."""
        if isinstance(x, tuple):
            x = x[self.rank % 2]
        if x == "fail":
            if self.rank == 1:
                raise RuntimeError("no gradient")
            x = 2
        return torch.ones(x)

    def two(self, x: int) -> Any:
        return torch.ones(x) * self.rank, torch.ones(x, 2) + self.rank

    def total(self, x: Any) -> float:
        return float(x.sum())

    def sizes(self, tensors: Any) -> Any:
        return [tuple(tensor.shape) for tensor in tensors]


# With CONVEYOR_ENGINE=ray it is that one; see `make test-ray`.
ENGINES = ["ray"] if os.environ.get("CONVEYOR_ENGINE") == "ray" else ["local", "inline"]


@pytest.fixture(scope="module", params=ENGINES)
def workers(request, leaves_nothing):
    """Three actors of a session on each engine."""
    with leaves_nothing():
        conveyor.init(engine=request.param, preload=PRELOAD)
        yield [Rank.options(name=f"r{i}").remote(i) for i in range(3)]
        conveyor.shutdown()


def every(workers: list[Any], method: str, *args: Any) -> list[Any]:
    return [getattr(worker, method).bind(*args) for worker in workers]


def each_way(dag: Any, *args: Any) -> list[Any]:
    """The results of an execution with ordinary calls, and of two of the compiled graph."""
    found = [get(dag.execute(*args))]
    with dag.compile() as graph:
        found += [get(graph.execute(*args)) for _ in range(2)]
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("rounds", [None, 2])
def test_allreduce_gives_all_ranks_the_same_bits(workers, count, rounds):
    workers = workers[:count]
    with InputNode() as size:
        made = collective.allreduce.bind(every(workers, "random", size), rounds=rounds)
        dag = MultiOutputNode(made)
    for elements in (3, 50_000):
        own = [
            torch.rand(elements, generator=torch.Generator().manual_seed(i)) for i in range(count)
        ]
        wanted = sum(own)
        # Nodes reduce what their ranks have first; the second actor is on a node of its own.
        if APART and count == 3 and (elements > 3 or rounds == 2):
            wanted = own[0] + own[2] + own[1]
        eager, *compiled = each_way(dag, elements)
        assert all(torch.equal(one, sum(own)) for one in eager)
        for found in compiled:
            assert len(found) == count
            assert all(torch.equal(one, wanted) for one in found)


def test_every_operation_on_tensors_and_arrays(workers):
    workers = workers[:2]
    with InputNode() as size:
        x, y = every(workers, "ramp", size)
        arrays = every(workers, "array", size)
        dag = MultiOutputNode(
            {
                "max": collective.allreduce.bind([x, y], op=ReduceOp.MAX),
                "min": collective.allreduce.bind([x, y], op=ReduceOp.MIN),
                "avg": collective.allreduce.bind(arrays, op=ReduceOp.AVG),
                "gathered": collective.allgather.bind([x, y]),
                "listed": collective.allgather.bind(arrays, join=False),
                "scattered": collective.reducescatter.bind([x, y]),
                "reduced": collective.reduce.bind([x, y], root=1),
                "at_root": collective.gather.bind([x, y], root=1),
                "everywhere": collective.broadcast.bind(x, workers),
                "shares": collective.scatter.bind(y, workers),
                "of_input": collective.broadcast.bind(size, workers),
                "swapped": collective.all_to_all.bind([x, y]),
                "met": collective.barrier.bind([x, y]),
            }
        )
    for found in each_way(dag, 4):
        lists = {
            key: [one.tolist() if hasattr(one, "tolist") else one for one in value]
            for key, value in found.items()
            if key not in ("reduced", "at_root", "listed")
        }
        assert found["reduced"].tolist() == [1, 3, 5, 7]
        assert [one.tolist() for one in found["at_root"]] == [[0, 1, 2, 3], [1, 2, 3, 4]]
        for listed in found["listed"]:
            assert [one.tolist() for one in listed] == [[1] * 4, [2] * 4]
        assert lists == {
            "max": [[1, 2, 3, 4]] * 2,
            "min": [[0, 1, 2, 3]] * 2,
            "avg": [[1.5] * 4] * 2,
            "gathered": [[0, 1, 2, 3, 1, 2, 3, 4]] * 2,
            "scattered": [[1, 3], [5, 7]],
            "everywhere": [[0, 1, 2, 3]] * 2,
            "shares": [[1, 2], [3, 4]],
            "of_input": [4, 4],
            "swapped": [[0, 1, 1, 2], [2, 3, 3, 4]],
            "met": [[0, 1, 2, 3], [1, 2, 3, 4]],
        }


def test_lists_of_tensors_are_reduced_at_once_and_results_used_as_any_node(workers):
    workers = workers[:2]
    with InputNode() as size:
        pairs = [worker.two.options(num_returns=2).bind(size) for worker in workers]
        made = collective.allreduce.bind([list(of_all) for of_all in zip(*pairs, strict=True)])
        sizes = [worker.sizes.bind(list(own)) for worker, own in zip(workers, made, strict=True)]
        # A rank's result goes to the other actor, and one of rank 0's is used by nobody.
        dag = MultiOutputNode([*sizes, workers[0].total.bind(made[1][1])])
    for found in each_way(dag, 3):
        assert found == [[(3,), (3, 2)], [(3,), (3, 2)], 18.0]


def test_ranks_that_differ_are_an_error_of_that_execution_at_every_rank(workers):
    workers = workers[:2]
    for rounds in (1, 2):
        with InputNode() as x:
            dag = MultiOutputNode(
                collective.allreduce.bind(every(workers, "one", x), rounds=rounds)
            )
        with dag.compile(fail_fast=False) as graph:
            for _ in range(2):
                refs = graph.execute((2, 3))
                for ref in refs:
                    with pytest.raises(ValueError, match=r"allreduce.* over 2 actors") as caught:
                        get(ref)
                    assert "r0 has a tensor of float32 with shape (2,)" in str(caught.value)
                    assert "r1 has a tensor of float32 with shape (3,)" in str(caught.value)
                assert "allreduce on r" in str(caught.value)
                assert [one.tolist() for one in get(graph.execute(2))] == [[2, 2]] * 2


@pytest.mark.parametrize("fail_fast", [True, False])
def test_a_rank_that_raises_before_its_collective(workers, fail_fast):
    with InputNode() as x:
        made = collective.allreduce.bind(every(workers, "one", x), rounds=2)
        dag = MultiOutputNode([workers[0].total.bind(made[0]), *made[1:]])
    with dag.compile(fail_fast=fail_fast) as graph:
        for ref in graph.execute("fail"):
            with pytest.raises(RuntimeError, match="no gradient") as caught:
                get(ref)
            assert isinstance(caught.value, TaskError)
            assert "r1.one" in str(caught.value)
        assert get(graph.execute(2))[0] == 6


def test_a_dimension_that_cannot_be_shared_is_an_error_of_that_execution(workers):
    workers = workers[:2]
    with InputNode() as x:
        dag = MultiOutputNode(collective.reducescatter.bind(every(workers, "one", x)))
    with dag.compile() as graph:
        with pytest.raises(ValueError, match=r"shape \(3,\) it cannot be.* multiple of 2"):
            get(graph.execute(3))
        assert [one.tolist() for one in get(graph.execute(4))] == [[2, 2]] * 2


def test_actors_that_are_named_twice_are_refused(workers):
    worker = workers[0]
    with InputNode() as x, pytest.raises(GraphError, match="the actor r0 is named twice"):
        collective.broadcast.bind(worker.one.bind(x), [worker, worker])


def test_what_people_are_shown(workers):
    workers = workers[:2]
    with InputNode() as x:
        graph = MultiOutputNode(collective.allreduce.bind(every(workers, "one", x))).compile()
    assert "call  allreduce(SUM) of r0.one, r1.one on r0, r1" in graph.explain()
    drawn = graph.visualize(None, "dot")
    assert 'label="allreduce on r0"' in drawn
    assert 'label="allreduce on r1"' in drawn
    get(graph.execute(2))
    assert "allreduce on r1" in str(graph.stats())
