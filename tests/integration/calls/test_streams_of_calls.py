"""Streams of calls as references like any other: in any order of threads, as arguments, without a handle."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import itertools
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from integration_helpers import WAIT, hold

import conveyor
from conveyor.calls import call as calls
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    CapacityError,
    DeadlineExceededError,
    GraphTornDownError,
    SerializationError,
    SessionEndedError,
    WaitTimeoutError,
)


class Source:
    def count(self, *given: Any) -> Any:
        yield from range(given[0])

    async def later(self, n: int) -> Any:
        for i in range(n):
            await asyncio.sleep(0)
            yield i

    def breaks(self, n: int) -> Any:
        yield from range(n)
        raise ValueError(f"after {n}")

    def endless(self) -> Any:
        while True:
            yield 1

    def given(self, *args: Any, **named: Any) -> Any:
        return args, named

    def refuse(self, *given: Any) -> Any:
        raise ValueError("refused")

    def count_and_hold(self, n: int, go: str) -> Any:
        yield from range(n)
        open(f"{go} held", "w").close()
        hold(go)

    def interrupt_and_hold(self, pid: int, go: str) -> Any:
        yield 0
        os.kill(pid, signal.SIGINT)
        hold(go)

    def held(self, go: str) -> int:
        hold(go)
        return 2

    @conveyor.method(tensor_transport="auto")
    def stays(self, n: int) -> Any:
        return np.arange(float(n))

    @conveyor.method(tensor_transport="auto")
    def stay(self, n: int) -> Any:
        for i in range(n):
            yield np.full(100, i)

    def pid(self) -> int:
        return os.getpid()


class Threaded:
    """Its threads begin what opens a generator only after the call that ``waits`` for that has ended."""

    def __init__(self, waits: int) -> None:
        submit = concurrent.futures.ThreadPoolExecutor.submit
        late: list[Any] = []

        def submit_late(pool: Any, function: Any, *args: Any) -> Any:
            what = next(one for one in args if type(one) is tuple and len(one) == 5)[4]
            if what == calls.OPEN:
                late.append(args)
                return None
            made = submit(pool, function, *args)
            while what == waits and late:
                opening = late.pop()
                made.add_done_callback(lambda _, opening=opening: submit(pool, function, *opening))
            return made

        concurrent.futures.ThreadPoolExecutor.submit = submit_late  # type: ignore[method-assign]

    def items(self, n: int, token: Any = None) -> Any:
        yield from range(n)

    def tokens(self) -> int:
        gc.collect()
        return sum(type(one) is Token for one in gc.get_objects())


class Token:
    def __init__(self) -> None:
        self.itself = self


def test_its_calls_may_be_run_in_any_order(local):
    actor = conveyor.remote(Threaded).options(max_concurrency=4).remote(calls.NEXT)
    for n in (0, 1, 5):
        assert list(actor.items.remote(n)) == list(range(n))
    streams = [actor.items.remote(n) for n in range(20)]
    assert conveyor.get(streams) == [list(range(n)) for n in range(20)]


def test_one_that_is_dropped_before_it_is_open_leaves_nothing(local, wait_until):
    actor = conveyor.remote(Threaded).options(max_concurrency=4).remote(calls.CLOSE)
    for _ in range(5):
        actor.items.remote(3, Token())
    wait_until(lambda: conveyor.get(actor.tokens.remote()) == 0)


def test_with_threads_that_are_switched_all_the_time(local):
    @conveyor.remote(max_concurrency=4)
    class Busy:
        def __init__(self) -> None:
            import sys

            sys.setswitchinterval(1e-6)

        def items(self, n: int) -> Any:
            yield from range(n)

    actor = Busy.remote()
    assert conveyor.get([actor.items.remote(2) for _ in range(200)]) == [[0, 1]] * 200


def test_threads_that_take_from_one_stream_share_its_items(engine):
    stream = conveyor.remote(Source).remote().count.remote(200)
    taken: list[list[int]] = [[], [], []]
    threads = [threading.Thread(target=mine.extend, args=(stream,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert sorted(itertools.chain(*taken)) == list(range(200))
    assert all(mine == sorted(mine) for mine in taken)


@pytest.mark.parametrize("method", ["count", "later"])
@pytest.mark.parametrize("whose", ["its own", "another"])
def test_as_an_argument_it_is_its_list(engine, whose, method):
    actor = conveyor.remote(Source).remote()
    items = getattr(actor, method).remote
    user = actor if whose == "its own" else conveyor.remote(Source).remote()
    for n in (0, 1, 2, 30):
        assert conveyor.get(user.given.remote(items(n)), timeout=WAIT) == (([*range(n)],), {})
    given = user.given.remote(1, items(2), x=items(3))
    assert conveyor.get(given, timeout=WAIT) == ((1, [0, 1]), {"x": [0, 1, 2]})
    nested = user.given.remote(user.given.remote(items(2)), items(1))
    assert conveyor.get(nested, timeout=WAIT) == (((([0, 1],), {}), [0]), {})
    of_stream = list(actor.count.remote(2, user.given.remote(items(2)), items(3)))
    assert of_stream == [0, 1]


def test_threads_that_send_one_stream_each_send_all_of_it(engine):
    source, *sinks = [conveyor.remote(Source).remote() for _ in range(4)]
    with InputNode() as inp:
        graph = sinks[0].given.bind(inp).compile()
    conveyor.get([sink.pid.remote() for sink in sinks])
    n, streams = 100, [source.count.remote(100) for _ in range(3)]
    streams[2].gather()
    start = threading.Barrier(4)

    def send(stream: Any, sink: Any) -> Any:
        start.wait(WAIT)
        if sink is None:
            return conveyor.get(graph.execute(stream), timeout=WAIT)
        return conveyor.get(sink.given.remote(stream), timeout=WAIT)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for stream in streams:
                sent = [pool.submit(send, stream, sink) for sink in (*sinks, None)]
                for one in sent:
                    assert one.result(WAIT) == ((list(range(n)),), {})
                assert conveyor.get(sinks[0].given.remote(stream)) == ((list(range(n)),), {})
    finally:
        sys.setswitchinterval(interval)
    graph.teardown()


def test_several_that_wait_for_each_other(engine):
    one, other = (conveyor.remote(Source).remote() for _ in range(2))
    waiting = []
    for _ in range(10):
        waiting.append(one.given.remote(other.count.remote(3), one.count.remote(2)))
        waiting.append(other.given.remote(one.later.remote(3), other.count.remote(2)))
    assert conveyor.get(waiting, timeout=WAIT) == [(([0, 1, 2], [0, 1]), {})] * 20


def test_an_actor_that_passes_them_on(engine):
    @conveyor.remote
    class Caller:
        def run(self, actor: Any) -> Any:
            return conveyor.get(actor.given.remote(actor.count.remote(3)), timeout=WAIT)

    assert conveyor.get(Caller.remote().run.remote(conveyor.remote(Source).remote()))[0] == (
        [0, 1, 2],
    )


def test_one_that_has_been_begun_and_one_that_fails(engine):
    actor = conveyor.remote(Source).remote()
    stream = actor.count.remote(4)
    assert next(stream) == 0
    assert conveyor.get(actor.given.remote(stream), timeout=WAIT)[0] == ([1, 2, 3],)
    for _ in range(2):
        with pytest.raises(ValueError, match="after 2"):
            conveyor.get(actor.given.remote(actor.breaks.remote(2)), timeout=WAIT)
    assert conveyor.get(actor.given.remote(1), timeout=WAIT)[0] == (1,)


def test_a_timeout_ends_the_wait_for_one_that_never_ends(local):
    actor, other = (conveyor.remote(Source).remote() for _ in range(2))
    for user in (actor, other):
        result = user.given.remote(actor.endless.remote())
        with pytest.raises(WaitTimeoutError, match=r"given \(not sent yet\)"):
            conveyor.get(result, timeout=0.1)
        assert result.cancel()
        assert conveyor.get(user.given.remote(2), timeout=WAIT)[0] == (2,)


def test_what_waits_for_an_argument_does_not_hold_up_a_stream(local, latches):
    actor, other, go = conveyor.remote(Source).remote(), conveyor.remote(Source).remote(), latches()
    stream = actor.count.remote(4)
    assert next(stream) == 0
    waits = actor.given.remote(other.held.remote(go.path))
    assert [stream.next(WAIT) for _ in range(3)] == [1, 2, 3]
    go.open()
    assert conveyor.get(waits)[0] == (2,)


def _given_graph(actor: Any) -> Any:
    with InputNode() as inp:
        return actor.given.bind(inp).compile()


@pytest.mark.parametrize("method", ["count", "later"])
def test_as_an_input_of_a_graph_it_is_its_list(engine, method):
    actor, user = (conveyor.remote(Source).remote() for _ in range(2))
    with contextlib.ExitStack() as graphs, InputNode() as inp:
        graph = graphs.enter_context(user.given.bind(inp).compile())
        parts = graphs.enter_context(user.given.bind(inp[0], x=inp["x"]).compile())
        streams = graphs.enter_context(getattr(actor, method).bind(inp).compile())

        async def execute_async(stream: Any) -> Any:
            return await (await graph.execute_async(stream))

        of_calls = getattr(user, method).remote, getattr(actor, method).remote
        for items in (*of_calls, streams.execute):
            for n in (0, 1, 70):
                whole = ([*range(n)],), {}
                assert conveyor.get(graph.execute(items(n), timeout=WAIT), timeout=WAIT) == whole
                assert asyncio.run(execute_async(items(n))) == whole
            both = parts.execute(items(2), x=items(3))
            assert conveyor.get(both, timeout=WAIT) == (([0, 1],), {"x": [0, 1, 2]})
            begun, taken, made = items(3), items(2), items(2)
            assert next(begun) == 0
            assert list(taken) == [0, 1]
            conveyor.wait([made])
            results = [graph.execute(stream, timeout=WAIT) for stream in (begun, taken, made)]
            assert conveyor.get(results) == [(([1, 2],), {}), (([],), {}), (([0, 1],), {})]


def test_the_stream_of_a_graph_as_its_own_input(engine):
    user = conveyor.remote(Source).remote()
    with InputNode() as inp:
        dag = MultiOutputNode([user.given.bind(inp[0]), user.count.bind(inp[1])])
    with dag.compile() as graph:
        _, stream = graph.execute(0, 70)
        given, _ = graph.execute(stream, 0)
        assert conveyor.get(given, timeout=WAIT) == (([*range(70)],), {})


def test_as_an_input_of_a_functions_graph_and_of_a_handle(engine):
    @conveyor.remote
    class Holder:
        def run(self, graph: Any, actor: Any) -> Any:
            return conveyor.get(graph.execute(actor.count.remote(3)), timeout=WAIT)

    actor, double = conveyor.remote(Source).remote(), conveyor.remote(lambda x: x * 2)
    with InputNode() as inp, double.bind(inp).compile() as graph:
        assert conveyor.get(graph.execute(actor.count.remote(2)), timeout=WAIT) == [0, 1, 0, 1]
        running = Holder.remote().run.remote(graph, actor)
        assert conveyor.get(running, timeout=WAIT) == [0, 1, 2, 0, 1, 2]


def test_an_execution_is_tried_until_its_stream_is_whole(engine, wait_until):
    actor, user = (conveyor.remote(Source).remote() for _ in range(2))
    stream, results = actor.count.remote(3), []

    def tried() -> bool:
        with contextlib.suppress(CapacityError):
            results.append(graph.try_execute(stream))
        return bool(results)

    with _given_graph(user) as graph:
        wait_until(tried)
        assert conveyor.get(results[0]) == (([0, 1, 2],), {})


class Busy:
    def given(self, x: Any, go: str) -> Any:
        hold(go)
        return x


@pytest.mark.parametrize("whole", [True, False], ids=["as it is", "a part of the input"])
def test_a_stream_that_finds_no_room_is_whole_at_the_next_try(local, latches, whole):
    actor, busy, go = conveyor.remote(Source).remote(), conveyor.remote(Busy).remote(), latches()
    with InputNode() as inp:
        node = busy.given.bind(inp, go.path) if whole else busy.given.bind(inp[0], inp[1])

    def given(x: Any) -> tuple[Any, ...]:
        return (x,) if whole else (x, go.path)

    with node.compile(depth=1) as graph:
        first = graph.execute(*given(0))
        stream = actor.count.remote(3)
        for _ in range(2):
            with pytest.raises(WaitTimeoutError, match="room"):
                graph.execute(*given(stream), timeout=0.3)
        go.open()
        assert conveyor.get(first, timeout=WAIT) == 0
        assert conveyor.get(graph.execute(*given(stream)), timeout=WAIT) == [0, 1, 2]
        assert conveyor.get(graph.execute(*given(stream)), timeout=WAIT) == [0, 1, 2]


def test_the_error_of_a_stream_is_that_of_the_execution(engine):
    actor, user = (conveyor.remote(Source).remote() for _ in range(2))
    with _given_graph(user) as graph:
        failed = graph.execute(actor.breaks.remote(2), timeout=WAIT)
        with pytest.raises(ValueError, match="after 2"):
            conveyor.get(failed)
        assert conveyor.get(graph.execute(1)) == ((1,), {})


def test_a_wait_for_an_input_that_ends_early_burns_nothing_and_loses_no_item(local, latches):
    actor, user, go = conveyor.remote(Source).remote(), conveyor.remote(Source).remote(), latches()
    stream = actor.count_and_hold.remote(3, go.path)
    with pytest.raises(WaitTimeoutError):
        stream.get(timeout=0.05)  # which leaves items that have been taken
    with InputNode() as inp, user.given.bind(inp).compile(submit_timeout=0.1) as graph:
        begun, used = time.monotonic(), time.process_time()
        with pytest.raises(WaitTimeoutError, match="an argument of"):
            graph.execute(stream, timeout=0.3)
        assert time.process_time() - used < 0.2
        with pytest.raises(WaitTimeoutError, match="an argument of"):
            graph.execute(stream)
        with pytest.raises(DeadlineExceededError):
            graph.execute(stream, deadline=0.1)
        with pytest.raises(CapacityError):
            graph.try_execute(stream)
        assert time.monotonic() - begun < WAIT
        assert conveyor.get(graph.execute(1)) == ((1,), {})
        assert [stream.next(WAIT), stream.next(WAIT)] == [0, 1]
        go.open()
        assert conveyor.get(graph.execute(stream, timeout=WAIT)) == (([2],), {})
        assert list(stream) == []


def test_items_that_are_awaited_while_a_call_waits_for_all(local, latches):
    actor, user, go = conveyor.remote(Source).remote(), conveyor.remote(Source).remote(), latches()
    stream = actor.count_and_hold.remote(3, go.path)
    waits = user.given.remote(stream)

    async def take() -> list[int]:
        return [await asyncio.wait_for(anext(stream), WAIT) for _ in range(2)]

    assert asyncio.run(take()) == [0, 1]
    go.open()
    assert conveyor.get(waits, timeout=WAIT) == (([2],), {})


def test_ctrl_c_ends_the_wait_of_an_execution_and_a_stream_that_is_dropped_is_closed(
    local, latches
):
    actor, user, go = conveyor.remote(Source).remote(), conveyor.remote(Source).remote(), latches()
    with _given_graph(user) as graph:
        with pytest.raises(KeyboardInterrupt):
            graph.execute(actor.interrupt_and_hold.remote(os.getpid(), go.path))
        go.open()
        with pytest.raises(WaitTimeoutError):
            graph.execute(actor.endless.remote(), timeout=0.1)
        assert conveyor.get(graph.execute(2)) == ((2,), {})
        assert conveyor.get(actor.given.remote(1), timeout=WAIT) == ((1,), {})


@pytest.mark.parametrize("end", ["teardown", "shutdown"])
def test_the_end_of_its_graph_or_session_ends_the_wait_of_an_execution(
    local, latches, end, wait_until
):
    actor, user, go = conveyor.remote(Source).remote(), conveyor.remote(Source).remote(), latches()
    graph = _given_graph(user)
    stream = actor.count_and_hold.remote(3, go.path)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lambda: conveyor.get(graph.execute(stream)))
        wait_until(lambda: os.path.exists(f"{go.path} held"))  # its items have been taken
        conveyor.shutdown() if end == "shutdown" else graph.teardown()
        with pytest.raises(SessionEndedError if end == "shutdown" else GraphTornDownError):
            waits.result(WAIT)
    go.open()


@pytest.mark.parametrize("method", ["count", "later"])
def test_it_keeps_its_actor(engine, method):
    def begin(n: int) -> Any:
        return getattr(conveyor.remote(Source).remote(), method).remote(n)

    assert list(begin(3)) == [0, 1, 2]
    late = begin(3)
    conveyor.wait([late])
    gc.collect()
    other = conveyor.remote(Source).remote()
    assert conveyor.get(other.given.remote(5))[0] == (
        5,
    )  # the driver has had time to end the first
    assert next(late) == 0
    assert conveyor.get(other.given.remote(6))[0] == (6,)
    assert list(late) == [1, 2]
    assert conveyor.get(begin(4)) == [0, 1, 2, 3]

    async def take() -> list[int]:
        return [item async for item in begin(3)]

    assert asyncio.run(take()) == [0, 1, 2]


@pytest.mark.parametrize("end", ["taken", "dropped", "failed", "cancelled"])
def test_the_actor_ends_with_its_last_stream(local, end, wait_until):
    actor = conveyor.remote(Source).remote()
    pid = conveyor.get(actor.pid.remote())
    stream = (actor.breaks if end == "failed" else actor.count).remote(3)
    del actor
    assert next(stream) == 0
    if end == "taken":
        assert list(stream) == [1, 2]
    elif end == "failed":
        with pytest.raises(ValueError, match="after 3"):
            list(stream)
    elif end == "cancelled":
        assert stream.cancel()
    else:
        del stream
    wait_until(lambda: not _runs(pid))


def test_the_actor_ends_when_who_has_its_stream_is_dead(local, wait_until):
    @conveyor.remote
    class Taker:
        def take(self, actor: Any) -> int:
            self.stream = actor.count.remote(5)
            return next(self.stream)

    actor, taker = conveyor.remote(Source).remote(), Taker.remote()
    assert conveyor.get(taker.take.remote(actor)) == 0
    conveyor.kill(taker)
    assert conveyor.get(actor.given.remote(1))[0] == (1,)


def test_a_value_that_stays_keeps_its_actor(local, wait_until):
    actor = conveyor.remote(Source).remote()
    pid = conveyor.get(actor.pid.remote())
    value, part = actor.stays.remote(1000), None
    conveyor.wait([value])
    del actor
    other = conveyor.remote(Source).remote()
    assert conveyor.get(other.given.remote(value))[0][0].sum() == 499_500
    assert _runs(pid)
    part = value[1:3]
    del value
    assert list(conveyor.get(part)) == [1, 2]
    del part
    wait_until(lambda: not _runs(pid))


def test_values_that_stay_without_a_handle(engine):
    value = conveyor.remote(Source).remote().stays.remote(10)
    stream = conveyor.remote(Source).remote().stay.remote(3)
    first = stream.next()
    conveyor.wait([value])
    other = conveyor.remote(Source).remote()
    assert conveyor.get(other.given.remote(value))[0][0].sum() == 45
    assert conveyor.get(value).sum() == 45
    assert [first[0], *[item[0] for item in stream]] == [0, 1, 2]


def test_neither_keeps_the_session(local):
    stream = conveyor.remote(Source).remote().count.remote(5)
    value = conveyor.remote(Source).remote().stays.remote(10)
    assert next(stream) == 0
    assert conveyor.get(value).sum() == 45
    begun = time.monotonic()
    conveyor.shutdown()
    assert time.monotonic() - begun < 4  # the grace period is 5 s


def passing(function: Any) -> Any:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return called


def listed(function: Any) -> Any:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return {"sum": sum(function(*args, **kwargs))}

    return called


class Decorated:
    @passing
    @passing
    def items(self, n: int) -> Any:
        yield from range(n)

    @listed
    def value(self, n: int) -> Any:
        yield from range(n)

    @conveyor.method(num_returns="streaming")
    def returned(self, n: int) -> Any:
        return iter(range(n))

    def unsaid(self, n: int) -> Any:
        return (i for i in range(n))

    @passing
    @conveyor.method(tensor_transport="auto")
    def staying(self, n: int) -> Any:
        for i in range(n):
            yield np.full(5, i)


class DecoratedAsync:
    @passing
    async def items(self, n: int) -> Any:
        for i in range(n):
            await asyncio.sleep(0)
            yield i

    @conveyor.method(num_returns="streaming")
    async def returned(self, n: int) -> Any:
        await asyncio.sleep(0)
        return iter(range(n))

    @passing
    async def coroutine(self) -> int:
        await asyncio.sleep(0)
        return 1

    def unsaid(self) -> Any:
        return self.returned(1)


class AloneAsync:
    @passing
    async def coroutine(self) -> int:
        await asyncio.sleep(0)
        return 1


@pytest.mark.parametrize("kind", [Decorated, DecoratedAsync])
@pytest.mark.parametrize("method", ["items", "returned"])
def test_a_generator_behind_a_decorator_or_returned_streams(engine, kind, method):
    actor = conveyor.remote(kind).remote()
    call = getattr(actor, method)
    assert [list(call.remote(n)) for n in (0, 3)] == [[], [0, 1, 2]]
    assert conveyor.get(call.options(num_returns="streaming").remote(2)) == [0, 1]


def test_a_decorator_that_makes_a_value_of_one(engine):
    actor = conveyor.remote(Decorated).remote()
    value = actor.value.remote(4)
    for _ in range(2):
        assert conveyor.get(value) == {"sum": 6}
        with pytest.raises(TypeError, match="has returned a dict, and no generator"):
            next(value)
    source = conveyor.remote(Source).remote()
    assert conveyor.get(source.given.remote(actor.value.remote(3)), timeout=WAIT)[0] == (
        {"sum": 3},
    )
    assert [item[0] for item in actor.staying.remote(2)] == [0, 1]


def test_what_is_not_said_to_stream_says_what_to_do(engine):
    actor, other = conveyor.remote(Decorated).remote(), conveyor.remote(DecoratedAsync).remote()
    with pytest.raises(
        SerializationError, match=r"unsaid .*a generator: .*num_returns='streaming'"
    ):
        conveyor.get(actor.unsaid.remote(2))
    with pytest.raises(SerializationError, match=r"unsaid has returned a coroutine: .*async def"):
        conveyor.get(other.unsaid.remote())


@conveyor.remote
@passing
def decorated_items(n: int) -> Any:
    yield from range(n)


@conveyor.remote
@listed
def decorated_value(n: int) -> Any:
    yield from range(n)


@pytest.mark.parametrize("kind", [Decorated, DecoratedAsync])
@pytest.mark.parametrize("method", ["items", "returned"])
def test_a_task_that_is_a_generator_behind_a_decorator_or_returned_streams(engine, kind, method):
    actor = conveyor.remote(kind).remote()
    with conveyor.dag.InputNode() as inp:
        dag = getattr(actor, method).bind(inp)
    with dag.compile() as graph:
        assert [list(graph.execute(n)) for n in (0, 3)] == [[], [0, 1, 2]]
        assert conveyor.get(graph.execute(2), timeout=WAIT) == [0, 1]


def test_a_function_that_is_a_generator_behind_a_decorator_streams(engine):
    assert list(decorated_items.remote(3)) == [0, 1, 2]
    assert conveyor.get(decorated_value.remote(4), timeout=WAIT) == {"sum": 6}
    with conveyor.dag.InputNode() as inp:
        dag = conveyor.dag.MultiOutputNode([decorated_items.bind(inp), decorated_value.bind(inp)])
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(3), timeout=WAIT) == [[0, 1, 2], {"sum": 3}]


def test_a_task_behind_a_decorator_that_makes_a_value_of_a_generator(engine):
    actor, source = conveyor.remote(Decorated).remote(), conveyor.remote(Source).remote()
    with conveyor.dag.InputNode() as inp:
        dag = actor.value.bind(inp)
    with dag.compile() as graph:
        for n in (4, 5):
            value = graph.execute(n)
            for _ in range(2):
                assert conveyor.get(value, timeout=WAIT) == {"sum": n * (n - 1) // 2}
                with pytest.raises(
                    TypeError, match=r"Decorated.*\.value has returned a dict, and no"
                ):
                    next(value)
        assert conveyor.get([graph.execute(n) for n in (2, 3)]) == [{"sum": 1}, {"sum": 3}]
        assert asyncio.run(_awaited(graph.execute(4))) == {"sum": 6}
        waited = graph.execute(3)
        assert conveyor.wait([waited], timeout=WAIT) == ([waited], [])
        del waited
    with conveyor.dag.InputNode() as inp:  # its value goes to another actor, and is an effect
        passed = source.given.bind(actor.value.bind(inp))
        dag = conveyor.dag.MultiOutputNode([passed], effects=[actor.value.bind(inp)])
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(3), timeout=WAIT)[0][0] == ({"sum": 3},)
    with conveyor.dag.InputNode() as inp:
        used = actor.items.bind(inp)
        dag = source.given.bind(used)
    with (
        dag.compile() as graph,
        pytest.raises(SerializationError, match=r"type generator .*num_returns='streaming'"),
    ):
        conveyor.get(graph.execute(2))


def test_a_value_for_a_generator_waits_for_the_effects_and_raises_their_errors(engine):
    actor, source = conveyor.remote(Decorated).remote(), conveyor.remote(Source).remote()
    with conveyor.dag.InputNode() as inp:
        effect = source.refuse.bind(inp)
        dag = conveyor.dag.MultiOutputNode([actor.value.bind(inp)], effects=[effect])
    with dag.compile() as graph:
        (value,) = graph.execute(4)
        with pytest.raises(ValueError, match="refused"):
            conveyor.get(value, timeout=WAIT)


async def _awaited(ref: Any) -> Any:
    return await ref


@pytest.mark.parametrize("kind", [AloneAsync, DecoratedAsync])
def test_a_coroutine_behind_a_decorator_is_awaited(engine, kind):
    actor = conveyor.remote(kind).remote()
    assert conveyor.get(actor.coroutine.remote()) == 1


def _runs(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
