"""Names, options and errors that programs written for Ray use, and the texts of errors."""

import asyncio
import os
import threading
import warnings

import numpy as np
import pytest

import conveyor
from conveyor import exceptions
from conveyor.dag import DAGContext, InputNode, MultiOutputNode
from conveyor.exceptions import GraphError, SerializationError
from conveyor.testing import hold_transfers

pytestmark = pytest.mark.usefixtures("session")


@conveyor.remote
class Echo:
    def __init__(self, *args, **kwargs):
        self.args = args

    def echo(self, x, y=None):
        return x

    def array(self):
        return np.ones(1000)

    def items(self, x):
        yield x

    def fail(self, error):
        raise error

    def holds_a_lock(self):
        error = RuntimeError("one\ntwo\nthree")
        error.lock = threading.Lock()
        raise error

    def variable(self, name):
        return os.environ.get(name)

    def whoami(self):
        context = conveyor.get_runtime_context()
        return context.get_actor_name(), context.get_actor_id(), context.get_job_id()


@conveyor.remote
def double(x):
    return 2 * x


@pytest.fixture(scope="module")
def echo(session):
    return Echo.remote()


@pytest.fixture
def graph(echo):
    with InputNode() as inp:
        dag = echo.echo.bind(inp)
    with dag.compile(name="echoes") as graph:
        yield graph


# Errors


def test_errors_are_caught_by_rays_names(echo, graph):
    ray = conveyor
    with pytest.raises(ray.exceptions.RayTaskError) as raised:
        ray.get(echo.fail.remote(KeyError("k")))
    assert isinstance(raised.value, ray.exceptions.RayError)
    assert isinstance(raised.value.cause, KeyError)
    victim = Echo.remote()
    ray.kill(victim)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(victim.echo.remote(1))
    ref = Echo.remote().__ray_call__.remote(lambda self: threading.Event().wait())
    for error in (ray.exceptions.GetTimeoutError, ray.exceptions.RayChannelTimeoutError):
        with pytest.raises(error):
            ray.get(ref, timeout=0.01)
    ray.kill(ref_actor := Echo.remote())
    assert ref_actor
    graph.teardown()
    with pytest.raises(ray.exceptions.RayChannelError):
        graph.execute(1)
    assert issubclass(exceptions.CapacityError, ray.exceptions.RayCgraphCapacityExceeded)
    assert ray.exceptions.TaskCancelledError is exceptions.ExecutionCancelledError
    assert issubclass(ray.exceptions.RayChannelTimeoutError, ray.exceptions.RayChannelError)


def test_errors_of_direct_objects_are_caught_by_rays_names(session, wait_until):
    ray = conveyor
    holder = Echo.remote()
    kept = holder.array.options(tensor_transport="auto").remote()
    ray.wait([kept])
    with hold_transfers(holder), pytest.raises(ray.exceptions.ObjectFetchTimedOutError):
        ray.get(kept, timeout=0.05)
    owner = Echo.remote()
    [lost] = ray.get(owner.__ray_call__.remote(_requested_of, holder))
    assert ray.wait([lost], timeout=30)[0]  # before its owner dies
    ray.kill(owner)
    wait_until(lambda: not any(one.id == lost.value_id() for one in ray.objects()), 20, "its end")
    for name in ("OwnerDiedError", "ObjectLostError"):
        with pytest.raises(getattr(ray.exceptions, name)):
            ray.get(lost)


def test_what_fails_of_the_session_is_a_system_error(echo):
    system_error = conveyor.exceptions.RaySystemError
    for name in ("RayChannelError", "RayCgraphCapacityExceeded", "RayDirectTransportError"):
        assert issubclass(getattr(exceptions, name), system_error)
    assert exceptions.RayDirectTransportError is exceptions.TransportError
    for ours in (exceptions.SystemLimitError, exceptions.SessionEndedError):
        assert issubclass(ours, system_error)
    for others in (exceptions.TaskError, exceptions.ActorDiedError, exceptions.ObjectLostError):
        assert not issubclass(others, system_error)


def _requested_of(self, holder):
    return [holder.array.options(tensor_transport="auto").remote()]


def test_every_public_name_of_exceptions_is_there():
    for name in exceptions.__all__:
        families = (exceptions.ConveyorError, exceptions.ConveyorWarning, tuple)
        assert issubclass(getattr(exceptions, name), families), name


@pytest.mark.parametrize("kind", [TypeError, ValueError, exceptions.ConveyorError])
def test_wrong_arguments_are_of_both_families(graph, echo, kind):
    with pytest.raises(kind, match="takes exactly one argument"):
        graph.execute(1, 2)
    with pytest.raises(kind, match=r"element \[1\] is of type NoneType"):
        conveyor.get([graph.execute(1), None])
    with pytest.raises(kind, match="1 positional argument"):
        echo.echo.bind(InputNode()).execute()


