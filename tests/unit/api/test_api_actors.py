"""Actor classes, handles and methods, over a runtime that only records."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import inspect
import os
import pickle
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import conveyor
from conveyor import ActorClass, ActorHandle, method, remote
from conveyor.api.methods import methods_of
from conveyor.config import Config
from conveyor.dag import InputNode, MethodNode, MultiOutputNode, OutputElementNode
from conveyor.exceptions import GraphError, RuntimeStateError
from conveyor.plan import lower
from conveyor.runtime import context
from conveyor.runtime.protocol import ActorId, ActorSpec

Call = namedtuple("Call", "actor method args kwargs num_returns")


class Retained:
    def __init__(self, released, actor):
        self._released = released
        self._actor = actor

    def __del__(self):
        self._released.append(self._actor)


class FakeRuntime:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.places = False
        self.specs: list[ActorSpec] = []
        self.calls: list[Call] = []
        self.retained: list[ActorId] = []
        self.released: list[ActorId] = []
        self.shared: list[ActorId] = []
        self.compiled: list[Any] = []
        self.exports = SimpleNamespace(session=f"session {id(self)}")

    def create_actor(self, spec: ActorSpec) -> ActorId:
        self.specs.append(spec)
        return ActorId(len(self.specs) - 1, spec.name or spec.cls.__name__)

    def call(self, actor, method, args, kwargs, num_returns):
        self.calls.append(Call(actor, method, args, dict(kwargs), num_returns))
        refs = [f"ref{len(self.calls)}.{i}" for i in range(num_returns)]
        return refs[0] if num_returns == 1 else refs

    def get(self, refs, timeout):
        return [f"value of {ref}" for ref in refs]

    def compile(self, root, config, placement):
        self.compiled.append((root, config))
        return "graph"

    def retain(self, actor):
        self.retained.append(actor)
        return Retained(self.released, actor)

    def share(self, actor):
        self.shared.append(actor)

    def shutdown(self):
        pass


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    before = context.running()
    context.install(fake := FakeRuntime())
    yield fake
    context.install(before)


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


def test_a_subclass_of_an_actor_class_is_a_plain_class(runtime):
    class Louder(Echo):
        def shout(self): ...

    assert type(Louder) is type
    assert Louder.__mro__[1] is Echo.__wrapped__
    actor = remote(Louder).remote("x")
    assert actor.echo.remote("y") == "ref1.0"
    assert actor.shout.remote() == "ref2.0"


def test_starting_an_actor(runtime):
    actor = Echo.remote("a", times=2)
    (spec,) = runtime.specs
    assert spec.cls is Echo.__wrapped__
    assert (spec.args, spec.kwargs) == (("a",), {"times": 2})
    assert set(spec.methods) == {"echo", "split", "__call__"}
    assert (spec.name, spec.num_cpus, spec.num_gpus) == (None, None, 0)
    assert (spec.max_concurrency, spec.env_vars) == (None, {})
    assert isinstance(actor, ActorHandle)
    assert repr(actor) == "Actor(Echo, 0)"


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1, 2), {}, "too many positional arguments"),
        ((), {"prefiks": 1}, "unexpected keyword argument 'prefiks'"),
    ],
)
def test_constructor_arguments_are_checked_before_anything_starts(runtime, args, kwargs, text):
    with pytest.raises(TypeError, match=text) as caught:
        Echo.remote(*args, **kwargs)
    assert str(caught.value).startswith("Echo(prefix")
    assert runtime.specs == []


def test_a_class_without_constructor_takes_no_arguments(runtime):
    with pytest.raises(TypeError, match="too many positional arguments"):
        remote(Plain).remote(1)


def test_a_class_whose_signature_python_does_not_know(runtime):
    class Odd(dict):
        pass

    remote(Odd).remote([("a", 1)])
    assert runtime.specs[0].args == ([("a", 1)],)
    assert "update" in runtime.specs[0].methods


def test_options(runtime):
    cls = remote(num_cpus=2, env_vars={"A": "1"})(Plain)
    named = cls.options(name="first", num_gpus=0.5, max_concurrency=3)
    assert cls.options() is not cls
    cls.remote()
    named.remote()
    named.options(runtime_env={"env_vars": {"B": "2"}}, env_vars={"C": "3"}, name=None).remote()
    first, second, third = runtime.specs
    assert (first.name, first.num_cpus, first.num_gpus, first.env_vars) == (None, 2, 0, {"A": "1"})
    assert (second.name, second.num_cpus, second.num_gpus) == ("first", 2, 0.5)
    assert (second.max_concurrency, second.env_vars) == (3, {"A": "1"})
    assert (third.name, third.env_vars) == (None, {"B": "2", "C": "3"})


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


def test_environments_are_rays_to_make(runtime):
    """Known when the actor is started: a class may be decorated before anybody says which engine it is."""
    placed = Echo.options(runtime_env={"pip": [], "env_vars": {"A": "1"}}, resources={"x": 1})
    with pytest.raises(TypeError, match=r"runtime_env\['pip'\] is not supported"):
        placed.remote()
    assert not runtime.specs
    runtime.places = True
    placed.options(scheduling_strategy="SPREAD").remote()
    (spec,) = runtime.specs
    assert spec.env_vars == {"A": "1"}
    assert spec.process.placement == {
        "runtime_env": {"pip": []},
        "resources": {"x": 1},
        "scheduling_strategy": "SPREAD",
    }


def test_options_left_open(runtime):
    Echo.options(
        num_cpus=None, num_gpus=None, max_concurrency=None, env_vars=None, runtime_env=None
    ).remote()
    spec = runtime.specs[0]
    assert (spec.num_cpus, spec.num_gpus, spec.env_vars) == (None, 0, {})


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


def test_what_is_a_method():
    assert set(methods_of(Many)) == {
        "inherited",
        "static",
        "of_class",
        "later",
        "items",
        "later_items",
        "anything",
        "marked",
        "cached",
        "bound",
    }


def test_what_is_known_of_a_method():
    known = methods_of(Many)
    assert [name for name, info in known.items() if info.is_async] == ["later", "later_items"]
    assert {n for n, info in known.items() if info.is_generator} == {"items", "later_items"}
    assert [name for name, info in known.items() if info.num_returns != 1] == ["of_class"]
    assert {name: str(info.signature) for name, info in known.items()} == {
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


def test_a_decorator_decides_whether_a_method_is_async():
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

    assert not methods_of(Actor)["f"].is_async
    assert methods_of(Actor)["f"].num_returns == 2


def test_defaults_and_annotations_do_not_travel():
    class Local: ...

    class Actor:
        def f(self, a: Local, b=Local(), c=None, d=1.5) -> Local: ...  # noqa: B008

    info = pickle.loads(pickle.dumps(methods_of(Actor)["f"]))
    info.signature.bind(1)
    text = str(info.signature)
    assert "Local object at" in text
    assert "c=None, d=1.5" in text


@pytest.mark.parametrize("wrong", [0, -1])
def test_num_returns_out_of_range(wrong, runtime):
    with pytest.raises(ValueError, match="num_returns must be from 1 to 10000"):
        method(num_returns=wrong)
    with pytest.raises(ValueError, match="num_returns must be from 1 to 10000"):
        Echo.remote().echo.options(num_returns=wrong)


@pytest.mark.parametrize("wrong", ["2", 1.0, True, "all"])
def test_num_returns_of_the_wrong_type(wrong, runtime):
    with pytest.raises(TypeError, match="num_returns must be an integer"):
        method(num_returns=wrong)
    with pytest.raises(TypeError, match="num_returns must be an integer"):
        Echo.remote().echo.options(num_returns=wrong)


def test_method_without_parentheses_changes_nothing(runtime):
    class Marked:
        @method
        def plain(self, x):
            return x

    assert Marked().plain(3) == 3
    handle = remote(Marked).remote()
    assert handle.plain.remote(3) == "ref1.0"


def test_wrong_uses_of_method():
    with pytest.raises(TypeError, match="method is used as"):
        method(3)
    with pytest.raises(TypeError, match="method is used as"):
        method(function, function)
    with pytest.raises(TypeError, match="tensor_transprt"):
        method(tensor_transprt="gloo")


# Handles


def test_calling_a_method(runtime):
    actor = Echo.remote()
    assert actor.echo.remote("x", times=2) == "ref1.0"
    assert actor.split.remote("xy") == ["ref2.0", "ref2.1"]
    assert actor.echo.options(num_returns=3).remote("z") == ["ref3.0", "ref3.1", "ref3.2"]
    assert actor.split.options(num_returns=1).remote("z") == "ref4.0"
    assert actor.split.options().remote("z") == ["ref5.0", "ref5.1"]
    assert actor.__call__.remote("w") == "ref6.0"
    me = ActorId(0, "Echo")
    assert runtime.calls[0] == Call(me, "echo", ("x",), {"times": 2}, 1)
    assert runtime.calls[1] == Call(me, "split", ("xy",), {}, 2)
    assert runtime.calls[5] == Call(me, "__call__", ("w",), {}, 1)


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
def test_arguments_are_checked_at_the_call(runtime, name, args, kwargs, fits):
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
    assert len(runtime.calls) == fits


def test_methods_are_not_called_directly(runtime):
    with pytest.raises(TypeError, match=r"handle\.echo\.remote"):
        Echo.remote().echo("x")


def test_the_signature_of_a_method(runtime):
    actor = Echo.remote()
    assert str(inspect.signature(actor.echo)) == "(message, times=1)"
    assert actor.echo.__name__ == "echo"
    assert repr(actor.echo) == "<method echo of Actor(Echo, 0)>"
    with pytest.raises(AttributeError, match="has no attribute 'remot'"):
        actor.echo.remot("x")
    assert inspect.isclass(type(actor.echo))
    inspect.signature(type(actor.echo))


def test_what_is_called_has_the_signature_and_the_docstring_of_the_method(runtime):
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


def test_a_method_that_does_not_exist(runtime):
    actor = Echo.remote()
    with pytest.raises(
        AttributeError, match=r"actor Echo \(class Echo\) has no method 'ehco'; did"
    ):
        actor.ehco.bind(1)
    with pytest.raises(AttributeError, match=r"it has echo, split, __call__$"):
        actor.zzz.remote()
    for name in ("size", "LIMIT"):
        assert not hasattr(actor, name)


def test_underscored_attributes_are_no_methods(runtime):
    actor = Echo.remote()
    with pytest.raises(AttributeError, match="private to the actor"):
        actor._private.remote()
    for name in ("__getstate__x", "__array__", "__len__", "_repr_html_"):
        assert not hasattr(actor, name)
    assert not hasattr(remote(Plain).remote(), "__call__")  # noqa: B004
    with pytest.raises(AttributeError):
        object.__new__(ActorHandle)._nothing  # noqa: B018


def test_dir_of_a_handle(runtime):
    assert {"echo", "split", "__call__"} <= set(dir(Echo.remote()))


def test_handles_are_equal_by_actor(runtime):
    one, two = Echo.remote(), Echo.remote()
    other = pickle.loads(pickle.dumps(one))
    assert one == other
    assert hash(one) == hash(other)
    assert one != two
    assert one != "Actor(Echo, 0)"
    assert len({one, other, two}) == 2


def test_handles_travel(runtime):
    actor = Echo.options(name="teller").remote()
    other = pickle.loads(pickle.dumps(actor))
    assert other is not actor
    assert other == actor
    assert repr(other) == "Actor(teller, 0)"
    assert other.split.remote("xy") == ["ref1.0", "ref1.1"]
    with pytest.raises(TypeError, match=r"teller\.echo\("):
        other.echo.remote()
    assert runtime.shared == [ActorId(0, "teller")]


def test_a_handle_is_its_own_copy(runtime):
    actor = Echo.remote()
    assert copy.copy(actor) is actor
    assert copy.deepcopy([actor])[0] is actor
    assert copy.copy(actor.echo) == copy.deepcopy(actor.echo) == actor.echo
    assert actor.echo != actor.echo.options(num_returns=2)
    assert actor.echo != Echo.remote().echo
    assert actor.echo != "echo"
    assert runtime.shared == []


def test_handles_carry_no_class(runtime):
    class Local:
        def f(self, x: Echo = Echo): ...  # type: ignore[valid-type]

    assert b"test_api_actors" not in pickle.dumps(remote(Local).remote())


def test_the_runtime_counts_handles(runtime):
    actor = Echo.remote()
    me = ActorId(0, "Echo")
    assert (runtime.retained, runtime.released) == ([me], [])
    other = pickle.loads(pickle.dumps(actor))
    assert runtime.retained == [me, me]
    gc.disable()
    try:
        echo = actor.echo
        del actor
        assert runtime.released == [], "a method keeps its handle"
        del echo
        assert runtime.released == [me], "at once: handles are in no reference cycle"
        del other
        assert runtime.released == [me, me]
    finally:
        gc.enable()


def test_handles_of_a_session_that_is_over(runtime):
    actor = Echo.remote()
    node = actor.echo.bind(InputNode())
    data = pickle.dumps(actor)
    context.install(another := FakeRuntime())
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
    assert another.specs
    with pytest.raises(RuntimeStateError, match="this process belongs to another session"):
        pickle.loads(data)
    context.install(None)
    with pytest.raises(RuntimeStateError, match="can only be unpickled in a process of its sess"):
        pickle.loads(data)


# Graphs


def test_binding_a_method(runtime):
    actor = Echo.remote()
    inp = InputNode()
    node = actor.echo.bind(inp, times=2)
    assert isinstance(node, MethodNode)
    assert node.actor == ActorId(0, "Echo")
    assert node.owner is actor
    first, second = actor.split.bind(node)
    assert isinstance(second, OutputElementNode)
    assert first.task is second.task
    assert isinstance(actor.split.options(num_returns=1).bind(inp), MethodNode)


def test_wrong_arguments_to_bind(runtime):
    with pytest.raises(TypeError, match=r"Echo\.echo\(message, times=1\): missing a required arg"):
        Echo.remote().echo.bind()


def test_a_graph_keeps_its_actors(runtime):
    dag = Echo.remote().echo.bind(InputNode())
    gc.collect()
    assert runtime.released == []
    del dag
    gc.collect()
    assert len(runtime.released) == 1


def test_compiling_a_graph(runtime):
    one, two = Echo.remote(), Echo.remote()
    with InputNode() as inp:
        dag = MultiOutputNode([one.echo.bind(inp), two.echo.bind(inp)])
    assert dag.compile(depth=2) == "graph"
    assert dag.experimental_compile(enable_asyncio=True) == "graph"
    assert runtime.compiled == [(dag, Config(depth=2)), (dag, Config())]
    assert [task.label for task in lower(dag, Config()).tasks] == ["Echo[0].echo", "Echo[1].echo"]


def test_bind_order_does_not_depend_on_the_handle(runtime):
    one = Echo.remote()
    other = pickle.loads(pickle.dumps(one))
    inp = InputNode()
    dag = MultiOutputNode([one.echo.bind(inp), other.split.bind(inp)[0], one.echo.bind(inp)])
    plan = lower(dag, Config())
    assert len(plan.actors) == 1
    assert [task.label for task in plan.tasks] == ["Echo.echo", "Echo.split", "Echo.echo#2"]


def test_executing_a_graph_without_compiling(runtime):
    one, two = Echo.remote(), Echo.remote()
    with InputNode() as inp:
        dag = two.echo.bind(one.echo.bind(inp))
    assert dag.execute("x") == "ref2.0"
    assert [(call.actor.index, call.args) for call in runtime.calls] == [
        (0, ("x",)),
        (1, ("ref1.0",)),
    ]
    nested = two.echo.bind([dag])
    assert nested.execute("y") == "ref5.0"
    assert runtime.calls[-1].args == (["value of ref4.0"],)


def test_a_graph_that_is_not_valid_starts_nothing():
    assert context.running() is None
    with pytest.raises(GraphError):
        InputNode().compile()
    assert context.running() is None


def test_nodes_are_not_sent_with_remote(runtime):
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
