"""What cannot be sent, in the user's terms: which argument, class, function, constant or result of whom,
and where in it. The same on both engines."""

import asyncio
import functools
import re
import sys
import threading

import cloudpickle
import numpy as np
import pytest
from integration_helpers import compiled, get

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import RuntimeStateError, SerializationError, TaskError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LOCK = "is of type _thread.lock: TypeError: cannot pickle '_thread.lock' object"


def lock():
    return threading.Lock()


class Keeper:
    """Plain methods; ``AsyncKeeper`` has the same on an event loop."""

    def keep(self, *args, **kwargs):
        return len(args)

    def result(self):
        return {"x": [lock()]}

    @conveyor.method(num_returns=2)
    def two(self):
        return 1, {"b": lock()}

    def items(self, *args):
        yield 1
        yield {"a": lock()}


class AsyncKeeper(Keeper):
    async def result(self):
        return {"x": [lock()]}

    async def items(self, *args):
        yield 1
        yield {"a": lock()}


@pytest.fixture(params=[Keeper, AsyncKeeper])
def holder(request, engine):
    return conveyor.remote(request.param).options(name="holder").remote()


def refused(call, kind=SerializationError):
    """The first line of the error that ``call`` raises."""
    with pytest.raises(kind) as raised:
        call()
    assert "\n" not in str(raised.value).rstrip() or isinstance(raised.value, TaskError)
    return str(raised.value).splitlines()[0]


def test_arguments_of_a_call(holder):
    bad = {"x": lock()}
    text = refused(lambda: holder.keep.remote(1, bad))
    assert text.startswith(
        f"argument 1 of holder.keep, a dict, cannot be sent: its part args[1]['x'] {LOCK}"
    )
    text = refused(lambda: holder.keep.remote(1, k=[bad]))
    assert text.startswith(
        "argument 'k' of holder.keep, a list, cannot be sent: its part kwargs['k'][0]['x'] is"
    )
    text = refused(lambda: holder.items.remote(bad))
    assert text.startswith("argument 0 of holder.items, a dict, cannot be sent: its part args[0]")
    text = refused(lambda: holder.__ray_call__.remote(lambda self, x: x, lock()))
    assert text.startswith(
        "argument 1 of holder.__ray_call__, a _thread.lock, cannot be sent: Type"
    )


def test_more_arrays_than_one_value_takes(local):
    holder = conveyor.remote(Keeper).options(name="holder").remote()
    arrays = [np.ones(1) for _ in range((1 << 16) + 1)]
    told = (
        r"a value with 65537 tensors and arrays cannot be sent, as one takes 65536 .*numpy\.stack"
    )
    assert re.match(told, refused(lambda: get(holder.keep.remote(arrays))))
    many = holder.__ray_call__.remote(
        lambda self, n: [__import__("numpy").ones(1) for _ in range(n)], (1 << 16) + 1
    )
    assert re.match(told, refused(lambda: get(many)))
    assert get(holder.keep.remote(arrays[: 1 << 16])) == 1


def test_an_argument_beside_one_that_is_not_there_yet(local, latches):
    go = latches()

    @conveyor.remote
    class Late:
        async def wait(self, path):
            import os

            while not os.path.exists(path):
                await asyncio.sleep(0.002)

    late = Late.remote().wait.remote(go.path)
    holder = conveyor.remote(Keeper).options(name="holder").remote()
    assert refused(lambda: holder.keep.remote(late, lock())).startswith(
        "argument 1 of holder.keep, a _thread.lock, cannot"
    )
    go.open()
    get(late)


def test_results_of_calls(holder):
    text = refused(lambda: get(holder.result.remote()))
    assert text.startswith(
        f"the result of holder.result, a dict, cannot be sent: its part ['x'][0] {LOCK}"
    )
    text = refused(lambda: get(holder.two.remote()))
    assert text.startswith("result 1 of holder.two, a dict, cannot be sent: its part ['b'] is of")


def test_results_that_are_to_stay(holder):
    stays = {"tensor_transport": "auto"}
    text = refused(lambda: get(holder.result.options(**stays).remote()))
    assert text.startswith(
        f"the result of holder.result, a dict, cannot be sent: its part ['x'][0] {LOCK}"
    )
    text = refused(lambda: get(holder.two.options(**stays).remote()))
    assert text.startswith("result 1 of holder.two, a dict, cannot be sent: its part ['b'] is of")
    stream = holder.items.options(**stays).remote()
    assert next(stream) == 1
    assert refused(lambda: next(stream)).startswith(
        "an item of holder.items, a dict, cannot be sent: its part ['a'] is of type _thread.lock"
    )


