"""Generator methods: their items stream to whoever executes the graph."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from integration_helpers import WAIT, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    DeadlineExceededError,
    ExecutionCancelledError,
    GraphError,
    GraphTornDownError,
    SerializationError,
    WaitTimeoutError,
)


class Source:
    def __init__(self) -> None:
        self.closed: list[Any] = []
        self.begun: list[Any] = []

    def count(self, n: Any) -> Any:
        yield from range(n)

    def endless(self, start: int) -> Any:
        self.begun.append(start)
        try:
            yield from itertools.count(start)
        finally:
            self.closed.append(start)

    def arrays(self, n: int) -> Any:
        for i in range(n):
            yield np.full(100_000, i)

    def breaks(self, n: int) -> Any:
        yield from range(n)
        raise ValueError(f"after {n}")

    def bad_item(self, n: int) -> Any:
        yield 1
        yield threading.Lock()

    def pair(self, x: int) -> Any:
        yield x
        yield x + 1

    def slow_end(self, go: str) -> Any:
        yield from range(5)
        hold(go)
        yield "end"

    def plain(self, x: int) -> int:
        return x + 1

    def hold(self, go: str) -> str:
        hold(go)
        return "held"

    def bad_after(self, go: str) -> None:
        hold(go)
        raise KeyError("after that")

    def bad(self, x: int) -> int:
        raise KeyError(f"{x} is bad")

    def notes(self) -> tuple[list[Any], list[Any]]:
        return self.begun, self.closed

    def pid(self) -> int:
        return os.getpid()

    def dies(self, n: int) -> Any:
        yield from range(n)
        os._exit(5)


class Iterating:
    """An asynchronous iterator that is no generator."""

    def __init__(self, n: int) -> None:
        self.items = iter(range(n))

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        for item in self.items:
            await asyncio.sleep(0)
            return item
        raise StopAsyncIteration


class Returning:
    """Methods that stream what they return."""

    def __init__(self) -> None:
        self.closed = 0

    async def later(self, n: int) -> Any:
        try:
            for i in range(n):
                await asyncio.sleep(0)
                yield i
        finally:
            self.closed += 1

    def now(self, n: int) -> Any:
        try:
            yield from range(n)
        finally:
            self.closed += 1

    @conveyor.method(num_returns="streaming")
    async def asynchronous(self, n: int) -> Any:
        await asyncio.sleep(0)
        return self.later(n)

    @conveyor.method(num_returns="streaming")
    async def iterating(self, n: int) -> Any:
        return Iterating(n)

    @conveyor.method(num_returns="streaming")
    async def generator(self, n: int) -> Any:
        return self.now(n)

    @conveyor.method(num_returns="streaming")
    async def iterator(self, n: int) -> Any:
        return iter(range(n))

    @conveyor.method(num_returns="streaming")
    def without_await(self, n: int) -> Any:
        return self.later(n)

    @conveyor.method(num_returns="streaming")
    def coroutine(self, n: int) -> Any:
        return self.asynchronous(n)

    @conveyor.method(num_returns="streaming")
    async def listed(self, n: int) -> Any:
        return [n]

    @conveyor.method(num_returns="streaming")
    async def breaks(self, n: int) -> Any:
        raise ValueError(f"no {n}")

    async def how_many(self) -> int:
        return self.closed


class NoLoop:
    @conveyor.method(num_returns="streaming")
    def streams(self, what: str) -> Any:
        async def items() -> Any:
            yield 1

        async def made() -> Any:
            return items()

        return items() if what == "an asynchronous generator" else made()


class AsyncSource:
    def __init__(self) -> None:
        self.closed = 0

    async def count(self, n: int) -> Any:
        try:
            for i in range(n):
                await asyncio.sleep(0)
                yield i
        finally:
            self.closed += 1

    async def breaks(self, n: int) -> Any:
        yield n
        raise ValueError("later")

    async def how_many(self) -> int:
        return self.closed


@pytest.fixture
def source(engine):
    return conveyor.remote(Source).options(name="source").remote()


@pytest.mark.parametrize("items", [0, 1, 5, 64, 65, 1000])
def test_items_come_in_order(source, items):
    with source.count.bind(InputNode()).compile() as graph:
        for _ in range(3):
            assert list(graph.execute(items)) == list(range(items))


def test_pipelined_executions_keep_their_items_apart(source):
    with source.count.bind(InputNode()).compile(stream_items=4) as graph:
        refs = [graph.execute(n) for n in (3, 0, 4, 2)]
        assert [list(ref) for ref in refs] == [[0, 1, 2], [], [0, 1, 2, 3], [0, 1]]


def test_streams_taken_in_another_order(source):
    with source.count.bind(InputNode()).compile(stream_items=8) as graph:
        first, second, third = (graph.execute(n) for n in (100, 3, 2))
        assert next(first) == 0
        if graph.name and conveyor.get(source.plain.remote(1)) == 2:
            assert list(third) == [0, 1]
            assert list(second) == [0, 1, 2]
        assert list(first) == list(range(1, 100))


def test_large_items(source):
    with source.arrays.bind(InputNode()).compile(stream_items=2) as graph:
        held = list(graph.execute(30))
        assert [int(a[0]) for a in held] == list(range(30))
        assert all((a == a[0]).all() for a in held)


def test_an_endless_generator_is_closed_when_its_reference_is_dropped(source, wait_until):
    with source.endless.bind(InputNode()).compile() as graph:
        for start in (0, 100):
            stream = graph.execute(start)
            assert [next(stream) for _ in range(200)] == list(range(start, start + 200))
            del stream
        wait_until(lambda: conveyor.get(source.notes.remote()) == ([0, 100], [0, 100]))
        # The actor serves others while a generator waits for its items to be taken.
        stream = graph.execute(7)
        assert conveyor.get(source.plain.remote(1), timeout=WAIT) == 2
        assert next(stream) == 7


@pytest.mark.parametrize("to_its_end", [True, False])
@pytest.mark.parametrize("kind", [Source, AsyncSource])
def test_one_is_closed_while_an_earlier_one_is_still_referred_to(local, kind, to_its_end):
    source = conveyor.remote(kind).remote()
    with source.count.bind(InputNode()).compile(stream_items=2, depth=1) as graph:
        earlier = graph.execute(2)
        if to_its_end:
            assert list(earlier) == [0, 1]
        else:
            assert [next(earlier), next(earlier)] == [0, 1]
        for _ in range(3):
            graph.execute(100, timeout=WAIT)  # and dropped
        assert list(graph.execute(5, timeout=WAIT)) == [0, 1, 2, 3, 4]
        assert list(earlier) == []


def test_dropped_before_it_began(source, wait_until):
    with source.endless.bind(InputNode()).compile() as graph:
        for start in range(20):
            graph.execute(start)
        stream = graph.execute(20)
        assert next(stream) == 20
        del stream
        wait_until(lambda: len(conveyor.get(source.notes.remote())[1]) >= 1)
        begun, closed = conveyor.get(source.notes.remote())
        assert begun[: len(closed)] == closed


def test_teardown_closes_generators(source, wait_until):
    graph = source.endless.bind(InputNode()).compile()
    stream = graph.execute(1)
    assert next(stream) == 1
    graph.teardown()
    wait_until(lambda: conveyor.get(source.notes.remote())[0] == [1])
    with pytest.raises(GraphTornDownError):
        graph.execute(1)
    del stream
    wait_until(lambda: conveyor.get(source.notes.remote())[1] == [1])


def test_an_error_comes_after_the_items(source):
    with source.breaks.bind(InputNode()).compile() as graph:
        stream = graph.execute(100)
        assert [next(stream) for _ in range(100)] == list(range(100))
        for _ in range(2):
            with pytest.raises(ValueError, match="after 100"):
                next(stream)
        with pytest.raises(ValueError, match="after 0"):
            conveyor.get(graph.execute(0))
        # What is wrong with the argument: the call itself raises at the first item.
        with pytest.raises(TypeError):
            list(graph.execute("x"))


def test_an_item_that_cannot_be_sent(source):
    with source.bad_item.bind(InputNode()).compile() as graph:
        stream = graph.execute(0)
        assert next(stream) == 1
        with pytest.raises(SerializationError, match="lock"):
            next(stream)
    assert conveyor.get(source.plain.remote(1)) == 2


def test_an_error_upstream(source):
    with source.count.bind(source.plain.bind(InputNode())).compile() as graph:
        assert list(graph.execute(2)) == [0, 1, 2]
        with pytest.raises(TypeError):
            list(graph.execute("x"))
        assert list(graph.execute(1)) == [0, 1]


def test_get_and_await_give_lists(source):
    with source.count.bind(InputNode()).compile() as graph:
        stream = graph.execute(5)
        assert next(stream) == 0
        assert conveyor.get(stream) == [1, 2, 3, 4]
        assert conveyor.get(stream) == []

        async def awaited() -> Any:
            whole = await (await graph.execute_async(100))
            one_by_one = [item async for item in await graph.execute_async(100)]
            return whole, one_by_one

        assert asyncio.run(awaited()) == (list(range(100)), list(range(100)))


def test_beside_other_results_and_effects(source):
    inp = InputNode()
    dag = MultiOutputNode({"items": source.count.bind(inp), "one": source.plain.bind(inp)})
    with dag.compile() as graph:
        result = graph.execute(4)
        assert conveyor.get(result["one"]) == 5
        assert list(result["items"]) == [0, 1, 2, 3]
    dag = MultiOutputNode([source.count.bind(inp)], effects=[source.plain.bind(inp)])
    with dag.compile() as graph:
        assert list(graph.execute(4)[0]) == [0, 1, 2, 3]


def test_from_several_actors_at_once(engine):
    sources = [conveyor.remote(Source).remote() for _ in range(3)]
    inp = InputNode()
    with MultiOutputNode([s.count.bind(inp) for s in sources]).compile(stream_items=3) as graph:
        for _ in range(3):
            streams = graph.execute(50)
            assert list(zip(*streams, strict=True)) == [(i, i, i) for i in range(50)]


def test_an_async_generator(engine, wait_until):
    source = conveyor.remote(AsyncSource).remote()
    with source.count.bind(InputNode()).compile(stream_items=4) as graph:
        assert list(graph.execute(20)) == list(range(20))
        stream = graph.execute(10**9)
        assert next(stream) == 0
        del stream
        assert list(graph.execute(3)) == [0, 1, 2]
    with source.breaks.bind(InputNode()).compile() as graph:
        stream = graph.execute(1)
        assert next(stream) == 1
        with pytest.raises(ValueError, match="later"):
            next(stream)


def test_a_bound_method_streams_what_it_returns_or_awaits(engine, wait_until):
    actor = conveyor.remote(Returning).remote()
    names = "asynchronous", "iterating", "generator", "iterator", "without_await", "coroutine"
    with contextlib.ExitStack() as graphs:
        for name in names:
            method, inp = getattr(actor, name), InputNode()
            if name not in ("without_await", "coroutine"):
                assert list(method.remote(3)) == [0, 1, 2]
            graph = graphs.enter_context(method.bind(inp).compile(stream_items=2))
            assert [list(graph.execute(n)) for n in (0, 1, 20)] == [[], [0], [*range(20)]]
            closed = conveyor.get(actor.how_many.remote())
            stream = graph.execute(100)
            assert next(stream) == 0
            del stream
            if name not in ("iterating", "iterator"):
                wait_until(lambda before=closed: conveyor.get(actor.how_many.remote()) > before)
            assert list(graph.execute(2)) == [0, 1]


def test_a_bound_method_that_is_to_stream_and_returns_no_items(engine):
    actor, alone = conveyor.remote(Returning).remote(), conveyor.remote(NoLoop).remote()
    with actor.listed.bind(InputNode()).compile() as graph:
        for _ in range(2):
            with pytest.raises(TypeError, match=r"listed has returned a list, and no generator"):
                list(graph.execute(1))
    with (
        actor.breaks.bind(InputNode()).compile() as graph,
        pytest.raises(ValueError, match="no 3"),
    ):
        list(graph.execute(3))
    with alone.streams.bind(InputNode()).compile() as graph:
        for what in ("an asynchronous generator", "a coroutine"):
            for stream in (graph.execute(what), alone.streams.remote(what)):
                with pytest.raises(TypeError, match=f"returned {what}, and the actor has no event"):
                    list(stream)


def test_num_returns_streaming_is_what_generators_do(source):
    """Ray's word for it: taken wherever there is a number of results, and refused of what is no generator."""

    @conveyor.remote
    class Marked:
        @conveyor.method(num_returns="streaming")
        def items(self, n):
            yield from range(n)

        @conveyor.method(num_returns="streaming")
        async def later(self, n):
            for i in range(n):
                yield i

        def whole(self):
            return [1]

    @conveyor.remote(num_returns="streaming")
    def numbers(n):
        yield from range(n)

    @conveyor.remote
    def one():
        return 1

    marked = Marked.remote()
    for call in (
        marked.items,
        marked.later,
        marked.items.options(num_returns=2).options(num_returns="streaming"),
        source.pair.options(num_returns="streaming"),
        numbers,
        numbers.options(num_returns="streaming"),
    ):
        assert list(call.remote(2)) in ([0, 1], [2, 3])
    for refused in (
        lambda: marked.whole.options(num_returns="streaming"),
        lambda: one.options(num_returns="streaming"),
        lambda: conveyor.remote(num_returns="streaming")(lambda: 1),
    ):
        with pytest.raises(
            ValueError, match=r"is for generators, and .*(whole|one|<lambda>).* is none"
        ):
            refused()
    for place in (marked.items.options, numbers.options, conveyor.method):
        with pytest.raises(ValueError, match="items of a generator come one by one"):
            place(num_returns="dynamic")