def test_a_node_where_none_can_be_is_an_error_of_the_graph(echo):
    class Box:
        def __init__(self, content):
            self.content = content

    inp = InputNode()
    for wrong in (lambda: echo.echo.bind(inp, Box(inp)).compile(), lambda: echo.echo.remote(inp)):
        for kind in (GraphError, ValueError, SerializationError):
            with pytest.raises(kind, match=r"InputNode\(\) is a graph node"):
                wrong()


# Names


def test_what_a_program_asks_of_where_it_runs(echo):
    context = conveyor.get_runtime_context()
    assert (context.get_actor_id(), context.get_actor_name()) == (None, None)
    name, identity, job = conveyor.get(echo.whoami.remote())
    assert name.startswith("Echo")
    assert identity
    assert job == context.get_job_id()
    (node,) = conveyor.nodes()
    assert node["Alive"]
    assert node["NodeID"] == context.get_node_id()
    assert conveyor.cluster_resources() == conveyor.available_resources() == node["Resources"]
    assert node["Resources"]["CPU"] == len(os.sched_getaffinity(0))


def test_ray_call_runs_a_function_with_the_instance(echo):
    call = echo.__ray_call__
    assert conveyor.get(call.remote(lambda self, x, y: (type(self).__name__, x, y), 1, y=2)) == (
        "Echo",
        1,
        2,
    )
    with InputNode() as inp:
        dag = call.bind(lambda self, x: [type(self).__name__, x], inp)
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(3)) == ["Echo", 3]


def test_graphs_have_identities(graph, echo):
    with echo.echo.bind(InputNode()).compile() as other:
        assert isinstance(graph.get_id(), str)
        assert graph.get_id() != other.get_id()


def test_cancel(echo):
    sleeper = Echo.remote()
    ref = sleeper.__ray_call__.remote(lambda self: threading.Event().wait())
    queued = sleeper.echo.remote(1)
    conveyor.cancel(queued, force=False, recursive=True)
    with pytest.raises(conveyor.exceptions.TaskCancelledError):
        conveyor.get(queued)
    with pytest.raises(TypeError, match="takes a reference"):
        conveyor.cancel(sleeper)
    conveyor.kill(sleeper)
    with pytest.raises(exceptions.ActorDiedError):
        conveyor.get(ref)


def test_wait_takes_fetch_local(echo):
    ref = echo.echo.remote(1)
    assert conveyor.wait([ref], fetch_local=False) == ([ref], [])


# Options


