"""Tensors of a device go wherever values go, by way of the host, and come back to such a device."""

import pickle
import subprocess
import sys
import time

import pytest

import conveyor
from conveyor import device as devices
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import GraphError, SerializationError, TransportError

torch = pytest.importorskip("torch")
pytest.importorskip("numpy")

import accelerator  # noqa: E402

PRELOAD = ["torch"]
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]

MIB = 1 << 20


class Marked(torch.Tensor):
    pass


def zoo(where):
    base = torch.arange(12.0).to(where).reshape(3, 4)
    return {
        "views": [base, base[1], base.t()],
        "parameter": torch.nn.Parameter(torch.ones(2).to(where), requires_grad=False),
        "module": torch.nn.Linear(2, 2).to(where),
        "subclass": torch.arange(3.0).to(where).as_subclass(Marked),
        "expanded": torch.ones(1).to(where).expand(1 << 20),
        "every other": base[:, ::2],
        "empty": torch.empty(0, 3).to(where),
        "half": torch.ones(4).to(where).bfloat16(),
        "conjugate": torch.tensor([1 + 2j]).to(where).conj(),
        "leaf": torch.ones(2).to(where).requires_grad_(),
        "large": torch.arange(1 << 18).to(where),
        "on the host": torch.ones(3),
    }


def oddities(value, where):
    """What has not come as it was sent, or not to where it was to come."""
    views = value["views"]
    views[1][0] = 50
    right = {
        "views": views[0][1, 0].item() == views[2][0, 1].item() == 50,
        "parameter": type(value["parameter"]) is torch.nn.Parameter,
        "module": value["module"].weight.requires_grad
        and value["module"](torch.ones(1, 2).to(where)).shape == (1, 2),
        "subclass": type(value["subclass"]) is Marked and value["subclass"].tolist() == [0, 1, 2],
        "expanded": value["expanded"].stride() == (0,) and value["expanded"].shape == (1 << 20,),
        "every other": value["every other"].tolist() == [[0, 2], [50, 6], [8, 10]],
        "empty": tuple(value["empty"].shape) == (0, 3),
        "half": value["half"].dtype is torch.bfloat16 and value["half"].float().sum().item() == 4,
        "conjugate": value["conjugate"].tolist() == [1 - 2j],
        "leaf": value["leaf"].is_leaf and value["leaf"].requires_grad,
        "large": value["large"].cpu().equal(torch.arange(1 << 18)),
    }
    wrong = [what for what, as_sent in right.items() if not as_sent]
    host = "cpu" if where == "cpu" else str(value.pop("on the host").device)
    wrong += [] if host == "cpu" else ["on the host"]
    for what, part in value.items():
        tensor = part[0] if what == "views" else part.weight if what == "module" else part
        if tensor.device.type != torch.device(where).type:
            wrong.append(f"{what} on {tensor.device}")
    return wrong


class Worker:
    def make(self, where="sim"):
        accelerator.install()
        return zoo(where)

    def makes(self, count):
        accelerator.install()
        for number in range(count):
            yield torch.full((4,), float(number), device="sim")

    def send_zoo(self, sender):
        with sender:
            sender.send(self.make())

    def oddities(self, value, where="sim"):
        return oddities(value, where)

    def places(self, *values):
        return [str(value.device) for value in values]

    def late(self, seconds):
        """A tensor whose values are there later."""
        accelerator.install()
        made = torch.zeros(1000, device="sim")
        accelerator.kernel(seconds, lambda t: t.fill_(7), made)
        return made

    def doubled(self, value):
        return value * 2

    def total(self, value):
        return value.sum().item()

    def broken(self, number):
        def broken():
            raise ArithmeticError("in a kernel")

        accelerator.install()
        made = torch.ones(number, device="sim")
        if number == 13:
            accelerator.kernel(0, broken)
        return made

    def fill(self, leave):
        """Take the device's memory, but for ``leave`` bytes; none: give it back."""
        sim = accelerator.install()
        self.taken = sim.empty(sim.memory()[0] - leave) if leave is not None else None
        sim.synchronize()


Remote = conveyor.remote(Worker)


