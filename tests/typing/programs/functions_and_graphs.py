"""Functions, graphs and refs, as a typed program writes them. What is `# wrong` must be seen to be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from typing_extensions import assert_type

import conveyor
from conveyor import CompiledGraph, ObjectRef, StreamRef
from conveyor.dag import InputNode, MethodNode, MultiOutputNode


@conveyor.remote
def scale(x: int, by: float = 1.0) -> float:
    return x * by


@conveyor.remote(num_cpus=1)
async def later(x: int) -> str:
    return str(x)


@conveyor.remote
def count(n: int) -> Iterator[int]:
    yield from range(n)


@conveyor.remote
async def acount(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


@conveyor.remote(num_returns=2)
def halves(text: str) -> tuple[str, str]:
    return text[:1], text[1:]


async def awaited() -> None:
    assert_type(await later.remote(2), str)
    async for item in acount.remote(2):
        assert_type(item, int)


def main() -> None:
    assert_type(scale.remote(3), ObjectRef[float])
    assert_type(scale.remote(3, by=2.0).get(), float)
    assert_type(scale.remote(conveyor.put(3)), ObjectRef[float])
    assert_type(scale.remote(3, conveyor.put(2.0)), ObjectRef[float])
    assert_type(scale.options(num_cpus=1).remote(3), ObjectRef[float])
    assert_type(later.remote(3), ObjectRef[str])
    assert_type(count.remote(3), StreamRef[int])
    assert_type(conveyor.get(count.remote(3)), list[int])
    for item in count.remote(2):
        assert_type(item, int)
    first, second = halves.remote("ab")
    assert_type(first, ObjectRef[Any])
    assert conveyor.get([first, second]) == ["a", "b"]
    assert_type(conveyor.put(3), ObjectRef[int])
    assert_type(conveyor.get([scale.remote(1), scale.remote(2)]), list[float])
    assert_type(conveyor.get({"a": scale.remote(1)}), dict[str, float])
    ready, rest = conveyor.wait([scale.remote(1), scale.remote(2)], num_returns=2)
    assert_type(ready, list[ObjectRef[float]])
    assert_type(rest, list[ObjectRef[float]])

    with InputNode() as inp:
        node = scale.bind(inp[0], by=inp.by)
    assert_type(node, MethodNode[ObjectRef[float]])
    with node.compile(depth=2, overlap=True, name="scaled") as graph:
        assert_type(graph, CompiledGraph[ObjectRef[float]])
        assert_type(graph.execute(3, by=2.0), ObjectRef[float])
        assert conveyor.get(graph.execute(3, by=2.0)) == 6.0
    assert_type(node.execute(3, by=1.0), ObjectRef[float])
    with MultiOutputNode([node, node]).compile() as several:
        assert_type(several.execute(3, by=1.0), list[ObjectRef[float]])
    with MultiOutputNode({"loss": node}).compile() as named:
        assert_type(named.execute(3, by=1.0), dict[str, ObjectRef[float]])
    with InputNode() as inp:
        left, right = halves.bind(inp.text)
    with MultiOutputNode([left, [right]]).compile() as any_shape:
        refs = any_shape.execute(text="ab")
        assert refs[1][0].get() == "b"
    with InputNode() as inp:
        items = count.bind(inp)
    with items.compile() as stream:
        assert_type(stream.execute(2), StreamRef[int])
        assert stream.execute(2).get() == [0, 1]


def seen_by_the_checker() -> None:
    scale.remote("3")  # wrong
    scale.remote(3, by="2")  # wrong
    scale.remote()  # wrong
    scale.remote(3).get().upper()  # wrong
    conveyor.get(scale.remote(3)).upper()  # wrong
    conveyor.get(3)  # wrong
    conveyor.wait([3])  # wrong
    conveyor.put(3).get().upper()  # wrong
    scale.options(num_cpu=1)  # wrong
    conveyor.init(arena_byte=1 << 30)  # wrong
    conveyor.init(preload="torch", tls=3)  # wrong
    scale.bind(1).compile(dept=4)  # wrong
    scale.bind(1).compile(depth="4")  # wrong
    conveyor.Config().with_options(overlaps=True)  # wrong
    scale.remote(3) + 1  # wrong
    for item in count.remote(3):
        item.upper()  # wrong


if __name__ == "__main__":
    import asyncio

    with conveyor.init(preload=["asyncio"], arena_bytes=1 << 30, namespace=None):
        main()
    asyncio.run(awaited())
