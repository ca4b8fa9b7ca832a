"""Values whose tensors and arrays are inside of objects, received into memory that is there."""

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from integration_helpers import get

import conveyor
from conveyor.exceptions import SerializationError
from conveyor.experimental import set_target_device_for_ref, set_target_for_ref

torch = pytest.importorskip("torch")


PRELOAD = ["torch"]
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]


@dataclass
class Step:
    name: str
    state: np.ndarray
    reward: np.ndarray


class Slots:
    __slots__ = ("first", "second")

    def __init__(self):
        self.first = np.arange(3.0)
        self.second = np.arange(3.0, 6.0)


class Looks:
    """Its loading asks for what its memory holds."""

    def __init__(self, array):
        self.array = array

    def __setstate__(self, state):
        self.array = state["array"]
        self.total = float(self.array.sum())


@conveyor.remote
class Maker:
    @conveyor.method(tensor_transport="auto")
    def make(self, make):
        return make()

    def load(self, refs):
        import torch

        module = torch.nn.Linear(2, 1)
        weight, bias = torch.zeros(1, 2), torch.zeros(1)
        set_target_for_ref(refs[0], [weight, bias])
        module = conveyor.get(refs[0])
        return module.weight.data_ptr() == weight.data_ptr(), weight.tolist(), bias.tolist()


def step():
    return Step("one", np.arange(4.0), np.ones(2))


def nested():
    inner = step()
    return {"steps": deque([inner, inner]), "alone": np.full(3, 7.0), "lookup": {1: [Slots()]}}


def linear():
    module = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(2, 1))
    module[1].weight = module[0].weight
    with torch.no_grad():
        for i, one in enumerate(module.parameters()):
            one.fill_(i + 1)
    return module


@pytest.fixture(scope="module")
def maker(simulated, session):
    made = Maker.remote()
    yield made
    conveyor.kill(made)


@pytest.fixture(params=["elsewhere", "here", "plain"])
def kept(request, maker):
    """A ref to a value that is kept by an actor, or by this process, or travels."""
    return {
        "elsewhere": maker.make.remote,
        "here": lambda make: conveyor.put(make(), tensor_transport="auto"),
        "plain": lambda make: conveyor.put(make()),
    }[request.param]


def test_arrays_in_dataclasses_slots_and_deques(kept):
    into = [np.zeros(4), np.zeros(2)]
    value = conveyor.get(kept(step), into=into)
    assert type(value) is Step
    assert value.name == "one"
    assert value.state is into[0]
    assert value.reward is into[1]
    assert (into[0].tolist(), into[1].tolist()) == ([0, 1, 2, 3], [1, 1])
    [slots] = conveyor.get(kept(lambda: deque([Slots()])), into=[np.empty(3), np.empty(3)])
    assert (slots.first.sum(), slots.second.sum()) == (3, 12)


def test_they_are_taken_in_the_order_of_the_pickler(kept):
    into = [np.empty(4), np.empty(2), *(np.empty(3) for _ in range(3))]
    value = conveyor.get(kept(nested), into=into)
    assert [one.tolist() for one in into] == [
        *([0, 1, 2, 3], [1, 1], [7, 7, 7]),
        *([0, 1, 2], [3, 4, 5]),
    ]
    one, again = value["steps"]
    assert one is again
    assert one.state is into[0]
    assert value["alone"] is into[2]
    assert value["lookup"][1][0].second is into[4]


def test_a_module_takes_buffers_for_its_parameters(kept):
    weight, bias, other = torch.zeros(1, 2), torch.zeros(1), torch.zeros(1)
    ref = kept(linear)
    set_target_for_ref(ref, [weight, bias, other])
    module = get(ref)
    assert [type(one) for one in module.parameters()] == [torch.nn.Parameter] * 3
    assert module[0].weight is module[1].weight
    assert module[0].weight.data_ptr() == weight.data_ptr()
    assert (weight.tolist(), bias.tolist(), other.tolist()) == ([[1, 1]], [2], [3])
    assert module[0](torch.ones(1, 2)).item() == 4


def test_what_does_not_fit_is_counted_with_what_is_in_objects(kept):
    buffer = np.zeros(4)
    with pytest.raises(ValueError, match="the value has 2 tensors and arrays, and there are 1"):
        conveyor.get(kept(step), into=[buffer])
    with pytest.raises(ValueError, match=r"number 1 of the value is of float64 and shape \[2\]"):
        conveyor.get(kept(step), into=[buffer, np.zeros(3)])
    assert not buffer.any()


def test_an_object_that_looks_at_its_memory_gets_what_is_there(kept):
    into = np.zeros(3)
    value = conveyor.get(kept(lambda: [Looks(np.ones(3))]), into=[into])[0]
    assert value.array is into
    assert value.total == 3
    assert into.tolist() == [1, 1, 1]


def test_what_cannot_be_pickled_is_not_looked_into_and_the_error_says_so(session):
    value = [np.ones(2), Slots()]
    kept = conveyor.put(value, tensor_transport="auto")
    value[1].first = threading.Lock()
    got = conveyor.get(kept, into=[into := np.zeros(2)])
    assert got[0] is into
    assert got[1] is value[1]
    with pytest.raises(ValueError, match=r"has 1 .* in its lists, tuples and mappings \(.*lock"):
        conveyor.get(kept, into=[np.zeros(2), np.zeros(3)])
    set_target_device_for_ref(kept, "cpu")
    with pytest.raises(SerializationError, match="looked into"):
        conveyor.get(kept)


def test_tensors_in_objects_come_onto_a_device(kept):
    ref = kept(linear)
    set_target_device_for_ref(ref, "sim")
    module = get(ref)
    assert {one.device.type for one in module.parameters()} == {"sim"}
    assert module[0].weight is module[1].weight


def test_an_actor_receives_a_module(maker):
    loaded = maker.load.remote([maker.make.remote(lambda: linear()[0])])
    assert get(loaded) == (True, [[1, 1]], [2])
