"""Calls are named as users know them, whatever they are on the wire."""

import pytest
from integration_helpers import get

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import TaskError


@conveyor.remote
class Actor:
    def items(self, count):
        yield from range(count)
        raise ValueError("no more")

    def given(this, **kwargs):
        return kwargs


@conveyor.remote
class Made:
    def __init__(this, **kwargs):
        this.kwargs = kwargs

    def given(this):
        return this.kwargs


@conveyor.remote
def copied(x):
    return x


@conveyor.remote
def given(**kwargs):
    return kwargs


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", ["self", "function", "instance", "args", "kwargs"])
def test_arguments_may_be_called_as_ours_are(name):
    actor, named = Actor.remote(), {name: 1}
    assert get(given.remote(**named)) == named
    assert get(actor.given.remote(**named)) == named
    assert get(Made.remote(**named).given.remote()) == named
    assert get(actor.__ray_call__.remote(lambda _, **kwargs: kwargs, **named)) == named
    for bound in given, actor.given:
        with InputNode() as inp:
            dag = bound.bind(**{name: inp[name]})
        assert get(dag.execute(**named)) == named
        with dag.compile() as graph:
            assert get(graph.execute(**named)) == named
            assert get(graph.try_execute(**named)) == named


@pytest.mark.usefixtures("engine")
def test_a_call_of_a_function():
    ref = copied.remote(1)
    assert get(ref) == 1
    assert ".copied (call" in repr(ref)


@pytest.mark.usefixtures("engine")
def test_a_failed_generator():
    actor = Actor.remote()
    stream = actor.items.remote(1)
    assert next(stream) == 0
    with pytest.raises(TaskError) as caught:
        next(stream)
    assert "Actor.items" in str(caught.value)
    assert "items#" not in str(caught.value)
