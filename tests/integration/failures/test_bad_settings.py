"""Settings and times that are none: an error that names them, before anything is done."""

import asyncio
import math
import sys

import cloudpickle
import numpy as np
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.dag import InputNode

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ENGINES = ["local", "inline"]


@conveyor.remote
class Actor:
    def echo(self, x):
        return x

    def items(self, n):
        yield from range(n)

    def executes(self, graph, **options):
        return conveyor.get(graph.execute(1, **options))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"arena_bytes": -1}, ValueError, r"arena_bytes must be .* from 1 to 2\*\*50, not -1"),
        ({"arena_bytes": 0}, ValueError, "arena_bytes must be .*, not 0"),
        ({"arena_bytes": 1 << 60}, ValueError, "arena_bytes must be "),
        ({"arena_bytes": math.nan}, ValueError, "arena_bytes must be .*, not nan"),
        ({"arena_bytes": "1G"}, TypeError, "arena_bytes must be a number of bytes, .*not '1G'"),
        ({"arena_bytes": True}, TypeError, "arena_bytes must be a number of bytes"),
        ({"object_store_memory": "1G"}, TypeError, "object_store_memory must be a number of bytes"),
        ({"env_vars": 5}, TypeError, "env_vars must be a dict, not int"),
        ({"env_vars": {"a": 1}}, TypeError, "env_vars must be a dict of str to str, .*'a': 1"),
        ({"env_vars": {"a=b": "c"}}, ValueError, "env_vars has 'a=b'"),
        ({"env_vars": {"a": "b\0"}}, ValueError, "env_vars has 'a'"),
        ({"env_vars": {"CONVEYOR_SPIN_US": "x"}}, ValueError, "CONVEYOR_SPIN_US .* not 'x'"),
        ({"env_vars": {"a": "\ud800"}}, ValueError, "env_vars has 'a'.* cannot be encoded"),
        ({"env_vars": {"": "b"}}, ValueError, "env_vars has '': 'b'"),
        ({"runtime_env": {"env_vars": {"a=b": "c"}}}, ValueError, r"\['env_vars'\] has 'a=b'"),
        ({"grace_seconds": -1}, ValueError, "grace_seconds must be a number of seconds, 0 or more"),
        ({"log_to_driver": "no"}, TypeError, "log_to_driver must be True or False, not 'no'"),
        ({"handle_sigterm": 0}, TypeError, "handle_sigterm must be True or False, not 0"),
        ({"ignore_reinit_error": None}, TypeError, "ignore_reinit_error must be True or False"),
        ({"raise_descriptor_limit": 1}, TypeError, "raise_descriptor_limit must be True or False"),
        ({"local_mode": "yes"}, TypeError, "local_mode must be True or False, not 'yes'"),
        ({"nonsense": 1}, TypeError, "has no option 'nonsense'"),
    ],
)
def test_options_of_a_session(leaves_nothing, engine, options, error, text):
    with leaves_nothing():
        with pytest.raises(error, match=text):
            conveyor.init(engine=engine, **options)
        assert not conveyor.is_initialized()


@pytest.mark.parametrize("wrong", [3, [], {}, b"local"])
def test_an_engine_that_is_none(wrong):
    with pytest.raises(TypeError, match="engine must be a str, not "):
        conveyor.init(engine=wrong)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"name": 5}, TypeError, "name must be a str, not int"),
        ({"name": ""}, ValueError, "name must not be empty"),
        ({"name": "\ud800"}, ValueError, "name must be text that can be encoded"),
        *[
            ({"name": f"a{char}b"}, ValueError, "name must have printable characters only")
            for char in "\0\n\r\t\x1b\x7f\x85\u2028\u202e\ufeff"
        ],
        ({"num_cpus": -1}, ValueError, "num_cpus must be a number from 0 to 1000000, not -1"),
        ({"num_cpus": 10**400}, ValueError, "num_cpus must be a number from 0 to 1000000"),
        ({"num_cpus": math.nan}, ValueError, "num_cpus must be a number from 0 to 1000000"),
        ({"num_gpus": -1}, ValueError, "num_gpus must be a number from 0 to 1000000, not -1"),
        ({"num_gpus": 1.5}, ValueError, "num_gpus must be a whole number or a fraction below 1"),
        ({"num_gpus": 1 << 40}, ValueError, "num_gpus must be a number from 0 to 1000000"),
        ({"num_gpus": True}, TypeError, "num_gpus must be a number, not bool"),
        ({"max_concurrency": 0}, ValueError, "max_concurrency must be at least 1, not 0"),
        ({"max_concurrency": 1.5}, TypeError, "max_concurrency must be an integer, not 1.5"),
        ({"max_restarts": -2}, ValueError, r"max_restarts must be -1 \(no limit\), 0"),
        ({"max_restarts": None}, TypeError, "max_restarts must be an integer, not None"),
        ({"env_vars": {"a=b": "c"}}, ValueError, "env_vars has 'a=b'"),
        ({"env_vars": {"a": "\ud800"}}, ValueError, "env_vars has 'a'.* cannot be encoded"),
        ({"env_vars": {"a": 5}}, TypeError, "env_vars must be a dict of str to str"),
        ({"get_if_exists": "yes"}, TypeError, "get_if_exists must be True or False, not 'yes'"),
        ({"get_if_exists": True}, ValueError, "get_if_exists looks for an actor by its name"),
        ({"get_if_exists": True, "name": None}, ValueError, "get_if_exists looks for an actor by"),
    ],
)
def test_options_of_an_actor(local, options, error, text):
    for wrong in (Actor.options, lambda **options: conveyor.remote(**options)(Actor.__wrapped__)):
        with pytest.raises(error, match=text):
            wrong(**options)
    assert get(Actor.remote().echo.remote(1)) == 1


