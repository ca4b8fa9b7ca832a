"""Tensors of a device from actor to actor: what is enqueued where, what overlaps, and what goes wrong."""

from __future__ import annotations

import gc
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
from integration_helpers import freeze, hold, measured

import conveyor
from conveyor import testing, transport
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.device.cuda import CudaDevice
from conveyor.exceptions import (
    ActorDiedError,
    DeadlineExceededError,
    ExecutionCancelledError,
    GraphError,
    TransportError,
    WaitTimeoutError,
)
from conveyor.transport.nccl import NcclTransport

torch = pytest.importorskip("torch")
accelerator = pytest.importorskip("accelerator")
from accelerator.streams import SimEvent  # noqa: E402

if accelerator.cannot_simulate() is not None:
    pytest.skip(accelerator.cannot_simulate(), allow_module_level=True)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("session")]

PRELOAD = ["torch", "accelerator"]

SIDE = 512
SIZE = SIDE * SIDE * 4
COPY, KERNEL = 0.04, 0.06
#: What a maker that comes late takes, and what its reader has to do meanwhile.
LATE, BUSY = 0.06, 0.1
#: Copies between devices take COPY for a tensor of the program.
SETTINGS = accelerator.Settings(bandwidth=SIZE / COPY)


@conveyor.remote(num_cpus=0)
class TorchTensorWorker:
    """That of the page "Overlapping communication and computation", on the simulated accelerator."""

    def __init__(self, index=0):
        self.device = f"sim:{index}"
        self.kept = None
        accelerator.install(SETTINGS)

    def send(self, shape, dtype, value):
        return torch.ones(shape, dtype=dtype, device=self.device) * value

    def recv_and_matmul(self, two_d_tensor):
        assert two_d_tensor.dim() == 2
        assert two_d_tensor.device.type == "sim"
        accelerator.kernel(KERNEL)
        return two_d_tensor[0][0].item(), two_d_tensor.shape, two_d_tensor.dtype

    def pair(self, value):
        """A tensor of the device, and one of the CPU."""
        on_device = torch.full((1000,), float(value), device=self.device)
        return {"device": on_device, "cpu": torch.full((10,), float(value)), "empty": None}

    def sums(self, value):
        places = value["device"].device.type, value["cpu"].device.type
        return places, float(value["device"].sum()), float(value["cpu"].sum())

    def late(self, value):
        """A tensor whose values are written long after the method has returned."""
        made = torch.zeros(SIDE, SIDE, device=self.device)
        accelerator.kernel(0.2, lambda tensor: tensor.fill_(value), made)
        return made

    def again(self, value):
        """A tensor that the next call writes to."""
        if not hasattr(self, "buffer"):
            self.buffer = torch.zeros(SIDE, SIDE, device=self.device)
        return self.buffer.fill_(value)

    def slow(self, value):
        """A tensor that is made long after it was asked for."""
        time.sleep(LATE)
        return torch.full((SIDE, SIDE), float(value), device=self.device)

    def busy(self, value):
        """Work on the device that is waited for."""
        accelerator.kernel(BUSY)
        accelerator.install().synchronize()
        return value

    def join(self, value, tensor):
        return value + tensor[0, 0].item()

    def held(self, value, begun, go):
        """A tensor that is made when it may be."""
        Path(begun).touch()
        while not os.path.exists(go):
            time.sleep(0.002)
        return torch.full((SIDE, SIDE), float(value), device=self.device)

    def far_behind(self, seconds=LATE * 5):
        """Work on the device that is not waited for."""
        accelerator.kernel(seconds)

    def behind(self, go):
        """What is enqueued from now on begins when there is a file ``go``."""
        accelerator.kernel(0, lambda: hold(go))

    def after(self, value, seconds):
        """A tensor that is written when so much time has gone by."""
        made = torch.zeros(SIDE, SIDE, device=self.device)
        accelerator.kernel(seconds, lambda tensor: tensor.fill_(value), made)
        return made

    def fresh(self, value):
        return torch.full((SIDE, SIDE), float(value), device=self.device)

    def keep_first(self, tensor):
        """Hold a tensor that nobody has looked at."""
        if self.kept is None:
            self.kept = tensor

    def kept_ends(self):
        kept, self.kept = self.kept, None
        return self.ends(kept)

    def ends(self, tensor):
        return tensor[0, 0].item(), tensor[-1, -1].item()

    def pid(self):
        return os.getpid()

    def free(self):
        """How much memory of the device is free."""
        made = accelerator.install()
        made.synchronize(0)
        return made.memory(0)[0]

    def told_of(self):
        """How many events there are here of which other processes have been told."""
        gc.collect()
        events = [one for one in gc.get_objects() if type(one) is SimEvent]
        return sum(one._interprocess for one in events)

    def nothing(self, *_):
        return None