def test_num_returns_takes_a_generators_items(source):
    a, b = source.pair.options(num_returns=2).bind(InputNode())
    with MultiOutputNode([b, a]).compile() as graph:
        assert conveyor.get(graph.execute(1)) == [2, 1]


def test_what_a_stream_cannot_be_bound_to(source):
    items = source.count.bind(InputNode())
    with pytest.raises(GraphError, match=r"source\.count yields"):
        source.plain.bind(items)
    with pytest.raises(GraphError, match="nobody would take its items"):
        MultiOutputNode([source.plain.bind(InputNode())], effects=[items])


def test_items_are_counted(source):
    with source.count.bind(InputNode()).compile() as graph:
        assert list(graph.execute(100)) == list(range(100))
        assert list(graph.execute(7)) == list(range(7))
        (items,) = [edge for edge in graph.stats().edges if "items of" in edge.source]
        assert items.frames == 107
        assert "source.count" in str(graph.stats())


def test_it_is_explained_and_drawn(source):
    with source.count.bind(InputNode()).compile() as graph:
        assert "items of source.count" in graph.explain()
        drawing = graph.visualize(None, format="ascii")
        assert drawing.count("recv  #2 items of source.count") == 1
        assert drawing.count("send  #2 items of source.count") == 1
        assert "source.count" in graph.visualize(None, format="mermaid", channel_details=True)


