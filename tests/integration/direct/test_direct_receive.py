"""Arguments that a method receives into memory that its actor has (``receive_into``)."""

import numpy as np
import pytest
from integration_helpers import get

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import TaskError

torch = pytest.importorskip("torch")
PRELOAD = ["torch"]


@conveyor.remote
class Trainer:
    def __init__(self):
        import torch

        self.weights = {"weight": torch.ones(2, 3), "bias": torch.arange(2.0)}

    @conveyor.method(tensor_transport="auto")
    def publish(self):
        return self.weights

    @conveyor.method(tensor_transport="auto")
    def array(self, size=3):
        return np.arange(float(size))

    @conveyor.method(tensor_transport="auto", num_returns=2)
    def two(self):
        return np.ones(3), self.weights

    def plain(self):
        return np.full(3, 4.0)

    @conveyor.method(tensor_transport="auto")
    def fails(self):
        raise KeyError("x")


@conveyor.remote
class Generator:
    def __init__(self):
        import torch

        self.model = torch.nn.Linear(3, 2)
        self.buffer = np.zeros(3)
        self.other = {"a": np.zeros(2)}
        self.calls = 0

    @conveyor.method(receive_into={"weights": "model.state_dict"})
    def load(self, weights, step=0):
        self.calls += 1
        own = self.model.state_dict()
        same = all(weights[key].data_ptr() == own[key].data_ptr() for key in own)
        return same, float(sum(one.sum() for one in own.values())), step

    @conveyor.method(receive_into={"array": lambda self: self.buffer})
    def take(self, array, *, more=None):
        self.calls += 1
        return array is self.buffer, self.buffer.tolist(), more

    @conveyor.method(receive_into={"array": "buffer"})
    async def take_later(self, array):
        return array is self.buffer, self.buffer.tolist()

    @conveyor.method(receive_into={"array": "buffer"})
    def items(self, array):
        yield from array.tolist()

    @conveyor.method(receive_into={"array": "buffer"})
    async def items_later(self, array):
        for item in array.tolist():
            yield item

    @conveyor.method(receive_into={"array": "nowhere.at_all"})
    def lost(self, array):
        self.calls += 1

    @conveyor.method(receive_into={"array": "calls"})
    def no_memory(self, array):
        self.calls += 1

    def state(self):
        return self.calls, self.buffer.tolist()


@pytest.fixture(scope="module", params=["local", "inline"])
def actors(request, leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine=request.param, preload=PRELOAD)
        made = Trainer.remote(), Generator.remote()
        yield made
        del made
        conveyor.shutdown()


def test_a_model_receives_its_weights(actors):
    trainer, generator = actors
    ref = trainer.publish.remote()
    assert get(generator.load.remote(ref)) == (True, 7.0, 0)
    assert get(generator.load.remote(step=5, weights=ref)) == (True, 7.0, 5)
    own = {"weight": torch.zeros(2, 3), "bias": torch.ones(2)}
    assert get(generator.load.remote(own)) == (True, 2.0, 0)
    put = conveyor.put(own, tensor_transport="auto")
    assert get(generator.load.remote(put)) == (True, 2.0, 0)
    assert get(generator.load.remote(conveyor.put(own))) == (True, 2.0, 0)


def test_any_reference(actors):
    trainer, generator = actors
    assert get(generator.take.remote(trainer.array.remote(), more=1)) == (True, [0, 1, 2], 1)
    assert get(generator.take.remote(array=trainer.plain.remote())) == (True, [4, 4, 4], None)
    assert get(generator.take.remote(trainer.array.remote(5)[2:])) == (True, [2, 3, 4], None)
    one, weights = trainer.two.remote()
    assert get(generator.take.remote(one)) == (True, [1, 1, 1], None)
    assert get(generator.load.remote(weights)) == (True, 7.0, 0)
    assert get(generator.take.remote(np.ones(3))) == (True, [1, 1, 1], None)


def test_any_kind_of_method(actors):
    trainer, generator = actors
    ref = trainer.array.remote()
    assert get(generator.take_later.remote(ref)) == (True, [0, 1, 2])
    assert list(generator.items.remote(ref)) == [0, 1, 2]
    assert list(generator.items_later.remote(ref)) == [0, 1, 2]


def test_in_a_graph(actors):
    trainer, generator = actors
    with InputNode() as given:
        dag = generator.take.bind(trainer.array.bind(given), more=given)
    with dag.compile() as graph:
        assert get(graph.execute(3)) == (True, [0, 1, 2], 3)
        with pytest.raises(ValueError, match=r"shape \[4\]"):
            get(graph.execute(4))
        assert get(graph.execute(3)) == (True, [0, 1, 2], 3)


def test_what_does_not_fit_is_not_run(actors):
    trainer, generator = actors
    before = get(generator.state.remote())
    for ref, words in (
        (trainer.array.remote(4), r"take\(\) cannot receive 'array': the value is of .* shape \[4\]"),
        (trainer.publish.remote(), "the value has 2 tensors and arrays, and there are 1 to take them"),
        (conveyor.put("text"), "has 0 tensors"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words) as raised:
            get(generator.take.remote(ref))
        assert isinstance(raised.value, TaskError)
    with pytest.raises(
        ValueError, match=r"into self.model.state_dict: receive_into .* has nothing"
    ):
        get(generator.load.remote({"weight": torch.zeros(2, 3), "b": torch.zeros(2)}))
    with pytest.raises(
        AttributeError, match=r"into self.nowhere.at_all: .* no attribute 'nowhere'"
    ):
        get(generator.lost.remote(trainer.array.remote()))
    with pytest.raises(TypeError, match=r"into self.calls: receive_into of 'array' takes a tensor"):
        get(generator.no_memory.remote(trainer.array.remote()))
    with pytest.raises(KeyError):
        get(generator.take.remote(trainer.fails.remote()))
    assert get(generator.state.remote()) == before


def test_a_call_is_checked_as_any_other(actors):
    with pytest.raises(TypeError, match="array"):
        actors[1].take.remote()


@pytest.mark.parametrize(
    ("places", "error", "words"),
    [
        ({"nothing": "buffer"}, ValueError, r"'nothing', which is no parameter of method\(\)"),
        ({"self": "buffer"}, ValueError, "'self', which is no parameter"),
        ({"rest": "buffer"}, ValueError, "'rest', which is no parameter"),
        ({"array": 5}, TypeError, "not 5 for 'array'"),
        ("array", TypeError, "is a mapping"),
    ],
)
def test_declarations_that_mean_nothing(places, error, words):
    def method(self, array, *rest):
        pass

    with pytest.raises(error, match=words):
        conveyor.method(receive_into=places)(method)


def test_of_no_instance():
    with pytest.raises(TypeError, match="methods of an instance"):
        conveyor.method(receive_into={"array": "a"})(staticmethod(lambda array: array))


def test_a_plain_call_receives_as_well():
    plain = Generator.__wrapped__()
    assert plain.take(np.full(3, 2.0)) == (True, [2, 2, 2], None)
    assert plain.take(plain.buffer)[0]
