"""Programs as a notebook runs them: a running loop, and cells that define classes again."""

import importlib.util
import sys
from pathlib import Path

RUNNER = Path(__file__).parents[2] / "seeds" / "notebook.py"


def run(scripts, *cells):
    paths = [scripts.path(cell, f"cell{i}.py") for i, cell in enumerate(cells)]
    return scripts.run(RUNNER, *paths).splitlines()


SETUP = """
    import asyncio, dataclasses
    import conveyor
    from conveyor.dag import InputNode

    @dataclasses.dataclass
    class Point:
        x: int

    @conveyor.remote
    class Actor:
        def who(self, p):
            return "first", p
        def make(self, x):
            return Point(x)

    actor = Actor.remote()
    with InputNode() as inp:
        graph = actor.who.bind(inp).compile()
"""


def test_await_at_the_top_level_and_get_in_a_running_loop(scripts):
    lines = run(
        scripts,
        SETUP,
        """
        print(await (await graph.execute_async(Point(1))))
        print(conveyor.get(graph.execute(Point(2)), timeout=60))
        print(await actor.make.remote(3))
        asyncio.get_running_loop()
        """,
        """
        async def one(i):
            return (await (await graph.execute_async(Point(i))))[1].x
        print(await asyncio.gather(*[one(i) for i in range(5)]))
        """,
    )
    assert lines == [
        "('first', Point(x=1))",
        "('first', Point(x=2))",
        "Point(x=3)",
        "[0, 1, 2, 3, 4]",
    ]


def test_classes_defined_again(scripts):
    lines = run(
        scripts,
        SETUP,
        """
        old_actor, old_point = actor, Point(1)
        print(conveyor.get(graph.execute(old_point), timeout=60)[1] == old_point)
        """,
        # The same cell again, changed.
        SETUP.replace('"first"', '"second"').replace("x: int", "x: int\n        y: int = 5"),
        """
        print(conveyor.get(graph.execute(Point(2)), timeout=60))
        new = conveyor.get(actor.make.remote(3), timeout=60)
        print(new, type(new) is Point)
        # The old ones still work, with their own classes.
        old = conveyor.get(old_actor.make.remote(4), timeout=60)
        print(old, type(old) is type(old_point), type(old) is Point)
        who, back = conveyor.get(old_actor.who.remote(Point(6)), timeout=60)
        print(who, back, type(back) is Point)
        """,
    )
    assert lines == [
        "True",
        "('second', Point(x=2, y=5))",
        "Point(x=3, y=5) True",
        "Point(x=4) True False",
        "first Point(x=6, y=5) True",
    ]


def test_a_cell_run_fifty_times(scripts):
    lines = run(
        scripts,
        *[SETUP.replace('"first"', f'"run {i}"') + BODY for i in range(50)],
        "import os; print(len(os.listdir('/proc/self/fd')) < 1000)",
    )
    assert lines == [f"('run {i}', Point(x={'1'}))" for i in range(50)] + ["True"]


BODY = """
    print(conveyor.get(graph.execute(Point(1)), timeout=60))
    graph.teardown()
"""


def test_functions_and_globals_of_cells(scripts):
    lines = run(
        scripts,
        """
        import conveyor
        FACTOR = 2
        def scale(x):
            return x * FACTOR
        @conveyor.remote
        class Scaler:
            def scale(self, x):
                return scale(x)
        a = Scaler.remote()
        print(conveyor.get(a.scale.remote(5), timeout=60))
        """,
        """
        FACTOR = 3
        b = Scaler.remote()
        print(conveyor.get(a.scale.remote(5), timeout=60))
        """,
        """
        conveyor.shutdown()
        def scale(x):
            return x + FACTOR
        @conveyor.remote
        class Scaler:
            def scale(self, x):
                return scale(x)
        print(conveyor.get(Scaler.remote().scale.remote(5), timeout=60))
        """,
    )
    assert lines == ["10", "10", "8"]


def test_an_exception_in_a_cell_leaves_the_session_usable(scripts):
    lines = run(
        scripts,
        SETUP,
        """
        try:
            graph.execute(1, 2)
        except TypeError as error:
            print("TypeError")
        try:
            conveyor.get(actor.make.options(num_returns=2).remote(1), timeout=60)
        except ValueError:
            print("ValueError")
        """,
        "print(await (await graph.execute_async(1)))",
    )
    assert lines == ["TypeError", "ValueError", "('first', 1)"]


def test_the_runner_is_there():
    assert importlib.util.spec_from_file_location("runner", RUNNER) is not None
    assert sys.version_info >= (3, 10)