@pytest.fixture(scope="module", autouse=True)
def simulated():
    """The accelerator in this process. Its memory stays when a session ends, so it is there before."""
    device = accelerator.install()
    torch.zeros(1, device="sim").cpu()
    transport.register(NcclTransport(device, accelerator.SimGroup, "sim_nccl"))
    yield
    transport.unregister("sim_nccl")


@pytest.fixture(scope="module")
def workers(session):
    made = [TorchTensorWorker.remote(1) for _ in range(3)]
    made.append(TorchTensorWorker.remote())
    yield made
    for worker in made:
        conveyor.kill(worker)


def program(workers, overlap, name="sim_ipc"):
    *senders, receiver = workers
    shape, dtype = (SIDE, SIDE), torch.float32
    with InputNode() as inp:
        branches = [sender.send.bind(shape, dtype, inp) for sender in senders]
        branches = [
            branch.with_tensor_transport(name, _static_shape=True, _direct_return=True)
            for branch in branches
        ]
        dag = MultiOutputNode([receiver.recv_and_matmul.bind(branch) for branch in branches])
    return dag.experimental_compile(_overlap_gpu_communication=overlap)


def usual_time(graph):
    times = []
    for i in range(3):
        begin = time.monotonic()
        assert conveyor.get(graph.execute(i)) == [(i, (SIDE, SIDE), torch.float32)] * 3
        times.append(time.monotonic() - begin)
    return statistics.median(times)


@pytest.mark.parametrize("check", testing.transport_checks("sim"), ids=str)
@pytest.mark.parametrize("name", ["sim_ipc", "sim_nccl"])
def test_conformance(name, check):
    check.run(name)


def test_what_has_come_outlives_a_teardown_before_it_was_copied(workers):
    """The writer makes the next tensor, so it has not heard of the reader's copy when it is told to stop; and
    the copy is enqueued behind other work of the reader's device."""
    sender, receiver = workers[:2]
    with InputNode() as inp:
        tensor = sender.slow.bind(inp).with_tensor_transport("sim_ipc")
        dag = receiver.keep_first.bind(tensor)
    for value in range(3):
        graph = dag.compile()
        conveyor.get(receiver.far_behind.remote())
        first, _ = graph.execute(value), graph.execute(value + 1)
        conveyor.get(first)
        graph.teardown()
        assert conveyor.get(receiver.kept_ends.remote()) == (value, value)


@pytest.mark.alone
@measured
def test_overlap_gains_what_the_simulation_says(workers):
    took, said = {}, {}
    for overlap in (False, True):
        with program(workers, overlap) as graph:
            out_of_band = [edge for edge in graph.plan.edges if edge.out_of_band]
            durations = {"send": 0, "recv_and_matmul": KERNEL}
            sizes = {edge.source: COPY for edge in out_of_band}
            foreseen = graph.simulate(durations, sizes=sizes, bandwidth=1, executions=1)
            said[overlap] = foreseen.latency_p50
            took[overlap] = min(usual_time(graph) for _ in range(2))
            where = "on streams of its own" if overlap else "on the stream of the program"
            assert graph.explain().count(where) == len(out_of_band) == 3
    assert said[True] < said[False]
    # A machine that is busy makes both longer.
    for overlap in (False, True):
        assert said[overlap] * 0.95 < took[overlap] < said[overlap] * 1.3
    assert took[True] < took[False] - COPY


