"""Collectives of graphs whose ranks are on several hosts: what is sent from host to host, what comes of it,
and that it fails as on one host. The tasks are run here, one after the other; between real hosts they are in
tests/ray/test_ray_graph_collectives.py."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest

import conveyor
from conveyor.config import Config
from conveyor.dag import InputNode, MultiOutputNode, OutputElementNode
from conveyor.dag.collective.spreading import by_host
from conveyor.dag.methods import bind
from conveyor.dag.survey import survey
from conveyor.experimental import collective
from conveyor.experimental.collective import ReduceOp
from conveyor.plan import explain, lower

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

#: What is sent as a part; below, tensors are sent whole.
LARGE = 24_000


@pytest.fixture(scope="module", autouse=True)
def handles():
    """Four actors, of which only the handles are used, of a session whose memory large results are in."""

    @conveyor.remote
    class Taker:
        pass

    conveyor.init(engine="inline")
    yield [Taker.remote() for _ in range(4)]
    conveyor.shutdown()


@dataclass(frozen=True)
class Actor:
    index: int
    name: str


def actors(count: int) -> list[Actor]:
    return [Actor(i, f"r{i}") for i in range(count)]


def made_by(ranks: list[Actor], n: int = 1) -> list[Any]:
    inp = InputNode()
    return [bind(rank, "make", (inp,), {}, num_returns=n) for rank in ranks]


def where(hosts: list[int]) -> Any:
    return lambda ranks: [hosts[rank.index] for rank in ranks]


def run(nodes: list[Any], puts: list[Any], hosts: list[int]) -> list[Any]:
    """As below; each actor's method makes its one of ``puts``, and it is on its one of ``hosts``."""
    return run_graph(nodes, lambda actor: puts[actor.index], where(hosts))


def run_graph(nodes: list[Any], put: Any, hosts_of: Any) -> list[Any]:
    """What each of ``nodes`` is, or its error."""
    graph = survey(MultiOutputNode(nodes))
    tasks, instead = by_host(graph.tasks, hosts_of)
    done: dict[Any, Any] = {}
    for task in tasks:
        values = [value_of(node, done, instead) for node in task.args]
        failed = next((value for value in values if isinstance(value, Exception)), None)
        if task.function is None:
            done[task] = put(task.actor)
        elif failed is not None:
            done[task] = failed
        else:
            try:
                done[task] = task.function.call(*values)
            except Exception as error:
                done[task] = error
    return [value_of(node, done, instead) for node in nodes]


def value_of(node: Any, done: dict[Any, Any], instead: Any) -> Any:
    if isinstance(node, OutputElementNode):
        whole = value_of(node.task, done, instead)
        return whole if isinstance(whole, Exception) else whole[node.index]
    return None if isinstance(node, InputNode) else done[instead.get(node, node)]


def sent_between(root: Any, hosts: list[int]) -> list[str]:
    """The edges of the plan that go from host to host."""
    return loopback(root, where(hosts))


def loopback(root: Any, hosts_of: Any) -> list[str]:
    plan = lower(root, Config(ignore_unused=True), None, hosts_of)
    at = hosts_of([actor.key for actor in plan.actors])
    return [
        edge.source
        for edge in plan.edges
        if edge.writer >= 0 and any(r >= 0 and at[r] != at[edge.writer] for r in edge.readers)
    ]


def tensors(count: int, size: int, dtype: Any = torch.float32) -> list[Any]:
    # Small whole numbers, of which every order of adding gives the same bits.
    return [
        torch.randint(1, 5, (size,), generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(count)
    ]


PLACEMENTS = [
    [0, 0, 1, 1],
    [0, 1, 0, 1],
    [1, 0, 0, 0],
    [0, 0, 1, 2],
    [2, 1, 0, 1, 2, 2],
    [0, 0, 0, 1, 1, 1, 2, 2],
    [0, 1, 2],
]

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8]


@pytest.mark.parametrize("hosts", PLACEMENTS, ids=str)
@pytest.mark.parametrize("size", [0, 1, 7, LARGE + 1])
@pytest.mark.parametrize("rounds", [None, 1, 2])
def test_every_reduction_is_what_it_is_on_one_host(hosts, size, rounds):
    count = len(hosts)
    one_host = [0] * count
    for dtype, op in itertools.product(DTYPES, ReduceOp):
        if op is ReduceOp.AVG and not dtype.is_floating_point:
            continue
        puts = tensors(count, size, dtype)
        nodes = made_by(actors(count))
        made = [
            *collective.allreduce.bind(nodes, op=op, rounds=rounds),
            collective.reduce.bind(nodes, op=op, root=count - 1),
        ]
        wanted, found = run(made, puts, one_host), run(made, puts, hosts)
        for one, other in zip(wanted, found, strict=True):
            assert other.dtype == dtype
            assert torch.equal(one, other), (dtype, op)


