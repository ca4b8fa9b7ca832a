"""Values that are received into memory, or onto a device, that was named before; and into mappings."""

import asyncio
import gc
import threading
import time
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
from integration_helpers import get, hold

import conveyor
import conveyor.compat.ray as ray
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import SerializationError
from conveyor.experimental import set_target_device_for_ref, set_target_for_ref

torch = pytest.importorskip("torch")


PRELOAD = ["torch"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@conveyor.remote
class Trainer:
    def __init__(self):
        import torch

        self.weights = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}

    @conveyor.method(tensor_transport="auto")
    def publish(self):
        return self.weights

    @conveyor.method(tensor_transport="auto")
    def one(self, size=4):
        import torch

        return torch.arange(float(size))

    @conveyor.method(tensor_transport="auto")
    def give(self, value):
        return value

    @conveyor.method(tensor_transport="auto")
    def tied(self):
        import torch

        w = torch.arange(8.0)
        return {"first": w, "again": w, "view": w[2:4], "step": 3}

    @conveyor.method(tensor_transport="auto", num_returns=2)
    def two(self):
        import torch

        return torch.ones(2), torch.zeros(3)

    @conveyor.method(tensor_transport="auto")
    def nothing(self):
        return 5

    @conveyor.method(tensor_transport="auto")
    def fails(self):
        raise KeyError("x")

    def plain(self):
        import torch

        return torch.full((4,), 7.0)

    @conveyor.method(tensor_transport="auto")
    def items(self):
        yield np.ones(3)

    def total(self, value):
        return float(value.sum())

    def receives(self, refs):
        import torch

        buffer = torch.zeros(4)
        set_target_for_ref(refs[0], [buffer])
        return conveyor.get(refs[0]) is buffer, buffer.tolist()

    def received_plainly(self, refs):
        return refs[0]._targets is None and conveyor.get(refs[0]).tolist()


@pytest.fixture(scope="module")
def trainer(simulated, session):
    made = Trainer.remote()
    yield made
    conveyor.kill(made)


def test_a_target_is_what_get_and_await_give(trainer):
    for make in (trainer.one, trainer.plain):
        ref = make.remote()
        buffer = torch.zeros(4)
        set_target_for_ref(ref, [buffer])
        assert get(ref) is buffer
        expected = buffer.tolist()
        buffer.zero_()
        assert conveyor.get([ref, ref])[1] is buffer
        assert buffer.tolist() == expected
        buffer.zero_()
        assert asyncio.run(awaited(ref)) is buffer
        assert ref.get() is buffer
        assert buffer.tolist() == expected != [0.0] * 4


async def awaited(ref):
    return await ref


def test_several_targets_in_their_places(trainer):
    ref = trainer.publish.remote()
    w, b = torch.zeros(2, 3), torch.zeros(3)
    set_target_for_ref(ref, [w, b])
    value = get(ref)
    assert value["w"] is w
    assert value["b"] is b
    assert (w.sum(), b.sum()) == (15, 3)


def test_targets_of_one_of_several_results_of_parts_and_of_what_was_put(trainer):
    first, second = trainer.two.remote()
    buffer = torch.zeros(3)
    set_target_for_ref(second, [buffer + 1])  # garbage at once
    set_target_for_ref(second[1:], [buffer])
    assert get(second) is not buffer
    set_target_for_ref(first, (mine := torch.zeros(2)))
    assert get(first) is mine
    part = trainer.one.remote()[1:]
    set_target_for_ref(part, [buffer])
    assert get(part) is buffer
    assert buffer.tolist() == [1, 2, 3]
    own = torch.ones(3)
    here = conveyor.put(own, tensor_transport="auto")
    set_target_for_ref(here, [buffer])
    assert get(here) is buffer
    assert buffer.tolist() == [1, 1, 1]
    kept = conveyor.put({"a": own}, tensor_transport="auto")
    set_target_for_ref(kept, [buffer])
    value = get(kept)
    assert value["a"] is buffer
    set_target_for_ref(kept, [own])
    assert get(kept)["a"] is own


def test_a_target_that_is_gone_is_left_alone(trainer):
    ref = trainer.one.remote()
    buffer = torch.zeros(4)
    set_target_for_ref(ref, [buffer])
    del buffer
    gc.collect()
    assert get(ref).tolist() == [0, 1, 2, 3]


def test_targets_are_of_this_ref_alone(trainer):
    ref = trainer.one.remote()
    buffer = torch.full((4,), 9.0)
    set_target_for_ref(ref, [buffer])
    assert get(trainer.total.remote(ref)) == 6
    assert get(trainer.received_plainly.remote([ref])) == [0, 1, 2, 3]
    assert buffer.tolist() == [9.0] * 4
    assert get(trainer.receives.remote([ref])) == (True, [0, 1, 2, 3])