def test_a_timeout_can_be_tried_again(local):
    source = conveyor.remote(Source).options(name="source").remote()
    with source.count.bind(InputNode()).compile() as graph:
        os.kill(pid := conveyor.get(source.pid.remote()), signal.SIGSTOP)
        stream = graph.execute(3)
        with pytest.raises(WaitTimeoutError, match=r"the next item of graph.*source\.count"):
            stream.next(timeout=0.05)
        assert not stream.done()
        os.kill(pid, signal.SIGCONT)
        assert stream.next(timeout=WAIT) == 0
        assert list(stream) == [1, 2]


def test_a_get_of_all_items_that_times_out_loses_none(local, latches):
    source = conveyor.remote(Source).remote()
    with source.slow_end.bind(InputNode()).compile() as graph:
        go = latches()
        stream = graph.execute(go.path)
        with pytest.raises(WaitTimeoutError):
            conveyor.get(stream, timeout=0.1)
        go.open()
        assert stream.get(timeout=WAIT) == [0, 1, 2, 3, 4, "end"]


def test_the_end_waits_for_effects_no_longer_than_requested(local, latches):
    source, other = (conveyor.remote(Source).remote() for _ in range(2))
    go, inp = latches(), InputNode()
    dag = MultiOutputNode([source.count.bind(inp)], effects=[other.hold.bind(go.path)])
    with dag.compile() as graph:
        (stream,) = graph.execute(2)
        assert [next(stream), next(stream)] == [0, 1]
        with pytest.raises(WaitTimeoutError, match=r"the end of a stream.*hold"):
            stream.next(timeout=0.05)
        assert not stream.done()
        go.open()
        assert stream.get(timeout=WAIT) == []
        assert stream.done()


