"""Tensors of a GPU between actors that Ray has placed, on two nodes of one machine with one card."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time

import cloudpickle
import pytest

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, GraphError
from conveyor.experimental import wait_tensor_freed

torch = pytest.importorskip("torch")
pytest.importorskip("ray")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

KIND = "cuda"
MIB = 1 << 20
WAIT = 30
SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
#: Both nodes have the card as their first one, since Ray numbers the cards of each node from 0.
HERE, THERE = {"resources": {"first": 0.01}}, {"resources": {"second": 0.01}}


@conveyor.remote(num_gpus=0.1, num_cpus=0)
class Worker:
    def __init__(self):
        os.environ[SHARE] = "1"

    def where(self):
        return torch.ones(1, device=KIND).device.type, os.environ.get("CUDA_VISIBLE_DEVICES")

    def make(self, seed, count):
        whole = torch.arange(count, device=KIND) + seed
        return {"whole": whole, "part": whole[10:20], "host": torch.arange(5), "half": whole.half()}

    @conveyor.method(tensor_transport="auto")
    def keep(self, seed, count):
        self.kept = self.make(seed, count)
        return self.kept

    def same(self, value, seed, count):
        wanted = self.make(seed, count)
        return [
            name
            for name, tensor in wanted.items()
            if value[name].device.type != tensor.device.type
            or not torch.equal(value[name].cpu(), tensor.cpu())
        ]

    def freed(self):
        wait_tensor_freed(self.kept["whole"], WAIT)
        return True

    def block(self, nbytes):
        return torch.ones(nbytes, dtype=torch.uint8, device=KIND)

    def sum_of(self, tensor):
        return int(tensor.sum(dtype=torch.int64))

    def pid(self):
        return os.getpid()


@pytest.fixture(scope="module")
def nodes():
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        given = {"num_cpus": 2, "num_gpus": 1}
        cluster.add_node(**given, resources={"first": 4}, include_dashboard=False)
        cluster.add_node(**given, resources={"second": 4})
        ray.init(address=cluster.address, log_to_driver=False)
        conveyor.init(engine="ray", shared_memory="node", node_timeout=30)
        try:
            yield
        finally:
            conveyor.shutdown()
            ray.shutdown()
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def workers(nodes):
    """Two on the driver's node, and two on the other one."""
    made = [Worker.options(**place).remote() for place in (HERE, HERE, THERE, THERE)]
    assert [
        kind for kind, _ in conveyor.get([one.where.remote() for one in made], timeout=120)
    ] == [KIND] * 4
    return made


@pytest.fixture(autouse=True)
def bounded(limited):
    """No test hangs."""


def get(ref, timeout=WAIT):
    return conveyor.get(ref, timeout=timeout)


def skip_without(name):
    if name == "nccl":
        from conveyor.transport.nccl.group import can_share

        why_not = can_share()
        if why_not is not None:
            pytest.skip(f"two actors cannot be on one GPU: {why_not}")


def pairs(workers):
    """From node to node, within the driver's, and within the other one."""
    a, b, c, d = workers
    return {"there": (a, c), "back": (c, a), "here": (a, b), "on the other": (c, d)}


@pytest.mark.parametrize("way", ["there", "back", "here", "on the other"])
@pytest.mark.parametrize("name", ["frame", "nccl", "cuda_ipc"])
def test_along_edges(workers, name, way):
    skip_without(name)
    a, b = pairs(workers)[way]
    with InputNode() as inp:
        made = a.make.bind(inp[0], inp[1])
        made = made if name == "frame" else made.with_tensor_transport(name)
        dag = b.same.bind(made, inp[0], inp[1])
    if name == "cuda_ipc" and way in ("there", "back"):
        with pytest.raises(GraphError, match="cuda_ipc"):
            dag.compile()
        return
    with dag.compile(depth=4) as graph:
        refs = [graph.execute(n, size) for n, size in enumerate([100, 100_000, 3_000_000] * 2)]
        assert get(refs) == [[]] * 6


@pytest.mark.parametrize("way", ["there", "back", "here", "on the other"])
def test_values_that_stay_and_calls(workers, way):
    a, b = pairs(workers)[way]
    ref = a.keep.remote(3, 100_000)
    assert get(b.same.remote(ref, 3, 100_000)) == []
    assert get(ref)["whole"].device.type == KIND
    near = way == "here"
    # What the driver's node cannot open goes by way of the hosts' memory.
    assert ref.route() == "ipc" if near else ref.route() in ("network", "ipc")
    part = get(ref["whole"][5:10])
    assert part.tolist() == [8, 9, 10, 11, 12]
    del ref
    assert get(a.freed.remote())
    assert get(b.same.remote(a.make.remote(4, 1000), 4, 1000)) == []


def test_the_driver_takes_part(workers):
    a, _, c, _ = workers
    given = {"whole": torch.arange(1000, device=KIND) + 2}
    given |= {"part": given["whole"][10:20], "host": torch.arange(5), "half": given["whole"].half()}
    with InputNode() as inp:
        dag = MultiOutputNode(
            [one.same.bind(inp, 2, 1000) for one in (a, c)]
            + [one.make.bind(2, 1000) for one in (a, c)]
        )
    with dag.compile() as graph:
        near, far, *made = get(graph.execute(given))
    assert near == far == []
    assert all(torch.equal(one["whole"], given["whole"]) for one in made)


@pytest.mark.parametrize("name", ["frame", "nccl"])
def test_how_long_it_takes_between_nodes(workers, name, record):
    skip_without(name)
    a, c = pairs(workers)["there"]
    with InputNode() as inp:
        made = a.block.bind(inp)
        dag = c.sum_of.bind(made if name == "frame" else made.with_tensor_transport(name))
    with dag.compile(depth=1) as graph:
        for nbytes in (4096, 16 * MIB):
            times = []
            for _ in range(10):
                begin = time.perf_counter()
                assert get(graph.execute(nbytes)) == nbytes
                times.append(time.perf_counter() - begin)
            took = statistics.median(times) * 1e3
            record(f"Ray, between nodes, {nbytes} bytes by {name}", f"{took:.2f} ms")


@pytest.mark.parametrize("name", ["frame", "nccl"])
def test_one_on_another_node_that_is_killed(workers, name):
    skip_without(name)
    a, _, c, _ = workers
    mortal = Worker.options(**THERE, name=f"mortal {name}").remote()
    pid = get(mortal.pid.remote())
    with InputNode() as inp:
        made = mortal.make.bind(inp[0], inp[1])
        made = made if name == "frame" else made.with_tensor_transport(name)
        dag = a.same.bind(made, inp[0], inp[1])
    graph = dag.compile()
    assert get(graph.execute(1, 1000)) == []
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match=f"mortal {name}"):
        get(graph.execute(2, 1000))
    graph.teardown()
    assert get(a.same.remote(c.make.remote(1, 1000), 1, 1000)) == []
