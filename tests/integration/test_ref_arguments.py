"""Refs as arguments, of graphs and of calls: their values are sent. On both engines."""

import asyncio
import os
import sys
import threading
import time
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pytest
from integration_helpers import WAIT, compiled, get

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    CapacityError,
    DeadlineExceededError,
    ExecutionCancelledError,
    TaskError,
    WaitTimeoutError,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    rows: Any
    label: str = ""


class Box:
    def __init__(self, inside):
        self.inside = inside


class Stage:
    def __init__(self, *args):
        self.args = args
        self.count = 0

    def made_with(self):
        return self.args

    def echo(self, x):
        self.count += 1
        return x

    def pack(self, *args, **kwargs):
        return args, kwargs

    def same(self, pair):
        return pair[0] is pair[1]

    def fail(self, x):
        raise ValueError(x)

    def ones(self, n):
        return np.ones(n)

    def total(self, x):
        return float(x["rows"].sum())

    def counted(self):
        return self.count


class Gate:
    """Lets nobody through before the file is there."""

    async def hold(self, x, go):
        while not os.path.exists(go):
            await asyncio.sleep(0.002)
        return x


@pytest.fixture(scope="module", params=["local", "inline"], autouse=True)
def engine(request, leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine=request.param)
        yield request.param
        conveyor.shutdown()


@pytest.fixture
def stage():
    return conveyor.remote(Stage).remote()


@pytest.fixture
def gate():
    return conveyor.remote(Gate).remote()


def test_a_ref_is_the_whole_argument(stage):
    graph = compiled(lambda inp: stage.echo.bind(inp))
    other = conveyor.remote(Stage).remote()
    twice = compiled(lambda inp: other.echo.bind(inp))
    assert get(twice.execute(graph.execute(1))) == 1
    assert get(graph.execute(graph.execute(graph.execute("same graph")))) == "same graph"
    assert get(graph.execute(stage.echo.remote([2]))) == [2]
    assert get(graph.execute(conveyor.put({"k": 3}))) == {"k": 3}
    assert get(graph.execute(conveyor.put(None))) is None
    array = get(graph.execute(stage.ones.remote(100_000)))
    assert array.sum() == 100_000


def test_refs_in_keyword_arguments_and_by_position(stage):
    graph = compiled(lambda inp: stage.pack.bind(inp[0], k=inp.k))
    value = get(graph.execute(stage.echo.remote(1), k=conveyor.put(2)))
    assert value == ((1,), {"k": 2})


def test_refs_at_any_depth(stage):
    graph = compiled(lambda inp: stage.echo.bind(inp))
    one, two = stage.echo.remote(1), conveyor.put(2)
    assert get(graph.execute([one, {"k": (two, [one])}])) == [1, {"k": (2, [1])}]
    assert get(graph.execute(Pair(one, [two]))) == Pair(1, [2])
    assert get(graph.execute(Batch([one], "b"))) == Batch([1], "b")
    boxed = get(graph.execute(Box({"deep": [two]})))
    assert boxed.inside == {"deep": [2]}
    assert get(graph.execute((one, two))) == (1, 2)


def test_one_ref_twice_is_one_value(stage):
    graph = compiled(lambda inp: stage.same.bind(inp))
    ref = stage.echo.remote([1])
    assert get(graph.execute([ref, ref])) is True
    assert get(stage.same.remote([ref, ref])) is True


def test_parts_of_an_argument_may_lie_behind_a_ref(stage):
    graph = compiled(lambda inp: stage.pack.bind(inp[0]["a"].left, inp[0]["b"]))
    pair = stage.echo.remote(Pair("left", 0))
    assert get(graph.execute({"a": pair, "b": conveyor.put("b")}))[0] == ("left", "b")
    whole = conveyor.put({"a": Pair("L", 0), "b": 1})
    assert get(graph.execute(whole))[0] == ("L", 1)


def test_parts_that_are_results_are_values(stage):
    with InputNode() as inp:
        graph = MultiOutputNode([stage.echo.bind(inp), inp]).compile()
    assert get(graph.execute(conveyor.put("v"))) == ["v", "v"]