def test_lists_of_tensors_and_a_tensor_that_does_not_lie_in_a_row():
    hosts = [0, 1, 0, 1, 1]
    each = [tensors(5, size) for size in (3, LARGE, 5)]
    grid = [torch.randn(200, 300).t() for _ in range(5)]
    puts = [(*own, square) for *own, square in zip(*each, grid, strict=True)]
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        pairs = made_by(actors(5), 4)
        made = collective.allreduce.bind([list(one) for one in zip(*pairs, strict=True)], op=op)
        nodes = [node for of_rank in made for node in of_rank]
        wanted, found = run(nodes, puts, [0] * 5), run(nodes, puts, hosts)
        for one, other in zip(wanted, found, strict=True):
            assert one.shape == other.shape
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
        first, *others = found[3::4]
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("kind", ["tensor", "array"])
@pytest.mark.parametrize("hosts", PLACEMENTS, ids=str)
def test_shares_and_what_is_used_of_them(hosts, kind):
    count, pick = len(hosts), random.Random(7)
    puts = [torch.randn(4 * count, 3).double() for _ in range(count)]
    if kind == "array":
        puts = [one.numpy() for one in puts]
    for _ in range(8):
        nodes = made_by(actors(count))
        made = [
            *pick.sample(collective.reducescatter.bind(nodes), pick.randint(1, count)),
            *pick.sample(collective.all_to_all.bind(nodes), pick.randint(1, count)),
            *collective.allgather.bind(nodes),
        ]
        wanted, found = run(made, puts, [0] * count), run(made, puts, hosts)
        for one, other in zip(wanted, found, strict=True):
            assert type(one) is type(other)
            assert one.shape == other.shape
            assert np.allclose(one, other, rtol=1e-12)


def test_sums_are_made_by_host_in_the_order_of_ranks():
    # Whatever is added to the large number first is lost in it.
    puts = [torch.full((LARGE,), value) for value in (1.0, 2.0**24, 1.0, 2.0**24, 1.0, 1.0)]
    hosts = [0, 1, 0, 1, 0, 0]
    made = collective.allreduce.bind(made_by(actors(6)))
    assert {float(one[0]) for one in run(made, puts, [0] * 6)} == {2.0**25}
    # Four ones are added on the one host, and on the other twice 2 ** 24.
    assert {float(one[-1]) for one in run(made, puts, hosts)} == {2.0**25 + 4}
    small = [one[:5] for one in puts]
    assert {float(one[0]) for one in run(made, small, hosts)} == {2.0**25}
    assert {float(one[0]) for one in run(made, small, [0] * 6)} == {2.0**25}


def test_halves_are_rounded_once():
    # 2048 + 1 is 2048 in f16, so in 16 bits nothing of the ones would be left.
    puts = [torch.full((LARGE,), value).half() for value in (2048.0, 1.0, 1.0, 1.0, 1.0)]
    for hosts in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1]):
        for kind in (puts, [one.numpy() for one in puts]):
            for made in (
                collective.allreduce.bind(made_by(actors(5))),
                collective.allreduce.bind(made_by(actors(5)), rounds=2),
                collective.reducescatter.bind(made_by(actors(5))),
            ):
                assert {float(one[-1]) for one in run(made, kind, hosts)} == {2052.0}


def masked() -> Any:
    return np.ma.masked_array(np.ones(4), [0, 1, 0, 0])


def lost() -> Any:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(4)
    return tensor


ODD = {
    "another shape": lambda: torch.ones(5),
    "another dtype": lambda: torch.ones(4, dtype=torch.int32),
    "an array": lambda: np.ones(4, np.float32),
    "no tensor": lambda: "x",
    "sparse": lambda: torch.ones(4).to_sparse(),
    "of complex numbers": lambda: torch.ones(4, dtype=torch.complex64),
    "masked": masked,
    "lost": lost,
    "nothing to be shared": lambda: torch.ones(()),
    "not a multiple": lambda: torch.ones(6),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 2]], ids=str)
