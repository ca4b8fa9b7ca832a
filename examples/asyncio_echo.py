"""A graph in an asyncio program: no flag, and many executions under way at once."""

import asyncio

import conveyor
from conveyor.dag import InputNode


@conveyor.remote
class Worker:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def multiply(self, value: int) -> int:
        return self.factor * value


async def main() -> None:
    double, triple = Worker.remote(2), Worker.remote(3)
    with InputNode() as value:
        dag = triple.multiply.bind(double.multiply.bind(value))

    with dag.compile() as graph:

        async def ask(value: int) -> int:
            ref = await graph.execute_async(value)  # waits for room in the graph
            return await ref  # waits for the result; the loop runs on meanwhile

        print(await asyncio.gather(*(ask(value) for value in range(20))))


if __name__ == "__main__":
    asyncio.run(main())
