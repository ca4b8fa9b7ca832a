"""Values that more actors read than one channel serves."""

import sys

import cloudpickle
import numpy as np
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ArgumentsError, DeadlineExceededError, SerializationError, TaskError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Actor:
    def total(self, *values):
        return float(sum(np.sum(value) for value in values))

    def array(self, x):
        return np.full(20_000, x, dtype=np.float64)

    def made_in_place(self, x):
        made = conveyor.empty((20_000,), "float64")
        made[:] = x
        return made

    @conveyor.method(tensor_transport="auto")
    def stays(self, x):
        return self.array(x)

    def same(self, x):
        return x

    def written(self, array, by):
        array += by
        return float(np.mean(array))

    def one(self):
        return 1

    def fail(self, x):
        raise ValueError(f"not {x}")


@pytest.fixture
def pairs(monkeypatch):
    """Channels have two readers each."""
    monkeypatch.setattr("conveyor.plan.channels.MOST_READERS", 2)


def test_more_readers_than_a_channel_can_have(leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine="inline")
        actors, source = [Actor.remote() for _ in range(250)], Actor.remote()
        with InputNode() as inp:
            made = source.array.bind(inp.x)
            tasks = [actor.total.bind(made, inp.x, inp.y) for actor in actors]
            starts = [actor.one.bind() for actor in actors]
        with MultiOutputNode([*tasks, made, *starts]).compile() as graph:
            results = get(graph.execute(x=2, y=3))
            assert results[:250] == [40_005.0] * 250
            assert np.sum(results.pop(250)) == 40_000.0
            assert results[250:] == [1] * 250
        conveyor.shutdown()


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("maker", ["array", "made_in_place", "stays"])
def test_all_of_them_get_what_a_task_makes(engine, maker):
    actors, source = [Actor.remote() for _ in range(5)], Actor.remote()
    with InputNode() as inp:
        made = getattr(source, maker).bind(inp)
        dag = MultiOutputNode([made, *(actor.total.bind(made) for actor in actors)])
    with dag.compile(depth=4) as graph:
        for ref in [graph.execute(i) for i in range(4)] + [graph.execute(4, deadline=WAIT)]:
            array, *results = get(ref)
            assert results == [20_000.0 * array[0]] * 5
            assert np.all(array == array[0])


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("passed_on", [False, True])
@pytest.mark.parametrize("maker", ["array", "made_in_place"])
def test_the_only_reader_of_a_channel_writes_to_its_own_value(local, maker, passed_on):
    readers = [Actor.remote() for _ in range(4)]  # and the driver: the last is alone on its channel
    source, between = Actor.remote(), Actor.remote()
    with InputNode() as inp:
        made = getattr(source, maker).bind(inp)
        if passed_on:
            made = between.same.bind(made)
        written = readers[-1].written.bind(made, 1)
        dag = MultiOutputNode([written, made, *(actor.total.bind(made) for actor in readers[:3])])
    with dag.compile() as graph:
        for i in range(10):
            mean, array, *totals = get(graph.execute(i))
            assert (mean, np.mean(array), totals) == (i + 1, i, [20_000.0 * i] * 3)


@pytest.mark.usefixtures("pairs")
def test_the_input_is_taken_and_refused_as_any(local):
    actors = [Actor.remote() for _ in range(5)]
    with InputNode() as inp:
        dag = MultiOutputNode([actor.total.bind(inp) for actor in actors])
    with dag.compile(name="the sums") as graph:
        value = conveyor.empty((20_000,), "float64")
        value[:] = 1
        assert get(graph.execute(value)) == [20_000.0] * 5
        assert get(graph.execute(conveyor.put(value))) == [20_000.0] * 5
        assert get(graph.execute(value, deadline=WAIT)) == [20_000.0] * 5
        with pytest.raises(ArgumentsError, match="takes exactly one argument"):
            graph.execute(1, 2)
        with pytest.raises(SerializationError, match="argument 0 of the sums"):
            graph.execute(i for i in range(3))
        with pytest.raises(DeadlineExceededError):
            get(graph.execute(1, deadline=0))
        assert get(graph.execute(3)) == [3.0] * 5


@pytest.mark.usefixtures("pairs")
def test_an_error_goes_to_all_of_them(local):
    actors, source = [Actor.remote() for _ in range(5)], Actor.remote()
    with InputNode() as inp:
        made = source.fail.bind(inp)
        dag = MultiOutputNode([actor.total.bind(made) for actor in actors])
    with dag.compile() as graph:
        for ref in graph.execute(7):
            with pytest.raises(TaskError, match="not 7"):
                get(ref)


@pytest.mark.usefixtures("pairs")
def test_a_graph_that_is_restarted(local):
    actors = [Actor.options(max_restarts=1).remote() for _ in range(5)]
    with InputNode() as inp:
        dag = MultiOutputNode([actor.total.bind(inp) for actor in actors])
    with dag.compile() as graph:
        assert get(graph.execute(1)) == [1.0] * 5
        conveyor.kill(actors[3], no_restart=False)
        assert get(graph.execute(2)) == [2.0] * 5


@pytest.mark.usefixtures("pairs")
def test_every_channel_counts_at_the_cap_of_the_graph(local):
    actors, source = [Actor.remote() for _ in range(5)], Actor.remote()
    with InputNode() as inp:
        made = source.array.bind(inp)
        dag = MultiOutputNode([actor.total.bind(made) for actor in actors])
    # One execution's three frames of 160 KB fit, and those of the next have to wait.
    with dag.compile(memory_bytes=600_000, depth=8) as graph:
        refs = [graph.execute(i) for i in range(24)]
        assert get(refs) == [[20_000.0 * i] * 5 for i in range(24)]


@pytest.mark.usefixtures("pairs")
def test_the_plan_says_that_a_value_has_several_channels(local):
    actors = [Actor.remote() for _ in range(5)]
    with InputNode() as inp:
        dag = MultiOutputNode([actor.total.bind(inp) for actor in actors])
    with dag.compile() as graph:
        lines = [line for line in graph.explain().splitlines() if "driver → " in line]
        assert len(lines) == 3
        assert "same host; 3 of 3 edges, which have at most 2 readers each" in lines[2]
        nodes = graph.visualize(format="ascii").split("\n\n")[1]
        assert nodes.count("input") == 2  # the name of one node and what it is
        get(graph.execute(1))
        sent = [edge.frames for edge in graph.stats().edges if edge.source == "input"]
        assert sent == [1, 1, 1]
