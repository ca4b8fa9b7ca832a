"""Actor classes, handles and methods: what they say of themselves, take and refuse, on the inline engine."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import pickle
import subprocess
import sys

import pytest

import conveyor
from conveyor import ActorClass, ActorHandle, method, remote
from conveyor.dag import InputNode, MethodNode, MultiOutputNode, OutputElementNode
from conveyor.exceptions import GraphError, RuntimeStateError


@pytest.fixture
def session():
    conveyor.init("inline")
    yield
    conveyor.shutdown()


@remote
class Echo:
    """Says what it hears."""

    LIMIT = 3

    def __init__(self, prefix: str = "", *, times: int = 1) -> None:
        self.prefix = prefix

    def echo(self, message, times=1):
        return message

    @method(num_returns=2)
    def split(self, message):
        return message[:1], message[1:]

    def __call__(self, message):
        return message

    def _private(self):
        pass

    @property
    def size(self):
        return 1


class Plain:
    def f(self, x): ...


# Classes


def test_remote_with_and_without_options():
    assert isinstance(Echo, ActorClass)
    assert isinstance(remote(Plain), ActorClass)
    assert isinstance(remote(num_gpus=1)(Plain), ActorClass)
    assert isinstance(remote()(Plain), ActorClass)
    assert remote(Plain).__wrapped__ is Plain


def test_an_actor_class_looks_like_its_class():
    assert Echo.__name__ == "Echo"
    assert Echo.__qualname__ == "Echo"
    assert Echo.__module__ == __name__
    assert Echo.__doc__ == "Says what it hears."
    assert str(inspect.signature(Echo)) == "(prefix: 'str' = '', *, times: 'int' = 1) -> 'None'"
    assert isinstance(Echo.__wrapped__, type)
    assert repr(Echo) == "ActorClass(Echo)"
    assert (
        str(inspect.signature(ActorClass)) == "(cls: 'type[T]', options: 'ActorOptions') -> 'None'"
    )


def test_an_actor_class_is_not_instantiated():
    with pytest.raises(TypeError, match=r"start an actor with Echo\.remote\(\.\.\.\)"):
        Echo("x")


def test_class_attributes_say_where_they_are():
    with pytest.raises(AttributeError, match=r"Echo\.__wrapped__\.LIMIT"):
        Echo.LIMIT  # noqa: B018
    with pytest.raises(AttributeError, match="start one with remote"):
        Echo.bind()
    assert not hasattr(Echo, "nothing")


def function(): ...


@pytest.mark.parametrize("called", [function, len, lambda: 1, functools.partial(function)])
def test_functions_can_be_made_remote(called):
    assert remote(called).__wrapped__ is called
    made = remote(num_cpus=1, num_returns=2)(called)
    with pytest.raises(TypeError, match=r"use .*\.remote\(\.\.\.\), .*\.bind"):
        made()
    with pytest.raises(TypeError, match="a remote function already"):
        remote(made)
    with pytest.raises(TypeError, match="unknown option 'name' of a function"):
        remote(name="x")(called)


def test_what_cannot_be_made_remote():
    with pytest.raises(TypeError, match="only classes and functions can be made remote, not 3"):
        remote(3)
    with pytest.raises(TypeError, match="an actor class already"):
        remote(Echo)
    with pytest.raises(TypeError, match=r"remote\(Class\)\.options"):
        remote(Plain, num_gpus=1)


def test_a_subclass_of_an_actor_class_is_a_plain_class(session):
    class Louder(Echo):
        def shout(self): ...

    assert type(Louder) is type
    assert Louder.__mro__[1] is Echo.__wrapped__
    actor = remote(Louder).remote("x")
    assert conveyor.get([actor.echo.remote("y"), actor.shout.remote()]) == ["y", None]


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1, 2), {}, "too many positional arguments"),
        ((), {"prefiks": 1}, "unexpected keyword argument 'prefiks'"),
    ],
)
def test_constructor_arguments_are_checked_before_anything_starts(session, args, kwargs, text):
    with pytest.raises(TypeError, match=text) as caught:
        Echo.remote(*args, **kwargs)
    assert str(caught.value).startswith("Echo(prefix")


def test_a_class_without_constructor_takes_no_arguments(session):
    with pytest.raises(TypeError, match="too many positional arguments"):
        remote(Plain).remote(1)


def test_a_class_whose_signature_python_does_not_know(session):
    class Odd(dict):
        pass

    odd = remote(Odd).remote([("a", 1)])
    odd.update.remote(b=2)
    assert list(conveyor.get(odd.keys.remote())) == ["a", "b"]


def test_options(session):
    cls = remote(num_cpus=2, env_vars={"A": "1"})(Plain)
    assert cls.options() is not cls
    named = cls.options(name="first", max_concurrency=3)
    actor = named.remote()
    assert conveyor.get_actor("first") == actor
    assert repr(named.options(name=None).remote()).startswith("Actor(Plain")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_gpu": 1}, TypeError, "unknown actor option 'num_gpu'; known are name, num_cpus"),
        ({"num_cpus": "2"}, TypeError, "num_cpus must be a number, not str"),
        ({"num_cpus": True}, TypeError, "num_cpus must be a number, not bool"),
        ({"num_gpus": -1}, ValueError, "num_gpus must be a number from 0 to 1000000"),
        ({"num_gpus": float("nan")}, ValueError, "num_gpus must be a number from 0 to 1000000"),
        ({"max_concurrency": 0}, ValueError, "max_concurrency must be at least 1"),
        ({"max_concurrency": 1.5}, TypeError, "max_concurrency must be an integer"),
        ({"name": 3}, TypeError, "name must be a str"),
        ({"name": ""}, ValueError, "name must not be empty"),
        ({"env_vars": ["A"]}, TypeError, "env_vars must be a dict, not list"),
        ({"env_vars": {"A": 1}}, TypeError, "env_vars must be a dict of str to str"),
        ({"runtime_env": "x"}, TypeError, "runtime_env must be a dict"),
        ({"runtime_env": {"env_vars": {1: "a"}}}, TypeError, r"runtime_env\['env_vars'\] must be"),
    ],
)
def test_wrong_options(options, error, text):
    with pytest.raises(error, match=text):
        remote(**options)
    with pytest.raises(error, match=text):
        Echo.options(**options)


def test_environments_are_rays_to_make(session):
    """Known when the actor is started: a class may be decorated before anybody says which engine it is."""
    placed = Echo.options(runtime_env={"pip": [], "env_vars": {"A": "1"}}, resources={"x": 1})
    with pytest.raises(TypeError, match=r"runtime_env\['pip'\] is not supported"):
        placed.remote()


def test_options_left_open(session):
    Echo.options(
        num_cpus=None, num_gpus=None, max_concurrency=None, env_vars=None, runtime_env=None
    ).remote()


def test_an_actor_class_pickles_by_name():
    assert pickle.loads(pickle.dumps(Echo)) is Echo
    assert copy.copy(Echo) is Echo


def test_an_actor_class_that_has_no_name_pickles_with_its_class():
    other = pickle.loads(pickle.dumps(remote(num_gpus=2)(Plain)))
    assert other.__wrapped__ is Plain
    assert other._options.num_gpus == 2


# Methods


class Base:
    def inherited(self): ...

    def hidden(self): ...

    def replaced(self): ...


class Many(Base):
    hidden = None
    replaced = property(lambda self: 1)
    factor = 3

    class Nested: ...

    @staticmethod
    def static(a, b=1): ...

    @classmethod
    @method(num_returns=3)
    def of_class(cls, a): ...

    async def later(self): ...

    def items(self):
        yield 1

    async def later_items(self):
        yield 1

    def anything(*args, **kwargs): ...

    def marked(self, a: list[int], b=object, *, c: str = "x") -> dict[str, int]: ...

    @functools.lru_cache  # noqa: B019
    def cached(self, a): ...

    bound = functools.partialmethod(marked, [1])

    @functools.cached_property
    def table(self): ...


def test_what_is_a_method(session):
    """Those that are called have the signature that callers see."""
    many = remote(Many).remote()
    methods = [name for name in dir(many) if not name.startswith("_")]
    assert {name: str(inspect.signature(getattr(many, name))) for name in methods} == {
        "inherited": "()",
        "static": "(a, b=1)",
        "of_class": "(a)",
        "later": "()",
        "items": "()",
        "later_items": "()",
        "anything": "(*args, **kwargs)",
        "marked": "(a: 'list[int]', b=<class 'object'>, *, c: 'str' = 'x') -> 'dict[str, int]'",
        "cached": "(a)",
        "bound": "(b=<class 'object'>, *, c: 'str' = 'x') -> 'dict[str, int]'",
    }
    assert len(many.of_class.bind(1)) == 3


def test_a_decorator_decides_whether_a_method_is_async(session):
    def blocking(function):
        @functools.wraps(function)
        def run(self):
            return asyncio.run(function(self))

        return run

    class Actor:
        @blocking
        @method(num_returns=2)
        async def f(self):
            return 1, 2

    assert conveyor.get(remote(Actor).remote().f.remote()) == [1, 2]


@pytest.mark.parametrize("wrong", [0, -1])
def test_num_returns_out_of_range(wrong, session):
    with pytest.raises(ValueError, match="num_returns must be from 1 to 10000"):
        method(num_returns=wrong)
    with pytest.raises(ValueError, match="num_returns must be from 1 to 10000"):
        Echo.remote().echo.options(num_returns=wrong)


@pytest.mark.parametrize("wrong", ["2", 1.0, True, "all"])
def test_num_returns_of_the_wrong_type(wrong, session):
    with pytest.raises(TypeError, match="num_returns must be an integer"):
        method(num_returns=wrong)
    with pytest.raises(TypeError, match="num_returns must be an integer"):
        Echo.remote().echo.options(num_returns=wrong)


def test_method_without_parentheses_changes_nothing(session):
    class Marked:
        @method
        def plain(self, x):
            return x

    assert Marked().plain(3) == 3
    handle = remote(Marked).remote()
    assert conveyor.get(handle.plain.remote(3)) == 3


def test_wrong_uses_of_method():
    with pytest.raises(TypeError, match="method is used as"):
        method(3)
    with pytest.raises(TypeError, match="method is used as"):
        method(function, function)
    with pytest.raises(TypeError, match="tensor_transprt"):
        method(tensor_transprt="gloo")


# Handles


def test_calling_a_method(session):
    actor = Echo.remote()
    assert conveyor.get(actor.echo.remote("x", times=2)) == "x"
    assert conveyor.get(actor.split.remote("xy")) == ["x", "y"]
    assert conveyor.get(actor.echo.options(num_returns=3).remote(["x", "y", "z"])) == [
        "x",
        "y",
        "z",
    ]
    assert conveyor.get(actor.split.options(num_returns=1).remote("xy")) == ("x", "y")
    assert len(actor.split.options().remote("xy")) == 2
    assert conveyor.get(actor.__call__.remote("w")) == "w"


class Shapes:
    def none(self): ...

    def two(self, a, b=1): ...

    def any(self, a, *rest): ...

    def keyword(self, *, k): ...

    def optional(self, *, k=1): ...

    def everything(self, **kwargs): ...


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "fits"),
    [
        ("none", (), {}, True),
        ("none", (1,), {}, False),
        ("two", (), {}, False),
        ("two", (1,), {}, True),
        ("two", (1, 2), {}, True),
        ("two", (1, 2, 3), {}, False),
        ("two", (), {"a": 1}, True),
        ("two", (1,), {"a": 1}, False),
        ("any", (), {}, False),
        ("any", (1, 2, 3), {}, True),
        ("keyword", (), {}, False),
        ("keyword", (), {"k": 1}, True),
        ("keyword", (1,), {"k": 1}, False),
        ("optional", (), {}, True),
        ("optional", (), {"j": 1}, False),
        ("everything", (), {"j": 1}, True),
        ("everything", (1,), {}, False),
    ],
)
def test_arguments_are_checked_at_the_call(session, name, args, kwargs, fits):
    actor = remote(Shapes).remote()
    inp = InputNode()
    target = getattr(actor, name)
    if fits:
        target.remote(*args, **kwargs)
        target.bind(*args, **kwargs)
    else:
        with pytest.raises(TypeError, match=rf"^Shapes\.{name}\(.*\): "):
            target.remote(*args, **kwargs)
        with pytest.raises(TypeError, match=rf"^Shapes\.{name}\(.*\): "):
            target.bind(*(inp for _ in args), **dict.fromkeys(kwargs, inp))


def test_methods_are_not_called_directly(session):
    with pytest.raises(TypeError, match=r"handle\.echo\.remote"):
        Echo.remote().echo("x")


def test_the_signature_of_a_method(session):
    actor = Echo.remote()
    assert str(inspect.signature(actor.echo)) == "(message, times=1)"
    assert actor.echo.__name__ == "echo"
    assert repr(actor.echo) == f"<method echo of {actor!r}>"
    with pytest.raises(AttributeError, match="has no attribute 'remot'"):
        actor.echo.remot("x")
    assert inspect.isclass(type(actor.echo))
    inspect.signature(type(actor.echo))


def test_what_is_called_has_the_signature_and_the_docstring_of_the_method(session):
    class Said:
        def scale(self, x, *, by=2):
            """Scale it."""

        def selfish(actor, self):
            pass

        @staticmethod
        def alone(a, /, *rest, **more):
            """Stand alone."""

    said = conveyor.remote(Said).remote()
    for name, signature, doc in [
        ("scale", "(x, *, by=2)", "Scale it."),
        ("selfish", "(self)", None),
        ("alone", "(a, /, *rest, **more)", "Stand alone."),
    ]:
        method = getattr(said, name)
        assert str(inspect.signature(method.remote)) == signature
        assert method.__doc__ == doc
        if doc is not None:
            assert method.remote.__doc__ == doc
        assert type(method) is type(getattr(said, name))
        assert pickle.loads(pickle.dumps(method)) == method


def test_a_method_that_does_not_exist(session):
    actor = Echo.remote()
    with pytest.raises(
        AttributeError, match=r"actor Echo \(class Echo\) has no method 'ehco'; did"
    ):
        actor.ehco.bind(1)
    with pytest.raises(AttributeError, match=r"it has echo, split, __call__$"):
        actor.zzz.remote()
    for name in ("size", "LIMIT"):
        assert not hasattr(actor, name)


def test_underscored_attributes_are_no_methods(session):
    actor = Echo.remote()
    with pytest.raises(AttributeError, match="private to the actor"):
        actor._private.remote()
    for name in ("__getstate__x", "__array__", "__len__", "_repr_html_"):
        assert not hasattr(actor, name)
    assert not hasattr(remote(Plain).remote(), "__call__")  # noqa: B004
    with pytest.raises(AttributeError):
        object.__new__(ActorHandle)._nothing  # noqa: B018


def test_dir_of_a_handle(session):
    assert {"echo", "split", "__call__"} <= set(dir(Echo.remote()))


def test_handles_are_equal_by_actor(session):
    one, two = Echo.remote(), Echo.remote()
    other = pickle.loads(pickle.dumps(one))
    assert one == other
    assert hash(one) == hash(other)
    assert one != two
    assert one != "Actor(Echo, 0)"
    assert len({one, other, two}) == 2


def test_handles_travel(session):
    actor = Echo.options(name="teller").remote()
    other = pickle.loads(pickle.dumps(actor))
    assert other is not actor
    assert other == actor
    assert repr(other) == repr(actor)
    assert conveyor.get(other.split.remote("xy")) == ["x", "y"]
    with pytest.raises(TypeError, match=r"teller\.echo\("):
        other.echo.remote()


def test_a_handle_is_its_own_copy(session):
    actor = Echo.remote()
    assert copy.copy(actor) is actor
    assert copy.deepcopy([actor])[0] is actor
    assert copy.copy(actor.echo) == copy.deepcopy(actor.echo) == actor.echo
    assert actor.echo != actor.echo.options(num_returns=2)
    assert actor.echo != Echo.remote().echo
    assert actor.echo != "echo"


def test_handles_carry_no_class(session):
    class Local:
        def f(self, x: Echo = Echo): ...  # type: ignore[valid-type]

    assert b"test_api_actors" not in pickle.dumps(remote(Local).remote())


def test_handles_of_a_session_that_is_over(session):
    actor = Echo.remote()
    node = actor.echo.bind(InputNode())
    data = pickle.dumps(actor)
    conveyor.shutdown()
    with pytest.raises(RuntimeStateError, match="can only be unpickled in a process of its sess"):
        pickle.loads(data)
    conveyor.init("inline")
    uses = [
        (actor.echo.remote, "x"),
        (actor.echo.bind, 1),
        (conveyor.kill, actor),
        (pickle.dumps, actor),
        (node.compile,),
        (node.execute, "x"),
    ]
    for use, *args in uses:
        with pytest.raises(RuntimeStateError, match="a session that has ended"):
            use(*args)
    # Actors are counted anew in each session: this one has another actor of that number.
    Echo.remote()
    with pytest.raises(RuntimeStateError, match="this process belongs to another session"):
        pickle.loads(data)


# Graphs


def test_binding_a_method(session):
    actor = Echo.remote()
    inp = InputNode()
    node = actor.echo.bind(inp, times=2)
    assert isinstance(node, MethodNode)
    assert node.owner is actor
    first, second = actor.split.bind(node)
    assert isinstance(second, OutputElementNode)
    assert first.task is second.task
    assert isinstance(actor.split.options(num_returns=1).bind(inp), MethodNode)


def test_wrong_arguments_to_bind(session):
    with pytest.raises(TypeError, match=r"Echo\.echo\(message, times=1\): missing a required arg"):
        Echo.remote().echo.bind()


def test_compiling_a_graph(session):
    one, two = Echo.remote(), Echo.remote()
    with InputNode() as inp:
        dag = MultiOutputNode([one.echo.bind(inp), two.echo.bind(inp)])
    for graph in dag.compile(depth=2), dag.experimental_compile(enable_asyncio=True):
        assert "Echo.echo" in graph.explain()
        assert "Echo#2.echo" in graph.explain()
        graph.teardown()


def test_bind_order_does_not_depend_on_the_handle(session):
    one = Echo.remote()
    other = pickle.loads(pickle.dumps(one))
    inp = InputNode()
    dag = MultiOutputNode([one.echo.bind(inp), other.split.bind(inp)[0], one.echo.bind(inp)])
    said = dag.compile().explain()
    places = [said.index(label) for label in ("Echo.echo", "Echo.split", "Echo.echo#2")]
    assert places == sorted(places)


def test_executing_a_graph_without_compiling(session):
    one, two = Echo.remote(), Echo.remote()
    with InputNode() as inp:
        dag = two.echo.bind(one.echo.bind(inp))
    assert conveyor.get(dag.execute("x")) == "x"
    assert conveyor.get(two.echo.bind([dag]).execute("y")) == ["y"]


def test_a_graph_that_is_not_valid_starts_nothing():
    with pytest.raises(GraphError):
        InputNode().compile()
    assert not conveyor.is_initialized()


def test_nodes_are_not_sent_with_remote(session):
    with pytest.raises(TypeError, match=r"bind\(\) instead of remote\(\)"):
        pickle.dumps(([InputNode()],))


def test_importing_is_light():
    heavy = ["asyncio", "numpy", "logging", "torch", "cloudpickle", "multiprocessing", "difflib"]
    # Without running the package's own __init__, which imports more than this room.
    code = f"""
import sys, types
package = sys.modules["conveyor"] = types.ModuleType("conveyor")
package.__path__ = {list(conveyor.__path__)}
import conveyor.api, conveyor.api.functions, conveyor.api.session
import conveyor.api.decorators, conveyor.api.decorators
print([name for name in {heavy} if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