@pytest.mark.parametrize("name", ["a b", "Zähler", "名前", "x" * 300, "a/b:c#1"])
def test_names_that_can_be_printed(local, name):
    actor = Actor.options(name=name).remote()
    assert get(actor.echo.remote(1)) == 1
    assert conveyor.get_actor(name) == actor


def test_the_name_that_get_if_exists_looks_for_stays(local):
    named = Actor.options(name="one")
    assert named.options(get_if_exists=True).remote() == named.options(get_if_exists=True).remote()
    with pytest.raises(ValueError, match="looks for an actor by its name"):
        named.options(get_if_exists=True).options(name=None)


def test_a_name_that_is_more_than_a_text(local):
    class Name(str):
        pass

    actor = Actor.options(name=Name("mine")).remote()
    assert get(actor.echo.remote(1)) == 1
    assert conveyor.get_actor("mine") == actor


def test_options_of_calls_and_functions(local):
    actor = Actor.remote()
    double = conveyor.remote(lambda x: 2 * x)
    for options in (actor.echo.options, double.options, lambda **o: conveyor.method(**o)):
        for wrong in (0, -1, 1 << 40, 10**400):
            with pytest.raises(ValueError, match="num_returns must be from 1 to 10000, not"):
                options(num_returns=wrong)
        with pytest.raises(TypeError, match=r"num_returns must be an integer, or .*, not "):
            options(num_returns="2")
    for wrong in (0, "", "actor", Actor):
        with pytest.raises(TypeError, match="on must be an actor's handle, not "):
            double.options(on=wrong)
    with pytest.raises(TypeError, match="graceful must be True or False, not 'yes'"):
        conveyor.kill(actor, graceful="yes")
    with pytest.raises(TypeError, match="no_restart must be True or False, not None"):
        conveyor.kill(actor, no_restart=None)
    assert get(actor.echo.remote(1)) == 1
    with pytest.raises(ValueError, match=r"<lambda> has num_returns=2 and must return") as raised:
        get(double.options(num_returns=2).remote(1))
    assert "#" not in str(raised.value.cause)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": 5}, "name must be a str, not int"),
        ({"name": None}, "name must be a str, not NoneType"),
        ({"name": "\ud800"}, "name must be text that can be encoded"),
        ({"name": "a\nb"}, "name must have printable characters only"),
        ({"fail_fast": "no"}, "fail_fast must be True or False, not 'no'"),
        ({"cancel_with_await": 0}, "cancel_with_await must be True or False, not 0"),
        ({"ignore_unused": None}, "ignore_unused must be True or False, not None"),
        ({"debug": 1}, "debug must be True or False, not 1"),
        ({"memory_bytes": 10**400}, r"memory_bytes must be an integer from 1 to 2\*\*50 or None"),
        ({"depth": 0}, "depth must be an integer from 1 to 4096, not 0"),
        ({"stream_items": 1 << 40}, "stream_items must be an integer from 1 to 4096"),
        ({"function_workers": 0}, "function_workers must be a positive integer, not 0"),
        ({"slot_bytes": 1 << 40}, "slot_bytes must be an integer from 256 to 1048576"),
        ({"spin_us": -1}, "spin_us must be a number from 0 to a million or None, not -1"),
        ({"deadline": 0}, "deadline must be a number above 0"),
        ({"get_timeout": math.inf}, "get_timeout must be a number above 0"),
    ],
)
def test_settings_of_a_graph(local, options, text):
    dag = Actor.remote().echo.bind(InputNode())
    with pytest.raises(conveyor.exceptions.GraphError, match=text):
        dag.compile(**options)
    with dag.compile() as graph:
        assert get(graph.execute(1)) == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CONVEYOR_ARENA_BYTES", "1G"),
        ("CONVEYOR_ARENA_BYTES", "-1"),
        ("CONVEYOR_ARENA_BYTES", "nan"),
        ("CONVEYOR_SPIN_US", "x"),
        ("CONVEYOR_SPIN_US", "-1"),
    ],
)
def test_variables_of_the_environment(leaves_nothing, monkeypatch, engine, name, value):
    monkeypatch.setenv(name, value)
    with leaves_nothing():
        with pytest.raises(ValueError, match=f"{name}.* must be a number of"):
            conveyor.init(engine=engine)
        assert not conveyor.is_initialized()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_memory_cap_as_a_float(leaves_nothing, monkeypatch, engine):
    monkeypatch.setenv("CONVEYOR_ARENA_BYTES", "2e9")
    for options in ({}, {"arena_bytes": 2e9}, {"arena_bytes": np.int64(2_000_000_000)}):
        with leaves_nothing():
            conveyor.init(engine=engine, **options)
            assert conveyor.runtime.context.current().process.arena_size.cap == 2_000_000_000
            assert get(Actor.remote().echo.remote(1)) == 1
            conveyor.shutdown()


