"""What actors do with their arguments, and arguments that cannot be read."""

import sys

import cloudpickle
import numpy as np
import pytest
from defect_actors import WAIT, seen

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ConveyorError, SerializationError, TaskError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")

ITEMS = (1 << 20) // 8


@conveyor.remote
class Keeper:
    def __init__(self):
        self.kept = []
        self.calls = 0

    def make(self, i):
        return np.full(ITEMS, float(i))

    def keep(self, array):
        self.kept.append(array)
        return len(self.kept)

    def kept_values(self):
        return [sorted(set(array.tolist())) for array in self.kept]

    def take(self, value):
        self.calls += 1
        if isinstance(value, BaseException):
            return f"got an error: {value!r}"
        return value

    def take_two(self, first, second):
        self.calls += 1
        return [type(first).__name__, type(second).__name__]

    def call_count(self):
        calls, self.calls = self.calls, 0
        return calls


# D19


@pytest.mark.parametrize("source", ["driver", "actor"])
@pytest.mark.parametrize("readers", [1, 2])
def test_d19_an_actor_that_keeps_its_arguments_blocks_nobody(source, readers):
    """Elsewhere an actor that keeps an array it was given without a copy holds the channel's only
    buffer with it, and who writes there waits for ever. Here it must be possible to keep many times
    more arrays than the graph is deep, and each must keep its contents."""
    depth, count = 2, 16
    maker, checkers = Keeper.remote(), [Keeper.remote() for _ in range(readers)]
    with InputNode() as inp:
        array = inp if source == "driver" else maker.make.bind(inp)
        dag = MultiOutputNode([holder.keep.bind(array) for holder in checkers])
    with dag.compile(depth=depth) as graph:
        for i in range(count):
            given = np.full(ITEMS, float(i)) if source == "driver" else i
            refs = graph.execute(given, timeout=WAIT)
            assert conveyor.get(refs, timeout=WAIT) == [i + 1] * readers
        for holder in checkers:
            kept = conveyor.get(holder.kept_values.remote(), timeout=WAIT)
            assert kept == [[float(i)] for i in range(count)]
    # And they are still there without the graph.
    kept = conveyor.get(checkers[0].kept_values.remote(), timeout=WAIT)
    assert kept == [[float(i)] for i in range(count)]


# D20


class Unreadable:
    """Travels, and cannot be put together where it arrives."""

    def __reduce__(self):
        return _fail, ()


def _fail():
    raise RuntimeError("not to be put together")


@pytest.fixture(scope="module")
def first(session):
    return Keeper.remote()


@pytest.fixture(scope="module")
def second(session):
    return Keeper.remote()


def test_d20_a_method_never_gets_an_argument_that_could_not_be_read(first, second):
    """Elsewhere an input that cannot be deserialised becomes an exception object, and the method is
    called with that as its argument. Here neither that method nor those behind it may be called;
    the caller must get the error, for this execution alone."""
    bad, says = Unreadable(), "not to be put together"
    with InputNode() as inp:
        dag = second.take.bind(first.take.bind(inp))
    with dag.compile() as graph:
        refs = [graph.execute(value) for value in ("before", bad, "after")]
        assert conveyor.get([refs[0], refs[2]], timeout=WAIT) == ["before", "after"]
        for _ in range(2):
            with pytest.raises((SerializationError, TaskError), match=says):
                conveyor.get(refs[1], timeout=WAIT)
        calls = conveyor.get([first.call_count.remote(), second.call_count.remote()], timeout=WAIT)
        assert calls == [2, 2]
    # The same in a call.
    with pytest.raises((SerializationError, TaskError), match=says):
        conveyor.get(first.take.remote(bad), timeout=WAIT)
    assert conveyor.get(first.call_count.remote(), timeout=WAIT) == 0


def test_d20_one_of_two_arguments_that_could_not_be_read(first, second):
    """The same for one argument of several, and for one made by another actor."""
    with InputNode() as inp:
        dag = MultiOutputNode(
            [
                first.take_two.bind(inp[0], inp[1]),
                second.take_two.bind(first.take.bind(inp[0]), 1),
                second.take.bind(inp[2]),
            ]
        )
    with dag.compile(fail_fast=False) as graph:
        for bad_at in (0, 1):
            args = ["x", "x", "y"]
            args[bad_at] = Unreadable()
            refs = graph.execute(*args)
            with pytest.raises((ConveyorError, RuntimeError), match="not to be put together"):
                conveyor.get(refs[0], timeout=WAIT)
            assert conveyor.get(refs[2], timeout=WAIT) == "y"
        refs = graph.execute("x", "x", "y")
        assert conveyor.get(refs, timeout=WAIT) == [["str", "str"], ["str", "int"], "y"]


def test_d20_an_error_of_one_step_is_no_argument_of_the_next(a, first):
    """An exception that a method raises must not reach the next method as a value either."""
    with InputNode() as inp:
        dag = first.take.bind(a.fail.bind(inp))
    conveyor.get(first.call_count.remote(), timeout=WAIT)
    with dag.compile() as graph:
        for i in range(3):
            with pytest.raises(LookupError, match=str(i)):
                conveyor.get(graph.execute(i), timeout=WAIT)
    assert conveyor.get(first.call_count.remote(), timeout=WAIT) == 0
    seen(a)
