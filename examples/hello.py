"""The smallest compiled graph: the driver sends a value to one actor and gets it back."""

from time import perf_counter

import conveyor
from conveyor.dag import InputNode


@conveyor.remote
class Greeter:
    def greet(self, name: str) -> str:
        return f"Hello, {name}!"


def main() -> None:
    greeter = Greeter.remote()
    print(conveyor.get(greeter.greet.remote("eager call")))

    with InputNode() as name:
        dag = greeter.greet.bind(name)
    with dag.compile() as graph:
        print(conveyor.get(graph.execute("compiled graph")))

        rounds = 10_000
        started = perf_counter()
        for _ in range(rounds):
            conveyor.get(graph.execute("again"))
        print(f"{1e6 * (perf_counter() - started) / rounds:.1f} us there and back")


if __name__ == "__main__":
    main()
