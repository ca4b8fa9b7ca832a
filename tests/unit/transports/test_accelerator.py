"""The simulated accelerator: order, overlap, and what a missing wait does."""

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time

import pytest

from conveyor import device as devices

torch = pytest.importorskip("torch")
pytest.importorskip("numpy")

import accelerator  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]

MIB = 1 << 20


@pytest.fixture(scope="module")
def sim():
    found = accelerator.install()
    yield found
    found.synchronize(0)


@pytest.fixture
def gate(sim):
    """Holds up streams: a kernel that waits until the test lets it go."""
    opened = threading.Event()
    yield opened
    opened.set()
    sim.synchronize(0)


def hold(gate):
    accelerator.kernel(0, lambda: gate.wait(30))


def test_it_is_a_device_of_torch(sim):
    tensor = torch.arange(6.0, device="sim").view(2, 3)
    assert type(tensor) is torch.Tensor
    assert (tensor.device.type, tensor.device.index) == ("sim", 0)
    assert devices.of(tensor) is sim is devices.get("sim")
    assert (tensor.t() @ tensor).sum().item() == 3**2 + 12**2
    assert torch.equal((tensor * 2).cpu(), torch.arange(0, 12, 2.0).view(2, 3))
    assert tensor.to("sim:1").device.index == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.softmax(0),
        lambda x: x.t().contiguous(),
        lambda x: torch.cat([x, x]),
        lambda x: x[x > 2],
        lambda x: torch.nonzero(x),
        lambda x: torch.topk(x, 2).indices,
        lambda x: x.clone().fill_(7).add_(x),
        lambda x: torch.stack(torch._foreach_mul([x, x], 3)),
        lambda x: torch.complex(x, x).conj(),
        lambda x: x.bool(),
        lambda x: x.half() + 1,
        lambda x: x.cumsum(0),
        lambda x: torch.unique(x),
        lambda x: x[:, :0],
        lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
        lambda x: torch.empty(2, device=x.device).resize_(3, 3).copy_(x),
    ],
)
def test_operations_give_what_they_give_on_the_cpu(sim, make):
    given = torch.tensor([[3.0, 1, 2], [6, 5, 4], [9, 7, 8]])
    expected, got = make(given), make(given.to("sim"))
    assert got.device.type == "sim"
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(got.cpu(), expected)


def test_a_model_is_trained_as_on_the_cpu(scripts):
    # In a process of its own: torch counts its devices at the first backward().
    scripts.run(
        """
        import torch
        import accelerator

        def train(where):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            model = model.to(where)
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(5, 4).to(where)).square().sum().backward()
                optimizer.step()
            return [p.detach().cpu() for p in model.parameters()]

        accelerator.install()
        torch.testing.assert_close(train("sim"), train("cpu"))
        """
    )


def test_a_stream_does_its_work_in_order_and_the_host_goes_on(sim, gate):
    tensor = torch.zeros(4, device="sim")
    hold(gate)
    tensor.add_(1).mul_(10)
    assert not sim.current_stream().query()
    gate.set()
    assert tensor.tolist() == [10.0] * 4
    assert sim.current_stream().query()


def test_streams_overlap_and_work_on_one_does_not(sim):
    streams = [sim.new_stream() for _ in range(3)]
    with accelerator.watching() as works:
        for stream in streams:
            with sim.using(stream):
                accelerator.kernel(0.2)
        sim.synchronize()
        with sim.using(streams[0]):
            accelerator.kernel(0.01)
            accelerator.kernel(0.01)
        sim.synchronize()
    three, two = works[:3], works[3:]
    assert max(w.begin for w in three) < min(w.end for w in three)
    assert {w.stream for w in three} == {s.name for s in streams}
    assert all(w.end - w.begin >= 0.2 for w in three)
    assert two[0].end <= two[1].begin


def test_without_a_wait_the_values_are_wrong_and_with_one_they_are_right(sim, gate):
    side = sim.new_stream()
    with sim.using(side):
        hold(gate)
        made = torch.full((1000,), 3.0, device="sim")
    too_early = made + 1
    assert too_early.isnan().all().item()
    sim.current_stream().wait_stream(side)
    gate.set()
    assert (made + 1).eq(4).all().item()


def test_a_copy_that_nobody_waits_for_is_not_there(sim, gate):
    target = sim.empty_pinned(4).fill_(0)
    source = torch.full((4,), 7, dtype=torch.uint8, device="sim")
    hold(gate)
    sim.copy(target, source)
    event = sim.current_stream().record()
    assert target.tolist() == [0] * 4
    assert not event.query()
    gate.set()
    event.synchronize()
    assert target.tolist() == [7] * 4


