"""What a graph can express: eagerly, compiled on processes, and compiled inline, with one result."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import inside
import numpy as np
import pytest

import conveyor
from conveyor.dag import InputData, InputNode, MultiOutputNode
from conveyor.exceptions import GraphError, SerializationError


@dataclasses.dataclass(frozen=True)
class Batch:
    left: Any
    right: Any = 3


@conveyor.remote
class Actor:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def got(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def add(self, a: Any, b: Any = 1) -> Any:
        return a + b

    def total(self, batch: Batch) -> Any:
        return type(batch).__name__, batch.left + batch.right

    def seven(self) -> int:
        return 7

    def note(self, value: Any) -> Any:
        self.log.append(value)
        return lambda: value  # it never travels

    def refuse(self, value: Any) -> Any:
        raise KeyError(value)

    def noted(self) -> list[Any]:
        return self.log


@pytest.fixture(params=["local", "inline"])
def two(request):
    conveyor.init(engine=request.param)
    yield Actor.remote(), Actor.remote()
    conveyor.shutdown()


def everywhere(dag: Any, *args: Any, **kwargs: Any) -> Any:
    """The one result of all ways to execute ``dag``."""
    results = [conveyor.get(dag.execute(*args, **kwargs))]
    with dag.compile() as graph:
        results += [conveyor.get(graph.execute(*args, **kwargs)) for _ in range(3)]
        results.append(conveyor.get(graph.try_execute(*args, **kwargs), timeout=30))

        async def awaited() -> Any:
            return conveyor.get(await graph.execute_async(*args, **kwargs))

        results.append(asyncio.run(awaited()))
    assert all(result == results[0] for result in results), results
    return results[0]


def test_parts_of_arguments(two):
    inp = InputNode()
    dag = two[0].got.bind(inp["a"][0].real, inp.a[-1], k=inp[0]["x"], whole=inp.a)
    assert everywhere(dag, {"x": 2}, a=[5, 6]) == ((5, 6), {"k": 2, "whole": [5, 6]})


def test_only_the_parts_travel(two):
    # What execute() was given could not be sent as a whole.
    dag = two[0].add.bind(InputNode()[0].value)
    with dag.compile() as graph:
        given = SimpleNamespace(value=1, rest=(i for i in ()))
        assert graph.execute(given).get() == 2


def test_a_part_that_is_not_there_is_refused_before_anything_is_sent(two):
    inp = InputNode()
    dag = MultiOutputNode([two[0].add.bind(inp["a"]), two[1].add.bind(inp["b"]["c"])])
    with dag.compile() as graph:
        with pytest.raises(TypeError, match=r"inp\['b'\]\['c'\].*KeyError"):
            graph.execute(a=1, b={})
        assert conveyor.get(graph.execute(a=1, b={"c": 2})) == [2, 3]


def test_the_whole_input_beside_parts(two):
    a, b = two
    inp = InputNode()
    assert everywhere(a.got.bind(inp, b.add.bind(inp[0])), 1) == ((1, 2), {})
    several = InputNode()
    dag = a.got.bind(several, several[1], k=several.k)
    assert everywhere(dag, 1, 2, k=3) == ((InputData((1, 2), {"k": 3}), 2), {"k": 3})


def test_dataclasses_hold_nodes(two):
    inp = InputNode()
    dag = two[1].total.bind(Batch(two[0].add.bind(inp), inp))
    assert everywhere(dag, 10) == ("Batch", 21)


def test_results_in_any_shape(two):
    inp = InputNode()
    x = two[0].add.bind(inp)
    dag = MultiOutputNode({"x": x, "rest": [inp, (x, 5, None), Batch(x)], "c": {"k": "v"}})
    expected = {"x": 11, "rest": [10, (11, 5, None), Batch(11)], "c": {"k": "v"}}
    assert everywhere(dag, 10) == expected
    flat = MultiOutputNode([x, inp, x, 1])
    assert everywhere(flat, 10) == [11, 10, 11, 1]


def test_what_is_passed_through_is_a_snapshot(two):
    inp = InputNode()
    dag = MultiOutputNode([two[0].add.bind(inp[0]), inp.values])
    with dag.compile() as graph:
        values = np.arange(3)
        refs = graph.execute(1, values=values)
        values[:] = 7
        assert conveyor.get(refs)[1].tolist() == [0, 1, 2]
        # What cannot be sent leaves no trace.
        with pytest.raises(SerializationError):
            graph.execute(1, values=(i for i in ()))
        assert conveyor.get(graph.execute(2, values=3)) == [3, 3]


def test_tasks_without_a_node_and_graphs_without_input(two):
    a, b = two
    assert everywhere(a.add.bind(a.seven.bind(), b.seven.bind())) == 14
    assert everywhere(MultiOutputNode([b.seven.bind(), a.add.bind(InputNode()[0])]), 1) == [7, 2]
    with a.seven.bind().compile() as graph, pytest.raises(TypeError, match="takes 0 positional"):
        graph.execute(1)


def test_a_task_without_a_node_runs_once_for_each_execution(two):
    a, _ = two
    dag = MultiOutputNode([a.seven.bind()], effects=[a.note.bind("x")])
    with dag.compile() as graph:
        assert conveyor.get(a.noted.remote()) == []
        for _ in range(40):  # more than depth
            assert conveyor.get(graph.execute()) == [7]
        assert conveyor.get(a.noted.remote()) == ["x"] * 40


def test_effects_have_run_when_a_result_is_there(two):
    a, b = two
    x = a.add.bind(InputNode())
    with MultiOutputNode([x], effects=[b.note.bind(x)]).compile() as graph:
        for i in range(20):
            (ref,) = graph.execute(i)
            assert ref.get(timeout=30) == i + 1
            assert ref.done()
            assert conveyor.get(b.noted.remote()) == list(range(1, i + 2))
            assert ref.get() == i + 1


def test_an_effect_that_fails_fails_its_execution(two):
    a, b = two
    inp = InputNode()
    dag = MultiOutputNode([a.add.bind(inp)], effects=[b.refuse.bind(inp)])
    with dag.compile() as graph:
        (ref,) = graph.execute(1)
        for _ in range(2):
            with pytest.raises(KeyError):
                ref.get()
        with pytest.raises(KeyError):
            conveyor.get(graph.execute(2))
        refs = graph.execute(3)
        assert conveyor.wait(refs, timeout=30) == (refs, [])


def test_only_effects(two):
    a, _ = two
    inp = InputNode()
    with MultiOutputNode([None], effects=[a.note.bind(inp)]).compile() as graph:
        assert conveyor.get(graph.execute(1)) == [None]
        assert conveyor.get(a.noted.remote()) == [1]
    failing = MultiOutputNode([None], effects=[a.refuse.bind(inp)])
    with failing.compile() as graph, pytest.raises(KeyError):
        conveyor.get(graph.execute(1))


def test_what_was_forgotten_is_told_and_what_ends_another_graph_is_not(two):
    a, b = two
    inp = InputNode()
    x = a.add.bind(inp)
    other = b.add.bind(x)
    with pytest.raises(GraphError, match=r"does not reach the output .*effects=.*ignore_unused"):
        a.got.bind(x).compile()
    with a.got.bind(x).compile(ignore_unused=True) as graph:
        assert conveyor.get(graph.execute(1)) == ((2,), {})
    with (
        other.compile(ignore_unused=True) as first,
        a.got.bind(x).compile(ignore_unused=True) as second,
    ):
        assert (first.execute(1).get(), second.execute(1).get()) == (3, ((2,), {}))


def test_get_of_other_shapes(two):
    a, _ = two
    refs = [a.add.remote(i) for i in range(4)]
    assert conveyor.get({"a": refs[0], "b": (refs[1], [refs[2]])}) == {"a": 1, "b": (2, [3])}
    with pytest.raises(TypeError, match=r"element \['a'\]\[1\] is of type int"):
        conveyor.get({"a": [refs[0], 5]})


def test_a_graph_draws_itself(two, tmp_path):
    a, b = two
    with b.add.bind(a.add.bind(InputNode())).compile() as graph:
        assert "digraph" in graph.visualize(tmp_path / "drawn", channel_details=True)
        assert (tmp_path / "drawn.svg").read_text().startswith("<svg")
        text = graph.visualize(format="ascii")
    assert text.count("Actor.add") >= 1
    with pytest.raises(ValueError, match="'jpeg'"):
        graph.visualize(format="jpeg")


def test_a_teardown_that_was_interrupted_is_finished_by_the_next(two, monkeypatch):
    a, _ = two
    graph = a.add.bind(InputNode()).compile()
    assert isinstance(graph, conveyor.CompiledGraph)
    supervisor = inside.supervision_of(graph)
    if "inline" not in repr(graph):  # on processes

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("conveyor.refs.ref.Ref.get", interrupted)
            with pytest.raises(KeyboardInterrupt):
                graph.teardown()
        assert graph.is_teardown
        assert supervisor._unloading
        graph.teardown()
        assert not supervisor._unloading
    else:
        graph.teardown()
    graph.teardown()
    assert conveyor.get(a.add.remote(1)) == 2


def test_a_negative_timeout_is_no_limit(two):
    a, _ = two
    with a.add.bind(InputNode()).compile(depth=1) as graph:
        refs = [graph.execute(i, timeout=-1) for i in range(4)]
        assert conveyor.get(refs, timeout=-1) == [1, 2, 3, 4]
        assert conveyor.wait([graph.execute(1)], timeout=-1)[1] == []
