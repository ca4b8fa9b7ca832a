"""Streams of calls as references like any other: in any order of threads, as arguments, without a handle."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import itertools
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from integration_helpers import WAIT, hold

import conveyor
from conveyor.exceptions import SerializationError, WaitTimeoutError
from conveyor.runtime.calls import call as calls


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
    with conveyor.dag.InputNode() as inp:  # what a task gives is settled before it runs
        dag = actor.items.bind(inp)
    with (
        dag.compile() as graph,
        pytest.raises(SerializationError, match=r"type generator .*num_returns='streaming'"),
    ):
        conveyor.get(graph.execute(2))


@pytest.mark.parametrize("kind", [AloneAsync, DecoratedAsync])
def test_a_coroutine_behind_a_decorator_is_awaited(engine, kind):
    actor = conveyor.remote(kind).remote()
    assert conveyor.get(actor.coroutine.remote()) == 1


def _runs(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
