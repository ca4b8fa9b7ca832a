"""Steps of ranks whose calls are queued behind each other, of which some fail."""

import os
import signal
from contextlib import contextmanager

import numpy as np
import pytest
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import CollectiveBrokenError
from conveyor.experimental import collective


@conveyor.remote
class Rank:
    def step(self, number, fails=False):
        if fails:
            raise LookupError("no batch")
        array = np.full(4, float(number))
        collective.allreduce(array, timeout=WAIT)
        return array[0]

    def hold(self, path):
        hold(path)

    def check(self, number):
        if number < 0:
            raise LookupError("no such batch")
        return number

    def pid(self):
        return os.getpid()

    def fail_before(self):
        raise LookupError("no batch")

    def fail_afterwards(self, number):
        self.step(number)
        raise LookupError("no room")


@pytest.fixture
def pair(local):
    actors = [Rank.remote(), Rank.remote()]
    collective.create_collective_group(actors)
    return actors


@pytest.fixture
def queued(pair, tmp_path):
    """Nothing that is called inside of it begins before all of it is queued."""

    @contextmanager
    def held():
        path = tmp_path / f"go {len(list(tmp_path.iterdir()))}"
        for actor in pair:
            actor.hold.remote(str(path))
        yield
        path.touch()

    return held


def outcomes(refs):
    """Of each, what it gives, or the class of what it raises."""
    made = []
    for ref in refs:
        try:
            made.append(get(ref))
        except (LookupError, CollectiveBrokenError) as error:
            made.append(CollectiveBrokenError if "Broken" in type(error).__name__ else LookupError)
    return made


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("steps", [6, 90])
def test_a_rank_that_misses_a_step_meets_no_later_one(pair, queued, failing, steps):
    with queued():
        refs = [
            [actor.step.remote(n, n == 2 and rank == failing) for rank, actor in enumerate(pair)]
            for n in range(steps)
        ]
    for n, row in enumerate(refs):
        for rank, outcome in enumerate(outcomes(row)):
            if n < 2:
                assert outcome == 2.0 * n
            else:
                missed = n == 2 and rank == failing
                assert outcome is (LookupError if missed else CollectiveBrokenError)


def test_the_error_says_who_has_missed_what(pair, queued):
    with queued():
        first = pair[0].step.remote(0)
        failed, late = pair[1].step.remote(0, True), pair[1].step.remote(1)
    with pytest.raises(LookupError):
        get(failed)
    for ref in (first, late):
        with pytest.raises(
            CollectiveBrokenError, match=r"rank 1 \(Rank#2\).*LookupError: no batch"
        ):
            get(ref)


def test_ranks_that_all_miss_a_step_go_on(pair, queued):
    for _ in range(5):
        with queued():
            refs = [actor.step.remote(n, n == 2) for n in range(5) for actor in pair]
        want = [0, 0, 2, 2, LookupError, LookupError, 6, 6, 8, 8]
        assert outcomes(refs) == want


def test_ranks_that_miss_different_steps_do_not_meet(pair, queued):
    with queued():
        refs = [[pair[0].step.remote(n, n == 1), pair[1].step.remote(n, n == 2)] for n in range(4)]
    assert outcomes(refs[0]) == [0, 0]
    for n in (1, 2, 3):
        for outcome in outcomes(refs[n]):
            assert outcome in (LookupError, CollectiveBrokenError)


def test_who_knows_of_a_failure_may_call_again(pair):
    for n in range(20):
        with pytest.raises(LookupError):
            get(pair[1].step.remote(n, True))
        assert outcomes([actor.step.remote(n) for actor in pair]) == [2.0 * n] * 2


def test_a_failure_after_the_operation_is_known_of_as_any_other(pair):
    refs = [pair[0].step.remote(1), pair[1].fail_afterwards.remote(1)]
    assert outcomes(refs) == [2.0, LookupError]
    assert outcomes([actor.step.remote(2) for actor in pair]) == [4.0, 4.0]


def test_who_knows_of_a_failure_is_waited_for_though_the_machine_is_slow(pair):
    """The rank that has failed is called again, and does not run yet."""
    late = get(pair[1].pid.remote())
    with pytest.raises(LookupError):
        get(pair[1].fail_before.remote())
    os.kill(late, signal.SIGSTOP)
    try:
        refs = [actor.step.remote(2) for actor in pair]
        # Longer than a rank is waited for whose failure nobody knew of.
        assert conveyor.wait(refs, num_returns=1, timeout=0.15)[0] == []
    finally:
        os.kill(late, signal.SIGCONT)
    assert outcomes(refs) == [4.0, 4.0]


def test_executions_of_a_graph_do_not_meet_each_other(pair):
    with InputNode() as inp:
        nodes = [actor.step.bind(inp[0], inp[rank + 1]) for rank, actor in enumerate(pair)]
        graph = MultiOutputNode(nodes).compile()
    refs = [graph.execute(n, False, n == 2) for n in range(6)]
    assert [get(ref) for ref in refs[:2]] == [[0.0] * 2, [2.0] * 2]
    with pytest.raises((LookupError, CollectiveBrokenError)):
        get(refs[2])
    # The other rank's step of that execution is skipped if it has not begun: then all is as before.
    for n, ref in enumerate(refs[3:], 3):
        assert outcomes([ref])[0] in ([2.0 * n] * 2, CollectiveBrokenError)


def test_an_execution_that_fails_before_its_operation_harms_no_later_one(pair):
    with InputNode() as inp:
        checked = pair[1].check.bind(inp)
        graph = MultiOutputNode([actor.step.bind(checked) for actor in pair]).compile()
    refs = [graph.execute(n) for n in range(-2, 5)]
    for n, ref in enumerate(refs, -2):
        if n < 0:
            with pytest.raises(LookupError):
                get(ref)
        else:
            assert get(ref) == [2.0 * n] * 2