def test_options_without_a_meaning_are_taken_with_one_warning():
    options = {
        "resources": {"special": 1},
        "namespace": "mine",
        "memory": 1 << 30,
        "scheduling_strategy": "SPREAD",
        "lifetime": "detached",
    }
    from conveyor.api import options as unused

    unused._warned.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            actor = Echo.options(**options).remote()
            conveyor.remote(num_cpus=1, max_retries=3, max_calls=0)(lambda: None)
    # Garbage of tests before this one may have something to tell, too.
    told = [one for one in told if one.category is not ResourceWarning]
    names = sorted(str(one.message).split("=")[0].split()[-1] for one in told)
    assert names == sorted([*options, "max_retries"])
    assert {one.filename for one in told} == {__file__}
    assert conveyor.get(actor.echo.remote(1)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Echo.options(**dict.fromkeys(options), max_restarts=0)  # nothing is asked for


def test_an_option_that_would_have_to_mean_something_is_refused():
    with pytest.raises(NotImplementedError, match="max_concurrency is one limit"):
        Echo.options(concurrency_groups={"io": 2})
    with pytest.raises(TypeError, match="unknown actor option 'colour'"):
        Echo.options(colour="red")


def test_get_if_exists():
    first = Echo.options(name="the one", get_if_exists=True).remote(1)
    assert Echo.options(name="the one", get_if_exists=True).remote(2) == first
    with pytest.raises(ValueError, match="give it a name"):
        Echo.options(get_if_exists=True).remote()
    with pytest.raises(TypeError, match="True or False"):
        Echo.options(get_if_exists=1)


def test_settings_of_the_dag_context_hold_for_rays_compile(echo):
    context = DAGContext.get_current()
    assert DAGContext.get_current() is context
    context.get_timeout, context.submit_timeout, context.max_inflight_executions = 7, -1, 3
    try:
        with InputNode() as inp:
            dag = echo.echo.bind(inp)
        with dag.experimental_compile() as graph, dag.compile() as plain:
            config = graph.config
            assert (config.get_timeout, config.submit_timeout, config.depth) == (7, None, 3)
            assert plain.config == conveyor.Config()
        with dag.experimental_compile(_submit_timeout=2.5) as graph:
            assert graph.config.submit_timeout == 2.5
        with dag.experimental_compile(_submit_timeout=-1) as graph:
            assert graph.config.submit_timeout is None
    finally:
        context.__init__()


SESSIONS = """
import os, warnings
import conveyor

@conveyor.remote
class A:
    def variable(self, name):
        return os.environ.get(name)

for address in ("auto", "local"):
    conveyor.init(address)
    conveyor.shutdown()
conveyor.init(address="auto", num_cpus=2, include_dashboard=False, logging_level="ERROR")
conveyor.shutdown()
for wrong in ("ray://host:10001", "10.0.0.1:6379"):
    for options in ({"engine": wrong}, {"address": wrong}):
        try:
            conveyor.init(**options)
        except ValueError as error:
            assert "no cluster to connect to" in str(error), error
        else:
            raise AssertionError(wrong)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    conveyor.init(
        num_gpus=1, namespace="mine", resources={"a": 1}, _system_config={"b": 2},
        object_store_memory=256 << 20, runtime_env={"env_vars": {"A": "1", "B": "2"}},
    )
assert len(told) == 4, told
assert all(one.filename == __file__ for one in told), [one.filename for one in told]
actor = A.options(env_vars={"B": "3"}).remote()
assert conveyor.get([actor.variable.remote("A"), actor.variable.remote("B")]) == ["1", "3"]
conveyor.shutdown()
try:
    conveyor.init(runtime_env={"working_dir": "/"})
except TypeError as error:
    assert "working_dir" in str(error)
"""


def test_arguments_of_init(scripts):
    scripts.run(SESSIONS)


# Texts


def test_errors_name_the_argument_that_cannot_be_sent(echo):
    lock = threading.Lock()
    for wrong, text in (
        (
            lambda: echo.echo.remote([1, {"k": lock}]),
            r"argument 0 of Echo\S*\.echo, a list, .*\[1\]\['k'\]",
        ),
        (lambda: echo.echo.remote(1, y=lock), r"argument 'y' of Echo\S*\.echo, a _thread\.lock"),
        (lambda: echo.items.remote(lock), r"argument 0 of Echo\S*\.items"),
        (lambda: double.remote(lock), r"argument 0 of .*double"),
        (lambda: Echo.remote(1, lock), r"argument 1 of Echo, a _thread\.lock"),
        (lambda: Echo.remote(k=lock), r"argument 'k' of Echo"),
    ):
        with pytest.raises(SerializationError, match=text):
            wrong()


def test_a_long_message_stands_once_in_an_error(echo):
    with pytest.raises(RuntimeError) as raised:
        conveyor.get(echo.holds_a_lock.remote())
    text = str(raised.value)
    assert text.count("three") == 1
    assert text.count(".lock") == 1
    assert "RuntimeError: one [...]" in raised.value.remote_traceback


def test_the_name_of_a_graph_is_in_what_shows_it(graph, tmp_path):
    assert graph.explain().startswith("echoes: 1 actor, 1 task")
    assert graph.visualize(None, "ascii").startswith("echoes\n")
    assert 'label="echoes"' in graph.visualize(None, "dot")
    assert 'title: "echoes"' in graph.visualize(None, "mermaid")
    assert "echoes: 1 actor" in graph.visualize(None, "svg")
    assert "1 task on 1 actor" in repr(graph)


def test_a_graph_without_a_name_is_called_the_same_everywhere(echo, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with echo.echo.bind(InputNode()).compile() as graph:
        assert graph.name.startswith("graph ")
        assert graph.explain().startswith(f"{graph.name}: 1 actor, 1 task")
        text = graph.visualize(format="ascii", view=True)
        assert text.startswith(f"{graph.name}\n")
        # It goes into no file, and is printed if it is to be viewed.
        assert capsys.readouterr().out == text + "\n"
        assert list(tmp_path.iterdir()) == []
        assert f'label="{graph.name}"' in graph.visualize(None, "dot")
        assert f'title: "{graph.name}"' in graph.visualize(None, "mermaid")
        assert f"{graph.name}: 1 actor" in graph.visualize(None, "svg")
        assert f"{graph.name}: 1 actor" in graph._repr_html_()


def test_the_table_of_edges_keeps_its_columns(echo):
    long = conveyor.remote(type("A" * 60, (), {"f": lambda self, x: x})).remote()
    with InputNode() as inp:
        dag = MultiOutputNode([long.f.bind(inp), echo.echo.bind(inp)])
    with dag.compile() as graph:
        table = graph.explain().partition("edges\n")[2].splitlines()
    places = {line.index("shm, depth") for line in table if "shm, depth" in line}
    assert len(places) == 1, "\n".join(table)


def test_workers_of_functions_look_like_no_class_of_a_users():
    with double.bind(InputNode()).compile() as graph:
        assert "<functions>" in graph.explain()
        assert "Worker" not in graph.explain()


def test_awaiting_without_asyncio_says_what_to_do(echo):
    ref = Echo.remote().__ray_call__.remote(lambda self: threading.Event().wait())
    coroutine = ref.__await__()
    with pytest.raises(exceptions.RuntimeStateError, match=r"ref\.fileno\(\)"):
        next(coroutine)

    async def gets():
        return await echo.echo.remote(1)

    assert asyncio.run(gets()) == 1
