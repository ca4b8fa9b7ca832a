"""What ``with_tensor_transport`` says of a value holds, and an execution where it cannot hold is an error."""

import re

import pytest

import conveyor
from conveyor import testing, transport
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import GraphError, TransportError

torch = pytest.importorskip("torch")

PRELOAD = ["torch"]
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight


class Marked(torch.Tensor):
    pass


def zoo():
    base = torch.arange(12.0).reshape(3, 4)
    return {
        "module": Tied().requires_grad_(),
        "state": Tied().state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "subclass": torch.arange(3.0).as_subclass(Marked),
        "views": [base, base[1], base.t()],
        "expanded": torch.ones(1).expand(1 << 20),
        "every other": base[:, ::2],
        "sparse": torch.eye(3).to_sparse().requires_grad_(),
        "quantized": torch.quantize_per_tensor(torch.arange(3.0), 0.5, 0, torch.qint8),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "empty": [torch.empty(0, 3), torch.tensor(7)],
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "made of another": torch.ones(2, requires_grad=True) * 2,
        "no tensors": (torch.Size([1, 2]), torch.bfloat16, torch.device("cuda:1")),
    }


def oddities(value):
    """What has not come as it was sent."""
    module, state, views = value["module"], value["state"], value["views"]
    views[1][0] = 50
    right = {
        "module": module.first.weight is module.second.weight and module.first.weight.requires_grad,
        "state": state["first.weight"].data_ptr() == state["second.weight"].data_ptr(),
        "parameter": type(value["parameter"]) is torch.nn.Parameter
        and not value["parameter"].requires_grad,
        "subclass": type(value["subclass"]) is Marked and value["subclass"].tolist() == [0, 1, 2],
        "views": views[0][1, 0] == views[2][0, 1] == 50,
        "expanded": value["expanded"].shape == (1 << 20,)
        and value["expanded"].untyped_storage().nbytes() < 100_000,
        "every other": value["every other"].tolist() == [[0, 2], [50, 6], [8, 10]],
        "sparse": value["sparse"].is_sparse and value["sparse"].requires_grad,
        "quantized": value["quantized"].dequantize().tolist() == [0, 1, 2],
        "conjugate": value["conjugate"].tolist() == [1 - 2j],
        "empty": [tuple(t.shape) for t in value["empty"]] == [(0, 3), ()]
        and value["empty"][1] == 7,
        "float8": value["float8"].dtype is torch.float8_e4m3fn
        and value["float8"].float().sum() == 4,
        "made of another": value["made of another"].is_leaf
        and value["made of another"].requires_grad,
        "no tensors": value["no tensors"]
        == (torch.Size([1, 2]), torch.bfloat16, torch.device("cuda:1"))
        and type(value["no tensors"][0]) is torch.Size,
    }
    return [what for what, as_sent in right.items() if not as_sent]


class Worker:
    def zoo(self):
        return zoo()

    def zoos(self, count):
        for _ in range(count):
            yield zoo()

    def oddities(self, value):
        return oddities(value)

    def send_zoo(self, sender):
        with sender:
            sender.send(zoo())

    def make(self, what):
        """The value that a word names."""
        return {
            "floats": lambda: torch.ones(3),
            "more": lambda: torch.ones(4),
            "doubles": lambda: torch.ones(3, dtype=torch.float64),
            "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
            "pair": lambda: {"a": torch.ones(2), "b": [torch.zeros(2, dtype=torch.int64)]},
            "other pair": lambda: {"a": torch.ones(2), "b": [torch.zeros(3, dtype=torch.int64)]},
            "three": lambda: {"a": torch.ones(2), "b": [torch.ones(1), torch.ones(1)]},
            "text": lambda: "text",
            "list": lambda: [torch.ones(3)],
            "sparse": lambda: torch.eye(2).to_sparse(),
        }[what]()

    def both(self, what):
        return self.make(what), self.make(what)

    def numbers(self, count):
        for number in range(count):
            yield torch.full((2,), float(number))

    def kind(self, value):
        return type(value).__name__, str(getattr(value, "device", "none"))

    def total(self, value):
        return float(sum(part.sum() for part in leaves(value)))


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, list) else []


