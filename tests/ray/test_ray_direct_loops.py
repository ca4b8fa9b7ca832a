"""Direct objects of another node as arguments of async actors, and as items of streams: loops run on."""

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
from conveyor.cluster.fetches import Source
from conveyor.dag import InputNode
from conveyor.direct import fetching as remote_status
from conveyor.exceptions import ActorDiedError, ExecutionCancelledError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT = 60
SMALL, LARGE = 100, 1 << 20
HERE, THERE = {"resources": {"first": 0.01}}, {"resources": {"second": 0.01}}


@conveyor.remote
class Maker:
    def pid(self):
        return os.getpid()

    @conveyor.method(tensor_transport="auto")
    def make(self, n):
        return torch.arange(n, dtype=torch.float32)

    @conveyor.method(tensor_transport="auto")
    def items(self, n, count):
        for i in range(count):
            yield torch.full((n,), float(i))


@conveyor.remote
class Loop:
    """All its methods run in one event loop."""

    async def total(self, x):
        return float(x.double().sum())

    async def totals_of(self, maker, n, count):
        return [float(x[0]) + len(x) async for x in maker.items.remote(n, count)]

    async def ping(self):
        return "pong"


@conveyor.remote
class Other:
    """Another caller than the driver."""

    def __init__(self, loop):
        self.loop = loop

    def ping(self):
        return get(self.loop.ping.remote(), timeout=WAIT)


def total(n):
    return float(torch.arange(n, dtype=torch.float32).double().sum())


@pytest.fixture(scope="module")
def actors(far):
    maker, loop = Maker.options(**THERE).remote(), Loop.options(name="a loop", **HERE).remote()
    made = maker, loop, Other.options(**HERE).remote(loop)
    get([made[0].pid.remote(), made[1].ping.remote(), made[2].ping.remote()])
    yield made
    for one in made:
        conveyor.kill(one)


@pytest.fixture
def held(monkeypatch):
    """Transfers to this node are held back where they are brought: whether one has begun, and to go on."""
    go, begun, bring = threading.Event(), threading.Event(), Source.run

    def bring_later(source, flight):
        begun.set()
        assert go.wait(WAIT)
        return bring(source, flight)

    monkeypatch.setattr(Source, "run", bring_later)
    yield begun, go
    go.set()


def made(maker, n):
    ref = maker.make.remote(n)
    conveyor.wait([ref])
    return ref


def fetching():
    """What an actor of this node waits for."""
    return inside.status_of("a loop").fetching


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_an_async_actor_runs_on_until_an_argument_has_come(actors, held, wait_until, n):
    maker, loop, other = actors
    begun, go = held
    ref = made(maker, n)
    waiting = loop.total.remote(ref)
    assert begun.wait(WAIT)
    assert get(other.ping.remote(), timeout=WAIT) == "pong"
    behind = loop.ping.remote()
    assert wait_until(fetching).value == ref.value_id()
    assert fetching().node == inside.agents()[0].name
    assert conveyor.wait([waiting, behind], num_returns=2, timeout=0)[0] == []
    go.set()
    assert get([waiting, behind], timeout=WAIT) == [total(n), "pong"]


def test_an_async_actor_runs_on_until_the_input_of_a_step_has_come(actors, held, wait_until):
    maker, loop, _ = actors
    begun, go = held
    with InputNode() as inp:
        graph = loop.total.bind(inp).compile()
    total_of = graph.execute(made(maker, LARGE))
    assert begun.wait(WAIT)
    assert get(loop.ping.remote(), timeout=WAIT) == "pong"
    there = f"on {inside.agents()[0].name}"
    wait_until(lambda: there in str(graph.status()))
    go.set()
    assert get(total_of, timeout=WAIT) == total(LARGE)
    graph.teardown()


def test_cancelled_while_an_argument_comes(actors, held, wait_until):
    maker, loop, _ = actors
    begun, go = held
    waiting, behind = loop.total.remote(made(maker, LARGE)), loop.ping.remote()
    assert begun.wait(WAIT)
    assert waiting.cancel()
    assert get(behind, timeout=WAIT) == "pong"
    with pytest.raises(ExecutionCancelledError):
        get(waiting)
    go.set()
    wait_until(lambda: not inside.hosts_memory()._fetches, WAIT)


def test_the_makers_death_ends_the_call(actors, held):
    _, loop, _ = actors
    begun, _ = held
    maker = Maker.options(name="the maker", **THERE).remote()
    pid = get(maker.pid.remote())
    waiting, behind = loop.total.remote(made(maker, LARGE)), loop.ping.remote()
    assert begun.wait(WAIT)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match="the maker"):
        get(waiting, timeout=WAIT)
    assert get(behind, timeout=WAIT) == "pong"


def test_a_loop_runs_on_while_memory_is_had(actors, monkeypatch):
    """What nobody has used takes its time. An error of it is that of the await."""
    maker, _, _ = actors
    ref = made(maker, LARGE)
    go, begun = threading.Event(), threading.Event()

    class LateRoom(remote_status.ReceiveBuffer):
        def __init__(self, *args):
            begun.set()
            assert go.wait(WAIT)
            super().__init__(*args)

    async def main():
        task = asyncio.ensure_future(_value(ref))
        cancelled = asyncio.ensure_future(_value(ref))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, WAIT)
        cancelled.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        go.set()
        return float((await task).double().sum())

    def none(*args):
        raise MemoryError("there is none")

    monkeypatch.setattr(remote_status, "ReceiveBuffer", LateRoom)
    assert asyncio.run(asyncio.wait_for(main(), WAIT)) == total(LARGE)
    monkeypatch.setattr(remote_status, "ReceiveBuffer", none)
    with pytest.raises(MemoryError, match="there is none"):
        asyncio.run(asyncio.wait_for(_value(ref), WAIT))
    monkeypatch.undo()
    again = asyncio.run(asyncio.wait_for(_value(ref), WAIT))
    assert float(again.double().sum()) == total(LARGE)


async def _value(ref):
    return await ref


@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_a_loop_runs_on_until_an_item_has_come(actors, held, n):
    maker, loop, other = actors
    begun, go = held

    async def main():
        stream = maker.items.remote(n, 2)
        task = asyncio.ensure_future(anext(stream))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, WAIT)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        go.set()
        assert float((await task)[0]) == 0.0
        assert [float(x[0]) + len(x) async for x in stream] == [1.0 + n]

    asyncio.run(asyncio.wait_for(main(), WAIT))
    go.clear()
    begun.clear()
    waiting = loop.totals_of.remote(maker, n, 3)
    assert begun.wait(WAIT)
    assert get(other.ping.remote(), timeout=WAIT) == "pong"
    go.set()
    assert get(waiting, timeout=WAIT) == [float(i) + n for i in range(3)]