def test_targets_are_left_alone_where_a_ref_is_an_input_of_a_graph(trainer):
    ref = trainer.one.remote()
    buffer = torch.full((4,), 9.0)
    set_target_for_ref(ref, [buffer])
    with InputNode() as given:
        dag = MultiOutputNode([trainer.total.bind(given.a), trainer.total.bind(ref)])
    with dag.compile() as graph:
        assert [get(one) for one in graph.execute(a=ref)] == [6, 6]
    assert buffer.tolist() == [9.0] * 4
    assert get(ref) is buffer


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ([], "has 1 tensors and arrays, and there are 0"),
        ([torch.zeros(4), torch.zeros(4)], "and there are 2"),
        ([torch.zeros(5)], r"shape \[4\], and what is to take it is of float32 and shape \[5\]"),
        ([torch.zeros(4, dtype=torch.int64)], "of int64"),
        ([torch.zeros(8)[::2]], "must be contiguous"),
    ],
)
def test_targets_that_do_not_fit(trainer, target, words):
    ref = trainer.one.remote()
    set_target_for_ref(ref, target)
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            get(ref)
    assert all(not one.any() for one in target)
    set_target_device_for_ref(ref, "cpu")  # in the place of the former
    assert get(ref).tolist() == [0, 1, 2, 3]


def test_what_is_no_target(trainer):
    ref = trainer.one.remote()
    for target in (5, {"a": torch.zeros(4)}, [object()], None):
        with pytest.raises(TypeError, match="a list of tensors or arrays"):
            set_target_for_ref(ref, target)
    for no_ref in (5, [ref], trainer.items.remote()):
        with pytest.raises(TypeError, match="a reference to one value"):
            set_target_for_ref(no_ref, [torch.zeros(4)])
    for device in (5, None):
        with pytest.raises(TypeError, match="name such as"):
            set_target_device_for_ref(ref, device)
    for device in ("nothing", "cuda:99", "meta"):
        with pytest.raises(ValueError, match="there is no device"):
            set_target_device_for_ref(ref, device)


def test_an_error_is_an_error(trainer):
    ref = trainer.fails.remote()
    set_target_for_ref(ref, [torch.zeros(4)])
    with pytest.raises(KeyError):
        get(ref)
    number = trainer.nothing.remote()
    set_target_for_ref(number, [])
    assert get(number) == 5


def test_on_a_device(trainer):
    ref = trainer.publish.remote()
    set_target_device_for_ref(ref, "sim:0")
    value = get(ref)
    assert {str(one.device) for one in value.values()} == {"sim:0"}
    assert value["w"].cpu().sum() == 15
    kept = {"a": torch.ones(2), "n": np.ones(2)}
    here = conveyor.put(kept, tensor_transport="auto")
    set_target_device_for_ref(here, "sim:0")
    assert str(get(here)["a"].device) == "sim:0"
    assert kept["a"].device.type == "cpu"
    w, b = torch.zeros(2, 3, device="sim"), torch.zeros(3)
    set_target_for_ref(ref, [w, b])
    assert get(ref)["w"] is w
    assert w.cpu().tolist() == [[0, 1, 2], [3, 4, 5]]
    one = torch.zeros(4, device="sim:0")
    assert conveyor.get(trainer.one.remote(), into=one) is one
    assert one.cpu().tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="on device 'meta'"):
        conveyor.get(ref, into=torch.zeros(4, device="meta"))


def test_into_a_mapping(trainer):
    ref = trainer.publish.remote()
    model = {"b": torch.zeros(3), "w": torch.zeros(2, 3)}
    value = conveyor.get(ref, into=model)
    assert value["w"] is model["w"]
    assert (model["w"].sum(), model["b"].sum()) == (15, 3)
    linear = torch.nn.Linear(3, 2)
    state = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    given = trainer.give.remote({"model": state, "steps": [1, torch.ones(1)]})
    into = {"steps": [None, torch.zeros(1)], "model": linear.state_dict()}
    value = conveyor.get(given, into=into)
    assert value["steps"][0] == 1
    assert linear.weight.tolist() == [[1.0] * 3] * 2
    assert linear.bias.tolist() == [0.0, 0.0]


