"""Inputs of graphs' steps on async actors whose transfers a test holds back: the event loop runs on."""

import os
import signal

import inside
import numpy as np
import pytest
from integration_helpers import get

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import (
    ActorDiedError,
    DeadlineExceededError,
    ExecutionCancelledError,
    WaitTimeoutError,
)
from conveyor.testing import InjectedFault, fail_transfers, hold_transfers


@conveyor.remote
class Keeper:
    @conveyor.method(tensor_transport="auto")
    def make(self, size=1000):
        return np.arange(size)

    def pid(self):
        return os.getpid()


@conveyor.remote
class Loop:
    """All its methods run in one event loop."""

    async def total(self, x, more=0):
        return int(x.sum()) + more

    def total_at_once(self, x):
        return int(x.sum())

    async def write(self, x):
        x += 1
        return int(x.sum())

    async def echo(self, x):
        return x


@pytest.fixture
def ann(local):
    return Keeper.options(name="ann").remote()


@pytest.fixture
def loop(local):
    return Loop.options(name="the loop").remote()


def made(actor, *args):
    ref = actor.make.remote(*args)
    conveyor.wait([ref])
    return ref


def compiled(method, **options):
    with InputNode() as inp:
        return method.bind(inp).compile(**options)


def fetching():
    """The value that some process of the session waits for."""
    found = [status.fetching for status in inside.statuses()]
    return next((one for one in found if one is not None), None)


@pytest.mark.parametrize("method", ["total", "total_at_once"])
def test_the_loop_runs_on(ann, loop, wait_until, method):
    ref = made(ann)
    graph, echo = compiled(getattr(loop, method)), compiled(loop.echo)
    with hold_transfers(ann):
        totals = [graph.execute(ref) for _ in range(2)]
        wait_until(fetching)
        for i in range(20):
            assert get(echo.execute(i)) == get(loop.echo.remote(i)) == i
        assert conveyor.wait(totals, timeout=0)[0] == []
        assert fetching().value == ref.value_id()
        with pytest.raises(WaitTimeoutError, match="fetching a value that ann keeps"):
            conveyor.get(totals[0], timeout=0.05)
        assert "fetching a value that ann keeps" in str(graph.status())
    assert get(totals) == [499500] * 2
    assert get(graph.execute(ref)) == 499500
    wait_until(lambda: not fetching())


def test_parts_of_the_input(ann, loop, wait_until):
    with InputNode() as inp:
        graph = loop.total.bind(inp[0], more=inp[1]).compile()
    ref = made(ann)
    with hold_transfers(ann):
        total = graph.execute(ref, 5)
        wait_until(fetching)
        assert get(loop.echo.remote(1)) == 1
    assert get(total) == 499505


def test_what_came_is_as_if_nothing_had_been_awaited(ann, loop, wait_until):
    graph = compiled(loop.write)
    for size in 1000, 100_000:
        ref = made(ann, size)
        with hold_transfers(ann):
            total = graph.execute(ref)
            wait_until(fetching)
        assert get(total) == get(graph.execute(ref)) == size * (size - 1) // 2 + size
        assert int(get(ref).sum()) == size * (size - 1) // 2


def test_who_cancels_gets_through(ann, loop, wait_until):
    graph, ref = compiled(loop.total), made(ann)
    with hold_transfers(ann):
        total = graph.execute(ref)
        wait_until(fetching)
        assert total.cancel()
        assert get(graph.execute(np.ones(3))) == 3
        with pytest.raises(ExecutionCancelledError):
            get(total)
        wait_until(lambda: not fetching())


def test_a_deadline_ends_it(ann, loop, wait_until):
    graph, ref = compiled(loop.total), made(ann)
    with hold_transfers(ann):
        total = graph.execute(ref, deadline=0.1)
        with pytest.raises(DeadlineExceededError):
            get(total)
    assert get(graph.execute(ref)) == 499500


def test_errors_of_a_transfer(ann, loop, wait_until):
    graph, ref = compiled(loop.total), made(ann)
    pid = get(ann.pid.remote())
    with fail_transfers(ann), pytest.raises(InjectedFault):
        get(graph.execute(ref))
    with hold_transfers(ann):
        total = graph.execute(ref)
        wait_until(fetching)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError, match="ann"):
            get(total)
    assert get(graph.execute(np.ones(3))) == 3
    wait_until(lambda: not fetching())


def test_the_graph_is_torn_down_meanwhile(ann, loop, wait_until):
    graph, ref = compiled(loop.total), made(ann)
    with hold_transfers(ann):
        graph.execute(ref)
        wait_until(fetching)
        graph.teardown()
        wait_until(lambda: not fetching())
        assert get(loop.echo.remote(1)) == 1
