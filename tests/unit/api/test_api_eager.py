"""Graphs that are executed once through ordinary calls, on the inline engine."""

from __future__ import annotations

import pytest

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import GraphError


@conveyor.remote
class Actor:
    """Notes what was called."""

    def __init__(self):
        self.calls = []

    def echo(self, x):
        self.calls.append("echo")
        return x

    def add(self, x, y=1):
        self.calls.append("add")
        return x + y

    @conveyor.method(num_returns=2)
    def divide(self, x, y):
        return divmod(x, y)

    def total(self, parts, **named):
        return sum(parts["all"]), sorted(named.items())

    def one(self):
        self.calls.append("one")
        return 1

    def called(self):
        return self.calls


@pytest.fixture
def pair():
    conveyor.init("inline")
    yield Actor.remote(), Actor.remote()
    conveyor.shutdown()


def called(actor):
    return conveyor.get(actor.called.remote())


def test_a_chain(pair):
    a, b = pair
    with InputNode() as inp:
        dag = b.echo.bind(a.echo.bind(inp))
    assert conveyor.get([dag.execute("hello"), dag.execute("world")]) == ["hello", "world"]
    assert called(a) == called(b) == ["echo"] * 2


def test_parts_of_the_input_keywords_and_several_outputs(pair):
    a, b = pair
    inp = InputNode()
    total = a.add.bind(inp[0], y=inp.more)
    quotient, rest = b.divide.bind(total, inp[1])
    dag = MultiOutputNode([rest, total, quotient, rest])
    assert conveyor.get(dag.execute(5, 3, more=6)) == [2, 11, 3, 2]


def test_calls_are_made_in_bind_order(pair):
    a, _ = pair
    inp = InputNode()
    first, second = a.echo.bind(inp), a.add.bind(inp)
    MultiOutputNode([second, first]).execute(1)
    assert called(a) == ["echo", "add"]


def test_hinted_views_are_the_same_call(pair):
    a, _ = pair
    x = a.echo.bind(InputNode().with_tensor_transport())
    parts = a.divide.bind(x.with_tensor_transport("nccl"), 2)
    dag = MultiOutputNode([x, parts[1].with_tensor_transport(device="cuda")])
    assert conveyor.get(dag.execute(7)) == [7, 1]
    assert called(a) == ["echo"]


def test_nested_nodes_arrive_as_values(pair):
    a, b = pair
    inp = InputNode()
    x = a.add.bind(inp)
    dag = b.total.bind({"all": [x, inp, 10, x]}, extra=(x, "k"))
    assert conveyor.get(dag.execute(1)) == (15, [("extra", (2, "k"))])


def test_what_needs_no_input_can_run_eagerly(pair):
    assert conveyor.get(pair[0].one.bind().execute()) == 1


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {}, "takes 1 positional argument for this graph, but 0 were given"),
        ((1, 2), {}, "takes 1 positional argument for this graph, but 2 were given"),
        ((1,), {"x": 1}, "got the argument 'x', which this graph does not use"),
    ],
)
def test_wrong_arguments_for_a_whole_input(pair, args, kwargs, text):
    dag = pair[0].echo.bind(InputNode())
    with pytest.raises(TypeError, match=text):
        dag.execute(*args, **kwargs)
    assert called(pair[0]) == []


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1,), {"k": 1}, "takes 2 positional arguments for this graph, but 1 was given"),
        ((1, 2, 3), {"k": 1}, "takes 2 positional arguments for this graph, but 3 were given"),
        ((1, 2), {}, "lacks the argument 'k'"),
        ((1, 2), {"k": 1, "j": 1}, "got the argument 'j'"),
    ],
)
def test_wrong_arguments_for_parts_of_an_input(pair, args, kwargs, text):
    inp = InputNode()
    dag = pair[0].add.bind(inp[1], inp.k)
    with pytest.raises(TypeError, match=text):
        dag.execute(*args, **kwargs)
    assert called(pair[0]) == []


def test_no_positional_arguments(pair):
    inp = InputNode()
    with pytest.raises(TypeError, match="takes no positional arguments for this graph, but 1 was"):
        pair[0].echo.bind(inp.k).execute(1, k=1)


def test_invalid_graphs_are_refused_as_by_compile(pair):
    inp, other = InputNode(), InputNode()
    with pytest.raises(GraphError, match="2 InputNodes"):
        pair[0].add.bind(inp, other).execute(1)
    with pytest.raises(GraphError, match="no task"):
        inp.execute(1)
    assert called(pair[0]) == []


def test_whole_input_and_parts_and_results_in_a_shape(pair):
    a, b = pair
    inp = InputNode()
    x = a.add.bind(a.echo.bind(inp), inp[0])
    dag = MultiOutputNode({"x": x, "rest": [inp, inp[0], 7]}, effects=[b.one.bind()])
    assert conveyor.get(dag.execute(1)) == {"x": 2, "rest": [1, 1, 7]}
    assert called(b) == ["one"]
