"""``max_concurrency``: what an actor says that it runs at the same time, one caller can have under way."""

import asyncio
import sys
import threading

import cloudpickle
import pytest
from integration_helpers import WAIT

import conveyor

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: More than a link to an actor holds that does not say.
MANY = 150


class Sleepers:
    """Coroutines that wait until a later call wakes them."""

    def __init__(self):
        self.awake = asyncio.Event()

    async def sleep(self):
        await self.awake.wait()
        return 1

    async def wake(self):
        self.awake.set()


class Threads:
    def __init__(self, parties):
        self.barrier = threading.Barrier(parties)

    def meet(self):
        self.barrier.wait(WAIT)
        return 1


class Caller:
    def wake_many(self, sleepers):
        refs = [sleepers.sleep.remote() for _ in range(MANY)]
        sleepers.wake.remote()
        return sum(conveyor.get(refs, timeout=WAIT))

    def meet_many(self, threads):
        return sum(conveyor.get([threads.meet.remote() for _ in range(MANY)], timeout=WAIT))


def test_one_caller_has_as_many_coroutines_under_way(engine):
    sleepers = conveyor.remote(Sleepers).options(max_concurrency=MANY + 1).remote()
    assert Caller().wake_many(sleepers) == MANY


def test_one_caller_has_as_many_threads_under_way(local):
    threads = conveyor.remote(Threads).options(max_concurrency=MANY).remote(MANY)
    assert Caller().meet_many(threads) == MANY


@pytest.mark.parametrize("kind", ["coroutines", "threads"])
def test_so_has_a_caller_that_is_an_actor(local, kind):
    caller = conveyor.remote(Caller).remote()
    if kind == "coroutines":
        sleepers = conveyor.remote(Sleepers).options(max_concurrency=MANY + 1).remote()
        made = caller.wake_many.remote(sleepers)
    else:
        threads = conveyor.remote(Threads).options(max_concurrency=MANY).remote(MANY)
        made = caller.meet_many.remote(threads)
    assert conveyor.get(made, timeout=2 * WAIT) == MANY


def test_it_holds_for_an_actor_that_has_been_started_again(local):
    options = {"max_concurrency": MANY + 1, "max_restarts": 1}
    sleepers = conveyor.remote(Sleepers).options(**options).remote()
    assert Caller().wake_many(sleepers) == MANY
    conveyor.kill(sleepers, no_restart=False)
    assert Caller().wake_many(sleepers) == MANY


def test_more_than_a_link_ever_holds_may_be_requested_for(engine):
    sleepers = conveyor.remote(Sleepers).options(max_concurrency=100_000).remote()
    refs = [sleepers.sleep.remote() for _ in range(1000)]
    sleepers.wake.remote()
    refs += [sleepers.sleep.remote() for _ in range(2000)]
    assert sum(conveyor.get(refs, timeout=WAIT)) == 3000


def test_a_cancelled_call_far_behind_in_a_deep_link(local):
    sleepers = conveyor.remote(Sleepers).options(max_concurrency=MANY).remote()
    refs = [sleepers.sleep.remote() for _ in range(MANY - 1)]
    assert all(ref.cancel() for ref in refs[1:])
    sleepers.wake.remote()
    assert conveyor.get(refs[0], timeout=WAIT) == 1
    assert all(ref.cancelled() for ref in refs[1:])