def test_the_spin_of_an_actor():
    with pytest.raises(ValueError, match=r"CONVEYOR_SPIN_US .* must be .*, not 'x'"):
        Actor.options(env_vars={"CONVEYOR_SPIN_US": "x"})


def test_timeouts(local):
    actor = Actor.remote()
    graph = actor.echo.bind(InputNode()).compile()
    with_effects = actor.echo.bind(InputNode()).compile(get_timeout=5)
    call, done = actor.echo.remote(1), actor.echo.remote(2)
    get(done)
    stream = actor.items.remote(3)
    waits = [
        lambda t: conveyor.get(call, timeout=t),
        lambda t: conveyor.get(done, timeout=t),
        lambda t: conveyor.get([call, done], timeout=t),
        lambda t: conveyor.get(conveyor.put(1), timeout=t),
        lambda t: conveyor.wait([call], timeout=t),
        lambda t: conveyor.get(graph.execute(1), timeout=t),
        lambda t: with_effects.execute(1).get(t),
        lambda t: graph.execute(1, timeout=t),
        stream.get,
        stream.next,
    ]
    for wait in waits:
        for wrong in ("x", True, [1]):
            with pytest.raises(TypeError, match="timeout must be a number of seconds or None, not"):
                wait(wrong)
        with pytest.raises(
            ValueError, match="timeout must be a number of seconds or None, not nan"
        ):
            wait(math.nan)
    # What is a number is taken.
    for t in (
        WAIT,
        -1,
        math.inf,
        1e300,
        10**400,
        np.float32(WAIT),
        np.int64(WAIT),
    ):
        assert conveyor.get(call, timeout=t) == 1
        assert conveyor.get(graph.execute(2, timeout=t), timeout=t) == 2
        assert conveyor.wait([call], timeout=t) == ([call], [])
    assert stream.get(math.inf) == [0, 1, 2]


@pytest.mark.parametrize(
    ("deadline", "error"),
    [
        ("a", TypeError),
        (True, TypeError),
        (math.nan, ValueError),
    ],
)
def test_deadlines(local, deadline, error):
    actor = Actor.remote()
    ran = []
    with actor.echo.bind(InputNode()).compile() as graph:
        for execute in (
            graph.execute,
            graph.try_execute,
            lambda x, **options: asyncio.run(graph.execute_async(x, **options)),
        ):
            with pytest.raises(error, match="deadline must be a number of seconds"):
                ran.append(execute(1, deadline=deadline))
        assert ran == []
        other = Actor.remote()
        with pytest.raises(error, match="deadline must be a number of seconds"):
            get(other.executes.remote(graph, deadline=deadline))
        with pytest.raises(TypeError, match="timeout must be a number of seconds"):
            get(other.executes.remote(graph, timeout="x"))
        assert get(other.executes.remote(graph, deadline=WAIT, timeout=WAIT)) == 1
        for nothing_left in (0, -1.5):
            with pytest.raises(conveyor.exceptions.DeadlineExceededError):
                get(graph.execute(1, deadline=nothing_left))


@pytest.mark.parametrize("make", [conveyor.empty, conveyor.empty_tensor])
def test_shapes(local, make):
    if make is conveyor.empty_tensor:
        pytest.importorskip("torch")
        with pytest.raises(TypeError, match=r"dtype must be a torch.dtype, .* not 'nope'"):
            make(3, "nope")
    for negative in (-1, (2, -3)):
        with pytest.raises(ValueError, match="shape must have no negative size, not"):
            make(negative)
    for wrong in ("a", 1.5, (2, "a"), None):
        with pytest.raises(TypeError, match="shape must be an integer or a sequence of integers"):
            make(wrong)
    assert make(np.int64(3)).shape == (3,)
    assert make([2, 3]).shape == (2, 3)
    assert make(()).shape == ()
    assert make((0, 4)).shape == (0, 4)
