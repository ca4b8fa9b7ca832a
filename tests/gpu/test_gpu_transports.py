"""Tensors of a GPU between actors on it: transfers, CUDA IPC, NCCL, and the program of overlap."""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time

import cloudpickle
import pytest

import conveyor
from conveyor import device as devices
from conveyor.dag import InputNode, MultiOutputNode

torch = pytest.importorskip("torch")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("on_gpu")

SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
MIB = 1 << 20
SIDE = 10000


@conveyor.remote(num_gpus=0.1)
class Worker:
    """All of them are on one GPU."""

    def __init__(self, environment=()):
        os.environ.update(environment)

    def make(self, seed, count):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        whole = torch.randn(count, device="cuda", generator=generator)
        return {"gpu": whole, "part": whole[10:20], "cpu": torch.arange(5), "half": whole.half()}

    def again(self, seed):
        """Memory that the next call writes to, some time after it has returned."""
        if not hasattr(self, "buffer"):
            self.buffer = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(20_000_000)
        return self.buffer.fill_(seed)

    def bounds(self, tensor):
        return int(tensor.min()), int(tensor.max())

    def same(self, value, seed, count):
        """Whether it is, bit by bit, what was made."""
        wanted = self.make(seed, count)
        return all(
            value[key].device.type == wanted[key].device.type
            and torch.equal(value[key], wanted[key])
            for key in wanted
        )

    def send(self, shape, dtype, value):
        return torch.ones(shape, dtype=dtype, device="cuda") * value

    def recv_and_matmul(self, two_d_tensor):
        assert two_d_tensor.device.type == "cuda"
        product = torch.matmul(two_d_tensor, two_d_tensor)
        return two_d_tensor[0][0].item(), two_d_tensor.shape, product.view(torch.int16).sum().item()

    def pins(self):
        return pins()

    def took(self, tensor):
        torch.cuda.synchronize()
        return tensor.numel()


@pytest.fixture(scope="module")
def workers(on_gpu):
    made = [Worker.remote({SHARE: "1"}) for _ in range(4)]
    yield made
    for worker in made:
        conveyor.kill(worker)


def test_between_host_and_device(record):
    device = devices.get("cuda")
    there = device.empty(256 * MIB)
    host = device.empty_pinned(256 * MIB)
    host.copy_(torch.randint(0, 255, (256 * MIB,), dtype=torch.uint8))
    back = device.empty_pinned(256 * MIB)
    stream = device.new_stream()
    for name, target, source in (("to device", there, host), ("to host", back, there)):
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            with device.using(stream):
                device.copy(target, source)
            stream.synchronize()
            times.append(time.perf_counter() - begin)
        gbytes = 256 * MIB / statistics.median(times) / 1e9
        record(f"256 MiB, pinned, {name}", f"{gbytes:.1f} GB/s")
    assert torch.equal(host, back)


def pins():
    from conveyor.codec.tensors import staging

    return staging.current().counts()[0]


def test_between_the_arena_and_the_device(workers, record):
    a, b, *_ = workers
    nbytes = 64 * MIB
    with InputNode() as inp:
        made = a.send.bind((nbytes,), torch.uint8, inp)
        graph = MultiOutputNode([b.bounds.bind(made), made]).compile()
    with graph:
        times = []
        for number in range(20):
            begin = time.perf_counter()
            bounds, here = conveyor.get(graph.execute(number))
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
            assert bounds == (number, number)
            assert here.device.type == "cuda"
            assert int(here.min()) == int(here.max()) == number
        seconds = statistics.median(times[5:])
        record("64 MiB in a frame, device to device", f"{seconds * 1e3:.2f} ms")
        record("64 MiB in a frame, device to device", f"{nbytes / seconds / 1e9:.1f} GB/s")
        assert all(conveyor.get([a.pins.remote(), b.pins.remote()]))
        assert pins()
    record_of_pinning(record, nbytes)