def test_the_end_waits_for_effects_without_blocking_the_event_loop(local, latches):
    source, other = (conveyor.remote(Source).remote() for _ in range(2))
    go, inp = latches(), InputNode()
    dag = MultiOutputNode([source.count.bind(inp)], effects=[other.hold.bind(go.path)])

    async def main() -> list[int]:
        (stream,) = await graph.execute_async(2)
        items = [await anext(stream), await anext(stream)]
        rest = asyncio.ensure_future(stream)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(rest), 0.05)
        go.open()
        return items + await rest

    with dag.compile() as graph:
        assert asyncio.run(main()) == [0, 1]


def test_what_a_generator_raises_does_not_wait_for_effects(local, latches):
    source, other = (conveyor.remote(Source).remote() for _ in range(2))
    go, inp = latches(), InputNode()
    dag = MultiOutputNode([source.breaks.bind(inp)], effects=[other.hold.bind(go.path)])
    with dag.compile(fail_fast=False) as graph:
        (stream,) = graph.execute(1)
        assert next(stream) == 0
        with pytest.raises(ValueError, match="after 1"):
            stream.next(timeout=WAIT)
        go.open()


@pytest.mark.parametrize("way", ["call", "graph"])
def test_a_stream_is_got_together_with_others(local, latches, way):
    source, other = (conveyor.remote(Source).remote() for _ in range(2))
    go = latches()
    with source.count.bind(InputNode()).compile() as graph:
        stream = graph.execute(3) if way == "graph" else source.count.remote(3)
        threading.Timer(0.05, go.open).start()  # it is a long wait
        assert conveyor.get([other.hold.remote(go.path), stream]) == ["held", [0, 1, 2]]