Remote = conveyor.remote(Worker)


@pytest.fixture(scope="module", params=["local", "inline"])
def engines(request, leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine=request.param, preload=PRELOAD)
        actors = Remote.options(max_restarts=1).remote(), Remote.remote()
        yield actors
        del actors
        conveyor.shutdown()


@pytest.fixture
def pair(engines):
    return engines


@pytest.fixture
def slow():
    one = testing.FaultyTransport("hinted")
    transport.register(one)
    yield one.name
    transport.unregister(one.name)


@pytest.mark.parametrize("promise", [{}, {"_static_shape": True}], ids=["", "static shape"])
@pytest.mark.parametrize("out_of_band", [False, True], ids=["in frames", "out_of_band"])
def test_tensors_of_all_kinds_over_edges(pair, slow, out_of_band, promise):
    a, b = pair
    with InputNode() as inp:
        made = a.zoo.bind().with_tensor_transport(slow if out_of_band else "auto", **promise)
        graph = MultiOutputNode([b.oddities.bind(made), b.oddities.bind(inp), made]).compile()
    for _ in range(2):
        at_reader, of_input, result = conveyor.get(graph.execute(zoo()), timeout=60)
        assert at_reader == of_input == oddities(result) == []


def test_tensors_of_all_kinds_over_everything_else(pair):
    a, b = pair
    assert conveyor.get(b.oddities.remote(a.zoo.remote()), timeout=60) == []
    assert oddities(conveyor.get(conveyor.put(zoo()))) == []
    assert [oddities(value) for value in a.zoos.remote(2)] == [[], []]
    with InputNode() as inp:
        graph = a.zoos.bind(inp).compile()
    assert [oddities(value) for value in graph.execute(2)] == [[], []]
    sender, receiver = conveyor.channel.open()
    sent = a.send_zoo.remote(sender)
    assert oddities(receiver.receive(timeout=60)) == []
    conveyor.get(sent)


def outcome(graph, *args, **kwargs):
    try:
        return conveyor.get(graph.execute(*args, **kwargs), timeout=30)
    except TransportError as error:
        return str(error).splitlines()[0]


@pytest.mark.parametrize("out_of_band", [False, True], ids=["in frames", "out_of_band"])
def test_one_tensor_is_what_direct_return_promises(pair, slow, out_of_band):
    a, b = pair
    name = slow if out_of_band else "auto"
    with InputNode() as inp:
        made = a.make.bind(inp).with_tensor_transport(name, _direct_return=True)
        graph = b.kind.bind(made).compile()
    assert outcome(graph, "floats") == ("Tensor", "cpu")
    for what, kind in (("text", "a str"), ("list", "a list"), ("pair", "a dict")):
        told = outcome(graph, what)
        assert re.search(rf"Worker.make: _direct_return promises one tensor, and got {kind}", told)
        assert outcome(graph, "more") == ("Tensor", "cpu")
    assert outcome(graph, "parameter") == ("Parameter", "cpu")
    assert outcome(graph, "sparse") == ("Tensor", "cpu")


@pytest.mark.parametrize("out_of_band", [False, True], ids=["in frames", "out_of_band"])
def test_tensors_of_the_first_execution_are_what_static_shape_promises(pair, slow, out_of_band):
    a, b = pair
    name = slow if out_of_band else "shm"
    with InputNode() as inp:
        made = a.make.bind(inp).with_tensor_transport(name, _static_shape=True)
        graph = b.total.bind(made).compile(depth=4)
    assert outcome(graph, "floats") == 3
    told = outcome(graph, "more")
    assert re.search(
        r"Worker.make: _static_shape promises the tensors of the first execution, "
        r"\(float32, shape \[3\], on cpu\), and got \(float32, shape \[4\], on cpu\)",
        told,
    )
    assert "got (float64, shape [3], on cpu)" in outcome(graph, "doubles")
    assert "of which there were 1, and got 0" in outcome(graph, "text")
    assert outcome(graph, "list") == 3  # the same tensor, wherever it stands
    assert outcome(graph, "floats") == 3


