"""Refs as arguments, of graphs and of calls: one that is an argument stands for its value, one inside of
an argument stays a ref. On both engines."""

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
from conveyor.refs.ref import Ref

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

    def inside_made_with(self):
        return [self.inside(arg) for arg in self.args]

    def echo(self, x):
        self.count += 1
        return x

    def pack(self, *args, **kwargs):
        return args, kwargs

    def same(self, one, other):
        return one is other

    def inside(self, x):
        """What the refs come to that are in a list, a dict, a named tuple, a dataclass or a box."""
        kinds = {list: lambda v: v, dict: lambda v: v.values(), Pair: lambda v: v}
        kinds |= {Batch: lambda v: [v.rows], Box: lambda v: [v.inside]}
        if isinstance(x, Ref):
            return self.inside(x.get())
        return [self.inside(v) for v in kinds[type(x)](x)] if type(x) in kinds else x

    def fail(self, x):
        raise ValueError(x)

    def returns_ref(self, x):
        return conveyor.put(x)

    def returns_refs(self, x):
        return conveyor.put(x), conveyor.put(x)

    def are_done(self, refs):
        return [ref.done() for ref in refs]

    def inputs(self, data, second, k):
        return data.args, data.kwargs

    def ones(self, n):
        return np.ones(n)

    def total(self, x):
        return float(x["rows"].sum())

    def counted(self):
        return self.count


def add(one, more):
    return [one, *more]


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


