"""Wrong programs: each mistake is a clear error, and nothing is half done."""

import sys
import weakref
from contextlib import suppress

import cloudpickle
import pytest
from integration_helpers import WAIT

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ConveyorError,
    GraphError,
    GraphTornDownError,
    RuntimeStateError,
    SerializationError,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


@conveyor.remote
class Actor:
    def __init__(self, start=0):
        self.start = start

    def echo(self, x):
        return x

    def pair(self, a, b, *, c=0):
        return a, b, c

    def generator(self, x):
        return (i for i in range(x)) if x else x

    def nothing(self):
        return None


@pytest.fixture(scope="module")
def a(session):
    return Actor.remote()


@pytest.fixture(scope="module")
def b(session):
    return Actor.remote()


@pytest.fixture
def graph(a, b):
    with InputNode() as inp:
        dag = b.echo.bind(a.echo.bind(inp))
    with dag.compile(name="checked") as compiled:
        yield weakref.proxy(compiled)  # pytest holds it until after the session's end
        # Whatever a test did wrong, the graph works.
        assert conveyor.get(compiled.execute("after"), timeout=WAIT) == "after"


# bind


@pytest.mark.parametrize("args", [(), (1, 2)])
def test_wrong_argument_count_to_bind(a, args):
    with pytest.raises(TypeError, match=r"Actor.*echo"):
        a.echo.bind(*args)


def test_unknown_keyword_to_bind(a):
    with InputNode() as inp, pytest.raises(TypeError, match="d"):
        a.pair.bind(inp, 1, d=2)


def test_a_multi_output_as_an_argument(a):
    with InputNode() as inp, pytest.raises(GraphError, match="MultiOutputNode"):
        a.echo.bind(MultiOutputNode([a.echo.bind(inp)]))


def test_a_method_that_does_not_exist(a):
    with pytest.raises(AttributeError, match=r"no method 'ecko'.*did you mean 'echo'"):
        a.ecko.bind(1)
    with pytest.raises(AttributeError, match="private"):
        a._private.remote()


def test_a_method_called_directly(a):
    with pytest.raises(TypeError, match="remote"):
        a.echo(1)


def test_bind_on_the_class():
    with pytest.raises(AttributeError, match="remote"):
        Actor.bind(1)


def test_remote_on_a_node(a):
    with InputNode() as inp, pytest.raises(AttributeError, match="graph node"):
        a.echo.bind(inp).remote(1)


def test_a_node_as_an_argument_of_remote(a):
    with InputNode() as inp:
        node = a.echo.bind(inp)
    with pytest.raises((TypeError, SerializationError), match="bind"):
        a.echo.remote(node)
    assert conveyor.get(a.echo.remote(1), timeout=WAIT) == 1


# compile


def test_a_graph_without_a_task():
    with pytest.raises(GraphError, match="no task"):
        InputNode().compile()


def test_arguments_for_a_graph_without_input(a):
    with a.echo.bind(1).compile() as graph, pytest.raises(TypeError, match="0 positional"):
        graph.execute(1)


def test_a_leaf_that_is_no_output(a, b):
    with InputNode() as inp:
        x = a.echo.bind(inp)
        b.echo.bind(x)  # nobody reads it
    with pytest.raises(GraphError, match=r"echo"):
        x.compile()


def test_an_input_as_the_whole_graph(a):
    with InputNode() as inp, pytest.raises(GraphError):
        inp.compile()


def test_two_inputs(a, b):
    with InputNode() as one, InputNode() as two:
        dag = MultiOutputNode([a.echo.bind(one), b.echo.bind(two)])
    with pytest.raises(GraphError, match="InputNode"):
        dag.compile()


def test_an_empty_multi_output():
    with pytest.raises(GraphError, match="at least one"):
        MultiOutputNode([])


def test_an_unknown_setting(a):
    with InputNode() as inp:
        dag = a.echo.bind(inp)
    with pytest.raises(TypeError, match=r"unknown setting 'deph'.*depth"):
        dag.compile(deph=3)
    for depth in (0, -1, 1.5, "3"):
        with pytest.raises(GraphError, match="depth"):
            dag.compile(depth=depth)


def test_an_unpicklable_constant():
    a = Actor.remote()  # its own, lest the other tests suffer
    with InputNode() as inp:
        dag = a.pair.bind(inp, (i for i in range(3)))
    with pytest.raises(SerializationError):
        dag.compile()
    with InputNode() as inp:
        dag = a.echo.bind(inp)
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(1), timeout=WAIT) == 1


def test_a_failed_compile_can_be_repeated_for_ever():
    a = Actor.remote()
    for _ in range(50):
        with InputNode() as inp, pytest.raises(SerializationError):
            a.pair.bind(inp, (i for i in range(3))).compile()
    assert conveyor.get(a.echo.remote(1), timeout=WAIT) == 1
    with InputNode() as inp:
        dag = a.echo.bind(inp)
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(1), timeout=WAIT) == 1


