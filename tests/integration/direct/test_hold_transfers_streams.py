"""Items of streams whose transfers a test holds back: event loops run on, and timeouts end the wait."""

import asyncio
import os
import signal

import inside
import numpy as np
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import ActorDiedError, ExecutionCancelledError, WaitTimeoutError
from conveyor.testing import InjectedFault, fail_transfers, hold_transfers


@conveyor.remote
class Keeper:
    @conveyor.method(tensor_transport="auto")
    def items(self, count, size=1000):
        for i in range(count):
            yield np.full(size, i)

    @conveyor.method(tensor_transport="auto")
    async def items_async(self, count, size=1000):
        for i in range(count):
            yield np.full(size, i)

    @conveyor.method(tensor_transport="auto")
    def pairs(self, count):
        for i in range(count):
            yield np.full(1000, i), np.full(1000, -i)

    def pid(self):
        return os.getpid()


@pytest.fixture
def ann(local):
    return Keeper.options(name="ann").remote()


@pytest.fixture(params=["items", "items_async"])
def begin(request, ann):
    """What begins a stream of so many items."""
    return getattr(ann, request.param).remote


def fetching():
    """Which of this process's waits for a value its slot of the process table names."""
    return inside.status_of("driver").fetching


async def value(ref):
    return await ref


async def pairs(ann, count):
    return [(int(one[0]), int(other[0])) async for one, other in ann.pairs.remote(count)]


async def call_lock(count):
    """That the loop runs, so often."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


def run(main):
    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_the_loop_runs_on(ann, begin):
    async def main():
        stream = begin(3)
        with hold_transfers(ann):
            task = asyncio.ensure_future(anext(stream))
            await until(fetching)
            await call_lock(100)
            assert not task.done()
            assert fetching().holder == "ann"
        assert int((await task)[0]) == 0
        assert not fetching()
        assert [int(item[0]) async for item in stream] == [1, 2]

    run(main)


def test_all_items_and_pairs(ann, begin):
    async def main():
        with hold_transfers(ann):
            tasks = [asyncio.ensure_future(value(begin(5))), asyncio.ensure_future(pairs(ann, 3))]
            await until(fetching)
            await call_lock(100)
        everything, found = await asyncio.gather(*tasks)
        assert [int(item[0]) for item in everything] == [0, 1, 2, 3, 4]
        assert found == [(0, 0), (1, -1), (2, -2)]

    run(main)


def test_several_tasks_share_a_stream(ann, begin):
    async def main():
        stream = begin(6)
        with hold_transfers(ann):
            tasks = [asyncio.ensure_future(anext(stream)) for _ in range(6)]
            await until(fetching)
            await call_lock(100)
            assert not any(task.done() for task in tasks)
        assert sorted(int(item[0]) for item in await asyncio.gather(*tasks)) == [0, 1, 2, 3, 4, 5]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(main)


def test_who_is_cancelled_can_have_the_item_still(ann, begin):
    async def main():
        stream = begin(2)
        with hold_transfers(ann):
            for _ in range(2):
                task = asyncio.ensure_future(anext(stream))
                await until(fetching)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert not fetching()
        assert [int(item[0]) async for item in stream] == [0, 1]

    run(main)


def test_errors_of_a_transfer(ann, begin):
    pid = get(ann.pid.remote())

    async def main():
        stream = begin(3)
        with fail_transfers(ann), pytest.raises(InjectedFault):
            await anext(stream)
        assert int((await anext(stream))[0]) == 0
        with hold_transfers(ann):
            task = asyncio.ensure_future(anext(stream))
            await until(fetching)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ActorDiedError, match="ann"):
                await task

    run(main)


def test_a_timeout_ends_the_wait(ann, begin, wait_until):
    stream = begin(2)
    wait_until(stream.done)
    with hold_transfers(ann):
        with pytest.raises(WaitTimeoutError, match="a value that ann keeps"):
            stream.next(0.05)
        with pytest.raises(WaitTimeoutError, match="a value that ann keeps"):
            stream.get(0.05)
    assert [int(item[0]) for item in stream] == [0, 1]


def test_to_cancel_waits_for_nothing(ann, begin, wait_until):
    stream = begin(2)
    wait_until(stream.done)
    with hold_transfers(ann):
        assert stream.cancel()
        with pytest.raises(ExecutionCancelledError):
            stream.next()