@pytest.mark.alone
@measured
def test_a_frame_that_comes_late_costs_nothing(workers):
    """The reader computes what is ready, and does not stand at the early receive meanwhile."""
    maker, *_, reader = workers
    with InputNode() as inp:
        tensor = maker.slow.bind(inp).with_tensor_transport("sim_ipc")
        dag = reader.join.bind(reader.busy.bind(inp), tensor)
    took = {}
    for overlap in (False, True):
        with dag.compile(overlap=overlap, depth=1) as graph:
            times = []
            for n in range(4):
                begin = time.monotonic()
                assert conveyor.get(graph.execute(n)) == 2 * n
                times.append(time.monotonic() - begin)
            took[overlap] = min(times)
            assert ("try " in graph.explain()) == overlap
            sizes = {edge.source: COPY for edge in graph.plan.edges if edge.out_of_band}
            durations = {"slow": LATE, "busy": BUSY, "join": 0}
            said = graph.simulate(durations, sizes=sizes, bandwidth=1, executions=4).latency_p50
            assert took[overlap] == pytest.approx(said, rel=0.1)
            assert said == pytest.approx(BUSY + COPY, rel=0.06)
    # To wait for the frame first would take LATE - COPY longer.
    assert took[True] < took[False] + (LATE - COPY) / 2


both = pytest.mark.parametrize("name", ["sim_ipc", "sim_nccl"])


@both
@pytest.mark.parametrize("overlap", [False, True])
def test_no_wait_is_missing(workers, name, overlap):
    a, *_, b = workers
    for method in ("late", "again"):
        with InputNode() as inp:
            made = getattr(a, method).bind(inp).with_tensor_transport(name)
            dag = b.ends.bind(made)
        with dag.compile(overlap=overlap, depth=4) as graph:
            refs = [graph.execute(n) for n in range(1, 6)]
            assert conveyor.get(refs, timeout=30) == [(n, n) for n in range(1, 6)]


@both
def test_other_tensors_of_a_value_go_in_its_frame(workers, name):
    a, *_, b = workers
    with InputNode() as inp:
        dag = b.sums.bind(a.pair.bind(inp).with_tensor_transport(name))
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(2)) == (("sim", "cpu"), 2000.0, 20.0)


def test_it_is_what_a_mark_without_a_name_means(workers):
    a, *_, b = workers
    with InputNode() as inp:
        dag = b.sums.bind(a.pair.bind(inp.with_tensor_transport()).with_tensor_transport())
    with dag.compile() as graph:
        told = graph.explain()
        assert "sim_ipc, depth 16: same host, tensors of 'sim'; by the host's memory where" in told
        assert conveyor.get(graph.execute(3)) == (("sim", "cpu"), 3000.0, 30.0)
    with InputNode() as inp:
        cpu = b.sums.bind(a.pair.bind(inp).with_tensor_transport(device="cpu"))
    with cpu.compile() as graph:
        assert "sim_ipc" not in graph.explain()


def test_only_actors_take_part(workers):
    with InputNode() as inp:
        dag = workers[0].send.bind((2, 2), torch.float32, inp).with_tensor_transport("sim_ipc")
    with pytest.raises(GraphError, match=r"'sim_ipc'.* only actors take part"):
        dag.compile()


def test_one_without_a_device_is_refused(workers):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    a, *_, b = workers
    with InputNode() as inp:
        dag = b.sums.bind(a.pair.bind(inp).with_tensor_transport("cuda_ipc"))
    with pytest.raises(GraphError, match="'cuda_ipc', which cannot be used: torch finds no GPU"):
        dag.compile()


def test_an_actor_that_asks_for_no_gpu_is_told_so(workers, monkeypatch):
    a, *_, b = workers
    with InputNode() as inp:
        dag = b.sums.bind(a.pair.bind(inp).with_tensor_transport("cuda_ipc"))
    monkeypatch.setattr(CudaDevice, "viable", lambda self: None)  # as if the driver saw one
    why = r"CUDA_VISIBLE_DEVICES is empty.*with num_gpus=1"
    with pytest.raises(TransportError, match=why), dag.compile() as graph:
        conveyor.get(graph.execute(1), timeout=60)


@pytest.mark.parametrize("overlap", [False, True])
def test_its_memory_is_given_back(workers, overlap, wait_until):
    a, *_, b = workers
    with InputNode() as inp:
        dag = b.sums.bind(a.pair.bind(inp).with_tensor_transport("sim_ipc"))
    before = None
    for _ in range(3):
        with dag.compile(overlap=overlap) as graph:
            refs = [graph.execute(n) for n in range(40)]
            assert conveyor.get(refs)[-1][1:] == (39000.0, 390.0)
        if before is None:
            before = conveyor.get([a.free.remote(), b.free.remote()])
    wait_until(lambda: conveyor.get([a.free.remote(), b.free.remote()]) >= before)


