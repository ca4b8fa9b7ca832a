"""Collectives by a communicator on the inline engine: all ranks are in one process, so it is not used."""

from __future__ import annotations

import pytest
from test_communicator_collectives import Hub, Rank, every, got, summed, wanted

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.experimental import collective

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ranks(leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine="inline")
        yield [Rank.options(name=f"r{i}").remote(i) for i in range(3)]
        conveyor.shutdown()


def test_the_results_are_the_same(ranks, tmp_path):
    hub = Hub(tmp_path, ranks)
    with summed(hub, ranks) as graph:
        for size in (3, 4):
            assert [each.tolist() for each in got(graph.execute(size))] == [wanted(size)] * 3
        with pytest.raises(ValueError, match=r"the ranks differ: r0 has a tensor of float32"):
            got(graph.execute((2, 3, 2)))
    with InputNode() as inp:
        apart = collective.allgather.bind(every(ranks, inp), hub, join=False)
        shares = collective.reducescatter.bind(every(ranks, inp), transport=hub)
        root = MultiOutputNode([ranks[1].sizes.bind(apart[1]), *shares])
    with root.compile() as graph:
        sizes, *parts = got(graph.execute(3))
        assert sizes == [(3,)] * 3
        assert [part.tolist() for part in parts] == [[3.0], [6.0], [9.0]]
    assert not (tmp_path / "log").exists()