def test_a_copy_from_memory_that_is_not_pinned_is_waited_for(sim):
    source = torch.full((4,), 7, dtype=torch.uint8, device="sim")
    accelerator.kernel(0.02)
    assert torch.empty(4, dtype=torch.uint8).copy_(source, non_blocking=True).tolist() == [7] * 4


def test_memory_that_is_freed_too_early_is_seen(sim, gate):
    side = sim.new_stream()
    results = []
    for keep in (False, True):
        tensor = torch.full((100,), 5.0, device="sim")
        sim.synchronize()
        gate.clear()
        with sim.using(side):
            hold(gate)
            result = tensor + 1
        if keep:
            sim.keep(tensor, side)
        del tensor
        sim.current_stream().synchronize()
        gate.set()
        side.synchronize()
        results.append(result.cpu())
    assert results[0].isnan().all()
    assert results[1].eq(6).all()


def test_an_event_can_be_recorded_again(sim, gate):
    event = sim.new_event()
    assert event.query()
    event.record()
    event.synchronize()
    hold(gate)
    event.record()
    assert not event.query()
    gate.set()
    event.synchronize()
    assert event.query()


def test_kernels_take_the_time_that_they_are_given(sim):
    def seconds(name, shapes):
        return 0.05 if name == "add" and shapes[0] == (2, 2) else 0

    tensor = torch.zeros(2, 2, device="sim")
    sim.synchronize()
    with accelerator.kernel_time(seconds), accelerator.watching() as works:
        _ = tensor + tensor
        _ = tensor[0] + tensor[0]
        sim.synchronize()
    assert [w.name for w in works] == ["add", "add"]
    assert works[0].end - works[0].begin >= 0.05
    with accelerator.kernel_time(0.03), accelerator.watching() as works:
        tensor.mul_(2)
        sim.synchronize()
    assert works[0].end - works[0].begin >= 0.03


def test_an_error_of_a_kernel_reaches_who_waits_and_is_told_once(sim):
    def broken():
        raise ArithmeticError("in a kernel")

    accelerator.kernel(0, broken)
    with pytest.raises(ArithmeticError, match="in a kernel"):
        sim.current_stream().synchronize()
    sim.current_stream().synchronize()


