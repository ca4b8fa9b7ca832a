"""Failures of ranks that are on nodes that share no memory: who knows of them goes on, as on one host."""

import contextlib
import sys
import time

import cloudpickle
import numpy as np
import pytest
from missed_steps import do_not_meet, fail, meet, settled
from ray_nodes import HERE, THERE, WAIT, get

import conveyor
from conveyor import collective
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import CollectiveBrokenError, ExecutionCancelledError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Rank:
    def step(self, number, fails=""):
        if fails == "before":
            raise LookupError("no batch")
        array = np.full(4, float(number))
        collective.allreduce(array, timeout=WAIT)
        if fails == "behind":
            raise LookupError("no room")
        return array[0]

    def step_of(self, number, _given):
        return self.step(number)

    def size(self, size):
        collective.allreduce(np.ones(size), timeout=WAIT)

    def fail(self, _given=None):
        raise LookupError("nothing of a step")

    def call(self, ranks, number, fails):
        """Somebody else makes calls: the references."""
        return [rank.step.remote(number, how) for rank, how in zip(ranks, fails, strict=True)]

    def learn(self, rank):
        """Somebody else calls, and gets the error."""
        with pytest.raises(LookupError):
            conveyor.get(rank.step.remote(1, "before"))


@pytest.fixture(scope="module")
def actors(far):
    """On both nodes, in turns; the last of them is in no group."""
    return [Rank.options(**where).remote() for where in (HERE, THERE, HERE, THERE, THERE)]


@pytest.fixture(params=["both nodes", "the other node"])
def ranks(request, actors):
    """A group over both nodes, and one that is all of it on another node than the driver."""
    made = actors[:4] if request.param == "both nodes" else [actors[1], actors[3]]
    group = collective.create_collective_group(made)
    yield made
    collective.destroy_collective_group(group)


def test_what_the_caller_has_heard_of_breaks_nothing(ranks):
    for number in range(10):
        for rank in ranks:
            fail(rank.step.remote(number, "before"))
            meet(ranks, number)
            refs = [one.step.remote(number, "behind" if one is rank else "") for one in ranks]
            fail(refs)
            settled(*refs)
            meet(ranks, number)


def test_a_rank_that_waits_for_one_whose_failure_was_known(ranks):
    """It is there before the other one has been called again."""
    for number in range(5):
        fail(ranks[-1].step.remote(number, "before"))
        first = [rank.step.remote(number) for rank in ranks[:-1]]
        settled(ranks[-1].step.remote(number), *first)
        assert get(first) == [number * float(len(ranks))] * len(first)


def test_many_failures_between_two_operations(ranks):
    """More than the ring between two nodes has slots."""
    for _ in range(40):
        fail(ranks[-1].fail.remote())
    meet(ranks, 1)
    refs = [ranks[-1].fail.remote() for _ in range(40)]
    settled(*refs)  # and nobody knows of these
    do_not_meet(*[rank.step.remote(3) for rank in ranks], match=rf"rank {len(ranks) - 1} \(Rank")


def test_a_failure_that_nobody_has_heard_of(ranks):
    settled(ranks[-1].step.remote(1, "before"))
    refs = [rank.step.remote(2) for rank in ranks]
    do_not_meet(*refs, match=rf"rank {len(ranks) - 1} \(Rank")


def test_a_call_that_was_made_before_anybody_had_heard_of_the_failure(ranks):
    missed = ranks[-1].step.remote(1, "before")
    first = [rank.step.remote(1) for rank in ranks[:-1]]
    settled(missed)
    fail(missed)
    do_not_meet(*first)


def test_an_argument_that_has_failed(ranks):
    """Nothing is sent to the actor, which hears of it all the same."""
    for known in (True, False):
        source = ranks[0].fail.remote()
        settled(source)
        dependent = ranks[-1].step_of.remote(1, source)
        settled(dependent)
        if known:
            fail(dependent)
            meet(ranks, 2)
        else:
            first = [rank.step.remote(1) for rank in ranks[:-1]]
            do_not_meet(ranks[-1].step.remote(2), *first)


