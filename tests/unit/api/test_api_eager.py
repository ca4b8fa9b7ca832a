"""Graphs that are executed once through ordinary calls, which are recorded here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from conveyor.api import graphs as eager
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.dag.methods import bind
from conveyor.exceptions import GraphError


@dataclass(frozen=True)
class Actor:
    index: int
    name: str


@dataclass(frozen=True)
class Ref:
    value: Any


A, B = Actor(0, "a"), Actor(1, "b")

METHODS = {
    "echo": lambda x: x,
    "add": lambda x, y=1: x + y,
    "divide": lambda x, y: divmod(x, y),
    "total": lambda parts, **named: (sum(parts["all"]), sorted(named.items())),
    "one": lambda: 1,
}


class Runtime:
    """Stands for the process's."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gets = 0
        self.checked: list[object] = []

    def call(self, actor, method, args, kwargs, num_returns):
        self.calls.append(f"{actor.name}.{method}")
        args = [a.value if isinstance(a, Ref) else a for a in args]
        kwargs = {k: v.value if isinstance(v, Ref) else v for k, v in kwargs.items()}
        result = METHODS[method](*args, **kwargs)
        return Ref(result) if num_returns == 1 else [Ref(part) for part in result]

    def keep(self, value):
        return Ref(value)

    def get(self, refs, timeout):
        self.gets += 1
        return [ref.value for ref in refs]


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(eager.context, "current", lambda: runtime)
    monkeypatch.setattr(eager, "check_owner", runtime.checked.append)
    return runtime


def call(actor: Actor, method: str, *args: Any, n: int = 1, **kwargs: Any) -> Any:
    return bind(actor, method, args, kwargs, num_returns=n, owner=actor)


def test_a_chain(runtime):
    with InputNode() as inp:
        dag = call(B, "echo", call(A, "echo", inp))
    assert dag.execute("hello") == Ref("hello")
    assert dag.execute("world") == Ref("world")
    assert runtime.calls == ["a.echo", "b.echo"] * 2
    assert runtime.gets == 0, "references are passed on as they are"
    assert runtime.checked == [A, B] * 2


def test_parts_of_the_input_keywords_and_several_outputs(runtime):
    inp = InputNode()
    total = call(A, "add", inp[0], y=inp.more)
    quotient, rest = call(B, "divide", total, inp[1], n=2)
    dag = MultiOutputNode([rest, total, quotient, rest])
    assert dag.execute(5, 3, more=6) == [Ref(2), Ref(11), Ref(3), Ref(2)]
    assert runtime.calls == ["a.add", "b.divide"]


def test_calls_are_made_in_bind_order(runtime):
    inp = InputNode()
    first, second = call(A, "echo", inp), call(A, "add", inp)
    MultiOutputNode([call(B, "echo", second), first]).execute(1)
    assert runtime.calls == ["a.echo", "a.add", "b.echo"]


def test_hinted_views_are_the_same_call(runtime):
    inp = InputNode().with_tensor_transport()
    x = call(A, "echo", inp)
    pair = call(A, "divide", x.with_tensor_transport("nccl"), 2, n=2)
    dag = MultiOutputNode([x, pair[1].with_tensor_transport(device="cuda")])
    assert dag.execute(7) == [Ref(7), Ref(1)]
    assert runtime.calls == ["a.echo", "a.divide"]


def test_nested_nodes_arrive_as_values(runtime):
    inp = InputNode()
    x = call(A, "add", inp)
    dag = call(B, "total", {"all": [x, inp, 10, x]}, extra=(x, "k"))
    assert dag.execute(1) == Ref((15, [("extra", (2, "k"))]))


def test_nested_inputs_need_no_waiting(runtime):
    inp = InputNode()
    call(B, "total", {"all": [inp]}).execute(1)
    assert runtime.gets == 0


def test_what_needs_no_input_can_run_eagerly(runtime):
    assert call(A, "one").execute() == Ref(1)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {}, "takes 1 positional argument for this graph, but 0 were given"),
        ((1, 2), {}, "takes 1 positional argument for this graph, but 2 were given"),
        ((1,), {"x": 1}, "got the argument 'x', which this graph does not use"),
    ],
)
def test_wrong_arguments_for_a_whole_input(runtime, args, kwargs, text):
    dag = call(A, "echo", InputNode())
    with pytest.raises(TypeError, match=text):
        dag.execute(*args, **kwargs)
    assert runtime.calls == []


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1,), {"k": 1}, "takes 2 positional arguments for this graph, but 1 was given"),
        ((1, 2, 3), {"k": 1}, "takes 2 positional arguments for this graph, but 3 were given"),
        ((1, 2), {}, "lacks the argument 'k'"),
        ((1, 2), {"k": 1, "j": 1}, "got the argument 'j'"),
    ],
)
def test_wrong_arguments_for_parts_of_an_input(runtime, args, kwargs, text):
    inp = InputNode()
    dag = call(A, "add", inp[1], inp.k)
    with pytest.raises(TypeError, match=text):
        dag.execute(*args, **kwargs)
    assert runtime.calls == []


def test_no_positional_arguments(runtime):
    inp = InputNode()
    with pytest.raises(TypeError, match="takes no positional arguments for this graph, but 1 was"):
        call(A, "echo", inp.k).execute(1, k=1)


def test_invalid_graphs_are_refused_as_by_compile(runtime):
    inp, other = InputNode(), InputNode()
    with pytest.raises(GraphError, match="2 InputNodes"):
        call(A, "add", inp, other).execute(1)
    with pytest.raises(GraphError, match="no task"):
        inp.execute(1)
    assert runtime.calls == []


def test_whole_input_and_parts_and_results_in_a_shape(runtime):
    inp = InputNode()
    x = call(A, "add", call(A, "echo", inp), inp[0])
    dag = MultiOutputNode({"x": x, "rest": [inp, inp[0], 7]}, effects=[call(B, "one")])
    assert dag.execute(1) == {"x": Ref(2), "rest": [Ref(1), Ref(1), Ref(7)]}
    assert "b.one" in runtime.calls


def test_an_actor_that_cannot_be_used_is_not_called(runtime, monkeypatch):
    def refuse(owner):
        raise RuntimeError("gone")

    monkeypatch.setattr(eager, "check_owner", refuse)
    with pytest.raises(RuntimeError, match="gone"):
        call(A, "echo", InputNode()).execute(1)
    assert runtime.calls == []