@pytest.mark.parametrize("way", ["call", "graph"])
def test_an_error_of_another_ends_the_wait_for_a_stream(local, latches, way):
    source, other = (conveyor.remote(Source).remote() for _ in range(2))
    go = latches()
    with source.slow_end.bind(InputNode()).compile() as graph:
        stream = graph.execute(go.path) if way == "graph" else source.slow_end.remote(go.path)
        with pytest.raises(KeyError, match="7 is bad"):
            conveyor.get([stream, other.bad.remote(7)])
        go.open()
        assert stream.get(timeout=WAIT) == [0, 1, 2, 3, 4, "end"]  # nothing is lost


def test_a_get_that_fails_loses_no_items(source):
    stream = source.breaks.remote(3)
    for _ in range(2):
        with pytest.raises(ValueError, match="after 3"):
            conveyor.get(stream)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="after 3"):
        next(stream)


def test_a_cancelled_stream_of_a_busy_actor(local, latches):
    source, go = conveyor.remote(Source).remote(), latches()
    held = source.hold.remote(go.path)
    stream = source.count.remote(3)
    assert stream.cancel()
    with pytest.raises(ExecutionCancelledError):
        stream.next(timeout=0)
    go.open()
    assert conveyor.get(held, timeout=WAIT) == "held"
    assert list(source.count.remote(2)) == [0, 1]


def test_the_actors_death_comes_after_its_items(local):
    source = conveyor.remote(Source).options(name="source").remote()
    with source.dies.bind(InputNode()).compile() as graph:
        stream = graph.execute(10)
        got = []
        with pytest.raises(ActorDiedError, match="source"):  # noqa: PT012
            for item in stream:
                got.append(item)
        assert got == list(range(10))


