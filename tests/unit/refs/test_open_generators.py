"""What an actor has open of its callers' streams, and lets go of when they do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

from conveyor.calls.generators import OpenGenerators

KEY = (1, 2)
#: s; a bound for what takes milliseconds.
WAIT = 60


def _operations(generators: OpenGenerators, method: Any) -> list[Any]:
    return [
        lambda key: generators.open(key, method),
        lambda key: generators.writer(key).next(key),
        lambda key: generators.writer(key).async_next(key),
        lambda key: generators.closing(key)(key),
    ]


def test_one_that_is_dropped_while_it_makes_an_item_is_closed_after_it():
    inside, go, closed = threading.Event(), threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        try:
            inside.set()
            go.wait(WAIT)
            yield 1
            yield 2
        finally:
            closed.set()

    begin, take, _, close = _operations(OpenGenerators(), items)
    begin(KEY)
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(take(KEY)))
    thread.start()
    assert inside.wait(WAIT)
    close(KEY)
    assert not closed.is_set()
    go.set()
    thread.join(WAIT)
    assert taken == [(1,)]
    assert closed.is_set()
    assert take(KEY) is None


def test_what_was_called_in_order_may_run_in_any():
    closed: list[bool] = []

    def items() -> Iterator[int]:
        try:
            yield 1
        finally:
            closed.append(True)

    generators = OpenGenerators()
    generators.open(KEY, items)
    first, second = generators.writer(KEY), generators.writer(KEY)
    close = generators.closing(KEY)
    assert first.next(KEY) == (1,)
    close(KEY)
    assert closed == [True]
    assert second.next(KEY) is None  # asked for before it was closed, and run afterwards
    assert not generators


def test_those_of_a_caller_that_is_dead_are_closed():
    generators = OpenGenerators()
    generators.open(KEY, lambda: iter([1]))
    generators.open((3, 2), lambda: iter([2]))
    generators.caller_gone(KEY[0])
    assert generators.writer(KEY).next(KEY) is None
    assert generators.writer((3, 2)).next((3, 2)) == (2,)


def test_so_is_an_asynchronous_one():
    async def main() -> None:
        inside, go = asyncio.Event(), asyncio.Event()
        closed: list[bool] = []

        async def items() -> AsyncIterator[int]:
            try:
                inside.set()
                await go.wait()
                yield 1
                yield 2
            finally:
                closed.append(True)

        generators = OpenGenerators()
        begin, _, take, close = _operations(generators, items)
        begin(KEY)
        taking = asyncio.ensure_future(take(KEY))
        await inside.wait()
        close(KEY)
        assert closed == []
        go.set()
        assert await taking == (1,)
        assert closed == [True]
        assert await take(KEY) is None

    asyncio.run(main())


def test_one_that_raises_is_gone():
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("later")

    begin, take, _, close = _operations(OpenGenerators(), items)
    begin(KEY)
    assert take(KEY) == (1,)
    try:
        take(KEY)
    except ValueError:
        pass
    else:
        raise AssertionError("nothing was raised")
    assert take(KEY) is None
    close(KEY)
