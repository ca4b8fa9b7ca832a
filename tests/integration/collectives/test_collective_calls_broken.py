"""A failed call breaks its group, at all ranks and with the first cause, until it is reset."""

import os
import signal

import numpy as np
import pytest
from integration_collectives import await_rank
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    CollectiveBrokenError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ExecutionCancelledError,
)
from conveyor.experimental import collective
from conveyor.experimental.collective import ReduceOp


@conveyor.remote
class Rank:
    def step(self, number=1.0, group="default", fails=""):
        if fails == "before":
            raise LookupError("no batch")
        array = np.full(4, float(number))
        collective.allreduce(array, group, timeout=WAIT)
        if fails == "behind":
            raise LookupError("no room")
        return array[0]

    def of(self, size, dtype="f8", op=ReduceOp.SUM):
        collective.allreduce(np.ones(size, dtype), op=op, timeout=WAIT)

    def make(self, size):
        return np.ones(size)

    def barrier(self):
        collective.barrier(timeout=WAIT)

    def caught(self, *args):
        try:
            self.of(*args)
        except (CollectiveError, TypeError) as error:
            return type(error).__name__

    def lists(self, count):
        collective.allgather([np.zeros(2)] * count, np.zeros(2))

    def shared(self, value):
        return collective.allgather.shared(value, timeout=WAIT)

    def other(self, _given=None):
        raise LookupError("nothing of a step")

    def hold(self, gate):
        gate.receive()

    def dies(self):
        os._exit(3)

    def pid(self):
        return os.getpid()


pytestmark = pytest.mark.usefixtures("session")


@pytest.fixture(scope="module")
def actors(session):
    return [Rank.remote() for _ in range(3)]


@pytest.fixture
def ranks(actors):
    """Actors that outlive the test, which leaves no group."""
    yield actors
    collective.destroy_all_collective_groups()


@pytest.fixture
def mortals():
    made = [Rank.options(max_restarts=0).remote() for _ in range(3)]
    yield made
    collective.destroy_all_collective_groups()
    for actor in made:
        conveyor.kill(actor)


@pytest.fixture
def group(ranks):
    return collective.create_collective_group(ranks, name="ours")


def outcomes(refs):
    """What each has come to: its value, or its error."""
    made = []
    for ref in refs:
        try:
            made.append(get(ref))
        except Exception as error:
            made.append(error)
    return made


def check_broken(ranks, words, times=2):
    for _ in range(times):
        for error in outcomes([rank.step.remote() for rank in ranks]):
            assert isinstance(error, CollectiveBrokenError), error
            assert words in str(error)
            assert "reset()" in str(error)


def check_whole(ranks, group="default"):
    for number in range(3):
        refs = [rank.step.remote(number, group) for rank in ranks]
        assert get(refs) == [float(number * len(ranks))] * len(ranks)


def mismatched(how, ranks):
    first, second, third = ranks
    if how == "size":
        return [first.of.remote(3), second.of.remote(4), third.of.remote(3)]
    if how == "dtype":
        return [first.of.remote(3), second.of.remote(3, "f4"), third.of.remote(3)]
    if how == "op":
        return [first.of.remote(3), second.of.remote(3, "f8", ReduceOp.MAX), third.of.remote(3)]
    if how == "form":
        return [first.shared.remote(3), second.barrier.remote(), third.shared.remote(5)]
    return [first.of.remote(3), second.barrier.remote(), third.of.remote(3)]


@pytest.mark.parametrize("got", ["as a list", "one by one"])
def test_ranks_that_differ(ranks, group, got):
    for how in ["size", "dtype", "op", "operation", "form"]:
        check_whole(ranks)
        refs = mismatched(how, ranks)
        if got == "as a list":
            with pytest.raises(CollectiveMismatchError, match=r"rank 1 \(Rank#2\)"):
                get(refs)
        assert [type(e) for e in outcomes(refs)] == [type(outcomes(refs[:1])[0])] * 3
        assert all(isinstance(e, CollectiveMismatchError) for e in outcomes(refs))
        check_broken(ranks, "have not called the same before", 1)
        check_broken(ranks, "rank 1 (Rank#2): ", 1)  # and what it has called
        group.reset()
    check_whole(ranks)


@pytest.mark.parametrize("got", ["as a list", "one by one", "not at all"])
@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_raises(ranks, group, when, who, got):
    for _ in range(2):
        refs = [
            rank.step.remote(1, "ours", when if i == who else "") for i, rank in enumerate(ranks)
        ]
        if got == "as a list":
            with pytest.raises((LookupError, CollectiveBrokenError)):
                get(refs)
        if got == "one by one":
            found = outcomes(refs)
            assert isinstance(found.pop(who), LookupError)
            if when == "before":
                assert all(isinstance(e, CollectiveBrokenError) for e in found)
            else:
                assert found == [3.0, 3.0]
        conveyor.wait(refs, num_returns=3, timeout=WAIT)
        check_broken(ranks, "LookupError: no ")
        group.reset()
    check_whole(ranks)