def test_what_does_not_fit_is_said_as_on_one_host(odd, everywhere, hosts):
    for rank in range(4):
        puts = [ODD[odd]() if everywhere or i == rank else torch.ones(4) for i in range(4)]
        nodes = made_by(actors(4))
        made = [
            *collective.allreduce.bind(nodes),
            *collective.allreduce.bind(nodes, rounds=2),
            *collective.reducescatter.bind(nodes, op=ReduceOp.AVG),
            *collective.all_to_all.bind(nodes),
            collective.reduce.bind(nodes, op=ReduceOp.MAX, root=1),
        ]
        wanted, found = run(made, puts, [0] * 4), run(made, puts, hosts)
        failed = 0
        for one, other in zip(wanted, found, strict=True):
            assert type(one) is type(other), (one, other)
            if isinstance(one, Exception):
                failed += 1
                assert str(one) == str(other)
        assert failed or odd in (
            "not a multiple",
            "nothing to be shared",
            "another dtype",
            "an array",
        )


def test_what_goes_between_hosts_is_what_is_needed_there():
    hosts = [0, 0, 1, 1]
    own = {f"r{i}.make" for i in range(4)}
    for bound in (
        collective.allreduce.bind,
        lambda nodes: collective.allreduce.bind(nodes, rounds=2),
        lambda nodes: [collective.reduce.bind(nodes, root=2)],
        collective.reducescatter.bind,
        collective.all_to_all.bind,
    ):
        root = MultiOutputNode(bound(made_by(actors(4))))
        sent = sent_between(root, hosts)
        assert sent
        assert own.isdisjoint(sent)
        assert lower(root, Config(), None, where([5] * 4)) == lower(root, Config())
    # Where each host has one rank, its tensor is what goes to the others.
    alone = MultiOutputNode(collective.allreduce.bind(made_by(actors(4))))
    assert lower(alone, Config(), None, where([0, 1, 2, 3])) == lower(alone, Config())
    # What is asked for by name is done.
    at_once = MultiOutputNode(collective.allreduce.bind(made_by(actors(4)), rounds=1))
    assert lower(at_once, Config(), None, where(hosts)) == lower(at_once, Config())
    assert set(sent_between(at_once, hosts)) == own


def test_a_graph_is_compiled_again_and_people_see_the_steps():
    nodes = made_by(actors(4))
    root = MultiOutputNode(collective.allreduce.bind(nodes))
    plan = lower(root, Config(), None, where([0, 0, 1, 1]))
    assert lower(root, Config(), None, where([0, 0, 1, 1])) == plan
    assert (
        len(lower(root, Config()).tasks) == 8
    )  # and on one host it is as if the other had never been
    text = explain(plan)
    assert "call  a host's part of allreduce(SUM) of r0.make, r1.make on r0, r1\n" in text
    assert text.count("call  allreduce(SUM) of r0.make, r1.make, r2.make, r3.make on r0, r1") == 4
    assert [task.label for task in plan.tasks if task.collective][:5] == [
        "a host's part of allreduce on r0",
        "a host's part of allreduce on r1",
        "a host's part of allreduce on r2",
        "a host's part of allreduce on r3",
        "allreduce on r0",
    ]


def test_collectives_of_collectives():
    puts = tensors(4, LARGE)
    summed = collective.allreduce.bind(made_by(actors(4)))
    shares = collective.reducescatter.bind(summed, op=ReduceOp.MAX)
    made = [*collective.all_to_all.bind(shares), *summed[:1]]
    wanted, found = run(made, puts, [0] * 4), run(made, puts, [0, 1, 1, 0])
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("used", [[0], [3], [1, 2], [0, 1, 2, 3]], ids=str)
def test_scatter_sends_a_host_what_its_ranks_get(handles, used):
    node = bind(handles[0]._id, "make", (InputNode(),), {})
    index = {handle._id: i for i, handle in enumerate(handles)}
    every = collective.scatter.bind(node, handles)
    made = [every[rank] for rank in used]

    def at(ranks):
        return [index[rank] % 2 for rank in ranks]

    def of(value, hosts_of):
        return run_graph(made, lambda _: value, hosts_of)

    rows = torch.arange(8.0).reshape(8, 1)
    for rank, found in zip(used, of(rows, at), strict=True):
        assert found.flatten().tolist() == [2.0 * rank, 2.0 * rank + 1]
    for wrong in (torch.ones(6), torch.ones(()), "x"):
        alone, apart = of(wrong, lambda ranks: [0] * len(ranks)), of(wrong, at)
        assert [(type(e), str(e)) for e in alone] == [(type(e), str(e)) for e in apart]
        assert isinstance(apart[0], Exception)
    sent = loopback(MultiOutputNode(made), at)
    assert len(sent) == any(rank % 2 for rank in used)
    assert all(source.startswith("rows for scatter on ") for source in sent)
