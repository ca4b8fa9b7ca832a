"""Calls are named as users know them, whatever they are on the wire."""

import pytest
from integration_helpers import get

import conveyor
from conveyor.exceptions import TaskError


@conveyor.remote
class Actor:
    def items(self, count):
        yield from range(count)
        raise ValueError("no more")


@conveyor.remote
def copied(x):
    return x


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
