"""Collectives of graphs over nodes that share no memory: within a node over shared memory, between nodes only
what the ranks there need. What comes of it for all sizes, types and errors is in
tests/unit/test_collectives_by_host.py."""

import contextlib
import json
import os
import signal
import sys

import cloudpickle
import inside
import pytest
import torch
from ray_nodes import HERE, THERE, get

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError
from conveyor.experimental import collective
from conveyor.experimental.collective import ReduceOp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Rank:
    def __init__(self, rank):
        self.rank = rank
        torch.set_num_threads(1)

    def pid(self):
        return os.getpid()

    def make(self, x):
        """A tensor of that size; what the rank has of a tuple; it raises at a string."""
        x = x[self.rank] if isinstance(x, tuple) else x
        if isinstance(x, str):
            raise RuntimeError(x)
        return torch.arange(x, dtype=torch.float64) + self.rank

    def held(self, x, began, path):
        if self.rank == 3:
            open(began, "w").close()
            while not os.path.exists(path):
                signal.sigtimedwait([], 0.005)
        return torch.full((x,), 1.0 + self.rank)

    def total(self, x):
        return x.sum().item()

    def over(self, ranks, size):
        """A graph that this actor executes."""
        with summing(ranks) as graph:
            return conveyor.get([graph.execute(size) for _ in range(20)]), graph.explain()


def ranks_on(*nodes, **options):
    return [Rank.options(**where, **options).remote(i) for i, where in enumerate(nodes)]


def made_by(ranks, x, method="make", *args):
    return [getattr(rank, method).bind(x, *args) for rank in ranks]


def summing(ranks, bind=collective.allreduce.bind, **options):
    """A graph whose ranks tell what they have got has come to."""
    with InputNode() as x:
        got = bind(made_by(ranks, x))
        dag = MultiOutputNode([rank.total.bind(one) for rank, one in zip(ranks, got, strict=True)])
    return dag.compile(**options)


@contextlib.contextmanager
def crossed(at_most, at_least=0):
    """Between the nodes so many bytes go each way, but for what frames and words take."""
    pump = inside.pump()
    before = pump.counts(1)
    yield
    after = pump.counts(1)
    for way in (2, 3):
        assert at_least <= after[way] - before[way] <= at_most + (64 << 10)


def links(graph):
    return [line for line in graph.explain().splitlines() if "network link" in line]


@pytest.fixture(scope="module")
def ranks(far):
    """Actors on both nodes, in turns."""
    return ranks_on(HERE, THERE, HERE, THERE)


SIZE = 1 << 17
BYTES = 8 * SIZE


