"""Programs over three nodes that share no memory: pipelines, many readers, large values, graphs of actors."""

import asyncio
import sys

import cloudpickle
import numpy as np
import pytest
import ray

import conveyor
from conveyor.dag import InputNode, MultiOutputNode

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT = 100
#: Connections are not to be lost because the machine has other work.
TIMEOUT = 60
NODES = [{"resources": {name: 0.01}} for name in ("first", "second", "aside")]


@conveyor.remote
class Rank:
    """A stage of a pipeline: it keeps what goes forward until its gradient comes back."""

    def __init__(self, weight=1.0):
        self.weight, self.kept = weight, {}

    def forward(self, batch):
        number, x = batch
        self.kept[number] = x
        return number, x * self.weight

    def backward(self, gradient):
        number, g = gradient
        self.weight += float(g[0])
        return number, g + self.kept.pop(number)

    def state(self):
        return self.weight, len(self.kept)

    def total(self, x):
        return float(x.sum())

    def echo(self, x):
        return x

    def join(self, *parts):
        return sum(parts)

    def count(self, n):
        yield from range(n)

    def over(self, ranks, batches):
        """A graph over others, of which none need be on this node."""
        with InputNode() as inp:
            node = inp
            for rank in ranks:
                node = rank.forward.bind(node)
        with node.compile(depth=4) as graph:
            refs = [graph.execute((i, np.full(10, float(i)))) for i in range(batches)]
            return [float(x[0]) for _, x in conveyor.get(refs)]


@pytest.fixture(scope="module", autouse=True)
def three(two_nodes, leaves_nothing, wait_until):
    node = two_nodes.add_node(num_cpus=1, resources={"aside": 1})
    with leaves_nothing():
        conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT)
        yield
        conveyor.shutdown()
    two_nodes.remove_node(node)
    # Until Ray knows, it goes on placing actors there.
    wait_until(lambda: sum(known["Alive"] for known in ray.nodes()) == 2, 100)


@pytest.fixture(scope="module")
def ranks(three):
    """One on each node, and another on the second."""
    return [Rank.options(**node).remote(2.0) for node in (*NODES, NODES[1])]


def get(ref):
    return conveyor.get(ref, timeout=WAIT)


def test_readers_on_several_nodes_get_one_value(ranks):
    with InputNode() as inp:
        made = ranks[1].echo.bind(inp)
        totals = [rank.total.bind(made) for rank in ranks]
        dag = MultiOutputNode([ranks[2].join.bind(*totals), *totals])
    with dag.compile(depth=4) as graph:
        for size in (10, 1 << 10, 1 << 20):
            refs = [graph.execute(np.full(size, float(i))) for i in range(8)]
            assert get(refs) == [[4.0 * size * i] + [1.0 * size * i] * 4 for i in range(8)]


def test_a_pipeline_over_nodes_forward_and_back(ranks):
    """Micro-batches, several under way, over three nodes and back: each in its order."""
    stages = [Rank.options(**node).remote(1.0) for node in NODES]
    with InputNode() as inp:
        node = inp
        for stage in stages:
            node = stage.forward.bind(node)
        for stage in reversed(stages):
            node = stage.backward.bind(node)
    batch = np.ones(1 << 15)
    with node.compile(depth=6) as graph:
        for _ in range(4):
            refs = [graph.execute((i, 0.0 * batch)) for i in range(12)]
            for i, ref in enumerate(refs):
                number, gradient = get(ref)
                assert (number, float(gradient.sum())) == (i, 0.0)
        assert "network link" in str(graph.explain())
    assert get([stage.state.remote() for stage in stages]) == [(1.0, 0)] * 3


def test_large_values_go_round(ranks):
    with InputNode() as inp:
        node = inp
        for rank in ranks[:3]:
            node = rank.echo.bind(node)
    sent = [np.arange(i, i + (4 << 20), dtype=np.float64) for i in range(3)]  # 32 MB each
    with node.compile(depth=3) as graph:
        for got, value in zip(get([graph.execute(value) for value in sent]), sent, strict=True):
            assert np.array_equal(got, value)
    assert get(ranks[2].total.remote(sent[0])) == float(sent[0].sum())


@pytest.mark.parametrize("node", [1, 2])
def test_all_items_come_before_their_end(ranks, node):
    async def taken(graph):
        return [item async for item in await graph.execute_async(150)]

    with ranks[node].count.bind(InputNode()).compile() as graph:
        for _ in range(10):
            assert asyncio.run(taken(graph)) == list(range(150))
            assert list(graph.execute(150)) == list(range(150))
