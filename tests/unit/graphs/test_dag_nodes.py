"""Nodes: what binding makes, and what it refuses."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from conveyor import dag
from conveyor.config import Config
from conveyor.dag import (
    ClassMethodNode,
    InputAttributeNode,
    InputNode,
    MethodNode,
    MultiOutputNode,
    OutputElementNode,
    TransportHint,
)
from conveyor.dag import node as hooks
from conveyor.dag.inputs import InputData, Path, given, key_of
from conveyor.dag.methods import bind
from conveyor.dag.node import hint_of, record_of, upstream_of
from conveyor.dag.survey import survey
from conveyor.exceptions import GraphError, RuntimeStateError
from conveyor.experimental.channel import TorchTensorType


@dataclass(frozen=True)
class Actor:
    index: int
    name: str


A, B = Actor(0, "a"), Actor(1, "b")


def call(actor: Actor, method: str, *args: Any, n: int = 1, **kwargs: Any) -> Any:
    return bind(actor, method, args, kwargs, num_returns=n)


class Host:
    def __init__(self) -> None:
        self.compiled: list[tuple[Any, Config]] = []

    def compile(self, root: Any, config: Config) -> Any:
        self.compiled.append((root, config))
        return "graph"

    def execute(self, root: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError


@pytest.fixture
def host():
    before = hooks._runners
    host = Host()
    hooks.install(hooks.Runners(host.compile, host.execute))
    yield host
    hooks.install(before)


# Inputs


def test_input_is_a_context_manager_that_gives_itself():
    inp = InputNode()
    with inp as entered:
        assert entered is inp


def test_a_part_of_the_input_is_one_node_whichever_way_it_is_written():
    inp = InputNode()
    assert inp.key is inp["key"]
    part = inp[0]
    assert inp[0] is part
    assert inp[1] is not part
    assert isinstance(part, InputAttributeNode)
    assert (key_of(part), key_of(inp.key)) == (0, "key")


def test_integers_of_other_kinds_are_positions():
    class Index:
        def __index__(self) -> int:
            return 2

    assert key_of(InputNode()[Index()]) == 2


def test_zip_of_actors_and_input():
    inp = InputNode()
    nodes = [call(actor, "f", part) for actor, part in zip((A, B), inp, strict=False)]
    assert [key_of(upstream_of(node)[0]) for node in nodes] == [0, 1]


def test_taking_all_parts_of_an_input_ends_with_an_error():
    with pytest.raises(GraphError, match="zip"):
        list(InputNode())


def test_attributes_that_python_asks_for_are_no_keys():
    inp = InputNode()
    for name in ("__array__", "_repr_html_", "_ipython_display_", "__wrapped__"):
        assert not hasattr(inp, name)
    assert key_of(inp["_hidden"]) == "_hidden"
    assert key_of(inp["compile"]) == "compile"


def test_input_takes_no_arguments():
    with pytest.raises(GraphError, match="takes no arguments"):
        InputNode(1)
    with pytest.raises(GraphError, match="takes no arguments"):
        InputNode(input_type=int)


@pytest.mark.parametrize("key", [1.5, None, (0,), slice(0, 2), True, b"x"])
def test_a_key_that_is_neither_position_nor_name(key):
    with pytest.raises(TypeError, match=r"by position \(int\) or by name \(str\)"):
        InputNode()[key]


def test_a_negative_position():
    with pytest.raises(GraphError, match="count from 0"):
        InputNode()[-1]


def test_parts_of_arguments():
    inp = InputNode()
    part = inp["a"][0].key
    assert part is inp.a[0].key
    assert part is not inp["a"][0]["key"]
    assert key_of(part) == Path("a", ((True, 0), (False, "key")))
    assert repr(part) == "InputNode()['a'][0].key"
    assert given(key_of(inp.a[-1].real), (), {"a": [1, 2]}) == 2


def test_a_part_that_an_argument_does_not_have():
    key = key_of(InputNode()["a"]["b"])
    with pytest.raises(
        TypeError, match=r"inp\['a'\]\['b'\]: .* given for inp\['a'\].*KeyError: 'b'"
    ):
        given(key, (), {"a": {}})


def test_a_part_cannot_be_iterated_over_or_named_by_a_node_or_a_list():
    inp = InputNode()
    with pytest.raises(TypeError, match="cannot be iterated over"):
        list(inp[0])
    with pytest.raises(GraphError, match="the key is a graph node"):
        inp[0][inp[1]]
    with pytest.raises(TypeError, match="by a hashable key, not by a list"):
        inp[0][[1]]


def test_the_whole_input():
    assert given(None, (1,), {}) == 1
    data = given(None, (1, 2), {"k": 3})
    assert data == InputData((1, 2), {"k": 3})
    assert (data[1], data["k"], data.k) == (2, 3, 3)
    assert pickle.loads(pickle.dumps(data)) == data
    assert repr(data) == "InputData(1, 2, k=3)"
    with pytest.raises(AttributeError, match="no argument 'j'"):
        data.j  # noqa: B018


# Methods


def test_bind_keeps_what_it_was_given():
    inp = InputNode()
    node = call(A, "f", inp, 1, scale=inp)
    assert isinstance(node, MethodNode)
    assert ClassMethodNode is MethodNode
    assert (node.actor, node.method, node.num_returns) == (A, "f", None)
    assert node.args == (inp, 1)
    assert node.kwargs == {"scale": inp}
    assert upstream_of(node) == (inp,)
    assert node.label == "a.f"


def test_bind_order_is_one_for_all_actors_and_handles():
    inp = InputNode()
    numbers = [call(actor, "f", inp).number for actor in (A, B, A, B)]
    assert numbers == sorted(set(numbers))


def test_bind_order_is_unique_across_threads():
    inp = InputNode()
    numbers: list[int] = []

    def work() -> None:
        for _ in range(500):
            numbers.append(call(A, "f", inp[0]).number)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(numbers)) == len(numbers) == 4000
    assert len(record_of(inp).consumers) == 4000


def test_several_returns_are_as_many_nodes():
    first, second = call(A, "split", InputNode(), n=2)
    assert isinstance(first, OutputElementNode)
    assert (first.index, second.index) == (0, 1)
    assert first.task is second.task
    assert first.task.num_returns == 2
    assert upstream_of(first) == (first.task,)


def test_nodes_inside_containers_are_found_once_and_in_order():
    inp = InputNode()
    x, y = call(A, "f", inp), call(B, "f", inp)
    node = call(A, "g", [x, {"k": (y, 1)}], [x], last=inp)
    assert upstream_of(node) == (x, y, inp)


def test_changing_a_container_after_bind_changes_no_graph():
    inp = InputNode()
    parts = [inp, {"k": inp}]
    node = call(A, "f", parts)
    parts.append("more")
    parts[1]["k"] = None
    assert node.args == ([inp, {"k": inp}],)


def test_constants_are_kept_as_they_are():
    table = {"a": [1, 2]}
    assert call(A, "f", InputNode(), table).args[1] is table


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((1, 2, 3), {}, "too many positional arguments"),
        ((1,), {"z": 1}, "unexpected keyword argument 'z'"),
        ((1,), {"x": 1}, "multiple values for argument 'x'"),
    ],
)
def test_arguments_that_do_not_fit_the_signature(args, kwargs, text):
    signature = inspect.signature(lambda x, y=1: None)
    inp = InputNode()
    with pytest.raises(TypeError, match=text) as caught:
        bind(A, "f", args, {**kwargs}, signature=signature)
    assert str(caught.value).startswith("a.f(x, y=1): ")
    # What could not be bound is no part of the graph.
    call(A, "f", inp).compile  # noqa: B018
    assert len(record_of(inp).consumers) == 1


def test_a_node_keeps_what_it_was_bound_through():
    class Handle: ...

    handle = Handle()
    node = bind(A, "f", (InputNode(),), {}, owner=handle)
    alive = weakref.ref(handle)
    del handle
    assert alive() is node.owner
    del node
    assert alive() is None, "nodes are in no reference cycle"


def test_upstream_nodes_do_not_keep_what_was_bound_to_them():
    gc.disable()
    try:
        inp = InputNode()
        part = inp[0]
        node = call(A, "f", inp, part)
        gone = [weakref.ref(node), weakref.ref(part)]
        del node, part
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_very_long_chains():
    node = inp = InputNode()
    for _ in range(20_000):
        node = call(A, "f", node)
    assert len(survey(node).tasks) == 20_000
    del node, inp


# Outputs


def test_multi_output_keeps_order_and_duplicates():
    inp = InputNode()
    x, y = call(A, "f", inp), call(B, "f", inp)
    assert MultiOutputNode([y, x, y]).nodes == (y, x, y)
    assert MultiOutputNode((x,)).nodes == (x,)


def test_multi_output_of_something_else_than_a_list():
    x = call(A, "f", InputNode())
    for wrong in (x, {x}, iter([x]), None):
        with pytest.raises(GraphError, match="takes a list, tuple, dict or dataclass of results"):
            MultiOutputNode(wrong)


def test_multi_output_of_nothing():
    with pytest.raises(GraphError, match="at least one result"):
        MultiOutputNode([])


def test_multi_output_of_any_shape():
    x, y = call(A, "split", InputNode(), n=2)
    shape = {"a": x, "b": [y, 1, (x, None)]}
    node = MultiOutputNode(shape)
    assert node.nodes == (x, y, x)
    assert node.structure == shape
    shape["b"].append(2)
    assert node.structure != shape
    with pytest.raises(GraphError, match="at least one output or effect"):
        MultiOutputNode([1, "x", None])
    with pytest.raises(GraphError, match="holds a MultiOutputNode"):
        MultiOutputNode([[MultiOutputNode([x])]])
    with pytest.raises(GraphError, match="inside a set"):
        MultiOutputNode([{x}])


def test_effects():
    inp = InputNode()
    x, log, pair = call(A, "f", inp), call(B, "log", inp), call(A, "split", inp, n=2)
    node = MultiOutputNode([x], effects=[log, pair[1], log])
    assert node.effects == (log, pair[1].task)
    assert node.with_tensor_transport().effects == node.effects
    assert MultiOutputNode([None], effects=[log]).nodes == ()
    for wrong in (inp, 1):
        with pytest.raises(GraphError, match="effects are bound methods"):
            MultiOutputNode([x], effects=[wrong])
    for wrong in (5, None, log, inp, "log", b"log"):
        with pytest.raises(GraphError, match="effects are a list of bound methods, not "):
            MultiOutputNode([x], effects=wrong)
    assert MultiOutputNode([x], effects=iter((log,))).effects == (log,)


# All nodes


def all_kinds() -> list[Any]:
    inp = InputNode()
    task = call(A, "f", inp)
    return [inp, inp[0], task, call(A, "s", inp, n=2)[0], MultiOutputNode([task])]


@pytest.mark.parametrize("node", all_kinds(), ids=lambda node: type(node).__name__)
class TestEveryNode:
    def test_has_no_remote_and_no_bind(self, node):
        for name in ("remote", "bind"):
            with pytest.raises(AttributeError, match=rf"has no \.{name}\(\)"):
                getattr(node, name)

    def test_never_changes(self, node):
        for name in ("anything", "_record", "key"):
            with pytest.raises(AttributeError, match="never change"):
                setattr(node, name, 1)
        with pytest.raises(AttributeError, match="never change"):
            del node._record

    def test_is_its_own_copy(self, node):
        assert copy.copy(node) is node
        assert copy.deepcopy([node])[0] is node

    def test_cannot_be_pickled(self, node):
        with pytest.raises(TypeError, match="bind\\(\\) instead of remote\\(\\)"):
            pickle.dumps(node)

    def test_prints(self, node):
        assert "Node" in repr(node)

    def test_compiles_with_settings(self, node, host):
        assert node.compile() == "graph"
        node.compile(depth=4)
        node.compile(Config(depth=2), name="g")
        assert host.compiled == [
            (node, Config()),
            (node, Config(depth=4)),
            (node, Config(depth=2, name="g")),
        ]

    def test_compile_refuses_what_is_no_setting(self, node, host):
        with pytest.raises(TypeError, match="unknown setting 'deep'"):
            node.compile(deep=4)
        with pytest.raises(TypeError, match=r"conveyor\.Config"):
            node.compile(4)
        with pytest.raises(GraphError, match="depth must be"):
            node.compile(depth=0)
        assert host.compiled == []


def test_experimental_compile_takes_rays_parameters(host):
    node = all_kinds()[2]
    node.experimental_compile(
        _submit_timeout=1.0,
        _buffer_size_bytes=100,
        enable_asyncio=True,
        _max_inflight_executions=3,
        _max_buffered_results=7,
        _overlap_gpu_communication=True,
        _default_communicator=None,
    )
    node.experimental_compile()
    assert [config for _, config in host.compiled] == [
        Config(depth=3, submit_timeout=1.0, overlap=True, default_communicator=None),
        Config(),
    ]
    with pytest.raises(TypeError, match="_inflight"):
        node.experimental_compile(_inflight=3)


def test_nodes_without_a_host_say_what_to_import():
    before = hooks._runners
    hooks.install(None)
    try:
        with pytest.raises(RuntimeStateError, match="import conveyor"):
            all_kinds()[2].compile()
    finally:
        hooks.install(before)


def test_a_node_with_one_return_cannot_be_unpacked():
    node = call(A, "f", InputNode())
    with pytest.raises(TypeError, match="num_returns"):
        _, _ = node
    with pytest.raises(TypeError, match="num_returns"):
        node[0]


def test_a_multi_output_is_no_argument():
    inp = InputNode()
    ends = MultiOutputNode([call(A, "f", inp)])
    with pytest.raises(GraphError, match=r"argument 'x' of b\.g is a MultiOutputNode"):
        call(B, "g", inp, x=[ends])


# Hints


@pytest.mark.parametrize("place", range(4), ids=lambda place: type(all_kinds()[place]).__name__)
def test_a_hint_marks_the_node_itself(place):
    # As in Ray, whose programs call it without using what it returns.
    node = all_kinds()[place]
    assert hint_of(node) is None
    assert node.with_tensor_transport(transport="shm", device="cpu") is node
    assert hint_of(node) == TransportHint("shm", "cpu")
    assert hint_of(node.with_tensor_transport()) == TransportHint()


def test_a_hint_on_the_input_holds_for_parts_that_have_none():
    inp = InputNode()
    before = inp["before"]
    assert hint_of(before) is None
    inp.with_tensor_transport(device="cuda")
    inp[1].with_tensor_transport("shm")
    assert [hint_of(part) for part in (inp, inp[0], before)] == [TransportHint(device="cuda")] * 3
    # The part that was marked is garbage by now; what was said of it holds.
    assert hint_of(inp[1]) == TransportHint("shm")
    assert inp.key is inp["key"]
    assert upstream_of(inp[0]) == (inp,)


def test_a_hint_on_several_outputs_holds_for_each():
    inp = InputNode()
    ends = MultiOutputNode([call(A, "f", inp), call(B, "f", inp)])
    assert ends.with_tensor_transport("shm") is ends
    assert [hint_of(node) for node in ends.nodes] == [TransportHint("shm")] * 2


def test_what_is_said_of_an_argument_holds_for_its_parts():
    inp = InputNode()
    parts = [inp[0]["a"], inp[0]["a"][3], inp["k"].x]
    inp.with_tensor_transport("shm")
    inp[0].with_tensor_transport(device="cpu")
    inp[0]["a"].with_tensor_transport(device="cuda")
    assert [hint_of(part).device for part in parts] == ["cuda", "cuda", "default"]
    assert hint_of(inp[0]["b"]) == TransportHint(device="cpu")
    assert hint_of(parts[2]) == TransportHint("shm")


def test_the_older_form_of_a_hint():
    node = call(A, "f", InputNode())
    given = TorchTensorType("nccl", _static_shape=True, _direct_return=True)
    assert node.with_type_hint(given) is node
    assert hint_of(node) == TransportHint("nccl", "default", True, True)
    assert TorchTensorType(device="cuda", transport=None) == TransportHint(device="cuda")
    with pytest.raises(ValueError, match=r"with_type_hint takes a .*TorchTensorType, not 'nccl'"):
        node.with_type_hint("nccl")
    with pytest.raises(ValueError, match="unknown transport 'pigeon'"):
        TorchTensorType("pigeon")


def test_a_hint_takes_rays_private_parameters():
    node = call(A, "f", InputNode())
    hinted = node.with_tensor_transport("nccl", _static_shape=True, _direct_return=True)
    assert hint_of(hinted) == TransportHint("nccl", "default", True, True)


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        ({"transport": "carrier pigeon"}, "unknown transport 'carrier pigeon'"),
        ({"transport": ["shm"]}, "unknown transport"),
        ({"device": "tpu"}, "unknown device 'tpu'; known are default, cpu, gpu, cuda"),
        ({"device": None}, "unknown device None"),
        ({"_static_shape": 1}, "_static_shape is True or False, not 1"),
        ({"_direct_return": "yes"}, "_direct_return is True or False, not 'yes'"),
    ],
)
def test_unknown_transports_and_devices(hint, text):
    with pytest.raises(ValueError, match=text):
        InputNode().with_tensor_transport(**hint)
    with pytest.raises(TypeError):
        InputNode().with_tensor_transport(devise="cpu")


def test_public_names():
    assert all(hasattr(dag, name) for name in dag.__all__)