@pytest.fixture(scope="module", params=["local", "inline"])
def engines(request, leaves_nothing):
    sim = accelerator.install()
    torch.zeros(1, device="sim"), torch.zeros(1, device="sim:1")
    with leaves_nothing():
        conveyor.init(engine=request.param, preload=PRELOAD)
        actors = Remote.remote(), Remote.remote()
        yield actors
        del actors
        conveyor.shutdown()
        for index in range(2):
            sim.synchronize(index)


@pytest.fixture
def pair(engines):
    return engines


def outcome(graph, *args):
    try:
        return conveyor.get(graph.execute(*args), timeout=30)
    except (TransportError, SerializationError) as error:
        return str(error).splitlines()[0]


def test_over_edges_inputs_and_results(pair):
    a, b = pair
    with InputNode() as inp:
        made = a.make.bind()
        graph = MultiOutputNode([b.oddities.bind(made), b.oddities.bind(inp), made]).compile()
    for _ in range(2):
        at_reader, of_input, result = conveyor.get(graph.execute(zoo("sim")), timeout=60)
        assert at_reader == of_input == oddities(result, "sim") == []


def test_in_calls_streams_and_channels(pair):
    a, b = pair
    assert conveyor.get(b.oddities.remote(a.make.remote()), timeout=60) == []
    assert conveyor.get(b.oddities.remote(zoo("sim:1"), "sim:1"), timeout=60) == []
    assert oddities(conveyor.get(conveyor.put(zoo("sim"))), "sim") == []
    got = [value.tolist() for value in a.makes.remote(3)]
    with InputNode() as inp:
        graph = a.makes.bind(inp).compile()
    assert got == [v.tolist() for v in graph.execute(3)] == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    graph.teardown()
    sender, receiver = conveyor.channel.open()
    sent = a.send_zoo.remote(sender)
    assert oddities(receiver.receive(timeout=60), "sim") == []
    conveyor.get(sent)


def test_a_tensor_comes_to_the_device_that_it_was_on(pair):
    _, b = pair
    one, two = torch.ones(2, device="sim:0"), torch.ones(2, device="sim:1")
    with InputNode() as inp:
        graph = b.places.bind(inp[0], inp[1], two, torch.ones(1)).compile()
    expected = ["sim:0", "sim:1", "sim:1", "cpu"]
    assert conveyor.get(graph.execute(one, two), timeout=30) == expected
    assert conveyor.get(b.places.remote(two, one), timeout=30) == ["sim:1", "sim:0"]


def test_values_that_are_not_there_yet_are_waited_for(pair):
    a, b = pair
    with InputNode() as inp:
        graph = b.total.bind(b.doubled.bind(a.late.bind(inp))).compile()
    assert [conveyor.get(graph.execute(s), timeout=30) for s in (0.05, 0.0)] == [14000, 14000]


@pytest.mark.parametrize(("hint", "where"), [("sim", "sim:0"), ("cpu", "cpu"), ("default", None)])
def test_a_hint_says_where_the_readers_get_them(pair, hint, where):
    a, b = pair
    with InputNode() as inp:
        marked = inp.with_tensor_transport(device=hint)
        graph = b.places.bind(marked).compile()
    for made in (torch.ones(2), torch.ones(2, device="sim")):
        expected = where or str(made.device)
        assert conveyor.get(graph.execute(made), timeout=30) == [expected]
    graph.teardown()
    with InputNode() as inp:
        made = a.make.bind(inp).with_tensor_transport(device=hint)
        graph = b.oddities.bind(made, hint if hint != "default" else "sim").compile()
    result = conveyor.get(graph.execute("sim"), timeout=30)
    assert result == (["on the host"] if hint == "sim" else [])


def test_static_shapes_know_the_device(pair):
    _, b = pair
    with InputNode() as inp:
        graph = b.places.bind(inp.with_tensor_transport(_static_shape=True)).compile()
    assert outcome(graph, torch.ones(2, device="sim")) == ["sim:0"]
    assert "on cpu" in outcome(graph, torch.ones(2))
    assert outcome(graph, torch.ones(2, device="sim")) == ["sim:0"]


def test_a_kernel_that_fails_fails_its_execution(pair):
    a, b = pair
    with InputNode() as inp:
        graph = b.total.bind(a.broken.bind(inp)).compile()
    assert outcome(graph, 3) == 3
    with pytest.raises(Exception, match=r"ArithmeticError|in a kernel"):
        conveyor.get(graph.execute(13), timeout=30)
    assert outcome(graph, 5) == 5