def test_steps_that_are_queued_behind_it_meet_nobody(ranks, group):
    refs = [
        [
            rank.step.remote(n, "ours", "before" if (n, i) == (2, 1) else "")
            for i, rank in enumerate(ranks)
        ]
        for n in range(6)
    ]
    for n, row in enumerate(refs):
        found = outcomes(row)
        if n < 2:
            assert found == [n * 3.0] * 3
        else:
            assert not any(isinstance(one, float) for one in found)
            assert sum(isinstance(one, LookupError) for one in found) == (n == 2)
    group.reset()
    check_whole(ranks)


def test_any_call_of_a_rank_that_fails_breaks_it(ranks, group):
    """Nobody knows that it would not have come to an operation: others may wait for it."""
    with pytest.raises(LookupError):
        get(ranks[1].other.remote())
    check_broken(ranks, "rank 1 (Rank#2) is not coming: its method other has raised LookupError")
    group.reset()
    outside = Rank.remote()
    with pytest.raises(LookupError):
        get(outside.other.remote())
    check_whole(ranks)


def test_a_call_whose_argument_has_failed(ranks, group):
    outside = Rank.remote()
    ref = ranks[2].other.remote(outside.other.remote())
    with pytest.raises(LookupError):
        get(ref)
    check_broken(ranks, "rank 2 (Rank#3) is not coming")


def test_a_call_that_is_cancelled_before_it_begins(ranks, group):
    sends, gate = conveyor.channel.open()
    held = ranks[0].hold.remote(gate)
    ref = ranks[0].step.remote()
    assert ref.cancel()
    sends.send(None)
    get(held)
    with pytest.raises(ExecutionCancelledError):
        get(ref)
    check_broken(ranks, "rank 0 (Rank) is not coming: its method step was cancelled")
    sends.close()


def test_an_operation_that_is_refused_is_a_failure_though_it_is_caught(ranks, group):
    waits = ranks[0].step.remote()
    assert get(ranks[1].caught.remote(3, "i8", ReduceOp.AVG)) == "TypeError"
    with pytest.raises(
        CollectiveBrokenError, match=r"rank 1 .*: its operation has raised TypeError"
    ):
        get(waits)
    check_broken(ranks, "integers have no average")
    group.reset()
    with pytest.raises(ValueError, match="tensor_list"):
        get(ranks[2].lists.remote(2))
    check_broken(ranks, "rank 2 (Rank#3) is not coming: its operation has raised ValueError")


def test_the_first_cause_stays(mortals):
    collective.create_collective_group(mortals)
    found = get([rank.caught.remote(3 + i) for i, rank in enumerate(mortals)])
    assert found == ["CollectiveMismatchError"] * 3
    with pytest.raises(LookupError):
        get(mortals[0].other.remote())
    with pytest.raises(ActorDiedError):
        get(mortals[2].dies.remote())
    check_broken(mortals[:2], "have not called the same before")


def test_a_rank_that_dies(mortals):
    first, second, third = mortals
    group = collective.create_collective_group(mortals, name="ours")
    waits = first.step.remote()
    await_rank(first, waits)
    with pytest.raises(ActorDiedError):
        get(second.dies.remote())
    with pytest.raises(CollectiveBrokenError, match=r"rank 1 \(Rank\S*\) has died"):
        get(waits)
    check_broken([first, third], ") has died")
    for _ in range(2):
        with pytest.raises(ActorDiedError, match=rf"{second._id.name}\b"):
            group.reset()
        check_broken([first, third], ") has died")
    collective.destroy_collective_group(group)
    with pytest.raises(ValueError, match="was destroyed"):
        group.reset()
    collective.create_collective_group([first, third], name="ours")
    check_whole([first, third])


def test_a_reset_takes_in_a_rank_that_was_started_again(ranks):
    comes_back = Rank.options(max_restarts=1).remote()
    both = [ranks[0], comes_back]
    group = collective.create_collective_group(both)
    os.kill(get(comes_back.pid.remote()), signal.SIGKILL)
    with pytest.raises(CollectiveBrokenError, match=r"has died"):
        get(ranks[0].step.remote())
    group.reset()
    check_whole(both)


def test_a_reset_of_a_group_that_is_whole_ends_who_waits(ranks, group):
    waits = ranks[0].step.remote()
    await_rank(ranks[0], waits)
    group.reset()
    with pytest.raises(CollectiveBrokenError, match="was destroyed"):
        get(waits)
    check_whole(ranks)


def test_a_timeout(ranks, group):
    def short(_):
        collective.barrier(timeout=0.01)

    with pytest.raises(CollectiveTimeoutError):
        get(ranks[0].__ray_call__.remote(short))
    check_broken(ranks, "the timeout of rank 0 (Rank) is over")
    group.reset()
    check_whole(ranks)


