"""Where the ranks of a collective in a graph read the tensors of the others."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
from integration_helpers import get

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.dag.collective import calls
from conveyor.experimental import collective

torch = pytest.importorskip("torch")

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Elements that take more bytes than are copied out of a frame.
LARGE = 1 << 16


def permissions(address: int) -> str:
    """Those of the mapping that ``address`` lies in: ``"rw-s"`` is shared, ``"rw-p"`` the process's own."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            if begin <= address < end:
                return line.split()[1]
    raise AssertionError(f"nothing is mapped at {address:#x}")


@conveyor.remote
class Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.seen: list[str] = []
        torch.set_num_threads(1)

    def watch(self) -> None:
        """Note where the inputs of other ranks lie from now on."""
        seen = self.seen

        def watched(kind: Any) -> None:
            run = kind.__call__

            def call(rank: Any, *inputs: Any) -> Any:
                others = [x for i, x in enumerate(inputs) if i != rank.rank]
                seen.extend(permissions(x.data_ptr()) for x in others)
                return run(rank, *inputs)

            kind.__call__ = call

        for kind in (calls.AllReduce, calls.AllGather, calls.Pass):
            watched(kind)

    def taken(self) -> list[str]:
        taken = self.seen[:]
        self.seen.clear()
        return taken

    def ramp(self, size: int) -> Any:
        return torch.arange(size, dtype=torch.float32) + self.rank

    def spoil(self, x: Any) -> float:
        """What it writes is its own."""
        total = float(x.sum())
        x.fill_(-1)
        return total


@pytest.fixture(scope="module")
def ranks(leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine="local", preload=["torch"])
        ranks = [Rank.remote(i) for i in range(3)]
        for each in ranks:
            get(each.watch.remote())
        yield ranks
        conveyor.shutdown()


def looks(ranks: list[Any], dag: Any) -> tuple[Any, list[list[str]]]:
    """The results of the last of three executions, and what each rank has seen meanwhile."""
    with dag.compile() as graph:
        for _ in range(3):
            found = get(graph.execute(LARGE))
    return found, [get(each.taken.remote()) for each in ranks]


def test_what_is_only_reduced_is_read_where_it_lies(ranks):
    with InputNode() as size:
        made = [each.ramp.bind(size) for each in ranks]
        dag = MultiOutputNode(collective.allreduce.bind(made))
    found, seen = looks(ranks, dag)
    wanted = 3 * torch.arange(LARGE, dtype=torch.float32) + 3
    assert all(torch.equal(one, wanted) for one in found)
    assert seen == [["rw-s"] * 6] * 3


@conveyor.remote
class Controller:
    def run(self, ranks: list[Any]) -> Any:
        with InputNode() as size:
            made = [each.ramp.bind(size) for each in ranks]
            dag = MultiOutputNode(collective.allreduce.bind(made))
        with dag.compile() as graph:
            return [one[:3].tolist() for one in get(graph.execute(LARGE))]


def test_so_it_is_in_a_graph_of_an_actor_whose_tasks_the_driver_does_not_see(ranks):
    assert get(Controller.remote().run.remote(ranks)) == [[3.0, 6.0, 9.0]] * 3
    assert [get(each.taken.remote()) for each in ranks] == [["rw-s"] * 2] * 3


def test_what_is_given_to_users_too_has_pages_of_its_own(ranks):
    with InputNode() as size:
        made = [each.ramp.bind(size) for each in ranks]
        summed = collective.allreduce.bind(made)
        spoilt = [each.spoil.bind(made[0]) for each in ranks[1:]]
        listed = collective.allgather.bind(made, join=False)
        dag = MultiOutputNode([*spoilt, *summed, listed[2]])
    (first, second, *sums, listing), seen = looks(ranks, dag)
    ramp = torch.arange(LARGE, dtype=torch.float32)
    assert first == second == float(ramp.sum())
    # A method may write to what it is given, also before or after a rank of the same actor has read it: so
    # those two get it as any two tasks of an actor do. The first rank reads what nobody writes to.
    assert torch.equal(sums[0], 3 * ramp + 3)
    assert torch.equal(listing[1], ramp + 1)
    assert all("rw-s" not in each for each in seen[2:])


def test_a_joined_allgather_and_a_list_differ(ranks):
    with InputNode() as size:
        made = [each.ramp.bind(size) for each in ranks]
        joined = MultiOutputNode(collective.allgather.bind(made))
        listed = MultiOutputNode(collective.allgather.bind(made, join=False))
    assert looks(ranks, joined)[1] == [["rw-s"] * 6] * 3
    assert looks(ranks, listed)[1] == [["rw-p"] * 6] * 3