def test_memory_ends_and_comes_back(sim):
    free, there = sim.memory(1)
    assert there == 256 * MIB
    taken = [sim.empty(64 * MIB, 1) for _ in range(free // (64 * MIB))]
    with pytest.raises(torch.OutOfMemoryError, match=r"sim:1 is out of memory: 67108864 bytes"):
        sim.empty(64 * MIB, 1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(64 * MIB, dtype=torch.uint8, device="sim:1")
    taken.pop()
    with sim.using(sim.new_stream(1)):
        accelerator.kernel(0.05)  # what is freed on a busy stream is waited for
        taken.append(torch.empty(16, device="sim:1"))
    taken.clear()
    assert sim.empty(there // 2, 1).numel() == there // 2
    sim.synchronize(1)
    assert sim.memory(1)[0] == free


def test_tensors_of_two_devices_do_not_meet(sim):
    one, two = torch.ones(2, device="sim"), torch.ones(2, device="sim:1")
    for other in (two, torch.ones(2)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            _ = one + other
    with pytest.raises(RuntimeError, match="there is no device sim:2"):
        torch.empty(1, device="sim:2")
    with pytest.raises(ValueError, match="one simulated device, not of sim:0, sim:1"):
        accelerator.kernel(0, None, one, two)
    with pytest.raises(ValueError, match="one simulated device, not of cpu"):
        accelerator.kernel(0, None, torch.ones(1))


def test_pinned_memory_is_known_and_forgotten(sim):
    pinned = sim.empty_pinned(100)
    address = pinned.data_ptr()
    with pytest.raises(RuntimeError, match="is pinned already"):
        sim.pin(address, 4096)
    assert sim.machine.is_pinned(address, 100)
    del pinned
    assert not sim.machine.is_pinned(address, 100)
    with pytest.raises(RuntimeError, match="nothing is pinned"):
        sim.unpin(address)
    with pytest.raises(RuntimeError, match="by pages"):
        sim.pin(address + 1, 10)


@pytest.fixture
def shared(sim):
    """Memory of the host that others keep: its file, a mapping and a tensor of it."""
    nbytes = 1 << 20
    file = os.memfd_create("shared")
    os.ftruncate(file, nbytes)
    memory = mmap.mmap(file, nbytes)
    memory.write(b"x" * nbytes)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    sim.pin(tensor.data_ptr(), nbytes)
    yield file, memory, tensor
    sim.synchronize()
    sim.unpin(tensor.data_ptr())
    os.close(file)


def test_a_copy_of_memory_that_others_keep_has_what_is_there_when_it_is_made(sim, shared, gate):
    _, memory, tensor = shared
    assert sim.machine.pinned() == [(tensor.data_ptr(), tensor.data_ptr() + tensor.numel())]
    hold(gate)
    there = sim.empty(tensor.numel())
    sim.copy(there, tensor)
    back = tensor[:4096]
    sim.copy(back, there[:4096])
    with pytest.raises(RuntimeError, match=r"a copy from or to the memory at .* is under way"):
        sim.unpin(tensor.data_ptr())
    memory[5000:5001] = b"y"
    gate.set()
    assert there[5000].item() == ord("y")
    assert there[5001].item() == ord("x")


def test_pages_that_are_lost_while_they_are_pinned_are_seen(sim, shared):
    file, memory, tensor = shared
    there = sim.empty(tensor.numel())
    memory[:] = b"z" * len(memory)  # to write there is no loss
    sim.copy(there, tensor)
    assert there[0].item() == ord("z")
    punch = ctypes.CDLL(None).fallocate
    assert punch(file, 3, ctypes.c_long(0), ctypes.c_long(1 << 20)) == 0
    memory[:] = b"w" * len(memory)
    sim.copy(there, tensor)
    with pytest.raises(RuntimeError, match="has lost its pages while it was pinned"):
        sim.synchronize()


def test_what_is_installed_stays(sim):
    assert accelerator.install() is accelerator.install(accelerator.Settings()) is sim
    with pytest.raises(RuntimeError, match="cannot be changed"):
        accelerator.install(accelerator.Settings(devices=5))


@pytest.mark.parametrize(
    "wrong",
    [{"devices": 0}, {"devices": True}, {"memory": 1}, {"bandwidth": 0}, {"kernel_time": -1}],
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        accelerator.Settings(**wrong)


def test_copies_of_a_direction_take_call_lock_and_directions_do_not():
    for seconds in (0.1, 0.5, 2.5):  # until the machine begins the second before the first is over
        up, down, ups = spans_on_a_bus(seconds)
        assert ups[0][1] <= ups[1][1] - 0.9 * seconds
        if up[0] < down[1] and down[0] < up[1]:
            break
    else:
        pytest.fail("directions take turns")


def spans_on_a_bus(seconds):
    """Spans of copies up and down at once, and of two up: in a process whose bus takes so long for each."""
    program = f"""
import torch
import accelerator
sim = accelerator.install(accelerator.Settings(bandwidth=(1 << 20) / {seconds}))
here, there = sim.empty_pinned(1 << 20), sim.empty(1 << 20)
other = sim.empty_pinned(1 << 20), sim.empty(1 << 20)
sim.synchronize()
streams = sim.new_stream(), sim.new_stream()
with accelerator.watching() as works:
    for stream, target, source in zip(streams, (there, other[0]), (here, other[1])):
        with sim.using(stream):
            sim.copy(target, source)
    sim.synchronize()
    for stream, target, source in zip(streams, (there, other[1]), (here, other[0])):
        with sim.using(stream):
            sim.copy(target, source)
    sim.synchronize()
first = {{w.name: (w.begin, w.end) for w in works[:2]}}
print([first["copy to sim"], first["copy to host"], [(w.begin, w.end) for w in works[2:]]])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return eval(done.stdout)


def test_a_program_ends_while_a_stream_works(tmp_path):
    program = """
import torch
import accelerator
sim = accelerator.install()
accelerator.kernel(0.05, lambda t: [t.add_(1) for _ in range(1000)], torch.zeros(1000, device="sim"))
for _ in range(100):
    accelerator.kernel(10)
"""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - begin < 180  # its work takes a thousand seconds


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told_that_it_has_none(sim):
    tensor = torch.ones(2, device="sim")
    sim.synchronize()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            try:
                tensor.add_(1)
            except RuntimeError as error:
                os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with open(read, "rb") as file:
        assert b"cannot be used in a forked child" in file.read()