def test_events_outlive_the_graph_whose_other_end_may_still_ask_for_them(workers):
    a, *_, b = workers
    with InputNode() as inp:
        dag = b.ends.bind(a.again.bind(inp).with_tensor_transport("sim_ipc"))
    before = conveyor.get([a.told_of.remote(), b.told_of.remote()])
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(1), timeout=60) == (1, 1)
        during = conveyor.get([a.told_of.remote(), b.told_of.remote()])
    assert all(now > then for now, then in zip(during, before, strict=True))
    assert conveyor.get([a.told_of.remote(), b.told_of.remote()]) == during


@both
def test_a_frozen_writer_holds_nobody(workers, name):
    *_, b = workers
    frozen = TorchTensorWorker.remote()
    with InputNode() as inp:
        dag = b.ends.bind(frozen.late.bind(inp).with_tensor_transport(name))
    graph = dag.compile()
    assert conveyor.get(graph.execute(1), timeout=60) == (1, 1)
    pid = conveyor.get(frozen.pid.remote())
    freeze(pid)
    try:
        with pytest.raises(DeadlineExceededError):
            conveyor.get(graph.execute(2, deadline=0.2), timeout=60)
        assert conveyor.get(b.nothing.remote(), timeout=60) is None
    finally:
        os.kill(pid, signal.SIGCONT)
    graph.teardown()
    conveyor.kill(frozen)


@both
def test_a_frozen_reader_holds_nobody(workers, name):
    a, *_, b = workers
    frozen = TorchTensorWorker.remote()
    pid = conveyor.get(frozen.pid.remote())
    with InputNode() as inp:
        made = a.again.bind(inp).with_tensor_transport(name)
        dag = MultiOutputNode([frozen.ends.bind(made), b.ends.bind(made)])
    graph = dag.compile(overlap=True, depth=4, fail_fast=False)
    assert conveyor.get(graph.execute(1), timeout=60) == [(1, 1)] * 2
    freeze(pid)
    try:
        late = [graph.execute(n) for n in range(2, 4)]
        for n, (_, other) in enumerate(late, 2):
            assert conveyor.get(other, timeout=60) == (n, n)
        assert conveyor.get([a.nothing.remote(), b.nothing.remote()], timeout=60) == [None] * 2
        too_late = [graph.execute(n, deadline=0.5) for n in range(4, 6)]
        for stuck, _ in too_late:
            with pytest.raises(DeadlineExceededError):
                conveyor.get(stuck, timeout=60)
        assert not any(stuck.done() for stuck, _ in late)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [conveyor.get(stuck, timeout=60) for stuck, _ in late] == [(2, 2), (3, 3)]
    assert conveyor.get(graph.execute(7), timeout=60) == [(7, 7)] * 2
    graph.teardown()
    conveyor.kill(frozen)


@both
@pytest.mark.parametrize("method", ["held", "late"])
def test_a_cancelled_execution_leaves_the_others(workers, name, method, tmp_path, wait_until):
    """Before its tensors are sent, and while they are on their way."""
    a, *_, b = workers
    begun, go = str(tmp_path / "begun"), str(tmp_path / "go")
    with InputNode() as inp:
        given = [inp[i] for i in range(3)] if method == "held" else [inp]
        made = getattr(a, method).bind(*given).with_tensor_transport(name)
        dag = b.ends.bind(made)
    with dag.compile(overlap=True, depth=4) as graph:
        rest = [begun, go] if method == "held" else []
        refs = [graph.execute(n, *rest) for n in range(1, 4)]
        if method == "held":
            wait_until(lambda: os.path.exists(begun))
        refs[0].cancel()
        with pytest.raises(ExecutionCancelledError):
            conveyor.get(refs[0], timeout=60)
        Path(go).touch()
        # Kernels that are enqueued run to their end.
        assert conveyor.get(refs[1:], timeout=60) == [(2, 2), (3, 3)]
        assert conveyor.get(graph.execute(4, *rest), timeout=60) == (4, 4)


