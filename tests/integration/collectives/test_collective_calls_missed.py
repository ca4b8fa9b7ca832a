"""Ranks that may have missed an operation: whose next calls were made before anybody had learned of it."""

import asyncio
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from integration_helpers import WAIT, get, hold
from missed_steps import do_not_meet, fail, meet, settled
from nodes_apart import APART

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import CollectiveBrokenError, ExecutionCancelledError
from conveyor.experimental import collective


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

    def other_step(self, number, fails=""):
        return self.step(number, fails)

    def step_of(self, number, _given):
        return self.step(number)

    def steps(self, numbers):
        for number in numbers:
            yield self.step(abs(number), "before" if number < 0 else "")

    def check(self, fails=True):
        if fails:
            raise LookupError("nothing of a step")

    def hold(self, path):
        hold(path)

    def hold_and_fail(self, begun, go):
        Path(begun).touch()
        hold(go)
        raise LookupError("nobody waits for this")

    def step_between(self, begins, ends, fails):
        """Tells that it has begun, and after its operation waits for another one that has."""
        if begins:
            Path(begins).touch()
        hold_if(ends, not fails)
        collective.barrier(timeout=WAIT)
        hold_if(ends, fails)
        if fails:
            raise LookupError("no room")


def hold_if(path, does):
    if path and does:
        hold(path)


class Unreadable:
    def __reduce__(self):
        return unreadable, ()


def unreadable():
    raise LookupError("it cannot be read")


@conveyor.remote
class AsyncRank(Rank):
    async def sleep(self):
        await asyncio.sleep(0)


@conveyor.remote
class Caller:
    def call(self, ranks, number, fails):
        return [rank.step.remote(number, how) for rank, how in zip(ranks, fails, strict=True)]

    def get(self, rank, number):
        return conveyor.get(rank.step.remote(number, "before"))


@pytest.fixture
def pair(local):
    actors = [Rank.remote(), Rank.remote()]
    collective.create_collective_group(actors)
    get([actor.check.remote(False) for actor in actors])
    return actors


def test_a_call_that_comes_after_the_failure_and_was_made_without_knowing(pair):
    why = (
        r"may have missed .* its method step has raised LookupError: no batch, and .* Get each result of a "
        r"step before the next one is called, or bind"
    )
    raised = "LookupError: no batch"
    if APART:  # it may hear of its error first
        raised = f"({raised}|CollectiveBrokenError: .* may have missed)"
    late = f"is not coming: its method step has raised {raised}"
    for _ in range(20):
        missed = pair[0].step.remote(1, "before")
        settled(missed)
        first = pair[1].step.remote(1)
        said = []
        for ref in (pair[0].step.remote(2), first):
            with pytest.raises(CollectiveBrokenError) as told:
                get(ref)
            said.append(str(told.value))
        assert all(re.search(rf"rank 0 \(Rank\) ({why}|{late})", text) for text in said), said
        # No rank of another node waits until it comes.
        if APART or all(re.search(why, text) for text in said):
            return
        # This machine has taken longer for the second call than a rank waits that knows nothing of it.
        collective.destroy_all_collective_groups()
        collective.create_collective_group(pair)
    pytest.fail("the call that came was not waited for")


def test_those_who_know_meet(pair):
    for number in range(10):
        fail(pair[number % 2].step.remote(number, "before"))
        meet(pair, number)
        refs = [rank.step.remote(number, "behind") for rank in pair]
        fail(refs)
        settled(*refs)
        fail(refs)  # by now both have failed
        meet(pair, number)


def test_what_another_rank_was_called_for_before_anybody_knew(pair, tmp_path):
    held = pair[1].hold.remote(str(tmp_path / "go"))
    missed, first = pair[0].step.remote(1, "before"), pair[1].step.remote(1)
    fail(missed)
    later = pair[0].step.remote(2)
    (tmp_path / "go").touch()
    get(held)
    do_not_meet(first, later, match="rank 0")


