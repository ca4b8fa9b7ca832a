"""The driver as a rank of a collective group."""

import os
import signal
import threading

import inside
import numpy as np
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import (
    CollectiveBrokenError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    RuntimeStateError,
)
from conveyor.experimental import collective


@conveyor.remote
class Rank:
    def rank(self):
        return collective.get_rank(), collective.get_collective_group_size()

    def sum(self, size=4, number=1.0):
        array = np.full(size, number)
        collective.allreduce(array, timeout=WAIT)
        return sorted(set(array.tolist()))

    def gather(self, size):
        own = np.full(size, float(collective.get_rank()))
        got = [np.empty(size) for _ in range(collective.get_collective_group_size())]
        collective.allgather(got, own, timeout=WAIT)
        return [sorted(set(one.tolist())) for one in got]

    def send(self, size):
        collective.broadcast(np.arange(size), src_rank=collective.get_rank(), timeout=WAIT)

    def fail(self):
        raise LookupError("no batch")

    def leave(self):
        os._exit(3)

    def make(self, actors):
        collective.create_collective_group(actors, driver_rank=0)


@pytest.fixture
def pair(local):
    actors = [Rank.remote(), Rank.remote()]
    collective.create_collective_group(actors, name="ours", driver_rank=1)
    return actors


def summed(size=4, timeout=WAIT):
    array = np.ones(size)
    collective.allreduce(array, timeout=timeout)
    return sorted(set(array.tolist()))


def test_it_has_the_rank_that_was_requested_for(pair):
    (group,) = collective.get_collective_groups()
    assert collective.get_rank() == group.driver_rank == 1
    assert collective.get_collective_group_size("ours") == 3
    assert [get(actor.rank.remote()) for actor in pair] == [(0, 3), (2, 3)]
    assert [group.get_rank(actor) for actor in pair] == [0, 2]
    assert group.actors == pair
    assert repr(group) == "<collective group 'ours' of 2 actors and the driver>"


@pytest.mark.parametrize("size", [4, 300_001])
def test_it_takes_part(pair, size):
    for _ in range(3):
        refs = [actor.sum.remote(size) for actor in pair]
        assert summed(size) == [3.0]
        assert [get(ref) for ref in refs] == [[3.0], [3.0]]
    refs = [actor.gather.remote(size) for actor in pair]
    got = [np.empty(size) for _ in range(3)]
    collective.allgather(got, np.ones(size), timeout=WAIT)
    want = [[0.0], [1.0], [2.0]]
    assert [sorted(set(one.tolist())) for one in got] == want
    assert [get(ref) for ref in refs] == [want, want]


def test_it_gets_what_an_actor_sends(local):
    actor = Rank.remote()
    collective.create_collective_group([actor], driver_rank=0)
    ref = actor.send.remote(100_000)
    got = np.zeros(100_000, int)
    collective.broadcast(got, src_rank=1, timeout=WAIT)
    get(ref)
    assert (got == np.arange(100_000)).all()


def test_it_is_told_why_a_rank_does_not_come(pair):
    refs = [pair[0].sum.remote(), pair[1].fail.remote()]
    with pytest.raises(CollectiveBrokenError, match=r"rank 2 \(Rank#2\).*LookupError: no batch"):
        summed()
    with pytest.raises(CollectiveBrokenError):
        get(refs[0])


def test_it_is_told_of_deaths(pair):
    waits = pair[0].sum.remote()
    pair[1].leave.remote()
    with pytest.raises(CollectiveBrokenError, match=r"rank 2 \(Rank#2\) has died"):
        summed()
    with pytest.raises(CollectiveBrokenError):
        get(waits)


def test_ranks_that_differ_from_it_are_told(pair):
    refs = [actor.sum.remote(5) for actor in pair]
    with pytest.raises(CollectiveMismatchError, match=r"rank 1 \(the driver\).*float64\[4\]"):
        summed()
    for ref in refs:
        with pytest.raises(CollectiveMismatchError):
            get(ref)


def test_its_timeout_and_its_interrupt_free_the_actors(pair, wait_until):
    refs = [pair[0].sum.remote()]
    with pytest.raises(CollectiveTimeoutError):
        summed(timeout=0.05)
    with pytest.raises(CollectiveBrokenError, match=r"timeout of rank 1 \(the driver\)"):
        get(refs[0])
    collective.destroy_all_collective_groups()
    collective.create_collective_group(pair, driver_rank=2)

    def handler(number, frame):
        raise KeyError("enough")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        waits = pair[0].sum.remote()

        def interrupt():
            wait_until(lambda: None in inside.sleeping())
            os.kill(os.getpid(), signal.SIGUSR1)

        interrupting = threading.Thread(target=interrupt)

        def wait():
            interrupting.start()  # here, so that nothing is raised before it is awaited
            summed()

        with pytest.raises(KeyError, match="enough"):
            wait()
        interrupting.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(CollectiveBrokenError, match=r"rank 2 \(the driver\) was interrupted"):
        get(waits)


def test_the_end_of_the_session_frees_its_threads(leaves_nothing):
    with leaves_nothing():
        conveyor.init()
        collective.create_collective_group([Rank.remote()], driver_rank=0)
        raised = []
        begun = threading.Event()

        def wait():
            begun.set()
            try:
                summed()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        assert begun.wait(WAIT)
        conveyor.shutdown()
        thread.join(WAIT)
        assert not thread.is_alive()
        assert len(raised) == 1
        raised.clear()


def test_a_group_that_is_destroyed_is_not_the_drivers_any_more(pair):
    collective.destroy_collective_group("ours")
    with pytest.raises(RuntimeStateError, match="the driver is in none"):
        summed()
    collective.create_collective_group(pair, name="theirs")
    with pytest.raises(RuntimeStateError, match="driver_rank="):
        collective.barrier("theirs")


def test_ranks_that_it_cannot_have(local):
    one, two = Rank.remote(), Rank.remote()
    for rank, error in [(-1, ValueError), (3, ValueError), ("0", TypeError), (True, TypeError)]:
        with pytest.raises(error, match="driver_rank must be a rank"):
            collective.create_collective_group([one, two], driver_rank=rank)
    with pytest.raises(ValueError, match="only the driver itself"):
        get(one.make.remote([two]))
    assert collective.get_collective_groups() == []