@both
def test_a_writer_that_dies_with_work_enqueued(workers, name):
    *_, b = workers
    mortal = TorchTensorWorker.remote()
    with InputNode() as inp:
        dag = b.ends.bind(mortal.late.bind(inp).with_tensor_transport(name))
    graph = dag.compile(depth=4)
    assert conveyor.get(graph.execute(1), timeout=60) == (1, 1)
    refs = [graph.execute(n) for n in range(4)]
    conveyor.kill(mortal)
    with pytest.raises(ActorDiedError):
        conveyor.get(refs[-1], timeout=60)
    assert conveyor.get(b.nothing.remote(), timeout=60) is None
    graph.teardown()


@pytest.mark.parametrize("overlap", [False, True])
def test_who_is_left_when_a_writer_dies_with_work_enqueued_goes_on(workers, overlap):
    """No stream of its waits for an event of the dead one, which never happens."""
    a, *_, b = workers
    mortal = TorchTensorWorker.remote()
    with InputNode() as inp:
        dag = b.ends.bind(mortal.after.bind(inp[0], inp[1]).with_tensor_transport("sim_ipc"))
    graph = dag.compile(overlap=overlap)
    assert conveyor.get(graph.execute(1, 0), timeout=60) == (1, 1)
    pid = conveyor.get(mortal.pid.remote())
    lost = graph.execute(2, 1000)
    assert conveyor.get(mortal.nothing.remote(), timeout=60) is None  # it has been sent
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        conveyor.get(lost, timeout=60)
    graph.teardown()
    conveyor.get(b.free.remote(), timeout=60)  # it waits for all that is enqueued
    with InputNode() as inp:
        dag = b.ends.bind(a.again.bind(inp).with_tensor_transport("sim_ipc"))
    with dag.compile(overlap=overlap) as other:
        assert conveyor.get(other.execute(3), timeout=60) == (3, 3)


def test_who_is_left_when_a_reader_dies_with_copies_enqueued_goes_on(workers, wait_until):
    a, *_, b = workers
    mortal = TorchTensorWorker.remote()
    pid = conveyor.get(mortal.pid.remote())
    before = conveyor.get(a.free.remote())
    with InputNode() as inp:
        dag = mortal.keep_first.bind(a.fresh.bind(inp).with_tensor_transport("sim_ipc"))
    graph = dag.compile(depth=2)
    conveyor.get(mortal.far_behind.remote(1000))
    for number in range(3):
        conveyor.get(graph.execute(number), timeout=60)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        conveyor.get(graph.execute(3), timeout=60)
    graph.teardown()
    wait_until(lambda: conveyor.get(a.free.remote(), timeout=60) >= before)
    with InputNode() as inp:
        dag = b.ends.bind(a.again.bind(inp).with_tensor_transport("sim_ipc"))
    with dag.compile() as other:
        assert conveyor.get(other.execute(3), timeout=60) == (3, 3)


def test_a_reader_is_not_far_ahead_of_its_device(workers, latches):
    """So the writer has as much memory for an edge as that is deep, and a little more."""
    a, *_ = workers
    reader, go = TorchTensorWorker.remote(), latches()
    with InputNode() as inp:
        dag = reader.nothing.bind(a.fresh.bind(inp).with_tensor_transport("sim_ipc"))
    with dag.compile(depth=2) as graph:
        conveyor.get(graph.execute(0), timeout=60)
        before = conveyor.get(a.free.remote())
        conveyor.get(reader.behind.remote(go.path))
        refs = []
        with pytest.raises(WaitTimeoutError, match="room"):
            refs.extend(graph.execute(number, timeout=0.5) for number in range(20))
        assert not refs[-1].done()
        least = conveyor.get(a.free.remote())
        go.open()
        conveyor.get(refs, timeout=60)
    assert before - least <= 10 * SIZE
    conveyor.kill(reader)


def test_two_that_send_to_each_other(workers):
    """A send that waits for its reader is on no stream of the program, so neither holds up the other."""
    a, *_, b = workers
    with InputNode() as inp:
        left = a.again.bind(inp).with_tensor_transport("sim_nccl")
        right = b.again.bind(inp).with_tensor_transport("sim_nccl")
        dag = MultiOutputNode([b.ends.bind(left), a.ends.bind(right)])
    with dag.compile(depth=4) as graph:
        refs = [graph.execute(n) for n in range(8)]
        assert conveyor.get(refs, timeout=30) == [[(n, n)] * 2 for n in range(8)]
        assert (
            graph.explain().count("sim_nccl, depth 4: asked for by with_tensor_transport; on st")
            == 2
        )
