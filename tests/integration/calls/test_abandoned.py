"""A task that awaits a result and is cancelled takes the execution, or the call, with it."""

import asyncio
import sys
from pathlib import Path

import cloudpickle
import pytest
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ExecutionCancelledError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Worker:
    def __init__(self):
        self.seen = []

    def hold(self, x, go, started=None):
        if started is not None:
            Path(started).touch()
        hold(go)
        return x

    def echo(self, x):
        self.seen.append(x)
        return x

    def noted(self):
        return self.seen

    def items(self, go):
        yield 1
        hold(go)
        yield 2

    @conveyor.method(num_returns=2)
    def two(self, go):
        hold(go)
        return 1, 2


@conveyor.remote
class Coroutines:
    def __init__(self):
        self.seen = []

    async def wait(self, x, begun):
        Path(begun).touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.seen.append(x)
            raise

    async def nested(self, given):
        other, begun = given
        return await other.wait.remote("nested", begun)

    async def noted(self):
        return self.seen


pytestmark = pytest.mark.usefixtures("session")


class Chain:
    """Two actors, of which the first is held."""

    def __init__(self, latches, **options):
        self.go = latches()
        self.a, self.b = Worker.remote(), Worker.remote()
        with InputNode() as inp:
            self.graph = self.b.echo.bind(self.a.hold.bind(inp, self.go.path)).compile(**options)


async def _times_out(awaitable):
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(awaitable, 0.05)


async def _is_given_up(awaitable, begun):
    """When what it is of has begun, which a short time would not be enough for on a busy machine."""
    task = asyncio.ensure_future(awaitable)
    while not begun.is_open:
        assert not task.done()
        await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("deadline", [None, WAIT])
def test_a_wait_that_times_out_cancels_the_execution(latches, deadline):
    chain = Chain(latches)
    ref = chain.graph.execute(1, deadline=deadline)
    asyncio.run(_times_out(ref))
    assert ref.cancelled()
    with pytest.raises(ExecutionCancelledError):
        get(ref)
    chain.go.open()
    assert get(chain.graph.execute(2)) == 2
    assert get(chain.b.noted.remote()) == [2]


def test_a_graph_can_leave_it_running(latches):
    chain = Chain(latches, cancel_with_await=False)
    for deadline in (None, WAIT):
        ref = chain.graph.execute(1, deadline=deadline)
        asyncio.run(_times_out(ref))
        assert not ref.cancelled()
    chain.go.open()
    assert get(ref) == 1


def test_a_shield_keeps_it(latches):
    chain = Chain(latches)

    async def main():
        ref = chain.graph.execute(1)
        shielded = asyncio.ensure_future(ref)
        await _times_out(asyncio.shield(shielded))
        assert not ref.cancelled()
        chain.go.open()
        assert await shielded == 1

    asyncio.run(main())


def test_the_last_of_several_that_await_counts(latches):
    chain = Chain(latches)

    async def main():
        ref = chain.graph.execute(1)
        first, second = asyncio.ensure_future(ref), asyncio.ensure_future(ref)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        assert not ref.cancelled()
        second.cancel()
        await asyncio.wait([second])
        assert ref.cancelled()

    asyncio.run(main())
    chain.go.open()


def test_results_of_one_execution_are_awaited_together(latches):
    go = latches()
    a, b = Worker.remote(), Worker.remote()
    with InputNode() as inp:
        held = a.hold.bind(inp, go.path)
        dag = MultiOutputNode([held, b.echo.bind(held)], effects=[b.echo.bind(held)])
    graph = dag.compile()

    async def main():
        refs = graph.execute(1)
        first, second = (asyncio.ensure_future(ref) for ref in refs)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        assert not any(ref.cancelled() for ref in refs)
        second.cancel()
        await asyncio.wait([second])
        assert all(ref.cancelled() for ref in refs)
        gathered = graph.execute(2)
        await _times_out(asyncio.gather(*gathered))
        assert all(ref.cancelled() for ref in gathered)

    asyncio.run(main())
    go.open()
    assert get(graph.execute(3)) == [3, 3]


def test_one_that_is_done_is_left_alone(latches):
    a = Worker.remote()

    async def main():
        ref = a.echo.remote(1)
        conveyor.wait([ref], timeout=WAIT)
        task = asyncio.ensure_future(ref)
        task.cancel()
        await asyncio.wait([task])
        assert not ref.cancelled()
        assert await ref == 1

    asyncio.run(main())


def test_a_call_is_cancelled_with_its_coroutine(latches, wait_until):
    a, begun = Coroutines.remote(), latches()
    ref = a.wait.remote("call", begun.path)
    asyncio.run(_is_given_up(ref, begun))
    assert ref.cancelled()
    wait_until(lambda: get(a.noted.remote()) == ["call"])


def test_what_a_coroutine_of_an_actor_awaits_goes_with_it(latches, wait_until):
    inner, outer, begun = Coroutines.remote(), Coroutines.remote(), latches()
    with InputNode() as inp:
        graph = outer.nested.bind(inp).compile()
    asyncio.run(_is_given_up(graph.execute((inner, begun.path)), begun))
    wait_until(lambda: get(inner.noted.remote()) == ["nested"])


def test_parts_of_a_call_go_together(latches):
    go = latches()
    one, two = Worker.remote().two.remote(go.path)

    async def main():
        tasks = asyncio.ensure_future(one), asyncio.ensure_future(two)
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        assert not two.cancelled()
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        assert one.cancelled()

    asyncio.run(main())
    go.open()


@pytest.mark.parametrize("where", ["graph", "call"])
def test_a_stream_is_cancelled(latches, where):
    go = latches()
    a = Worker.remote()
    with InputNode() as inp:
        graph = a.items.bind(inp).compile()
    stream = graph.execute(go.path) if where == "graph" else a.items.remote(go.path)

    async def main():
        assert await stream.__anext__() == 1
        await _times_out(stream.__anext__())
        with pytest.raises(ExecutionCancelledError):
            await stream.__anext__()

    asyncio.run(main())
    assert stream.cancelled()
    go.open()
    assert get(a.echo.remote(1)) == 1