def test_static_shapes_of_many_tensors(pair):
    a, b = pair
    with InputNode() as inp:
        made = a.make.bind(inp).with_tensor_transport(_static_shape=True)
        graph = MultiOutputNode([b.total.bind(made), made]).compile()
    assert conveyor.get(graph.execute("pair"))[0] == 2
    with pytest.raises(TransportError, match=r"number 2 of 2 was \(int64, shape \[2\]"):
        conveyor.get(graph.execute("other pair"))
    with pytest.raises(TransportError, match="of which there were 2, and got 3"):
        conveyor.get(graph.execute("three"))
    assert conveyor.get(graph.execute("pair"))[0] == 2


def test_promises_about_the_whole_input(pair):
    a, _ = pair
    with InputNode() as inp:
        inp.with_tensor_transport(_static_shape=True, _direct_return=True)
        graph = a.total.bind(inp).compile()
    with pytest.raises(
        TransportError, match="input: _direct_return promises one tensor, and got a"
    ):
        graph.execute([torch.ones(2)])
    # It has not begun, so it was not the first one.
    assert outcome(graph, torch.ones(5)) == 5
    with pytest.raises(
        TransportError, match=r"input: _static_shape .* shape \[5\], .* shape \[2\]"
    ):
        graph.execute(torch.ones(2))
    with pytest.raises(TransportError, match="and got None"):
        graph.execute(None)
    assert outcome(graph, torch.ones(5)) == 5
    assert outcome(graph, conveyor.put(torch.ones(5))) == 5
    with pytest.raises(TransportError, match="and got a list"):
        graph.execute(conveyor.put([1]))


def test_promises_about_parts_of_the_input(pair):
    a, b = pair
    with InputNode() as inp:
        inp["fixed"].with_tensor_transport(_static_shape=True, _direct_return=True)
        tasks = [a.total.bind([inp["fixed"], inp["free"]]), b.kind.bind(inp["free"])]
        graph = MultiOutputNode(tasks).compile()
    two = torch.ones(2)
    assert conveyor.get(graph.execute(fixed=two, free=torch.ones(1)))[0] == 3
    assert conveyor.get(graph.execute(fixed=two, free=[torch.ones(7)]))[0] == 9
    with pytest.raises(TransportError, match=r"input\['fixed'\]: _static_shape"):
        graph.execute(fixed=torch.ones(3), free=two)
    with pytest.raises(TransportError, match=r"input\['fixed'\]: _direct_return"):
        graph.execute(fixed="x", free=two)
    assert conveyor.get(graph.execute(fixed=two, free=two))[0] == 4


def test_what_did_not_begin_was_not_the_first_execution(pair):
    a, _ = pair
    with InputNode() as inp:
        inp[0].with_tensor_transport(_static_shape=True)
        inp[1].with_tensor_transport(_static_shape=True)
        graph = a.total.bind([inp[0], inp[1]]).compile()
    with pytest.raises(conveyor.exceptions.SerializationError):
        graph.execute(torch.ones(2), (number for number in ()))
    assert outcome(graph, torch.ones(3), torch.ones(1)) == 4
    with pytest.raises(TransportError, match=r"input\[1\]: _static_shape"):
        graph.execute(torch.ones(3), torch.ones(2))
    assert outcome(graph, torch.ones(3), torch.ones(1)) == 4


def test_elements_have_promises_of_their_own(pair):
    a, b = pair
    with InputNode() as inp:
        left, right = a.both.options(num_returns=2).bind(inp)
        left.with_tensor_transport(_static_shape=True)
        graph = b.total.bind([left, right]).compile()
    assert outcome(graph, "floats") == 6
    assert re.search(r"both\[0\]: _static_shape", outcome(graph, "more"))
    assert outcome(graph, "floats") == 6


