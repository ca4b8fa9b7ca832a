"""A rank that fails in an execution before another one has begun its step of that."""

from pathlib import Path

import numpy as np
import pytest
from integration_helpers import WAIT, get, hold
from missed_steps import do_not_meet, meet

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import CollectiveBrokenError
from conveyor.experimental import collective
from conveyor.runtime.graph.edges.failures import FailureTeller


@conveyor.remote
class Rank:
    def step(self, number, fails=""):
        if fails:
            Path(fails).touch()
            raise LookupError("no batch")
        array = np.full(4, float(number))
        collective.allreduce(array, timeout=WAIT)
        return array[0]

    def check(self):
        pass

    def tell_late(self, path):
        """What a step raises is told to who executes the graph when the latch is open."""
        tell = FailureTeller.tell

        def late(*args):
            hold(path)
            tell(*args)

        FailureTeller.tell = late

    def hold(self, path):
        hold(path)


@pytest.fixture
def pair(local):
    actors = [Rank.remote(), Rank.remote()]
    collective.create_collective_group(actors)
    meet(actors, 1)
    return actors


@pytest.fixture
def graph(pair):
    with InputNode() as inp:
        dag = MultiOutputNode([rank.step.bind(inp[0], inp[i + 1]) for i, rank in enumerate(pair)])
    with dag.compile(fail_fast=False) as graph:
        yield graph


@pytest.fixture
def waits(pair, graph, latches, wait_until):
    """The result of a rank that begins its step of an execution when the other one has failed there, and has
    run something else since."""
    failed, go = latches(), latches()
    held = pair[0].hold.remote(go.path)
    first, second = graph.execute(1, "", failed.path)
    wait_until(lambda: failed.is_open)
    get(pair[1].check.remote())
    go.open()
    get(held)
    with pytest.raises(LookupError):
        get(second)
    return first


@pytest.mark.parametrize("by", ["a call", "another graph"])
def test_what_the_other_rank_runs_later_does_not_meet_that_step(pair, waits, by):
    if by == "a call":
        return do_not_meet(pair[1].step.remote(2), waits, match=r"rank 1 \(Rank#2\)")
    with InputNode() as inp:
        other = pair[1].step.bind(inp).compile(ignore_unused=True)
    with other:
        do_not_meet(other.execute(2), waits, match=r"rank 1 \(Rank#2\)")


@pytest.mark.usefixtures("pair")
def test_a_rank_that_comes_to_nothing_any_more_is_not_waited_for(waits):
    with pytest.raises(CollectiveBrokenError, match=r"rank 1 \(Rank#2\) is not coming: .*no batch"):
        get(waits)


def test_what_has_failed_first_is_raised_though_it_comes_last(pair, latches, wait_until):
    """Who waits in the operation is told before who executes the graph is."""
    go, failed = latches(), latches()
    get(pair[1].tell_late.remote(go.path))
    with InputNode() as inp:
        dag = MultiOutputNode([rank.step.bind(inp[0], inp[i + 1]) for i, rank in enumerate(pair)])
    with dag.compile() as graph:
        refs = graph.execute(1, "", failed.path)
        wait_until(lambda: "CollectiveBrokenError" in str(graph.status()))
        get(pair[0].check.remote())  # by then its step has sent what it has come to
        assert conveyor.wait(refs, timeout=0.1)[0] == []
        go.open()
        for ref in refs:
            with pytest.raises(LookupError, match="no batch") as caught:
                get(ref)
            assert caught.match(r"also failed in this execution: \S*CollectiveBrokenError")