def test_an_item_of_a_stream(holder):
    stream = holder.items.remote()
    assert next(stream) == 1
    with pytest.raises(SerializationError) as raised:
        next(stream)
    text = "an item of holder.items, a dict, cannot be sent: its part ['a'] is of type _thread.lock"
    assert str(raised.value).startswith(text)
    assert raised.value.node == "holder.items"


def test_what_a_graph_is_executed_with(holder):
    bad = {"x": lock()}
    with compiled(holder.keep.bind, name="whole") as graph:
        for execute in (
            graph.execute,
            graph.try_execute,
            functools.partial(graph.execute, deadline=9),
        ):
            text = refused(lambda execute=execute: execute([bad]))
            assert text.startswith(
                "argument 0 of whole.execute, a list, cannot be sent: its part args[0][0]['x'] is of"
            )
        text = refused(lambda: asyncio.run(graph.execute_async(bad)))
        assert text.startswith(
            "argument 0 of whole.execute, a dict, cannot be sent: its part args[0]"
        )
        assert get(graph.execute(1)) == 1
    with compiled(lambda inp: holder.keep.bind(inp[0], inp["b"][1]), name="parts") as graph:
        text = refused(lambda: graph.execute(bad, b=[0, 1]))
        assert text.startswith(
            "argument 0 of parts.execute, a dict, cannot be sent: its part args[0]"
        )
        text = refused(lambda: graph.execute(1, b=[0, bad]))
        assert text.startswith(
            "part [1] of argument 'b' of parts.execute, a dict, cannot be sent: its part "
            "kwargs['b'][1]['x'] is of type _thread.lock"
        )
        assert get(graph.execute(lock, b=[lock(), 1])) == 2  # only parts are sent


def test_constants_of_a_graph(holder):
    with InputNode() as inp:
        whole = holder.keep.bind(inp, {"c": lock()})
        nested = holder.keep.bind(1, k={"n": inp, "c": [lock()]})
    text = refused(lambda: whole.compile(name="first", ignore_unused=True))
    assert text.startswith(
        "argument 1 of holder.keep in first, a dict, cannot be sent: its part args[1]['c'] is of"
    )
    text = refused(lambda: nested.compile(name="second", ignore_unused=True))
    assert text.startswith(
        "part ['c'] of argument 'k' of holder.keep in second, a list, cannot be sent: its part "
        "kwargs['k']['c'][0] is of type _thread.lock"
    )


def test_results_and_items_of_a_graph(holder):
    with holder.result.bind().compile() as graph:
        with pytest.raises(SerializationError, match=r"its part \['x'\]\[0\] is of") as raised:
            get(graph.execute())
        assert raised.value.node == "holder.result"
    with MultiOutputNode(list(holder.two.bind())).compile() as graph:
        _first, second = graph.execute()
        with pytest.raises(SerializationError, match=r"its part \['b'\] is of") as raised:
            get(second)
        assert raised.value.node == "holder.two[1]"
    with holder.items.bind().compile() as graph:
        with pytest.raises(SerializationError, match=r"its part \['a'\] is of") as raised:
            list(graph.execute())
        assert raised.value.node == "holder.items"


def test_a_class_and_its_constructor(engine):
    held = lock()

    class Attribute:
        held = lock()

    class Closure:
        def run(self):
            return held

    text = refused(conveyor.remote(Attribute).remote)
    assert text.startswith(f"actor class Attribute cannot be sent: its part Attribute.held {LOCK}")
    text = refused(conveyor.remote(Closure).options(max_restarts=1).remote)
    assert text.startswith(
        "actor class Closure cannot be sent: its part Closure.run.<variable held>"
    )

    class Takes:
        def __init__(self, *args, **kwargs):
            pass

    text = refused(lambda: conveyor.remote(Takes).remote(1, {"x": held}))
    assert text.startswith(
        "argument 1 of Takes, a dict, cannot be sent: its part args[1]['x'] is of"
    )


def test_functions(engine):
    held = lock()

    @conveyor.remote
    def closes_over():
        return held

    @conveyor.remote
    def takes(*args):
        return lock()

    @conveyor.remote
    def yields(*args):
        yield lock()

    text = refused(closes_over.remote)
    assert text.startswith(
        "function closes_over cannot be sent: its part closes_over.<variable held> is of type"
    )
    with InputNode():
        dag = closes_over.bind()
    assert refused(dag.compile).startswith("function closes_over cannot be sent: its part closes")
    assert refused(lambda: takes.remote([held])).startswith("argument 0 of <functions>")
    assert refused(lambda: yields.remote([held])).startswith("argument 0 of <functions>")
    assert refused(lambda: get(takes.remote())).startswith("the result of <functions>")
    assert refused(lambda: list(yields.remote())).startswith("an item of <functions>")


