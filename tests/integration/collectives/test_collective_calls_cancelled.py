"""Ranks that wait in a collective operation while nobody waits for them any more."""

import numpy as np
import pytest
from integration_collectives import await_rank
from integration_helpers import WAIT, get

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    CollectiveBrokenError,
    DeadlineExceededError,
    ExecutionCancelledError,
    WaitTimeoutError,
)
from conveyor.experimental import collective

pytestmark = pytest.mark.usefixtures("session")


@conveyor.remote
class Rank:
    def join(self):
        collective.barrier()

    def add(self, x):
        out = np.full(8, float(x))
        collective.allreduce(out)
        return out[0]

    def wait_for(self, gate):
        return gate.receive()

    def late_add(self, here, gate, x):
        here.send(None)
        gate.receive()
        return self.add(x)

    def ping(self):
        return "pong"


@pytest.fixture
def ranks():
    made = [Rank.remote(), Rank.remote()]
    collective.create_collective_group(made)
    get([one.join.remote() for one in made])
    yield made
    collective.destroy_all_collective_groups()
    for one in made:
        conveyor.kill(one)


def test_a_call_that_is_cancelled_leaves_and_tells_the_others(ranks):
    first, second = ranks
    ref = first.add.remote(1)
    await_rank(first, ref)
    assert ref.cancel()
    with pytest.raises(ExecutionCancelledError):
        conveyor.get(ref, timeout=WAIT)
    assert conveyor.get(first.ping.remote(), timeout=WAIT) == "pong"
    with pytest.raises(
        CollectiveBrokenError,
        match=r"rank 0 \(Rank\S*\) was interrupted in an operation by its cancellation or deadline",
    ):
        conveyor.get(second.add.remote(2), timeout=WAIT)


def test_who_waits_for_a_rank_that_is_cancelled_is_told(ranks):
    """Both are in it: three ranks, of which one never comes."""
    third = Rank.remote()
    collective.create_collective_group([*ranks, third], name="three")
    try:
        refs = [one.__ray_call__.remote(in_three) for one in ranks]
        for one, ref in zip(ranks, refs, strict=True):
            await_rank(one, ref)
        assert refs[0].cancel()
        with pytest.raises(CollectiveBrokenError, match=r"rank 0 .* its cancellation or deadline"):
            conveyor.get(refs[1], timeout=WAIT)
    finally:
        collective.destroy_collective_group("three")
        conveyor.kill(third)


def in_three(_):
    from conveyor.experimental import collective

    collective.barrier("three")


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_an_execution_whose_rank_waits(ranks, how):
    """The other rank is not even in the graph's execution yet: it waits for something else."""
    first, second = ranks
    sends, gate = conveyor.channel.open()
    here, arrives = conveyor.channel.open()
    with InputNode() as x:
        late = second.late_add.bind(here, gate, x)
        graph = MultiOutputNode([first.add.bind(x), late]).compile()
    for deadline in (2, 20):
        refs = graph.execute(1, deadline=deadline if how == "late" else None)
        try:
            arrives.receive(timeout=2 * deadline if how == "late" else WAIT)
            break
        except WaitTimeoutError:
            # That was not time enough for it to begin, so it was skipped; the one that waited has left.
            assert (how, deadline) == ("late", 2)
            collective.destroy_all_collective_groups()
            collective.create_collective_group(ranks)
    if how == "late":
        with pytest.raises(DeadlineExceededError):
            conveyor.get(refs[0], timeout=WAIT)
    else:
        await_rank(first, refs[0])
        refs[0].cancel()
        with pytest.raises(ExecutionCancelledError):
            conveyor.get(refs[0], timeout=WAIT)
    assert conveyor.get(first.ping.remote(), timeout=WAIT) == "pong"
    sends.send(None)  # the other one comes, and is not left alone
    assert conveyor.get(second.ping.remote(), timeout=WAIT) == "pong"
    graph.teardown()
    sends.close()


def test_those_that_come_in_time_are_done(ranks):
    with InputNode() as x:
        graph = MultiOutputNode([one.add.bind(x) for one in ranks]).compile()
    with graph:
        for number in range(50):
            assert conveyor.get(graph.execute(number, deadline=30)) == [2.0 * number] * 2
    refs = [[one.add.remote(number) for one in ranks] for number in range(50)]
    assert [get(pair) for pair in refs] == [[2.0 * number] * 2 for number in range(50)]
