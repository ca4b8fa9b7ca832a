"""What is given to ``bind`` and to ``execute``."""

import sys
from collections import namedtuple

import cloudpickle
import pytest
from defect_actors import WAIT, room, run, seen, single

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ConveyorError, GraphError, SerializationError, WaitTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")

Pair = namedtuple("Pair", "left right")


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("this does not travel")


@conveyor.remote
class Show:
    def show(self, x, y=None, **more):
        return [x, y, *sorted(more.items())]


@pytest.fixture(scope="module")
def show(session):
    return Show.remote()


def parts(*actors):
    """A graph that gives each actor an argument of ``execute`` of its own."""
    with InputNode() as inp:
        nodes = [actor.take.bind(inp[i]) for i, actor in enumerate(actors)]
    return MultiOutputNode(nodes)


# D6


@pytest.mark.parametrize("at", [0, 1])
def test_d06_an_input_that_cannot_be_sent_sends_nothing(a, b, at):
    """Elsewhere the inputs of an execution are written one after the other: if the second cannot be
    pickled, the first has already left, and from then on every execution mixes the inputs of two.
    Here an execution must start with all its inputs or not at all."""
    depth = 2
    with parts(a, b).compile(depth=depth) as graph:
        for i in range(3 * depth):
            inputs = [f"lost{i}", f"lost{i}"]
            inputs[at] = Unpicklable()
            for submit in (graph.execute, graph.try_execute):
                with pytest.raises(SerializationError, match="does not travel"):
                    submit(*inputs)
            assert conveyor.get(graph.execute(i, -i), timeout=WAIT) == [f"a{i}", f"b{-i}"]
        # Nothing of what was lost takes up room.
        assert room(graph, 6, -6)[0] >= depth
    assert seen(a)[:6] == [0, 1, 2, 3, 4, 5]
    assert seen(b)[:6] == [0, -1, -2, -3, -4, -5]


def test_d06_an_input_that_found_no_room_sends_nothing(a, b, latches):
    """Elsewhere the same happens if the first input finds room and the second does not before the
    timeout. Here what timed out must have left no trace, at the actors with room in particular."""
    go = latches()
    with InputNode() as inp:
        dag = MultiOutputNode([a.take.bind(inp[0]), b.take_when.bind(inp[1], go.path)])
    with dag.compile(depth=2, fail_fast=False) as graph:
        started = [graph.execute(i, i) for i in range(2)]
        assert conveyor.get([refs[0] for refs in started], timeout=WAIT) == ["a0", "a1"]
        for timeout in (0, 0.01, 0.05):
            with pytest.raises(WaitTimeoutError, match="room"):
                graph.execute("lost", "lost", timeout=timeout)
        go.open()
        started += [graph.execute(i, i, timeout=WAIT) for i in range(2, 6)]
        for i, refs in enumerate(started):
            assert conveyor.get(refs, timeout=WAIT) == [f"a{i}", f"b{i}"]
    assert seen(a) == seen(b) == list(range(6))


# D7

NESTED = [
    (lambda n: ([n], 1), [["in"], 1]),
    (lambda n: (1, [n]), [1, ["in"]]),
    (lambda n: ((n, 0), 1), [("in", 0), 1]),
    (lambda n: ({"k": n}, "plain"), [{"k": "in"}, "plain"]),
    (lambda n: ([[{"k": (n, [n])}], n], 1), [[[{"k": ("in", ["in"])}], "in"], 1]),
    (lambda n: (Pair(n, 2), None), [Pair("in", 2), None]),
    (lambda n: (n, [n]), ["in", ["in"]]),
]


@pytest.mark.parametrize(("arguments", "expected"), NESTED)
@pytest.mark.parametrize("by_name", [False, True])
def test_d07_a_nested_node_before_a_plain_argument_is_filled_in(show, arguments, expected, by_name):
    """Elsewhere a node inside a container is an error, and one that goes unnoticed if a plain
    argument comes after it: the actor then gets the node itself. Here nodes in containers must be
    replaced by their values wherever they stand, compiled or not."""
    with InputNode() as inp:
        if by_name:
            first, second = arguments(inp)
            dag = show.show.bind(x=first, y=second, z=0)
        else:
            dag = show.show.bind(*arguments(inp))
    expected = expected + [("z", 0)] * by_name
    assert conveyor.get(dag.execute("in"), timeout=WAIT) == expected
    with dag.compile() as graph:
        assert conveyor.get(graph.execute("in"), timeout=WAIT) == expected


@pytest.mark.parametrize("after", [(), (1,), ("plain",)])
@pytest.mark.parametrize("container", [lambda n: {n}, lambda n: {n: 1}, lambda n: {(1, n): 1}])
def test_d07_a_node_where_none_can_be_filled_in_is_refused(show, container, after):
    """Where a node cannot be replaced, that must be said at bind, whatever arguments follow."""
    with InputNode() as inp, pytest.raises(GraphError, match=r"argument 1 of Show"):
        show.show.bind(container(inp), *after)


def test_d07_a_node_that_nothing_can_find_never_reaches_an_actor(show):
    """A node inside an object of unknown kind must not travel either: compile refuses it."""

    class Box:
        def __init__(self, inside):
            self.inside = inside

    with InputNode() as inp:
        dag = show.show.bind(Box([inp]), inp)
    with pytest.raises((ConveyorError, TypeError), match="graph node"):
        dag.compile()
    assert conveyor.get(show.show.remote(1), timeout=WAIT) == [1, None]


# D12


@pytest.mark.parametrize("submit", ["execute", "try_execute", "execute_async"])
@pytest.mark.parametrize(
    ("args", "kwargs"), [((1,), {"extra": 2}), ((), {"extra": 2}), ((1, 2), {}), ((), {})]
)
def test_d12_arguments_that_a_whole_input_does_not_take(a, submit, args, kwargs):
    """Elsewhere a keyword too many, where the input is used as a whole, is a ``KeyError`` about
    ``None``. Here it must be a ``TypeError`` that says what the graph takes and what it got, and
    nothing of it may reach an actor."""
    with single(a.take).compile(name="whole") as graph:

        def start():
            if submit != "execute_async":
                return getattr(graph, submit)(*args, **kwargs)

            async def start_async():
                return await graph.execute_async(*args, **kwargs)

            return run(start_async())

        with pytest.raises(TypeError, match=r"whole takes exactly one argument.*got") as caught:
            start()
        said = f"{len(args)} positional and {len(kwargs)} keyword"
        assert said in str(caught.value)
        assert conveyor.get(graph.execute(3), timeout=WAIT) == "a3"
    assert seen(a) == [3]


def test_d12_a_keyword_that_a_graph_of_parts_does_not_know(show):
    """Elsewhere such a keyword is dropped in silence. Here it must be named."""
    with InputNode() as inp:
        dag = show.show.bind(inp[0], inp.k)
    with dag.compile() as graph:
        with pytest.raises(TypeError, match="extra"):
            graph.execute(1, k=2, extra=3)
        with pytest.raises(TypeError, match="missing: k"):
            graph.execute(1)
        assert conveyor.get(graph.execute(1, k=2), timeout=WAIT) == [1, 2]
