"""Sessions, groups of actors, and what shows a graph, as a typed program writes them."""

from __future__ import annotations

import numpy
from typing_extensions import assert_type

import conveyor
from conveyor import ObjectRef, device, metrics, observe, testing, transport
from conveyor.dag import InputNode
from conveyor.experimental import collective
from conveyor.experimental.collective import CollectiveGroupHandle, CollectiveOutputNode


class Rank:
    @conveyor.method
    def grad(self, x: int) -> numpy.ndarray:
        return numpy.ones(2) * x

    @conveyor.method(tensor_transport="auto")
    def keep(self) -> numpy.ndarray:
        return numpy.ones(1 << 14)


RankActor = conveyor.actor(Rank)
PlainActor = conveyor.remote(Rank)


@conveyor.remote
def double(x: int) -> int:
    return 2 * x


def main() -> None:
    conveyor.init(log_to_driver=True, env_vars={"MODE": "test"}, arena_bytes=1 << 28)
    assert_type(conveyor.is_initialized(), bool)
    assert_type(conveyor.cluster_resources(), dict[str, float])
    assert_type(conveyor.get_runtime_context().get_actor_name(), str | None)
    a, b = RankActor.remote(), RankActor.remote()
    plain = PlainActor.options(name="plain").remote()

    with InputNode() as inp:
        nodes = [a.grad.bind(inp), b.grad.bind(inp)]
    summed = collective.allreduce.bind(nodes, op=collective.ReduceOp.SUM)
    assert_type(summed, list[CollectiveOutputNode])
    with InputNode() as inp:
        others = [a.grad.bind(inp), b.grad.bind(inp)]
    several = collective.allreduce.bind([nodes, others])
    assert [len(of_rank) for of_rank in several] == [2, 2]
    assert_type(collective.broadcast.bind(nodes[0], [a, plain]), list[CollectiveOutputNode])
    assert_type(collective.scatter.bind(nodes[0], [a, b]), list[CollectiveOutputNode])
    group = collective.create_collective_group([a, b], name="ranks")
    assert_type(group, CollectiveGroupHandle)
    assert_type(group.get_rank(b), int)
    assert collective.get_collective_groups([a]) == [group]
    collective.destroy_collective_group(group)

    ref = a.keep.remote()
    assert_type(conveyor.objects(), list[conveyor.KeptObject])
    with testing.hold_transfers(a), testing.hold_transfers(plain), testing.hold_transfers():
        assert_type(ref.done(), bool)
    with testing.fail_transfers(b):
        pass
    assert_type(ref.route(), str)
    assert_type(double.options(on=a).remote(3).get(), int)
    assert_type(double.options(on=plain).remote(3), ObjectRef[int])

    with InputNode() as inp:
        node = double.bind(inp)
    with node.compile(conveyor.Config(depth=2), name="looks") as graph:
        assert_type(graph.try_execute(3), ObjectRef[int])
        assert_type(graph.explain(), str)
        assert_type(graph.status(), observe.GraphStatus)
        assert_type(graph.stats(), observe.GraphStats)
        assert_type(graph.simulate(1e-3), observe.Simulation)
        assert_type(metrics.prometheus_text([graph]), str)
        graph.restart()
    assert_type(transport.names(), tuple[str, ...])
    assert_type(device.get("none"), device.Device | None)
    conveyor.kill(a)
    conveyor.kill(plain, graceful=True)
    conveyor.shutdown()


def seen_by_the_checker() -> None:
    with InputNode() as inp:
        node = double.bind(inp)
    collective.allreduce.bind(node)  # wrong
    collective.allreduce.bind([node], op="sum")  # wrong
    collective.broadcast.bind(node, ["a"])  # wrong
    collective.create_collective_group(["a"])  # wrong
    conveyor.init(grace_seconds="5")  # wrong
    conveyor.Config(depth="2")  # wrong
    double.options(on="a")  # wrong
    with testing.hold_transfers("a"):  # wrong
        pass


if __name__ == "__main__":
    main()