def test_an_unrelated_failure_is_no_missed_step(pair):
    """Each has failed once."""
    settled(pair[0].step.remote(1, "before"), pair[1].check.remote())
    refs = pair[1].step.remote(1), pair[0].step.remote(2)
    do_not_meet(*refs, match="rank")


def test_a_failure_behind_the_operation_is_no_missed_step(pair):
    refs = [pair[0].step.remote(1), pair[1].step.remote(1, "behind")]
    settled(*refs)
    settled(pair[0].step.remote(2, "before"))
    do_not_meet(pair[1].step.remote(2), pair[0].step.remote(3), match="rank")


def test_steps_of_another_method_are_not_the_same(pair):
    settled(pair[0].step.remote(1, "before"), pair[1].other_step.remote(1, "before"))
    do_not_meet(pair[0].step.remote(2), pair[1].step.remote(2), match="rank")


def test_ranks_that_fail_alike_meet_though_nobody_knows(pair):
    for number in range(5):
        for how in ("before", "behind"):
            settled(*[rank.step.remote(number, how) for rank in pair])
        meet(pair, number)


def test_a_result_that_was_dropped_was_seen_by_nobody(pair):
    missed = pair[0].step.remote(1, "before")
    settled(missed)
    del missed
    do_not_meet(*[rank.step.remote(2) for rank in pair], match="rank 0")


def test_of_several_results_that_are_got_those_that_have_failed_are_known(pair):
    refs = [pair[0].step.remote(1, "before"), pair[1].other_step.remote(1, "before")]
    settled(*refs)
    fail(refs)
    meet(pair, 2)


def test_a_failure_is_known_where_it_is_awaited(pair):
    async def awaits(ref):
        with pytest.raises(LookupError):
            await ref

    asyncio.run(awaits(pair[0].step.remote(1, "before")))
    meet(pair, 1)


def test_a_failure_of_a_stream_is_known_with_its_item(pair):
    streams = [pair[0].steps.remote([1, -2, 3]), pair[1].steps.remote([1])]
    assert [next(stream) for stream in streams] == [2.0, 2.0]
    settled(streams[0])
    first = pair[1].step.remote(2)
    with pytest.raises(LookupError):
        next(streams[0])
    do_not_meet(pair[0].step.remote(3), first, match="rank 0")


def test_who_has_taken_the_failed_item_may_go_on(pair):
    streams = [pair[0].steps.remote([1, -2]), pair[1].steps.remote([1])]
    assert [next(stream) for stream in streams] == [2.0, 2.0]
    with pytest.raises(LookupError):
        next(streams[0])
    meet(pair, 3)


def test_an_argument_that_has_failed(pair):
    """Nothing is sent to the actor, which misses an operation all the same."""
    source = pair[1].check.remote()
    settled(source)
    dependent = pair[0].step_of.remote(1, source)
    settled(dependent)
    do_not_meet(pair[1].step.remote(1), pair[0].step.remote(2), match="rank")


@pytest.mark.parametrize("late", [False, True])
def test_who_gets_what_has_failed_with_an_argument_knows_both(pair, late, tmp_path):
    if late:
        pair[1].hold.remote(str(tmp_path / "go"))
    source = pair[1].check.remote()
    dependent = pair[0].step_of.remote(1, source)
    (tmp_path / "go").touch()
    fail(dependent)
    meet(pair, 2)


def test_a_failure_is_not_known_where_its_ref_is_passed_on(pair):
    missed = pair[0].step.remote(1, "before")
    first = pair[1].step_of.remote(1, [missed])  # inside of another value, so it is called
    settled(pair[0].check.remote(False))
    other = Rank.remote()
    settled(other.step_of.remote(1, missed))
    do_not_meet(first, pair[0].step.remote(2), match="rank 0")


