"""Memory that transports move: how tensors lie in it, and who has it when."""

import gc
import threading

import pytest

torch = pytest.importorskip("torch")

from conveyor.transport.base import TensorSpec  # noqa: E402
from conveyor.transport.packing import Layout  # noqa: E402
from conveyor.transport.pool import Pool  # noqa: E402


def of(tensors):
    return Layout.of([TensorSpec.of(tensor) for tensor in tensors])


def test_tensors_come_out_as_they_went_in():
    tensors = [
        torch.arange(5, dtype=torch.uint8),
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 4),
        torch.arange(6).reshape(2, 3).to(torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.ones(2, requires_grad=True),
    ]
    layout = of(tensors)
    memory = torch.full((layout.size + 10,), 255, dtype=torch.uint8)
    layout.fill(memory, tensors)
    for tensor, got in zip(tensors, layout.open(memory), strict=True):
        assert torch.equal(got, tensor)
        assert got.dtype == tensor.dtype
    assert memory[layout.size :].eq(255).all()


def test_each_tensor_begins_where_any_dtype_may():
    layout = of([torch.zeros(3, dtype=torch.uint8), torch.zeros(2), torch.zeros(1)])
    assert layout.begins == (0, 64, 128)
    assert layout.size == 132


def test_nothing_needs_no_memory():
    assert of([]).size == 0
    assert of([torch.empty(0)]).size == 0


def test_memory_is_used_again_once_nothing_holds_it():
    pool = Pool(keep=2)
    first = pool.take(1 << 20)
    address = first.data_ptr()
    part = first[10:20].view(5, 2)
    del first
    gc.collect()
    second = pool.take(1 << 20)
    assert second.data_ptr() != address
    part.fill_(7)
    assert not second.eq(7).any()
    del part
    assert pool.take(1 << 20).data_ptr() == address


def test_memory_that_is_much_too_large_is_left_for_others():
    pool = Pool(keep=2)
    large = pool.take(64 << 20)
    address = large.data_ptr()
    del large
    small = pool.take(1 << 20)
    assert small.data_ptr() != address
    assert pool.take(40 << 20).data_ptr() == address


def test_a_pool_keeps_so_much_and_when_it_is_closed_nothing():
    pool = Pool(keep=2)
    held = [pool.take(1 << 20) for _ in range(4)]
    last = held.pop()
    held.clear()
    assert len(pool._free) == 2
    pool.close()
    assert not pool._free
    assert last.fill_(1).sum() == 1 << 20
    del last
    assert not pool._free


def test_any_thread_may_let_go():
    pool = Pool(keep=3)
    box = [pool.take(1 << 20)]
    address = box[0].data_ptr()
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert pool.take(1 << 20).data_ptr() == address


def test_more_than_there_is():
    with pytest.raises(MemoryError, match="no memory for"):
        Pool(keep=1).take(1 << 60)