def test_an_end_that_comes_with_another_actors_death_cuts_nothing_short(
    local, latches, monkeypatch
):
    source, other = (conveyor.remote(Source).remote() for _ in range(2))
    go, inp = latches(), InputNode()
    with MultiOutputNode([source.slow_end.bind(inp), other.plain.bind(1)]).compile() as graph:
        stream, _ = graph.execute(go.path)
        assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
        conveyor.kill(other)
        # The generator goes on while its end is looked for, which the death has made look done.
        monkeypatch.setattr("conveyor.graph.result_source._FIRST_LOOK", float(WAIT))
        threading.Timer(0.1, go.open).start()
        assert stream.next(timeout=WAIT) == "end"
        with pytest.raises(StopIteration):
            stream.next(timeout=WAIT)


def test_several_threads_take_from_several_streams(local):
    source = conveyor.remote(Source).remote()
    with source.count.bind(InputNode()).compile(stream_items=4) as graph:
        streams = [graph.execute(200) for _ in range(4)]
        taken: dict[int, list[int]] = {}
        threads = [
            threading.Thread(target=lambda i=i, s=s: taken.update({i: list(s)}))
            for i, s in enumerate(streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert taken == {i: list(range(200)) for i in range(4)}


@pytest.mark.parametrize("way", ["call", "graph"])
@pytest.mark.parametrize("method", ["count", "breaks"])
def test_one_that_has_ended_keeps_nothing_of_who_has_taken_it(local, way, method):
    class Local:
        pass

    def take(stream: Any) -> weakref.ref[Local]:
        mine = Local()
        with contextlib.suppress(ValueError):
            for _ in stream:
                pass
        return weakref.ref(mine)

    source = conveyor.remote(Source).remote()
    bound = getattr(source, method)
    with bound.bind(InputNode()).compile() as graph:
        stream = bound.remote(3) if way == "call" else graph.execute(3)
        gc.disable()
        try:
            assert take(stream)() is None
        finally:
            gc.enable()


def test_an_ordinary_call_streams_too(source, wait_until):
    assert list(source.count.remote(10)) == list(range(10))
    stream = source.breaks.remote(3)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="after 3"):
            next(stream)
    stream = source.endless.remote(5)
    assert [next(stream) for _ in range(10)] == list(range(5, 15))
    del stream
    assert list(source.count.remote(2)) == [0, 1]
    wait_until(lambda: conveyor.get(source.notes.remote()) == ([5], [5]))
    assert conveyor.get(source.count.remote(source.plain.remote(2))) == [0, 1, 2]
    assert conveyor.get(source.pair.options(num_returns=2).remote(1)) == [1, 2]

    async def awaited() -> Any:
        return [item async for item in source.count.remote(50)]

    assert asyncio.run(awaited()) == list(range(50))


def test_an_ordinary_call_of_an_async_generator(engine):
    source = conveyor.remote(AsyncSource).remote()
    assert list(source.count.remote(10)) == list(range(10))
    with pytest.raises(ValueError, match="later"):
        list(source.breaks.remote(1))


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_the_stream_of_a_call_can_be_cancelled_until_it_has_ended(engine, kind, wait_until):
    source = conveyor.remote(Source if kind == "plain" else AsyncSource).remote()
    stream = source.count.remote(30)
    assert next(stream) == 0
    wait_until(stream.done)  # the next item is made, and nobody has taken it
    assert stream.cancel()
    assert stream.cancelled()
    for _ in range(2):
        with pytest.raises(ExecutionCancelledError, match=r"Source\.count was cancelled"):
            next(stream)
    assert not stream.cancel()

    over = source.count.remote(0)
    wait_until(over.done)
    assert not over.cancel()
    assert list(over) == []
    broken = source.breaks.remote(1)
    next(broken)
    wait_until(broken.done)
    assert not broken.cancel()
    with pytest.raises(ValueError, match=r"after 1|later"):
        next(broken)
    assert not broken.cancelled()


def test_cancelling_the_stream_of_a_call_closes_its_generator(source, wait_until):
    stream = source.endless.remote(3)
    wait_until(stream.done)
    assert stream.cancel()
    wait_until(lambda: conveyor.get(source.notes.remote()) == ([3], [3]))


def test_a_dag_that_is_not_compiled_streams_too(source):
    inp = InputNode()
    dag = MultiOutputNode({"items": source.count.bind(inp), "one": source.plain.bind(inp)})
    result = dag.execute(4)
    assert list(result["items"]) == [0, 1, 2, 3]
    assert conveyor.get(result["one"]) == 5


@pytest.mark.parametrize("kind", [Source, AsyncSource])
def test_a_cancelled_stream(local, kind):
    source = conveyor.remote(kind).remote()
    with source.count.bind(InputNode()).compile(stream_items=4) as graph:
        stream = graph.execute(10**9)
        assert next(stream) == 0
        assert stream.cancel()
        with pytest.raises(ExecutionCancelledError):  # noqa: PT012
            for _ in range(10):
                next(stream)
        assert stream.cancelled()
        assert list(graph.execute(3)) == [0, 1, 2]


def test_one_that_ends_as_its_execution_fails_does_not_look_complete(local, latches, wait_until):
    source, other = (conveyor.remote(Source).remote() for _ in range(2))
    go, inp = latches(), InputNode()
    dag = MultiOutputNode([source.endless.bind(inp), other.bad_after.bind(go.path)])
    with dag.compile(stream_items=2) as graph:
        stream, _ = graph.execute(0)
        assert next(stream) == 0
        go.open()
        # Nobody looks at the graph until the generator has been closed.
        wait_until(lambda: conveyor.get(source.notes.remote()) == ([0], [0]))
        with pytest.raises(KeyError, match="after that"):
            list(stream)


@pytest.mark.parametrize("kind", [Source, AsyncSource])
def test_a_stream_with_a_deadline(local, kind):
    source = conveyor.remote(kind).remote()
    with source.count.bind(InputNode()).compile(stream_items=4) as graph:
        stream = graph.execute(10**9, deadline=0.2)
        with pytest.raises(DeadlineExceededError, match=r"deadline of 0\.2 s"):
            for _ in stream:
                pass
        assert list(graph.execute(3, deadline=WAIT)) == [0, 1, 2]


def test_streams_in_an_actor(engine):
    @conveyor.remote
    class Controller:
        def run(self, source: Any, n: int) -> list[int]:
            with source.count.bind(InputNode()).compile(stream_items=2) as graph:
                return list(graph.execute(n))

    source = conveyor.remote(Source).remote()
    assert conveyor.get(Controller.remote().run.remote(source, 30)) == list(range(30))


def test_a_stream_does_not_end_with_the_process_that_comes_after_its_own(engine):
    # The new process knows nothing of it: its answer would look like the generator's end.
    @conveyor.remote(max_restarts=-1)
    class Phoenix:
        def __init__(self) -> None:
            self.life = object()

        def items(self) -> Any:
            yield from range(9)

        async def later(self) -> Any:
            for i in range(9):
                yield i

        def ready(self) -> bool:
            return True

    for method in ("items", "later"):
        actor = Phoenix.remote()
        stream = getattr(actor, method).remote()
        taken = [stream.next(WAIT)]
        conveyor.kill(actor, no_restart=False)
        while True:
            try:
                assert conveyor.get(actor.ready.remote(), timeout=WAIT)
                break
            except ActorDiedError:  # by the process before
                pass
        with pytest.raises(ActorDiedError):
            taken.extend(stream)  # those that had come are taken
        assert taken == list(range(len(taken)))
        assert len(taken) < 9
        with pytest.raises(ActorDiedError):  # and it stays so
            stream.next(WAIT)


def test_streams_that_are_dropped_with_their_actors_process(scripts):
    # What lets go of them in the driver must not wait for the actor: it is what restarts are told by.
    scripts.run("""
        import os, signal, conveyor

        @conveyor.remote(max_restarts=-1)
        class Source:
            def items(self):
                while True:
                    yield 1
            def pid(self):
                return os.getpid()

        source = Source.remote()
        def pid_of_source():
            while True:
                try:
                    return conveyor.get(source.pid.remote(), timeout=60)
                except conveyor.exceptions.ActorRestartedError:
                    pass  # it was the process before

        for i in range(10):
            pid = pid_of_source()
            stream = source.items.remote()
            next(stream)
            os.kill(pid, signal.SIGKILL)
            del stream
        assert pid_of_source() != pid
    """)
