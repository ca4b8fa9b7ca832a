"""Direct objects of another node in asyncio: the loop runs on while they are on their way."""

import asyncio
import os
import signal
import sys
import threading

import cloudpickle
import inside
import pytest
import torch

import conveyor
from conveyor import get
from conveyor.cluster.fetches import Fetch, Source
from conveyor.command.status import find_sessions
from conveyor.exceptions import ActorDiedError
from conveyor.testing import hold_transfers

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT = 60
SMALL, LARGE = 100, 1 << 20
HERE, THERE = {"resources": {"first": 0.01}}, {"resources": {"second": 0.01}}


@conveyor.remote
class Maker:
    def pid(self):
        return os.getpid()

    @conveyor.method(tensor_transport="auto")
    def make(self, n, first=0):
        return torch.arange(first, first + n, dtype=torch.float32)

    def put_two(self, n):
        return [conveyor.put(torch.full((n,), float(i)), tensor_transport="auto") for i in range(2)]


@conveyor.remote
class Reads:
    def ready(self):
        return True

    def total(self, x):
        return float(x.double().sum())


@conveyor.remote
class Awaits:
    """All its methods run in one event loop."""

    async def totals(self, refs):
        found = await asyncio.gather(*refs)
        return [float(one.double().sum()) for one in found]

    async def total_within(self, refs, seconds):
        try:
            await asyncio.wait_for(asyncio.gather(*refs), seconds)
        except asyncio.TimeoutError:
            return "over"
        return "came"

    async def ping(self):
        return "pong"


def total(n, first=0):
    return float(torch.arange(first, first + n, dtype=torch.float32).double().sum())


@pytest.fixture(scope="module")
def actors(far):
    made = Maker.options(**THERE).remote(), Awaits.options(**HERE).remote()
    get([made[0].pid.remote(), made[1].ping.remote()])
    yield made
    for one in made:
        conveyor.kill(one)


def made(maker, *args):
    ref = maker.make.remote(*args)
    conveyor.wait([ref])
    return ref


async def ticks(count):
    """That the loop runs, so often."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_what_comes_is_right(actors):
    maker, awaits = actors

    async def main():
        for n in SMALL, LARGE:
            ref = maker.make.remote(n)
            assert torch.equal(await ref, torch.arange(n, dtype=torch.float32))
            assert torch.equal(await ref, torch.arange(n, dtype=torch.float32))  # and once more
            assert torch.equal(await ref[5:7], torch.tensor([5.0, 6.0]))
            refs = [maker.make.remote(n, i) for i in range(20)]
            for i, value in enumerate(await asyncio.gather(*refs)):
                assert float(value.double().sum()) == total(n, i)
            assert await awaits.totals.remote(refs) == [total(n, i) for i in range(20)]

    asyncio.run(main())


def test_the_loop_runs_on_while_it_is_on_its_way(actors, monkeypatch):
    """The transfer itself is held back, at the thread that brings it."""
    maker, _ = actors
    ref = made(maker, LARGE)
    go, begun, bring = threading.Event(), threading.Event(), Source.run

    def bring_later(source, flight):
        begun.set()
        assert go.wait(WAIT)
        return bring(source, flight)

    monkeypatch.setattr(Source, "run", bring_later)

    async def main():
        task = asyncio.ensure_future(_value(ref))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, WAIT)
        await ticks(100)
        assert not task.done()
        go.set()
        assert float((await task).double().sum()) == total(LARGE)

    try:
        asyncio.run(main())
    finally:
        go.set()


def test_who_is_cancelled_leaves_nothing_under_way(actors, monkeypatch, wait_until):
    maker, _ = actors
    ref = made(maker, LARGE)
    get(ref)
    go, begun = threading.Event(), threading.Semaphore(0)
    take = Source._take

    def take_later(source):
        begun.release()
        assert go.wait(WAIT)
        return take(source)

    monkeypatch.setattr(Source, "_take", take_later)

    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_value(ref), 0.2)
        task = asyncio.ensure_future(_value(ref))
        await asyncio.get_running_loop().run_in_executor(None, begun.acquire)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = inside.hosts_memory().transfers
    try:
        asyncio.run(main())
    finally:
        go.set()
    wait_until(lambda: not inside.hosts_memory()._fetches, WAIT)
    assert inside.hosts_memory().transfers == before
    assert float(get(ref).double().sum()) == total(LARGE)


def test_the_makers_death_ends_the_wait(actors):
    maker = Maker.options(name="the maker", **THERE).remote()
    ref = made(maker, LARGE)
    pid = get(maker.pid.remote())

    async def main():
        with hold_transfers(maker):
            task = asyncio.ensure_future(_value(ref))
            await ticks(10)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ActorDiedError, match="the maker"):
                await asyncio.wait_for(task, WAIT)

    asyncio.run(main())


def test_an_async_actor_answers_meanwhile(actors):
    maker, awaits = actors
    refs = [made(maker, LARGE, i) for i in range(8)]
    with hold_transfers(maker):
        waiting = awaits.totals.remote(refs)
        assert get(awaits.ping.remote(), timeout=WAIT) == "pong"
        assert get(awaits.total_within.remote(refs, 0.1), timeout=WAIT) == "over"
        assert conveyor.wait([waiting], timeout=0)[0] == []
    assert get(waiting, timeout=WAIT) == [total(LARGE, i) for i in range(8)]
    assert get(awaits.total_within.remote(refs, WAIT), timeout=WAIT) == "came"


async def _value(ref):
    return await ref


def test_a_wait_says_for_what_it_is_and_how_far_it_has_come(actors, monkeypatch, wait_until):
    maker, _ = actors
    near = Reads.options(name="near", **HERE).remote()
    get(near.ready.remote())
    ref = made(maker, LARGE)
    put, go, held = Fetch.put, threading.Event(), threading.Event()

    def put_and_wait(flight, piece, at):
        put(flight, piece, at)
        held.set()
        assert go.wait(WAIT)

    monkeypatch.setattr(Fetch, "put", put_and_wait)
    try:
        total_of = near.total.remote(ref)
        assert held.wait(WAIT)
        status = inside.status_of("near")
        fetching = status.fetching
        assert (fetching.value, fetching.total) == (ref.value_id(), 4 * LARGE)
        assert 0 < fetching.done < fetching.total
        assert fetching.node == inside.agents()[0].name
        assert f"on {fetching.node}" in str(status)
        assert f"{fetching.done:,} of {4 * LARGE:,} bytes, since" in str(status)
        (session,) = find_sessions(os.getpid())
        (member,) = [one for one in session.processes if one.status.name == "near"]
        assert (member.status.fetching.node, member.status.fetching.done) == (
            fetching.node,
            fetching.done,
        )
    finally:
        go.set()
    assert get(total_of, timeout=WAIT) == total(LARGE)
    assert inside.status_of("near").fetching is None