@pytest.mark.parametrize("count", [3, 150])
def test_a_cancelled_call_of_a_step(pair, count, tmp_path):
    """Those behind it that were made before are of other steps. ``count``: beyond 64 they wait here."""
    for rank in pair:
        rank.hold.remote(str(tmp_path / "go"))
    rows = [[rank.step.remote(number) for rank in pair] for number in range(count)]
    assert rows[count - 2][0].cancel()
    (tmp_path / "go").touch()
    for number, row in enumerate(rows[: count - 2]):
        assert get(row) == [number * 2.0] * 2
    fail(rows[count - 2][0], ExecutionCancelledError)
    do_not_meet(rows[count - 2][1], rows[count - 1][0], match="rank 0")


@pytest.mark.parametrize("count", [3, 150])
def test_who_has_cancelled_a_whole_step_goes_on(pair, count, tmp_path):
    for rank in pair:
        rank.hold.remote(str(tmp_path / "go"))
    rows = [[rank.step.remote(number) for rank in pair] for number in range(count)]
    for ref in rows[-1]:
        assert ref.cancel()
    rows[-1] = [rank.step.remote(count - 1) for rank in pair]
    (tmp_path / "go").touch()
    assert [get(row) for row in rows] == [[number * 2.0] * 2 for number in range(count)]


def test_calls_of_another_process(pair):
    caller = Caller.remote()
    missed, _ = get(caller.call.remote(pair[:1], 1, ["before"])) * 2
    settled(missed)
    do_not_meet(pair[1].step.remote(1), *get(caller.call.remote(pair[:1], 2, [""])), match="rank 0")


def test_a_failure_is_known_wherever_it_was_got(pair):
    caller = Caller.remote()
    (missed,) = get(caller.call.remote(pair[:1], 1, ["before"]))
    fail(missed)  # made there, got here
    meet(pair, 1)
    fail(caller.get.remote(pair[0], 2))  # got there
    assert get(get(caller.call.remote(pair, 3, ["", ""]))) == [6.0, 6.0]
    missed = pair[0].step.remote(4, "before")
    fail(missed)
    assert get(get(caller.call.remote(pair, 4, ["", ""]))) == [8.0, 8.0]


def test_many_failures_that_are_got_are_known(pair):
    for _ in range(200):
        fail(pair[0].check.remote())
    meet(pair, 1)
    refs = [pair[0].check.remote() for _ in range(60)]
    settled(*refs)
    for ref in refs:
        fail(ref)
    meet(pair, 2)


def test_more_failures_than_are_remembered(pair):
    refs = [pair[0].check.remote() for _ in range(100)]
    settled(*refs)
    for ref in refs:
        fail(ref)
    do_not_meet(*[rank.step.remote(1) for rank in pair], match="rank 0")


def test_where_one_rank_runs_several_calls_at_a_time(local):
    ranks = [Rank.remote(), AsyncRank.remote(), Rank.options(max_concurrency=2).remote()]
    collective.create_collective_group(ranks)
    meet(ranks, 1)
    fail(ranks[0].step.remote(2, "before"))
    meet(ranks, 2)
    settled(ranks[0].step.remote(3, "before"))
    do_not_meet(*[rank.step.remote(3) for rank in ranks], match="rank 0")


def test_the_driver_as_a_rank(local):
    rank = Rank.remote()
    collective.create_collective_group([rank], driver_rank=1)
    array = np.ones(4)

    def meet_driver(ref):
        array[:] = 1.0
        collective.allreduce(array, timeout=WAIT)
        assert get(ref) == array[0] == 2.0

    meet_driver(rank.step.remote(1))
    fail(rank.step.remote(1, "before"))
    meet_driver(rank.step.remote(1))
    settled(rank.step.remote(1, "before"))
    later = rank.step.remote(5)
    with pytest.raises(CollectiveBrokenError, match="rank 0"):
        collective.allreduce(array, timeout=WAIT)
    do_not_meet(later, match="rank 0")