def test_what_else_lies_in_the_memory_of_a_target_has_the_value(trainer):
    weights = torch.arange(4.0)
    state = OrderedDict(w=weights)
    state.last = weights[3:]
    into = {"w": torch.zeros(4)}
    value = conveyor.get(trainer.give.remote(state), into=into)
    assert value["w"] is into["w"]
    assert value.last.tolist() == [3]
    into = {"w": torch.zeros(4)}
    held = {"w": weights, "object": SimpleNamespace(last=weights[3:]), "bytes": bytes(1 << 19)}
    value = conveyor.get(trainer.give.remote(held), into=into)
    assert value["w"] is into["w"]
    assert value["object"].last.tolist() == [3]
    assert value["bytes"] == held["bytes"]
    assert into["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_as_it_was(trainer, collects):
    (gc.enable if collects else gc.disable)()
    try:
        conveyor.get(trainer.publish.remote(), into={"w": torch.zeros(2, 3), "b": torch.zeros(3)})
        with pytest.raises(SerializationError):
            conveyor.put(threading.Lock())
        assert gc.isenabled() is collects
    finally:
        gc.enable()


def test_what_is_tied_is_written_to_each(trainer):
    into = {"first": torch.zeros(8), "again": torch.zeros(8), "view": torch.zeros(2)}
    value = conveyor.get(trainer.tied.remote(), into=into)
    assert value["step"] == 3
    assert [into[key].sum() for key in ("first", "again", "view")] == [28, 28, 5]
    shared = torch.zeros(8)
    into = {"first": shared, "again": shared, "view": shared[2:4]}
    conveyor.get(trainer.tied.remote(), into=into)
    assert shared.tolist() == list(range(8))
    ref = trainer.tied.remote()
    set_target_for_ref(ref, [shared, into["view"]])  # once for what is in it twice
    assert get(ref)["again"] is shared


@pytest.mark.parametrize(
    ("into", "words"),
    [
        ({"w": torch.zeros(2, 3)}, r"into= has nothing to take \['b'\]$"),
        (
            {"w": torch.zeros(2, 3), "c": torch.zeros(3)},
            r"nothing to take \['b'\], and the value has nothing for \['c'\]",
        ),
        ({"w": {"b": torch.zeros(3)}}, r"take \['w'\], \['b'\], .* nothing for \['w'\]\['b'\]"),
        ({"w": torch.zeros(3, 2), "b": torch.zeros(3)}, r"\['w'\] of the value is of float32"),
        ([{"w": torch.zeros(2, 3)}], r"nothing for \[0\]\['w'\]"),
    ],
)
def test_a_mapping_that_does_not_fit_is_left_as_it_is(trainer, into, words):
    for ref in (trainer.publish.remote(), conveyor.put(get(trainer.publish.remote()))):
        with pytest.raises(ValueError, match=words):
            conveyor.get(ref, into=into)
    assert not any(one.any() for _, one in leaves(into))


def leaves(value):
    from conveyor.direct.structure import leaves_of

    return leaves_of(value)


def test_rays_names(trainer):
    ref = trainer.one.remote()
    buffer = torch.zeros(4)
    ray.experimental.set_target_for_ref(ref, [buffer])
    assert ray.get(ref) is buffer
    ray.experimental.set_target_device_for_ref(ref, "cpu")
    assert ray.get(ref) is not buffer
    for usual in (trainer.plain.remote(), conveyor.put(np.ones(3))):
        with pytest.raises(ValueError, match="is not an RDT object"):
            ray.experimental.set_target_for_ref(usual, [buffer])
        with pytest.raises(ValueError, match="is not an RDT object"):
            ray.experimental.set_target_device_for_ref(usual, "cpu")
    failed = trainer.fails.remote()
    ray.experimental.set_target_for_ref(failed, [buffer])
    with pytest.raises(KeyError):
        ray.get(failed)


def test_what_nixl_is_told_does_nothing_and_is_checked():
    names = ray.experimental
    names.register_nixl_memory(torch.zeros(3))
    names.deregister_nixl_memory(torch.zeros(3))
    names.register_nixl_memory_pool(1 << 20, "cpu")
    names.register_nixl_memory_pool(1 << 20, torch.device("cpu"))
    names.set_nixl_cuda_stream(None)
    for use in (
        lambda: names.register_nixl_memory(5),
        lambda: names.deregister_nixl_memory(np.zeros(3)),
        lambda: names.register_nixl_memory_pool("much", "cpu"),
        lambda: names.set_nixl_cuda_stream(5),
    ):
        with pytest.raises(TypeError):
            use()
    for use in (
        lambda: names.register_nixl_memory_pool(0, "cpu"),
        lambda: names.register_nixl_memory_pool(1, "nothing"),
    ):
        with pytest.raises(ValueError, match=r"there is no device|number of bytes"):
            use()


@conveyor.remote
class Late:
    @conveyor.method(tensor_transport="auto")
    def ones(self, path, size):
        import torch

        hold(path)
        return torch.ones(size)


@pytest.mark.parametrize("size", [16, 1 << 20])
def test_a_target_whose_memory_is_another_by_the_time_that_the_value_comes(trainer, latches, size):
    """It is what it is then, and nothing is written to where it was."""
    go, target, before = latches(), torch.zeros(size), torch.zeros(size)
    ref = Late.remote().ones.remote(go.path, size)
    was = target.data
    thread = threading.Thread(target=conveyor.get, args=(ref,), kwargs={"into": target})
    thread.start()
    time.sleep(0.1)  # it waits, most likely; the outcome is the same if it does not yet
    target.data = before
    go.open()
    thread.join()
    assert target.sum() == size
    assert before.sum() == size
    assert was.sum() == 0


def test_a_tensor_without_memory_of_its_own_is_no_target(trainer):
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError

    with pytest.raises(TypeError, match="has no memory of its own"):
        conveyor.get(
            conveyor.put(torch.ones(3), tensor_transport="auto"), into=Wrapper(torch.zeros(3))
        )