def test_a_node_sends_as_much_as_is_needed_remote(ranks):
    """One tensor where it has two, and the halves of it where ranks get shares."""
    total = 4 * sum(range(SIZE)) + 6 * SIZE
    for bind, most in (
        (collective.allreduce.bind, BYTES),
        (lambda nodes: collective.allreduce.bind(nodes, rounds=2), BYTES),
        # Every rank reduces the tensors of all, if that is what is asked for.
        (lambda nodes: collective.allreduce.bind(nodes, rounds=1), 2 * BYTES),
    ):
        with summing(ranks, bind) as graph:
            assert get(graph.execute(SIZE)) == [total] * 4
            with crossed(most, most):
                assert get(graph.execute(SIZE)) == [total] * 4
            assert get(graph.execute(4)) == [4 * 6 + 4 * 6] * 4
    shares = [4 * sum(range(i * SIZE // 4, (i + 1) * SIZE // 4)) + 6 * SIZE // 4 for i in range(4)]
    with summing(ranks, collective.reducescatter.bind) as graph:
        assert get(graph.execute(SIZE)) == shares
        with crossed(BYTES // 2, BYTES // 2):
            assert get(graph.execute(SIZE)) == shares
    with summing(ranks, collective.all_to_all.bind) as graph:
        assert get(graph.execute(SIZE)) == shares
        with crossed(BYTES, BYTES):
            assert get(graph.execute(SIZE)) == shares
    with InputNode() as x:
        root = collective.reduce.bind(made_by(ranks, x), op=ReduceOp.MAX, root=1)
        there = ranks[1].total.bind(root)
    with there.compile() as graph:
        assert get(graph.execute(SIZE)) == sum(range(3, SIZE + 3))
        with crossed(BYTES):
            assert get(graph.execute(SIZE)) == sum(range(3, SIZE + 3))
    with InputNode() as x:
        parts = collective.scatter.bind(ranks[0].make.bind(x), ranks)
        dag = MultiOutputNode([r.total.bind(p) for r, p in zip(ranks, parts, strict=True)])
    with dag.compile() as graph:
        assert get(graph.execute(8)) == [1, 5, 9, 13]
        with crossed(BYTES // 2):
            assert sum(get(graph.execute(SIZE))) == sum(range(SIZE))


def test_what_people_are_shown(ranks, tmp_path):
    with summing(ranks, name="sums") as graph:
        get([graph.execute(4) for _ in range(5)])
        text = graph.explain()
        names = [f"{rank._id.name}" for rank in ranks]
        assert f"a host's part of allreduce(SUM) of {names[0]}.make, {names[2]}.make on" in text
        assert text.count("call  allreduce(SUM) of ") == 4
        # Of each rank its part, and what the driver gives and gets.
        assert not any(".make " in line and "part" not in line for line in links(graph))
        assert sum("a host's part of allreduce on" in line for line in links(graph)) == 4
        stats = str(graph.stats())
        for name in names:
            assert f"allreduce on {name}" in stats
            assert f"a host's part of allreduce on {name}" in stats
        with graph.trace(tmp_path / "trace.json"):
            get([graph.execute(SIZE) for _ in range(3)])
        told = {
            event["name"]
            for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        }
        for name in names:
            assert {f"allreduce on {name}", f"a host's part of allreduce on {name}"} <= told


def test_ranks_of_one_node_are_as_on_one_host(far):
    """All of them on the other node than the driver: shared memory there, and nothing more."""
    there = ranks_on(THERE, THERE, THERE)
    with summing(there) as graph:
        assert "a host's part" not in graph.explain()
        assert get(graph.execute(SIZE)) == [3 * sum(range(SIZE)) + 3 * SIZE] * 3
        with crossed(0):
            get(graph.execute(SIZE))
        assert all(".make " not in line for line in links(graph))


def test_an_actor_of_another_node_compiles_it(ranks):
    outside = ranks_on(THERE)[0]
    found, text = get(outside.over.remote(ranks, SIZE))
    assert found == [[4 * sum(range(SIZE)) + 6 * SIZE] * 4] * 20
    assert "a host's part of allreduce" in text


def held_graph(ranks, tmp_path, **options):
    with InputNode() as x:
        made = made_by(ranks, x, "held", f"{tmp_path}/began", f"{tmp_path}/go")
        got = collective.allreduce.bind(made)
        dag = MultiOutputNode([rank.total.bind(one) for rank, one in zip(ranks, got, strict=True)])
    return dag.compile(**options)


@pytest.mark.parametrize("there", [True, False])
def test_a_rank_that_dies_frees_all_and_may_come_back(far, tmp_path, wait_until, there):
    where = (HERE, HERE, THERE, THERE) if there else (THERE, THERE, HERE, HERE)
    ranks = ranks_on(*where, max_restarts=1)
    pid = get(ranks[3].pid.remote())
    with held_graph(ranks, tmp_path) as graph:
        refs = graph.execute(SIZE)
        wait_until(lambda: os.path.exists(tmp_path / "began"))
        os.kill(pid, signal.SIGKILL)
        for ref in refs:
            with pytest.raises(ActorDiedError, match="Rank"):
                get(ref)
        (tmp_path / "go").touch()
        graph.restart()
        assert get(graph.execute(SIZE)) == [10.0 * SIZE] * 4
        assert get(graph.execute(3)) == [30.0] * 4