def test_who_has_cancelled_a_step_goes_on(ranks):
    meet(ranks, 1)
    waiting = ranks[0].step.remote(2)  # the others come only when it was cancelled
    queued = ranks[0].step.remote(3)
    assert queued.cancel()
    assert get([rank.step.remote(2) for rank in ranks[1:]]) == [2.0 * len(ranks)] * (len(ranks) - 1)
    get(waiting)
    fail(queued, ExecutionCancelledError)
    meet(ranks, 4)


def test_a_failure_is_known_wherever_it_was_got(actors, ranks):
    """By the driver, by an actor of its node or of the other one; and whoever makes the calls."""
    for other in (actors[4], actors[0]):
        callers = [rank for rank in ranks if rank is not other]
        get(other.learn.remote(callers[-1]))
        meet(ranks, 1)
        (missed,) = get(other.call.remote(callers[-1:], 1, ["before"]))
        fail(missed)  # called there, got here
        if other not in ranks:
            refs = get(other.call.remote(ranks, 2, [""] * len(ranks)))
            assert get(refs) == [2.0 * len(ranks)] * len(ranks)
        else:
            meet(ranks, 2)
    settled(*get(actors[4].call.remote(ranks[:1], 3, ["before"])))
    do_not_meet(*get(actors[4].call.remote(ranks, 4, [""] * len(ranks))))


def test_a_shape_that_differs_is_the_error_of_that_call_alone(ranks):
    for number in range(3):
        refs = [rank.size.remote(3 + (rank is ranks[-1])) for rank in ranks]
        for ref in refs:
            fail(ref, conveyor.exceptions.CollectiveMismatchError)
        meet(ranks, number)


def test_steps_of_a_graph_behind_one_whose_method_has_raised_behind_its_operation(ranks):
    with InputNode() as inp:
        dag = MultiOutputNode([rank.step.bind(inp[0], inp[i + 1]) for i, rank in enumerate(ranks)])
    nothing = [""] * len(ranks)
    with dag.compile() as graph:
        for number in range(5):
            failing = [*nothing[1:], "behind"]
            ahead = graph.execute(number, *failing)
            behind = graph.execute(number, *nothing)
            fail(ahead)
            assert get(behind) == [number * float(len(ranks))] * len(ranks)


def test_steps_of_graphs_behind_failures_of_calls_and_of_other_graphs(ranks):
    last = len(ranks) - 1
    with InputNode() as inp:
        steps = [rank.step.bind(inp) for rank in ranks]
        together = MultiOutputNode(steps).compile()
        apart = [one.compile() for one in steps]
        alone = ranks[last].fail.bind(inp).compile()
    with together, alone, contextlib.ExitStack() as stack:
        for graph in apart:
            stack.enter_context(graph)
        for number in range(5):
            total = [number * float(len(ranks))] * len(ranks)
            settled(ranks[last].fail.remote())
            # A rank that has failed less than 50 ms ago is waited for as long, any other for a second.
            time.sleep(0.1)
            assert get(together.execute(number)) == total
            fail(alone.execute(0))
            assert get(together.execute(number)) == total
            fail(alone.execute(0))
            meet(ranks, number)
            fail(alone.execute(0))
            assert get([graph.execute(number) for graph in apart]) == total
            fail(ranks[last].fail.remote())
            assert get([graph.execute(number) for graph in apart]) == total
            fail(alone.execute(0))
            first = [rank.step.remote(number) for rank in ranks[:last]]
            assert get([*first, apart[last].execute(number)]) == total


def test_the_driver_knows_of_what_it_has_got(actors):
    made = collective.create_collective_group(actors[:2], driver_rank=2)
    array = np.ones(4)
    for rank in actors[:2]:
        fail(rank.step.remote(1, "before"))
        refs = [one.step.remote(1) for one in actors[:2]]
        array[:] = 1.0
        collective.allreduce(array, timeout=WAIT)
        assert get(refs) == [3.0, 3.0]
        assert array[0] == 3.0
    settled(actors[1].step.remote(1, "before"))
    refs = [one.step.remote(1) for one in actors[:2]]
    with pytest.raises(CollectiveBrokenError, match="rank 1"):
        collective.allreduce(array, timeout=WAIT)
    do_not_meet(*refs)
    collective.destroy_collective_group(made)