def test_groups_of_the_same_actors_stand_alone(ranks, group):
    """Whatever an operation comes to is of its own group; a method that raises might have come to any."""
    collective.create_collective_group(ranks, name="other")
    collective.create_collective_group(ranks[:2], name="two")

    def mismatch(_, size):
        with pytest.raises(CollectiveMismatchError):
            collective.allreduce(np.ones(size), "other")

    get([rank.__ray_call__.remote(mismatch, 3 + i) for i, rank in enumerate(ranks)])
    check_whole(ranks, "ours")
    check_whole(ranks[:2], "two")
    with pytest.raises(CollectiveBrokenError, match="'other'"):
        get(ranks[0].step.remote(1, "other"))
    # That has left a method, so it has broken the others, too.
    with pytest.raises(
        CollectiveBrokenError, match="its method step has raised CollectiveBrokenError"
    ):
        get(ranks[1].step.remote(1, "two"))


def test_threads_of_actors():
    """Methods that run side by side with others tell of no failure; their operations do."""
    ranks = [Rank.options(max_concurrency=2).remote() for _ in range(2)]
    group = collective.create_collective_group(ranks)
    for _ in range(3):
        with pytest.raises(LookupError):
            get(ranks[1].other.remote())
        check_whole(ranks)
        refs = [rank.of.remote(3 + i) for i, rank in enumerate(ranks)]
        assert all(isinstance(error, CollectiveMismatchError) for error in outcomes(refs))
        check_broken(ranks, "have not called the same before")
        group.reset()
    check_whole(ranks)
    collective.destroy_collective_group(group)


def test_threads_of_actors_that_leave_late(latches, wait_until):
    """Methods that run side by side come in any order: an actor joins before it has left the last group."""
    ranks = [Rank.options(max_concurrency=3).remote() for _ in range(2)]
    go = latches()

    def come_late(_, path):
        from conveyor.collective import membership

        def late(*group):
            hold(path)
            leave(*group)
            membership.left = True

        membership.left = False
        leave, membership.leave = membership.leave, late

    def has_left(_):
        from conveyor.collective import membership

        return membership.left

    group = collective.create_collective_group(ranks, name="ours")
    get([rank.__ray_call__.remote(come_late, go.path) for rank in ranks])
    group.reset()
    check_whole(ranks, "ours")
    collective.destroy_collective_group(group)
    group = collective.create_collective_group(ranks, name="ours")
    check_whole(ranks, "ours")
    go.open()
    wait_until(lambda: all(get([rank.__ray_call__.remote(has_left) for rank in ranks])))
    check_whole(ranks, "ours")
    collective.destroy_collective_group(group)


def test_the_driver_is_a_rank(ranks):
    group = collective.create_collective_group(ranks, name="ours", driver_rank=1)
    for _ in range(3):
        array = np.ones(4)
        refs = [rank.step.remote() for rank in ranks]
        collective.allreduce(array, timeout=WAIT)
        assert array[0] == get(refs)[0] == 4.0
        refs = [rank.of.remote(3) for rank in ranks]
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 \(the driver\)"):
            collective.allreduce(array, timeout=WAIT)
        assert all(isinstance(error, CollectiveMismatchError) for error in outcomes(refs))
        check_broken(ranks, "have not called the same before")
        with pytest.raises(CollectiveBrokenError, match="have not called the same before"):
            collective.barrier()
        group.reset()
        with pytest.raises(TypeError, match="no average"):
            collective.allreduce(np.ones(4, int), op=ReduceOp.AVG)
        check_broken(ranks, "rank 1 (the driver) is not coming: its operation has raised TypeError")
        group.reset()


def test_a_collective_of_a_graph_fails_with_its_execution_and_breaks_nothing(ranks, group):
    with InputNode() as inp:
        made = [rank.make.bind(inp[i]) for i, rank in enumerate(ranks)]
        dag = MultiOutputNode(collective.allreduce.bind(made))
    with dag.compile() as graph:
        for _ in range(3):
            with pytest.raises(Exception, match="differ"):
                get(graph.execute(3, 4, 3))
            check_whole(ranks)
            assert [a.tolist() for a in get(graph.execute(2, 2, 2))] == [[3.0, 3.0]] * 3


def test_a_step_of_a_graph_that_raises(ranks, group):
    with InputNode() as inp:
        dag = MultiOutputNode([rank.step.bind(1, "ours", inp[i]) for i, rank in enumerate(ranks)])
    with dag.compile() as graph:
        for when in ("before", "behind"):
            assert get(graph.execute("", "", "")) == [3.0] * 3
            with pytest.raises(LookupError):
                get(graph.execute("", when, ""))
            with pytest.raises(CollectiveBrokenError, match="its step has raised LookupError"):
                get(graph.execute("", "", ""))
            group.reset()
        assert get(graph.execute("", "", "")) == [3.0] * 3