def test_a_reader_without_room_says_so(pair):
    _, b = pair
    with InputNode() as inp:
        graph = b.total.bind(inp.with_tensor_transport(device="sim")).compile()
    assert outcome(graph, torch.ones(8)) == 8
    conveyor.get(b.fill.remote(MIB), timeout=30)
    large = torch.ones(MIB)
    with pytest.raises(Exception, match="sim:0 is out of memory: 4194304 bytes were asked for"):
        conveyor.get(graph.execute(large), timeout=30)
    conveyor.get(b.fill.remote(None), timeout=30)
    assert outcome(graph, large) == MIB


def test_a_kind_that_nobody_knows_is_refused(pair):
    with pytest.raises(ValueError, match=r"unknown device 'tpu'; known are default, cpu, .*, sim"):
        InputNode().with_tensor_transport(device="tpu")
    with InputNode() as inp:
        marked = pair[1].places.bind(inp.with_tensor_transport("gloo", device="sim"))
        with pytest.raises(GraphError, match="'gloo'"):
            pair[0].places.bind(marked).compile()


def test_a_kind_that_is_registered_no_more_is_refused(pair):
    tensor = torch.ones(2, device="sim")
    sim = devices.get("sim")
    devices.unregister("sim")
    try:
        with pytest.raises(SerializationError, match=r"nobody has registered devices of this kind"):
            conveyor.put([tensor])
        with pytest.raises(SerializationError, match=r"nobody has registered devices of this kind"):
            conveyor.put(tensor)
    finally:
        devices.register(sim)


def test_an_actor_ends_although_its_device_works(scripts):
    out = scripts.run(
        """
        import time

        import conveyor
        import accelerator

        @conveyor.remote
        class Busy:
            def begin(self):
                sim = accelerator.install()
                accelerator.kernel(1000)
                side = sim.new_stream()
                side.wait_stream(sim.current_stream())
                with sim.using(side):
                    accelerator.kernel(1000)
                return sim.current_stream().query(), side.query()

        conveyor.init(grace_seconds=30)
        busy = Busy.remote()
        print(conveyor.get(busy.begin.remote()))
        begin = time.monotonic()
        conveyor.shutdown()
        print(time.monotonic() - begin < 20)
        """
    )
    assert out == "(False, False)\nTrue\n"


def test_memory_and_events_of_another_process():
    """A handle brings another process's memory, in step with its stream, and says when it has ended."""
    sim = accelerator.install()
    program = """
import pickle, sys, torch
import accelerator
sim = accelerator.install()
tensor = torch.zeros(8, device="sim:1")
sim.synchronize(1)
with sim.using(sim.current_stream(1)):
    event = sim.new_event(1, interprocess=True)
    accelerator.kernel(0.3, lambda t: t.fill_(5), tensor)
    event.record(sim.current_stream(1))
    never = sim.new_event(1, interprocess=True)
    accelerator.kernel(1000)
    never.record(sim.current_stream(1))
sys.stdout.buffer.write(pickle.dumps((sim.export_memory(tensor), event.handle(), never.handle())))
sys.stdout.flush()
sys.stdin.readline()
"""
    peer = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        memory, event, never = pickle.load(peer.stdout)
        opened = sim.open_memory(memory).view(torch.float32)
        assert opened.device == torch.device("sim", 1)
        assert "in the memory of another process" in sim.cannot_export(opened)
        stream = sim.new_stream(1)
        with sim.using(stream):
            stream.wait_event(sim.open_event(event))
            assert (opened + 1).tolist() == [6.0] * 8
            lost = sim.open_event(never)
            stream.wait_event(lost)
        assert not stream.query()
    finally:
        peer.kill()
        peer.wait()
        peer.stdin.close()
        peer.stdout.close()
    time.sleep(0.2)
    assert not stream.query()  # an event of a process that was killed never happens, as in CUDA
    sim.current_stream(1).synchronize()  # and others of this process go on
    lost.word.tell(lost.word.recorded)  # or nobody could wait for the device any more
    stream.synchronize()
    assert opened.tolist() == [5.0] * 8  # the memory stays with who has opened it
    del opened
    with pytest.raises(RuntimeError, match=rf"the memory of process {peer.pid} cannot be opened"):
        sim.open_memory(memory)