SHAPES = [
    lambda one, two: [one, {"k": [two, one]}],
    lambda one, two: Pair(one, [two]),
    lambda one, two: Batch([one, two], "b"),
    lambda one, two: Box({"deep": [one, Batch(two)]}),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_refs_inside_arguments_stay_refs(stage, shape):
    one, two = stage.echo.remote(1), conveyor.put([2])
    arguments = shape(one, two)
    expected = Stage().inside(arguments)
    assert get(stage.inside.remote(arguments)) == expected
    assert get(stage.inside.remote(x=arguments)) == expected
    graph = compiled(lambda inp: stage.inside.bind(inp))
    assert get(graph.execute(arguments)) == expected
    parts = compiled(lambda inp: stage.inside.bind(inp.named))
    assert get(parts.execute(named=arguments)) == expected
    # Through the driver and back.
    echoed = get(stage.echo.remote(arguments))
    assert Stage().inside(echoed) == expected
    assert get(stage.inside.remote(stage.echo.remote(arguments))) == expected


def test_the_value_of_a_ref_may_be_a_ref_or_hold_some(stage):
    nested = conveyor.put([conveyor.put(1)])
    for _ in range(2):  # nothing is used up
        (inner,) = get(nested)
        assert get(inner) == 1
        assert get(stage.inside.remote(nested)) == [1]
    graph = compiled(lambda inp: stage.echo.bind(inp))
    returned = stage.returns_ref.remote(5)
    for _ in range(2):
        assert isinstance(get(returned), Ref)
        assert get(get(returned)) == 5
        assert get(get(stage.echo.remote(returned))) == 5
        assert get(get(graph.execute(returned))) == 5
    first, second = stage.returns_refs.options(num_returns=2).remote(6)
    assert get(get(stage.echo.remote(second))) == get(get(graph.execute(first))) == 6


def test_one_ref_twice(stage):
    ref = stage.echo.remote([1])
    assert get(stage.same.remote(ref, ref)) is True
    graph = compiled(lambda inp: stage.same.bind(inp[0][0], inp[0][1]))
    assert get(graph.execute([ref, ref])) is True


def test_parts_of_an_argument_that_is_a_ref(stage):
    graph = compiled(lambda inp: stage.pack.bind(inp[0]["a"].left, inp[0]["b"]))
    whole = conveyor.put({"a": Pair("L", 0), "b": 1})
    assert get(graph.execute(whole))[0] == ("L", 1)
    assert get(graph.execute({"a": Pair("M", 0), "b": 2}))[0] == ("M", 2)
    # A part is what is found there: a ref stays one, and has no parts.
    (_, part), _ = get(graph.execute({"a": Pair("N", 0), "b": conveyor.put("b")}))
    assert get(part) == "b"
    with pytest.raises(TypeError, match="left"):
        graph.execute({"a": stage.echo.remote(Pair("left", 0)), "b": 0})


def test_an_eager_graph_keeps_the_rule(stage):
    with InputNode() as inp:
        whole = stage.pack.bind(inp, k=[inp])
    ref = stage.echo.remote([1])
    assert get(whole.execute(ref)) == (([1],), {"k": [[1]]})
    ((inner,),), _ = get(whole.execute([conveyor.put(2)]))
    assert get(inner) == 2
    with InputNode() as inp:
        parts = stage.pack.bind(inp[0]["a"], k=inp.named)
    (part,), named = get(parts.execute(conveyor.put({"a": conveyor.put(3)}), named=ref))
    assert (get(part), named) == (3, {"k": [1]})
    with InputNode() as inp:
        several = stage.inputs.bind(inp, inp[1], inp.k)
    (one, (two,)), k = get(several.execute(ref, [conveyor.put(4)], k=ref))
    assert (one, get(two), k) == ([1], 4, {"k": [1]})
    assert get(several.compile().execute(ref, 5, k=ref)) == (([1], 5), {"k": [1]})


def test_parts_that_are_results_are_values(stage):
    with InputNode() as inp:
        graph = MultiOutputNode([stage.echo.bind(inp), inp]).compile()
    assert get(graph.execute(conveyor.put("v"))) == ["v", "v"]


def test_arguments_of_calls_and_constructors(stage):
    one, two = stage.echo.remote(1), conveyor.put([2])
    assert get(stage.pack.remote(one, k=two)) == ((1,), {"k": [2]})
    made = conveyor.remote(Stage).remote(one, [two])
    assert get(made.inside_made_with.remote()) == [1, [[2]]]
    array = get(stage.pack.remote(stage.ones.remote(50_000)))[0][0]
    assert array.sum() == 50_000
    assert get(conveyor.remote(add).remote(one, two)) == [1, 2]


def test_a_call_waits_for_its_arguments_here(stage, gate, latches):
    go = latches()
    held = gate.hold.remote("held", go.path)
    also = gate.hold.remote("also", go.path)
    waiting = stage.pack.remote(held, k=also)
    behind = stage.echo.remote("behind")
    assert not waiting.done()
    go.open()
    assert get(waiting) == (("held",), {"k": "also"})
    assert get(behind) == "behind"


def test_a_call_does_not_wait_for_refs_inside(engine, stage, gate, latches):
    go = latches()
    held = gate.hold.remote("held", go.path)
    assert get(stage.are_done.remote([held])) == [False]
    if engine == "inline":  # there the method runs now, and this program would wait for itself
        go.open()
    waiting = stage.inside.remote([held])  # waits for it there
    go.open()
    assert get(waiting) == ["held"]


def test_an_error_in_a_ref_is_the_executions(stage):
    with InputNode() as inp:
        graph = MultiOutputNode(
            {"out": stage.echo.bind(inp), "in": inp}, effects=[stage.echo.bind(inp)]
        ).compile()
    before = get(stage.counted.remote())
    refs = graph.execute(stage.fail.remote("broken"))
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
    with pytest.raises(ValueError, match="of a call"):
        get(stage.echo.remote(stage.fail.remote("of a call")))
    assert get(stage.counted.remote()) == before
    # One inside is the business of who gets it.
    (failed,) = get(stage.echo.remote([stage.fail.remote("inside")]))
    with pytest.raises(ValueError, match="inside"):
        get(failed)
    with pytest.raises(ValueError, match="inside"):
        get(stage.inside.remote([failed]))
    assert get(single.execute(1)) == 1


def test_execute_waits_and_says_for_what(engine, stage, gate, latches):
    go = latches()
    held = gate.hold.remote("held", go.path)
    graph = compiled(lambda inp: stage.echo.bind(inp), name="waiter")
    with pytest.raises(CapacityError, match=r"waiter: .*hold"):
        graph.try_execute(held)
    if engine == "local":
        with pytest.raises(WaitTimeoutError, match=r"hold.*an argument of waiter"):
            graph.execute(held, timeout=0.02)
        with pytest.raises(DeadlineExceededError, match="waiter"):
            graph.execute(held, deadline=0.02)
    threading.Timer(0.02, go.open).start()
    assert get(graph.execute(held)) == "held"
    assert get(graph.try_execute(held)) == "held"


def test_execute_async_awaits(engine, stage, gate, latches):
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
        ref = await graph.execute_async(held)
        ticker.cancel()
        assert time.monotonic() >= started
        return await ref, ticks

    if engine == "local":
        value, ticks = asyncio.run(main())
        assert value == "held"
        assert ticks > 1


def test_a_cancelled_ref_cancels_what_needs_it(stage, gate, latches):
    held = gate.hold.remote("held", latches().path)
    call = stage.echo.remote(held)
    held.cancel()
    with pytest.raises(ExecutionCancelledError):
        get(call)
    graph = compiled(lambda inp: stage.echo.bind(inp))
    with pytest.raises(ExecutionCancelledError):
        get(graph.execute(held))


def test_results_of_one_graph_feed_another_many_times(stage):
    other = conveyor.remote(Stage).remote()
    first = compiled(lambda inp: stage.echo.bind(inp), depth=4)
    second = compiled(lambda inp: other.echo.bind(inp), depth=4)
    refs = [second.execute(first.execute([i])) for i in range(200)]
    assert get(refs) == [[i] for i in range(200)]


def test_a_constant_of_a_graph_may_be_a_ref(stage):
    constant = stage.echo.remote("c")
    graph = compiled(lambda inp: stage.pack.bind(inp, [constant], k=constant))
    (x, (inside,)), k = get(graph.execute(1))
    assert (x, get(inside), k) == (1, "c", {"k": "c"})
    with InputNode() as inp:
        shaped = MultiOutputNode({"out": stage.echo.bind(inp), "const": constant}).compile()
    assert get(shaped.execute(2)) == {"out": 2, "const": "c"}