# execute


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2), {}), ((), {"x": 1}), ((1,), {"x": 1})]
)
def test_wrong_arguments_to_execute(graph, args, kwargs):
    with pytest.raises(TypeError, match=r"checked takes exactly one argument"):
        graph.execute(*args, **kwargs)
    with pytest.raises(TypeError):
        graph.try_execute(*args, **kwargs)


def test_wrong_arguments_to_a_graph_of_parts(a):
    with InputNode() as inp:
        dag = a.pair.bind(inp[0], inp[1], c=inp.c)
    with dag.compile() as graph:
        with pytest.raises(TypeError, match="2 positional"):
            graph.execute(1, c=2)
        with pytest.raises(TypeError, match="missing: c"):
            graph.execute(1, 2)
        with pytest.raises(TypeError, match="not known: d"):
            graph.execute(1, 2, c=3, d=4)
        assert conveyor.get(graph.execute(1, 2, c=3), timeout=WAIT) == (1, 2, 3)


def test_a_keyword_called_timeout(a):
    with InputNode() as inp:
        dag = a.pair.bind(inp[0], inp.timeout)
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(1, timeout="mine"), timeout=WAIT) == (1, "mine", 0)


def test_an_unpicklable_argument(graph):
    with pytest.raises(SerializationError, match="generator"):
        graph.execute(i for i in range(3))
    with pytest.raises(TypeError):  # the standard family
        graph.execute({"deep": [lambda: (yield), (i for i in ())]})


def test_an_unpicklable_result(a):
    with InputNode() as inp:
        dag = a.generator.bind(inp)
    with dag.compile() as graph:
        refs = [graph.execute(x) for x in (0, 3, 0)]
        assert conveyor.get(refs[0], timeout=WAIT) == 0
        with pytest.raises(SerializationError, match="generator"):
            conveyor.get(refs[1], timeout=WAIT)
        assert conveyor.get(refs[2], timeout=WAIT) == 0


def test_use_after_teardown(a):
    with InputNode() as inp:
        dag = a.echo.bind(inp)
    graph = dag.compile(name="gone")
    ref = graph.execute(1)
    conveyor.get(ref, timeout=WAIT)
    graph.teardown()
    for use in (graph.execute, graph.try_execute):
        with pytest.raises(GraphTornDownError, match="gone has been torn down"):
            use(1)
    assert conveyor.get(ref) == 1
    graph.teardown()
    with graph:
        pass
    assert "torn down" in repr(graph)
    assert graph.explain()


def test_a_result_lost_with_the_teardown(a):
    with InputNode() as inp:
        dag = a.echo.bind(inp)
    graph = dag.compile(depth=4)
    refs = [graph.execute(i) for i in range(4)]
    graph.teardown()
    for i, ref in enumerate(refs):
        # It was there, or its absence is explained; it never hangs.
        with suppress(GraphTornDownError):
            assert conveyor.get(ref, timeout=WAIT) == i


# actors


def test_wrong_arguments_to_remote(a):
    with pytest.raises(TypeError, match=r"Actor.*echo"):
        a.echo.remote()
    with pytest.raises(TypeError, match=r"start"):
        Actor.remote(1, 2)
    with pytest.raises(TypeError, match="z"):
        Actor.remote(z=1)


def test_unknown_options():
    with pytest.raises(TypeError, match="unknown actor option 'nmae'"):
        Actor.options(nmae="x")
    with pytest.raises(ValueError, match="max_concurrency"):
        Actor.options(max_concurrency=0)
    with pytest.raises(TypeError, match="num_cpus"):
        Actor.options(num_cpus="two")


def test_remote_of_no_class():
    with pytest.raises(TypeError, match="only classes and functions"):
        conveyor.remote(1)
    with pytest.raises(TypeError, match="already"):
        conveyor.remote(Actor)
    with pytest.raises(TypeError, match="remote"):
        Actor()


def test_get_of_what_is_no_reference(a):
    for wrong in (1, "ref", {"a": 1}, a):
        with pytest.raises(TypeError, match="ref"):
            conveyor.get(wrong)
    with pytest.raises(TypeError, match=r"element \[1\]"):
        conveyor.get([a.echo.remote(1), 2])


def test_wait_on_what_makes_no_sense(a):
    ref = a.echo.remote(1)
    with pytest.raises(ValueError, match="num_returns"):
        conveyor.wait([ref], num_returns=2)
    with pytest.raises(ValueError, match="once"):
        conveyor.wait([ref, ref])
    with pytest.raises(TypeError):
        conveyor.wait(ref)


def test_kill_of_what_is_no_actor():
    with pytest.raises(TypeError, match="handle"):
        conveyor.kill("actor")


def test_init_twice():
    with pytest.raises(RuntimeStateError, match="running already"):
        conveyor.init()
    conveyor.init(ignore_reinit_error=True)


def test_init_with_what_does_not_exist():
    with pytest.raises(ValueError, match="unknown engine"):
        conveyor.init("remote")


def test_all_of_them_have_one_base():
    for error in (GraphError, GraphTornDownError, SerializationError, RuntimeStateError):
        assert issubclass(error, ConveyorError)