def test_arguments_of_calls_at_any_depth(stage):
    one, two = stage.echo.remote(1), conveyor.put(2)
    assert get(stage.pack.remote([one], k={"two": two})) == (([1],), {"k": {"two": 2}})
    assert get(conveyor.remote(Stage).remote([one]).made_with.remote()) == ([1],)
    array = get(stage.pack.remote([stage.ones.remote(50_000)]))[0][0][0]
    assert array.sum() == 50_000


def test_a_call_with_a_nested_ref_waits_for_it_here(stage, gate, latches):
    go = latches()
    held = gate.hold.remote("held", go.path)
    also = gate.hold.remote("also", go.path)
    waiting = stage.pack.remote([held, {"k": also}])
    behind = stage.echo.remote("behind")
    assert not waiting.done()
    go.open()
    assert get(waiting) == ((["held", {"k": "also"}],), {})
    assert get(behind) == "behind"


def test_an_error_in_a_ref_is_the_executions(stage):
    with InputNode() as inp:
        graph = MultiOutputNode(
            {"out": stage.echo.bind(inp), "in": inp}, effects=[stage.echo.bind(inp)]
        ).compile()
    before = get(stage.counted.remote())
    refs = graph.execute([stage.fail.remote("broken")])
    for ref in refs.values():
        with pytest.raises(ValueError, match="broken"):
            ref.get(timeout=WAIT)
        assert ref.done()
        assert not ref.cancel()
        assert "not sent" in repr(refs["in"])
    single = compiled(lambda inp: stage.echo.bind(inp))
    with pytest.raises(TaskError):
        get(single.execute(stage.fail.remote("whole")))
    with pytest.raises(ValueError, match="async"):
        get(asyncio.run(single.execute_async(stage.fail.remote("async"))))
    with pytest.raises(ValueError, match="nested"):
        get(stage.echo.remote([stage.fail.remote("nested")]))
    assert get(stage.counted.remote()) == before
    assert get(single.execute(1)) == 1


def test_execute_waits_and_says_for_what(engine, stage, gate, latches):
    go = latches()
    held = gate.hold.remote("held", go.path)
    graph = compiled(lambda inp: stage.echo.bind(inp), name="waiter")
    with pytest.raises(CapacityError, match=r"waiter: .*hold"):
        graph.try_execute([held])
    if engine == "local":
        with pytest.raises(WaitTimeoutError, match=r"hold.*an argument of waiter"):
            graph.execute([held], timeout=0.02)
        with pytest.raises(DeadlineExceededError, match="waiter"):
            graph.execute([held], deadline=0.02)
    threading.Timer(0.02, go.open).start()
    assert get(graph.execute([held])) == ["held"]
    assert get(graph.try_execute(held)) == "held"


def test_execute_async_awaits(stage, gate, latches):
    graph = compiled(lambda inp: stage.echo.bind(inp))

    async def main():
        go = latches()
        held = gate.hold.remote("held", go.path)
        asyncio.get_running_loop().call_later(0.02, go.open)
        started = time.monotonic()
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticker = asyncio.create_task(tick())
        ref = await graph.execute_async([held])
        ticker.cancel()
        assert time.monotonic() >= started
        return await ref, ticks

    if conveyor.is_initialized() and type(graph).__name__ == "ProcessGraph":
        value, ticks = asyncio.run(main())
        assert value == ["held"]
        assert ticks > 1


def test_a_cancelled_ref_cancels_what_needs_it(stage, gate, latches):
    held = gate.hold.remote("held", latches().path)
    call = stage.echo.remote([held])
    held.cancel()
    with pytest.raises(ExecutionCancelledError):
        get(call)
    graph = compiled(lambda inp: stage.echo.bind(inp))
    with pytest.raises(ExecutionCancelledError):
        get(graph.execute({"k": held}))


def test_results_of_one_graph_feed_another_many_times(stage):
    other = conveyor.remote(Stage).remote()
    first = compiled(lambda inp: stage.echo.bind(inp), depth=4)
    second = compiled(lambda inp: other.echo.bind(inp), depth=4)
    refs = [second.execute([first.execute(i)]) for i in range(200)]
    assert get(refs) == [[i] for i in range(200)]


def test_a_constant_of_a_graph_may_be_a_ref(stage):
    constant = stage.echo.remote("c")
    graph = compiled(lambda inp: stage.pack.bind(inp, [constant], k=constant))
    assert get(graph.execute(1)) == ((1, ["c"]), {"k": "c"})