def test_executions_go_on_behind_failures_of_calls(pair):
    with InputNode() as inp:
        graph = MultiOutputNode([rank.step.bind(inp) for rank in pair]).compile()
    with graph:
        gone_on = 0
        for number in range(30):
            settled(pair[0].check.remote())
            try:
                assert get(graph.execute(number)) == [number * 2.0] * 2
            except CollectiveBrokenError:
                # This machine has taken longer for that step than a rank waits for one that has just failed.
                collective.destroy_all_collective_groups()
                collective.create_collective_group(pair)
                continue
            gone_on += 1
            if gone_on == 5:
                return
    pytest.fail(f"{gone_on} of 30 have gone on")


def test_a_thread_that_gets_results_tells_the_one_that_calls(pair):
    for number in range(5):
        missed = pair[0].step.remote(number, "before")
        getter = threading.Thread(target=fail, args=(missed,))
        getter.start()
        getter.join()
        meet(pair, number)


def test_executions_of_a_graph_meet_whatever_has_failed_before(pair):
    """An unrelated failure of one rank does not stand for the step that another one has missed."""
    with InputNode() as inp:
        dag = MultiOutputNode([rank.step.bind(inp[0], inp[i + 1]) for i, rank in enumerate(pair)])
    with dag.compile() as graph:
        assert get(graph.execute(1, "", "")) == [2, 2]
        with pytest.raises(LookupError):
            get(pair[1].check.remote())
        refs = [graph.execute(10, "before", ""), graph.execute(20, "", "")]
        with pytest.raises((LookupError, CollectiveBrokenError)):
            get(refs[0])
        with suppress(CollectiveBrokenError):
            assert get(refs[1]) == [40, 40]


def test_an_execution_that_has_begun_when_the_one_before_fails_behind_its_operation(pair, latches):
    """The rank that waits has begun before that; the other one comes when it has looked."""
    with InputNode() as inp:
        dag = MultiOutputNode(
            [
                rank.step_between.bind(*[inp[3 * i + j] for j in range(3)])
                for i, rank in enumerate(pair)
            ]
        )
    nothing = "", "", False
    with dag.compile() as graph:
        for _ in range(20):
            begun, late = latches(), latches()
            first = graph.execute("", begun.path, True, *nothing)
            second = graph.execute("", late.path, False, begun.path, "", False)
            fail(first)
            time.sleep(0.1)  # without which a fault might not be seen
            late.open()
            with suppress(CollectiveBrokenError):
                assert get(second) == [None, None]
                return
            # This machine has taken longer for that step than a rank waits for one that has just failed.
            collective.destroy_all_collective_groups()
            collective.create_collective_group(pair)
    pytest.fail("the second execution has failed each time")


@pytest.mark.usefixtures("local")
def test_calls_of_actors_in_no_group_fail_at_once_while_they_are_busy(latches):
    go, busy, other = latches(), Rank.remote(), Rank.remote()
    failed = other.check.remote()
    conveyor.wait([failed], timeout=WAIT)
    held = busy.hold.remote(go.path)
    for _ in range(100):  # more than a mailbox has places
        with pytest.raises(LookupError):
            get(busy.step_of.remote(1, failed))
    go.open()
    get(held)


def test_a_call_that_raises_after_it_was_cancelled_breaks_nothing(pair, latches, wait_until):
    begun, go = latches(), latches()
    ref = pair[0].hold_and_fail.remote(begun.path, go.path)
    wait_until(lambda: begun.is_open)
    ref.cancel()
    go.open()
    with pytest.raises(LookupError):
        get(pair[0].check.remote())
    assert get([rank.step.remote(2) for rank in pair]) == [4, 4]


def test_calls_that_could_not_be_read_are_like_no_other(pair, latches):
    """Their names are not known."""
    go = latches()
    held = pair[1].hold.remote(go.path)
    lost = [pair[0].step_of.remote(1, Unreadable()), pair[1].step_of.remote(7, Unreadable())]
    refs = [pair[0].step.remote(2), pair[1].step.remote(1), pair[1].step.remote(2)]
    go.open()
    get(held)
    for ref in refs:
        with pytest.raises(CollectiveBrokenError):
            get(ref)
    for ref in lost:
        with pytest.raises(conveyor.exceptions.ConveyorError):
            get(ref)
