"""NIXL: what it is told by the environment, and where there is none."""

import os
import signal
import sys

import pytest

import conveyor
from conveyor import transport
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError, GraphError

PRELOAD = ["torch"]
pytestmark = [
    pytest.mark.alone,
    pytest.mark.usefixtures("session"),
    pytest.mark.skipif(
        transport.get("nixl").viable() is not None, reason=str(transport.get("nixl").viable())
    ),
]


@conveyor.remote
class Worker:
    def make(self, count):
        import torch

        return torch.full((count,), float(count))

    def total(self, tensor):
        return float(tensor.sum())

    def environment(self):
        return {name: value for name, value in os.environ.items() if name[:4] in ("UCX_", "NIXL")}

    def pid(self):
        return os.getpid()


@pytest.fixture(scope="module")
def pair(session):
    made = Worker.remote(), Worker.remote()
    yield made
    for one in made:
        conveyor.kill(one)


def graph_of(a, b):
    with InputNode() as inp:
        return b.total.bind(a.make.bind(inp).with_tensor_transport("nixl")).compile()


def test_memory_that_is_offered_is_told_of_when_it_changes(pair):
    """Each larger size needs memory of its own, and what was offered first is let go of."""
    with graph_of(*pair) as graph:
        for turn in range(2):
            for power in range(2, 21, 3):
                count = 1 << power
                assert graph.execute(count).get(timeout=60) == count**2, (turn, power)


def test_the_environment_is_the_programs(pair):
    with graph_of(*pair) as graph:
        assert graph.execute(4).get(timeout=60) == 16
        for one in pair:
            assert conveyor.get(one.environment.remote(), timeout=60) == {}


def test_a_fault_is_told_as_ever(pair):
    """UCX has handlers of its own for it, which are left out."""
    a, b = pair[0], Worker.remote()
    with graph_of(a, b) as graph:
        assert graph.execute(4).get(timeout=60) == 16
        os.kill(conveyor.get(b.pid.remote()), signal.SIGSEGV)
        with pytest.raises(ActorDiedError, match="SIGSEGV"):
            graph.execute(4).get(timeout=60)


def test_where_there_is_none(monkeypatch, pair):
    nixl = transport.get("nixl")
    assert nixl.viable() is None
    find = sys.modules["importlib.util"].find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "nixl" else find(name)
    )
    monkeypatch.delitem(sys.modules, "nixl", raising=False)
    said = "nixl is not installed: pip install 'conveyor[nixl]'"
    assert nixl.viable() == said
    a, b = pair
    with InputNode() as inp:
        root = b.total.bind(a.make.bind(inp).with_tensor_transport("nixl"))
    with pytest.raises(GraphError, match="'nixl', which cannot be used: nixl is not installed"):
        root.compile()