def record_of_pinning(record, nbytes):
    """What it costs to pin shared memory, small pages and huge ones."""
    device = devices.get("cuda")
    for name, advice in (("small pages", None), ("huge pages", 25)):
        with open(os.memfd_create("pinned"), "r+b") as file:
            file.truncate(nbytes)
            memory = mmap.mmap(file.fileno(), nbytes)
        memory.write(b"x" * nbytes)
        if advice is not None:
            try:
                memory.madvise(advice)  # MADV_COLLAPSE
            except OSError:
                continue
        view = torch.frombuffer(memory, dtype=torch.uint8)
        begin = time.perf_counter()
        device.pin(view.data_ptr(), nbytes)
        pinned = time.perf_counter()
        there = device.empty(nbytes)
        device.copy(there, view)
        device.synchronize()
        copied = time.perf_counter()
        device.unpin(view.data_ptr())
        unpinned = time.perf_counter()
        record(f"64 MiB, {name}, pinned", f"{(pinned - begin) * 1e3:.2f} ms")
        record(f"64 MiB, {name}, copied to device", f"{nbytes / (copied - pinned) / 1e9:.1f} GB/s")
        record(f"64 MiB, {name}, unpinned", f"{(unpinned - copied) * 1e3:.2f} ms")
        assert torch.equal(there.cpu(), view)


def test_a_failed_pin_leaves_no_error_behind():
    device = devices.get("cuda")
    with pytest.raises(RuntimeError, match="cudaHostRegister has failed"):
        device.pin(4096, 4096)  # nothing is mapped there
    assert torch.ones(4, device="cuda").sum().item() == 4


def routes():
    return ["auto", "cuda_ipc", "nccl"]


def skip_without(name):
    if name == "nccl":
        from conveyor.transport.nccl.group import can_share

        why_not = can_share()
        if why_not is not None:
            pytest.skip(f"two actors cannot be on one GPU: {why_not}")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", routes())
def test_values_come_bit_by_bit(workers, name, overlap):
    skip_without(name)
    a, b, *_ = workers
    with InputNode() as inp:
        made = a.make.bind(inp[0], inp[1]).with_tensor_transport(name)
        dag = b.same.bind(made, inp[0], inp[1])
    with dag.compile(overlap=overlap, depth=4) as graph:
        sizes = [100, 1000, MIB, 16 * MIB]
        refs = [graph.execute(n, size) for n, size in enumerate(sizes * 3)]
        assert conveyor.get(refs, timeout=120) == [True] * len(refs)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["cuda_ipc", "nccl"])
def test_no_wait_is_missing(workers, name, overlap):
    skip_without(name)
    a, b, *_ = workers
    with InputNode() as inp:
        dag = b.bounds.bind(a.again.bind(inp).with_tensor_transport(name))
    with dag.compile(overlap=overlap, depth=4) as graph:
        refs = [graph.execute(n) for n in range(20)]
        assert conveyor.get(refs, timeout=120) == [(n, n) for n in range(20)]


@pytest.mark.parametrize("name", ["cuda_ipc", "nccl"])
def test_how_long_a_transfer_takes(workers, name, record):
    skip_without(name)
    a, b, *_ = workers
    for size in (4096, 64 * MIB, 1024 * MIB):
        with InputNode() as inp:
            made = a.send.bind((size,), torch.uint8, inp).with_tensor_transport(name)
            dag = b.took.bind(made)
        with dag.compile(depth=1) as graph:
            times = []
            for n in range(10):
                begin = time.perf_counter()
                assert conveyor.get(graph.execute(n), timeout=120) == size
                times.append(time.perf_counter() - begin)
        record(f"{size} bytes made and sent by {name}", f"{statistics.median(times) * 1e3:.3f} ms")


@pytest.mark.parametrize("name", ["cuda_ipc", "nccl"])
def test_the_program_of_overlap(workers, name, record):
    skip_without(name)
    *senders, receiver = workers
    shape, dtype = (SIDE, SIDE), torch.float16
    took, came = {}, {}
    for overlap in (False, True):
        with InputNode() as inp:
            branches = [
                sender.send.bind(shape, dtype, inp).with_tensor_transport(
                    transport=name, _static_shape=True, _direct_return=True
                )
                for sender in senders
            ]
            dag = MultiOutputNode([receiver.recv_and_matmul.bind(one) for one in branches])
        with dag.experimental_compile(_overlap_gpu_communication=overlap) as graph:
            times, results = [], []
            for n in range(7):
                begin = time.perf_counter()
                results.append(conveyor.get(graph.execute(n), timeout=120))
                times.append(time.perf_counter() - begin)
        took[overlap], came[overlap] = statistics.median(times[2:]), results
        assert [[one[:2] for one in result] for result in results] == [
            [(n, shape)] * 3 for n in range(7)
        ]
    assert came[True] == came[False]
    gain = 1 - took[True] / took[False]
    record(
        f"003 over {name}, {SIDE} x {SIDE} float16",
        f"{took[False] * 1e3:.1f} ms without overlap, {took[True] * 1e3:.1f} ms with it: {gain:.0%} less",
    )
