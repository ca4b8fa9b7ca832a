"""Transfers that a test holds back from who awaits them: the event loop runs on."""

import asyncio
import os
import signal

import numpy as np
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import ActorDiedError
from conveyor.testing import InjectedFault, fail_transfers, hold_transfers


@conveyor.remote
class Keeper:
    @conveyor.method(tensor_transport="auto")
    def make(self, size=1000):
        return np.arange(size)

    def put_two(self):
        return [conveyor.put(np.full(9, i), tensor_transport="auto") for i in range(2)]

    def pid(self):
        return os.getpid()


@conveyor.remote
class Awaits:
    """All its methods run in one event loop."""

    async def totals(self, refs):
        return [int(one.sum()) for one in await asyncio.gather(*refs)]

    async def within(self, refs, seconds):
        try:
            await asyncio.wait_for(asyncio.gather(*refs), seconds)
        except asyncio.TimeoutError:
            return "over"
        return "came"

    async def ping(self):
        return "pong"


@pytest.fixture
def pair(local):
    return Keeper.options(name="ann").remote(), Awaits.remote()


def made(actor):
    ref = actor.make.remote()
    conveyor.wait([ref])
    return ref


async def value(ref):
    return await ref


async def call_lock(count):
    """That the loop runs, so often."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_the_loop_runs_on(pair):
    ann, _ = pair
    ref = made(ann)

    async def main():
        with hold_transfers(ann):
            several = [asyncio.ensure_future(value(one)) for one in (ref, ref[1:3], ref)]
            await call_lock(100)
            assert not any(one.done() for one in several)
        found = await asyncio.wait_for(asyncio.gather(*several), WAIT)
        assert [one.sum() for one in found] == [499500, 3, 499500]

    asyncio.run(main())


def test_who_is_cancelled_waits_no_more_and_can_try_again(pair):
    ann, _ = pair
    ref = made(ann)

    async def main():
        with hold_transfers(ann):
            for _ in range(2):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(value(ref), 0.05)
        assert (await ref).sum() == 499500

    asyncio.run(main())


def test_refs_that_came_inside_of_values(pair):
    ann, awaits = pair
    refs = get(ann.put_two.remote())

    async def main():
        with hold_transfers(ann):
            task = asyncio.ensure_future(asyncio.wait_for(asyncio.gather(*refs), WAIT))
            await call_lock(10)
            assert not task.done()
        assert [int(one[0]) for one in await task] == [0, 1]

    asyncio.run(main())
    refs = [made(ann) for _ in range(8)]
    with hold_transfers(ann):
        waiting = awaits.totals.remote(refs)
        assert get(awaits.ping.remote()) == "pong"
        assert get(awaits.within.remote(refs, 0.05)) == "over"
        assert conveyor.wait([waiting], timeout=0)[0] == []
    assert get(waiting) == [499500] * 8
    assert get(awaits.within.remote(refs, WAIT)) == "came"


def test_errors_of_a_transfer(pair):
    ann, _ = pair
    ref = made(ann)
    pid = get(ann.pid.remote())

    async def main():
        with fail_transfers(ann), pytest.raises(InjectedFault):
            await ref
        with hold_transfers(ann):
            task = asyncio.ensure_future(value(ref))
            await call_lock(10)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ActorDiedError, match="ann"):
                await asyncio.wait_for(task, WAIT)

    asyncio.run(main())


def test_outside_of_asyncio_it_waits(pair):
    """A loop of another kind has no bell to wait on."""
    ann, _ = pair
    ref = made(ann)
    with pytest.raises(StopIteration) as ended:
        ref.__await__().send(None)
    assert ended.value.value.sum() == 499500