def test_inside_of_an_actor(local):
    @conveyor.remote
    class Caller:
        def calls(self, other):
            other.keep.remote({"k": lock()})

        def executes(self, graph):
            graph.execute({"k": lock()})

        def compiles(self, other):
            with InputNode() as inp:
                dag = other.keep.bind(inp, {"k": lock()})
            dag.compile(name="inner")

    caller = Caller.remote()
    holder = conveyor.remote(Keeper).options(name="holder").remote()
    for call, text in (
        (lambda: caller.calls.remote(holder), "argument 0 of holder.keep, a dict"),
        (lambda: caller.executes.remote(graph), "argument 0 of outer.execute, a dict"),
        (lambda: caller.compiles.remote(holder), "argument 1 of holder.keep in inner, a dict"),
    ):
        with compiled(holder.keep.bind, name="outer") as graph:
            assert refused(lambda call=call: get(call())).startswith(f"{text}, cannot be sent")


class Says:
    """Refuses by itself."""

    def __init__(self):
        self.inner = lock()

    def __reduce__(self):
        raise ValueError("not this one")


def test_what_refuses_by_itself_is_not_looked_into(local):
    holder = conveyor.remote(Keeper).options(name="holder").remote()
    text = refused(lambda: holder.keep.remote({"x": Says()}))
    assert "its part args[0]['x'] is of type test_unsendable.Says: ValueError: not this one" in text


def test_a_long_path_is_cut_and_says_how_deep_it_goes(local):
    holder = conveyor.remote(Keeper).options(name="holder").remote()

    def nested(levels, inside):
        for _ in range(levels):
            inside = [inside]
        return inside

    steps = "[0]" * 8 + "…" + "[0]" * 3
    text = refused(lambda: holder.keep.remote(nested(20, lock())))
    assert f"its part args[0]{steps} (20 levels deep) is of type _thread.lock" in text
    text = refused(lambda: holder.keep.remote(nested(200, lock())))
    assert f"args[0]{steps} (50 levels deep, where the search ends) is of type list" in text
    deep = nested(100_000, 1)
    text = refused(lambda: holder.keep.remote(deep))
    assert (
        "a list, cannot be sent: it is nested too deeply to be pickled (maximum recursion" in text
    )
    while deep != 1:  # freed by hand, not by recursion
        (deep,) = deep


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_what_belongs_to_a_session_that_has_ended(leaves_nothing, engine):
    @conveyor.remote
    class Sleeper:
        async def sleep(self):
            await asyncio.sleep(600)

    with leaves_nothing():
        conveyor.init(engine=engine, grace_seconds=1)
        old = conveyor.remote(Keeper).options(name="old").remote()
        graph = compiled(old.keep.bind)
        pending = Sleeper.remote().sleep.remote()
        conveyor.shutdown()
        conveyor.init(engine=engine)
        new = conveyor.remote(Keeper).options(name="new").remote()
        with pytest.raises(RuntimeStateError) as calling:
            old.keep.remote()
        assert "belongs to a session that has ended" in str(calling.value)
        text = refused(lambda: new.keep.remote(old))
        assert text.startswith("argument 0 of new.keep, a conveyor.api.actors.ActorHandle, can")
        assert text.endswith(f"RuntimeStateError: {calling.value}")
        text = refused(lambda: new.keep.remote(k=[old]))
        assert "its part kwargs['k'][0] is of type conveyor.api.actors.Actor" in text
        assert text.endswith(f"RuntimeStateError: {calling.value}")
        text = refused(lambda: new.keep.remote([graph]))
        assert "its part args[0][0] is of type" in text
        assert "GraphTornDownError: graph 1 has been torn down" in text
        with pytest.raises(
            RuntimeStateError, match=r"Sleeper\.sleep .* belongs to a session that has"
        ):
            get(new.keep.remote(pending))
        with compiled(new.keep.bind) as other:
            with pytest.raises(
                RuntimeStateError, match=r"Sleeper\.sleep .* a session that has ended"
            ):
                get(other.execute(pending))
            assert get(other.execute(1)) == 1
        old = graph = pending = new = other = None
        conveyor.shutdown()
