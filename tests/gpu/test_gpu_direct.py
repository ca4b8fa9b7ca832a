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


@pytest.fixture(scope="module")
def keepers(on_gpu):
    made = [Keeper.remote() for _ in range(2)]
    yield made
    for keeper in made:
        conveyor.kill(keeper)


def test_values_come_bit_by_bit(keepers):
    maker, other = keepers
    ref = maker.make.remote(5, 100_000)
    assert conveyor.get(other.same.remote(ref, 5, 100_000))
    assert ref.route() == "ipc"
    assert conveyor.get(ref)["part"].is_cuda
    del ref
    assert conveyor.get(maker.freed.remote())


def test_whoever_fetches_waits_for_the_values(keepers):
    maker, other = keepers
    for value in range(5):
        assert conveyor.get(other.bounds.remote(maker.late.remote(value))) == (value, value)


@pytest.mark.parametrize("nbytes", [4096, 64 * MIB, 1024 * MIB])
def test_how_long_a_fetch_takes(keepers, record, nbytes):
    maker, other = keepers
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
