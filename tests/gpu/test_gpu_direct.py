"""Tensors of a GPU that stay on the actor that made them."""

from __future__ import annotations

import statistics
import sys
import time

import cloudpickle
import pytest

import conveyor
from conveyor.experimental import wait_tensor_freed

torch = pytest.importorskip("torch")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("on_gpu")

MIB = 1 << 20


@conveyor.remote(num_gpus=0.1)
class Keeper:
    @conveyor.method(tensor_transport="auto")
    def make(self, seed, count):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.tensor = torch.randn(count, device="cuda", generator=generator)
        return {"whole": self.tensor, "part": self.tensor[10:20], "half": self.tensor.half()}

    @conveyor.method(tensor_transport="auto")
    def late(self, value):
        """A tensor whose values are there some time after the method has returned."""
        self.tensor = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(50_000_000)
        return self.tensor.fill_(value)

    def same(self, value, seed, count):
        wanted = self.make(seed, count)
        return all(v.is_cuda and torch.equal(v, wanted[k]) for k, v in value.items())

    def bounds(self, tensor):
        return int(tensor.min()), int(tensor.max())

    def freed(self):
        wait_tensor_freed(self.tensor, 10)
        return True

    def took(self, value):
        torch.cuda.synchronize()
        return len(value)

    @conveyor.method(tensor_transport="auto")
    def small(self):
        return torch.ones(1024, device="cuda")

    def watch(self):
        """Note what the parts of a fetch take, from now on."""
        from conveyor import _core
        from conveyor.device import cuda
        from conveyor.direct import devices, fetching

        self.taken = {}
        for owner, names in {
            devices.Devices: ("offer", "fetch", "forget"),
            devices: ("_fetch", "_filled", "wait_for_values"),
            fetching: ("fetch", "_out_of_band", "decode_with", "_fetched"),
            _core: ("read_peer_joined", "fetch_peer"),
            cuda: ("export", "_call"),
            cuda.Opened: ("__init__", "__del__"),
            cuda.CudaDevice: ("viable", "identity", "open_memory", "open_event", "empty"),
            cuda.CudaEvent: ("handle", "synchronize"),
        }.items():
            for name in names:
                self.note(owner, name)

    def note(self, owner, name):
        function = getattr(owner, name)
        whose = getattr(owner, "__name__", "").rpartition(".")[2]

        def noted(*args, **kwargs):
            begin = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                what = f"{whose}.{args[0] if name == '_call' else name}"
                self.taken.setdefault(what, []).append(time.perf_counter_ns() - begin)

        setattr(owner, name, noted)

    def noted(self):
        taken, self.taken = self.taken, {}
        return {what: (len(times), statistics.median(times) / 1e3) for what, times in taken.items()}


@pytest.fixture(scope="module")
def checkers(on_gpu):
    made = [Keeper.remote() for _ in range(2)]
    yield made
    for holder in made:
        conveyor.kill(holder)


def test_values_come_bit_by_bit(checkers):
    maker, other = checkers
    ref = maker.make.remote(5, 100_000)
    assert conveyor.get(other.same.remote(ref, 5, 100_000))
    assert ref.route() == "ipc"
    assert conveyor.get(ref)["part"].is_cuda
    del ref
    assert conveyor.get(maker.freed.remote())


def test_whoever_fetches_waits_for_the_values(checkers):
    maker, other = checkers
    for value in range(5):
        assert conveyor.get(other.bounds.remote(maker.late.remote(value))) == (value, value)


@pytest.mark.parametrize("nbytes", [4096, 64 * MIB, 1024 * MIB])
def test_how_long_a_fetch_takes(checkers, record, nbytes):
    maker, other = checkers
    ref = maker.make.remote(1, nbytes // 4)
    conveyor.wait([ref])
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        conveyor.get(other.took.remote(ref))
        times.append(time.perf_counter() - begin)
    record(
        f"direct, {nbytes} bytes and half of it again", f"{statistics.median(times) * 1e3:.2f} ms"
    )


def test_where_the_time_of_a_fetch_goes(on_gpu, record):
    """Of 4 KiB: the same value again and again, and one that is made for it."""
    maker, other = Keeper.remote(), Keeper.remote()
    ref = maker.small.remote()
    conveyor.wait([ref])
    fetches = {
        "the same": lambda: conveyor.get(other.took.remote(ref)),
        "a new one": lambda: conveyor.get(other.took.remote(maker.small.remote())),
    }
    for watched in (False, True):
        if watched:
            conveyor.get([maker.watch.remote(), other.watch.remote()])
        for what, fetch in fetches.items():
            times = []
            for _ in range(100):
                begin = time.perf_counter()
                fetch()
                times.append(time.perf_counter() - begin)
            record(f"direct, 4 KiB, {what}", f"{statistics.median(times) * 1e6:.0f} us")
            if watched:
                for who in (maker, other):
                    lines = conveyor.get(who.noted.remote()).items()
                    told = "".join(f"\n    {name} ({n}, {us:.1f})" for name, (n, us) in lines)
                    record("us in the maker" if who is maker else "us in the reader", told)
    for holder in (maker, other):
        conveyor.kill(holder)
