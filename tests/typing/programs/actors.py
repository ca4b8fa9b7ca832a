"""Actors of typed classes. mypy does not apply decorators of classes, so the classes are plain ones here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from typing_extensions import assert_type

import conveyor
from conveyor import ActorHandle, ActorProxy, ObjectRef, StreamRef
from conveyor.dag import InputNode, MethodNode


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    @conveyor.method
    def add(self, step: int, times: int = 1) -> int:
        self.count += step * times
        assert_type(self.peek(), int)
        return self.count

    @conveyor.method
    def peek(self) -> int:
        return self.count

    @conveyor.method
    async def later(self, text: str) -> str:
        return text

    @conveyor.method
    def items(self, n: int) -> Iterator[str]:
        yield str(n)

    @conveyor.method
    async def aitems(self, n: int) -> AsyncIterator[str]:
        yield str(n)

    @conveyor.method(num_returns=2)
    def both(self) -> tuple[int, str]:
        return self.count, "a"


class Plain:
    def double(self, x: int) -> int:
        return 2 * x


CounterActor = conveyor.actor(Counter)
SmallCounter = conveyor.actor(num_cpus=1)(Counter)
PlainActor = conveyor.remote(Plain)


def adds(counter: ActorProxy[Counter]) -> ObjectRef[int]:
    return counter.add.remote(1)


async def awaited(counter: ActorProxy[Counter]) -> None:
    assert_type(await counter.later.remote("x"), str)
    async for item in counter.aitems.remote(2):
        assert_type(item, str)


def main() -> None:
    counter = CounterActor.options(name="counter").remote(start=1)
    assert_type(counter.add.remote(3), ObjectRef[int])
    assert_type(counter.add.remote(counter.peek.remote()), ObjectRef[int])
    assert_type(counter.add.remote(3, times=2).get(), int)
    assert_type(adds(counter).get(), int)
    assert_type(counter.items.remote(3), StreamRef[str])
    for item in counter.items.remote(3):
        assert_type(item, str)
    number, text = counter.both.remote()
    assert conveyor.get([number, text])[1] == "a"
    with InputNode() as inp:
        node = counter.add.bind(inp)
        first, second = counter.both.bind()
    assert first is not second
    assert_type(node, MethodNode[ObjectRef[int]])
    assert_type(conveyor.get(node.execute(1)), int)
    assert SmallCounter.remote().peek.remote().get() == 0

    plain = PlainActor.remote()
    assert_type(plain, ActorHandle[Plain])
    assert_type(plain.double.remote(3), Any)
    assert conveyor.get(plain.double.remote(3)) == 6
    assert conveyor.get(plain.double.options(num_returns=1).remote(3)) == 6
    assert_type(plain.double.bind(inp), Any)

    import asyncio

    asyncio.run(awaited(counter))
    conveyor.kill(counter)
    conveyor.kill(plain)


def seen_by_the_checker(counter: ActorProxy[Counter]) -> None:
    CounterActor.remote("a")  # wrong
    CounterActor.remote(begin=1)  # wrong
    counter.add.remote("x")  # wrong
    counter.add.remote()  # wrong
    counter.add.remote(1, by=2)  # wrong
    counter.subtract.remote(1)  # wrong
    counter.peek.remote().get().upper()  # wrong
    conveyor.actor(3)  # wrong
    conveyor.kill("counter")  # wrong


if __name__ == "__main__":
    main()