def test_parts_of_an_input_that_go_different_ways(pair):
    a, _ = pair
    with InputNode() as inp:
        inp[0].with_tensor_transport("shm")
        inp[1].with_tensor_transport(device="cpu")
        graph = a.total.bind([inp[0], inp[1], inp[2]]).compile()
    assert outcome(graph, torch.ones(1), torch.ones(2), torch.ones(3)) == 6


def test_a_promise_about_the_items_of_a_generator_is_refused(pair):
    a, _ = pair
    for promise in ({"_static_shape": True}, {"device": "cpu", "_direct_return": True}):
        with InputNode() as inp:
            items = a.numbers.bind(inp).with_tensor_transport(**promise)
            with pytest.raises(GraphError, match=r"numbers: .*about a generator"):
                items.compile()
    with InputNode() as inp:
        graph = a.numbers.bind(inp).with_tensor_transport(device="cpu").compile()
    assert [float(item.sum()) for item in graph.execute(3)] == [0, 2, 4]


def test_promises_of_a_function(pair):
    @conveyor.remote
    def ones(count):
        return torch.ones(count)

    with InputNode() as inp:
        graph = ones.bind(inp).with_tensor_transport(_static_shape=True).compile()
    assert conveyor.get(graph.execute(3)).tolist() == [1, 1, 1]
    with pytest.raises(TransportError, match="ones: _static_shape"):
        conveyor.get(graph.execute(2))


def test_a_device_that_is_not_here(pair):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    a, b = pair
    for device in ("cuda", "gpu"):
        with InputNode() as inp:
            made = a.make.bind(inp).with_tensor_transport(device=device)
            with pytest.raises(
                GraphError,
                match=f"device '{device}', and there is none on this machine: torch finds",
            ):
                b.kind.bind(made).compile()
    with InputNode() as inp:
        graph = b.kind.bind(a.make.bind(inp).with_tensor_transport(device="cpu")).compile()
    assert outcome(graph, "floats") == ("Tensor", "cpu")


@pytest.mark.parametrize("name", ["nccl", "accelerator", "cuda_ipc", "nixl", "gloo"])
def test_a_transport_that_is_not_here(pair, name):
    there = transport.get("nccl" if name == "accelerator" else name)
    if there is not None and there.viable() is None:
        pytest.skip("it is here")
    a, b = pair
    with InputNode() as inp:
        made = a.make.bind(inp).with_tensor_transport(name)
        with pytest.raises(GraphError, match=rf"make: .*'{name}'.*'auto', .*'shm'.* can be used"):
            b.kind.bind(made).compile()


def test_a_graph_that_is_deployed_anew_begins_anew(pair):
    a, b = pair
    with InputNode() as inp:
        made = a.make.bind(inp).with_tensor_transport(_static_shape=True)
        graph = b.total.bind(made).compile()
    assert outcome(graph, "floats") == 3
    conveyor.kill(a, no_restart=False)
    assert conveyor.get(graph.execute("more"), timeout=30) == 4
    assert "_static_shape" in outcome(graph, "floats")


@needs_gpu
@pytest.mark.parametrize("device", ["cuda", "gpu"])
def test_tensors_come_to_the_readers_gpu(pair, device):
    b = conveyor.remote(num_gpus=1)(Worker).remote()
    with InputNode() as inp:
        graph = b.kind.bind(inp.with_tensor_transport(device=device)).compile()
    assert outcome(graph, torch.zeros(10)) == ("Tensor", "cuda:0")
    graph.teardown()
    with InputNode() as inp:
        graph = b.kind.bind(inp.with_tensor_transport()).compile()
    assert outcome(graph, torch.zeros(10)) == ("Tensor", "cpu")
    assert outcome(graph, torch.zeros(10, device="cuda")) == ("Tensor", "cuda:0")
