"""Devices copy from and to the arena itself, whose memory stays as long as one has it."""

import dis
import functools
import itertools
import logging
import math
import os
import signal
import sys
import time

import pytest
from integration_helpers import WAIT, hold

import conveyor
from conveyor.codec.tensors import staging
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.runtime import context, process

torch = pytest.importorskip("torch")
pytest.importorskip("numpy")

import accelerator  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]

PRELOAD = ["torch"]
MIB = 1 << 20
NEVER = 600.0
LONG = 60


def pins():
    """Of this process: how many blocks are pinned, as it says itself, and as the device says."""
    return staging.current().counts()[0], len(accelerator.install().machine.pinned())


def values(number, device=0, count=MIB):
    return torch.full((count,), float(number), device=f"sim:{device}")


class Worker:
    def __init__(self):
        self.sim = accelerator.install()
        self.held = []

    def make(self, number, device=0, count=MIB):
        return values(number, device, count)

    def mixed(self, number):
        made = values(number, 0), values(number + 1, 1), values(number + 2, count=1 << 15)
        return {"gpus": made, "host": torch.arange(number), "text": "x" * 5000}

    def bounds(self, *tensors):
        return [(t.min().item(), t.max().item(), str(t.device)) for t in tensors]

    def bounds_within(self, value):
        return self.bounds(*value["gpus"])

    def late(self, tensor, go):
        """What is enqueued when the tensor is here: whether the host has waited for it."""
        busy = not self.sim.current_stream().query()
        self.held.append(tensor)
        accelerator.kernel(0, lambda: hold(go))
        return busy

    def of_held(self):
        held, self.held = self.held, []
        return [tensor.sum().item() / tensor.numel() for tensor in held]

    def pid(self):
        return os.getpid()

    def pins(self):
        return pins()

    def begins(self):
        return [begin for begin, _ in self.sim.machine.pinned()]

    def give_up(self):
        return staging.current().tidy(True), pins()

    def refuse(self):
        def refuse(address, nbytes):
            self.requested = getattr(self, "requested", 0) + 1
            raise RuntimeError("no memory may be locked")

        self.sim.pin = refuse
        self.told = []
        handler = logging.Handler()
        handler.emit = lambda record: self.told.append(record.getMessage())
        logger = logging.getLogger("conveyor")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)

    def refused(self):
        return self.requested, self.told

    def fork(self, tensor):
        """A child that inherits what is pinned, and goes through what it has."""
        child = os.fork()
        if child == 0:
            os._exit(0 if staging.current().take(tensor, self.sim) is None else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


Remote = conveyor.remote(Worker)


@pytest.fixture
def session(leaves_nothing, monkeypatch):
    """Begins a session: ``session(idle=..., actors=...)`` gives its actors."""
    sim = accelerator.install()
    torch.zeros(1, device="sim"), torch.zeros(1, device="sim:1")

    def begin(idle=NEVER, actors=2, **options):
        monkeypatch.setattr(process, "IDLE_SECONDS", idle)
        conveyor.init(engine="local", preload=["torch"], **options)
        return [Remote.remote() for _ in range(actors)]

    with leaves_nothing():
        yield begin
        conveyor.shutdown()
        assert sim.machine.pinned() == []
        sim.synchronize(0), sim.synchronize(1)


def arena():
    return context.current().process.arena


def send(graph, numbers):
    for number in numbers:
        got = conveyor.get(graph.execute(values(number)), timeout=LONG)
        assert got == [(number, number, "sim:0")]


def test_both_ends_of_an_edge_pin_the_block_that_they_share(session):
    a, b = session()
    with InputNode() as inp:
        graph = b.bounds.bind(a.make.bind(inp)).compile()
    assert conveyor.get(graph.execute(0), timeout=LONG) == [(0, 0, "sim:0")]
    # Used once, it is not worth it.
    assert conveyor.get([a.pins.remote(), b.pins.remote()]) == [(0, 0)] * 2
    for number in range(1, 8):
        got = conveyor.get(graph.execute(number), timeout=LONG)
        assert got == [(number, number, "sim:0")]
    for count, at_device in conveyor.get([a.pins.remote(), b.pins.remote()]):
        assert 1 <= count == at_device <= 3  # once for each block


def test_a_reader_copies_from_the_arena_while_its_device_is_busy(session, latches, wait_until):
    (a,) = session(actors=1)
    go = latches()
    with InputNode() as inp:
        graph = a.late.bind(inp, go.path).compile()
    # The first kernel does not end before that, so nothing here waits for one.
    busy = [conveyor.get(graph.execute(values(n)), timeout=WAIT) for n in range(6)]
    go.open()
    assert busy[1:] == [True] * 5
    assert conveyor.get(a.pins.remote())[0] >= 2
    # Each block was left alone until the copy from it was done.
    assert conveyor.get(a.of_held.remote(), timeout=LONG) == [0, 1, 2, 3, 4, 5]
    conveyor.get(a.give_up.remote())
    wait_until(lambda: arena().give_back() or arena().blocks_out == 0, LONG)


def test_memory_that_is_pinned_is_not_given_back(session, wait_until):
    (a,) = session(actors=1)
    with InputNode() as inp:
        graph = a.bounds.bind(inp).compile()
    send(graph, range(4))
    begins = conveyor.get(a.begins.remote())
    arena().give_back()
    # The driver has pinned it as well, to copy to it.
    assert arena().bytes_touched >= 4 * MIB * len(begins) > 0
    assert pins()[0] >= len(begins)
    # The simulated device compares its pages with those that it has pinned.
    send(graph, range(4, 8))
    assert set(begins) <= set(conveyor.get(a.begins.remote()))
    assert conveyor.get(a.give_up.remote()) == (False, (0, 0))
    arena().give_back()
    assert arena().bytes_touched > 0
    staging.current().tidy(True)
    arena().give_back()
    assert arena().bytes_touched == 0


def test_what_is_not_used_is_given_up_and_goes_back(session, wait_until, monkeypatch):
    (a,) = session(idle=0.3, actors=1)
    sim, requested = accelerator.install(), []
    monkeypatch.setattr(sim, "pin", lambda *of, pin=sim.pin: requested.append(of) or pin(*of))
    with InputNode() as inp:
        graph = a.bounds.bind(inp).compile()
    send(graph, range(4))
    assert requested  # it may have been given up by now
    wait_until(lambda: pins() == (0, 0) == conveyor.get(a.pins.remote()), LONG)
    wait_until(lambda: arena().bytes_touched == 0, LONG)


def test_at_the_cap_what_is_pinned_is_given_up(session):
    (a,) = session(actors=1, arena_bytes=24 * MIB)
    with InputNode() as inp:
        graph = a.bounds.bind(inp).compile()
    for count in (MIB, 2 * MIB, 3 * MIB, 5 * MIB, MIB):
        for number in range(4):
            got = conveyor.get(graph.execute(values(number, 0, count)), timeout=LONG)
            assert got == [(number, number, "sim:0")]


def test_a_dead_process_keeps_no_memory(session, wait_until):
    (a,) = session(actors=1)
    with InputNode() as inp:
        graph = a.bounds.bind(inp).compile()
    send(graph, range(4))
    staging.current().tidy(True)
    arena().give_back()
    assert arena().bytes_touched > 0
    conveyor.kill(a)
    wait_until(lambda: arena().give_back() or arena().bytes_touched == 0, LONG)


def test_many_gpus_of_many_actors_read_one_copy(session):
    actors = session(actors=4)
    with InputNode() as inp:
        graph = MultiOutputNode([actor.bounds.bind(inp) for actor in actors]).compile()
    for number in range(8):
        both = values(number, 0), values(number, 1)
        got = conveyor.get(graph.execute(both[number % 2]), timeout=LONG)
        assert got == [[(number, number, f"sim:{number % 2}")]] * 4
    # One block, and another one while copies of the first are under way: which value that is, is chance.
    assert arena().bytes_touched < 3 * 5 * MIB
    # Four readers and the writer, once each for both GPUs.
    begins = conveyor.get([actor.begins.remote() for actor in actors])
    assert len({len(each) for each in begins}) == 1
    assert 1 <= len(begins[0]) <= 3


def test_several_gpus_of_an_actor_are_in_one_value(session):
    a, b = session()
    with InputNode() as inp:
        made = a.mixed.bind(inp)
        graph = MultiOutputNode([made, b.bounds_within.bind(made)]).compile()
    for number in range(6):
        value, bounds = conveyor.get(graph.execute(number), timeout=LONG)
        expected = [(number + i, number + i, f"sim:{i % 2}") for i in range(3)]
        assert bounds == Worker.bounds(None, *value["gpus"]) == expected
        assert value["host"].equal(torch.arange(number))
        assert len(value["text"]) == 5000
    assert conveyor.get(a.pins.remote())[0] >= 1


def test_the_driver_holds_tensors_of_gpus(session):
    (a,) = session(actors=1)
    with InputNode() as inp:
        graph = a.make.bind(inp[0], inp[1]).compile()
    held = []
    for number in range(6):
        held.append(conveyor.get(graph.execute(number, number % 2), timeout=LONG))
    assert pins()[0] >= 1
    conveyor.kill(a)
    for number, tensor in enumerate(held):
        assert str(tensor.device) == f"sim:{number % 2}"
        assert tensor.min().item() == tensor.max().item() == number
    back = conveyor.get(conveyor.put(held), timeout=LONG)
    assert [tensor.mean().item() for tensor in back] == list(range(6))


def test_a_device_that_refuses_is_requested_again_later_and_told_of_once(session):
    a, b = session()
    conveyor.get(b.refuse.remote())
    begun = time.monotonic()
    with InputNode() as inp:
        graph = b.bounds.bind(a.make.bind(inp)).compile()
    for number in range(6):
        assert conveyor.get(graph.execute(number), timeout=LONG) == [(number, number, "sim:0")]
    requested, told = conveyor.get(b.refused.remote())
    # Not for each value: after a second, then after two more, then after four.
    assert 1 <= requested <= 1 + int(math.log2(1 + time.monotonic() - begun))
    assert len(told) == 1
    assert "no memory may be locked" in told[0]
    assert conveyor.get(b.pins.remote()) == (0, 0)
    assert conveyor.get(a.pins.remote())[0] >= 1


def test_a_forked_child_leaves_what_is_pinned_alone(session):
    (a,) = session(actors=1)
    with InputNode() as inp:
        graph = a.bounds.bind(inp).compile()
    send(graph, range(3))
    before = conveyor.get(a.pins.remote())
    assert before[0] >= 1
    assert conveyor.get(a.fork.remote(b"some"), timeout=LONG) == 0
    child = os.fork()
    if child == 0:
        os._exit(0 if not staging.current().here() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert conveyor.get(a.pins.remote()) == before
    send(graph, range(3))


def test_a_stopped_reader_does_not_let_memory_go(session, wait_until):
    (a,) = session(actors=1)
    with InputNode() as inp:
        graph = a.bounds.bind(inp).compile()
    send(graph, range(4))
    pid = conveyor.get(a.pid.remote())
    staging.current().tidy(True)
    os.kill(pid, signal.SIGSTOP)
    try:
        arena().give_back()
        assert arena().bytes_touched > 0
    finally:
        os.kill(pid, signal.SIGCONT)
    send(graph, range(4))


def test_small_values_take_the_way_by_the_pool(session):
    a, b = session()
    with InputNode() as inp:
        graph = b.bounds.bind(a.make.bind(inp, 0, 1000)).compile()
    for number in range(5):
        assert conveyor.get(graph.execute(number), timeout=LONG) == [(number, number, "sim:0")]
    assert conveyor.get([a.pins.remote(), b.pins.remote()]) == [(0, 0)] * 2


def test_no_more_blocks_are_pinned_than_a_device_should_know(session, monkeypatch):
    (a,) = session(actors=1)
    monkeypatch.setattr(staging, "MOST", 2)
    with InputNode() as inp:
        graph = a.bounds.bind(inp).compile()
    for count in (MIB, MIB // 2, MIB // 4 + 1000, MIB * 2):
        for number in range(4):
            got = conveyor.get(graph.execute(values(number, 0, count)), timeout=LONG)
            assert got == [(number, number, "sim:0")]
            assert pins()[0] <= 2


def test_a_kernel_that_fails_leaves_no_copy_under_way(session):
    (a,) = session(actors=1)
    with InputNode() as inp:
        graph = a.bounds.bind(inp).compile()
    send(graph, range(3))

    def broken():
        raise ArithmeticError("in a kernel")

    for number in range(3):
        made = values(number)
        accelerator.kernel(0, broken)
        with pytest.raises(Exception, match="in a kernel"):
            conveyor.get(graph.execute(made), timeout=LONG)
    send(graph, range(3))
    assert staging.current().tidy(True) is False


def after_calls(code):
    """Where a signal's handler may run: behind each call, but for that which a ``with`` begins with."""
    found = list(dis.get_instructions(code))
    return {
        then.offset
        for before, call, then in zip(found, found[1:], found[2:], strict=False)
        if call.opname.startswith("CALL") and before.opname != "LOAD_SPECIAL"
    }


def interrupted(place, codes, function):
    """Whether ``function`` came to the place of that number in these codes, where it is interrupted."""
    left, places = [place], {code: after_calls(code) for code in codes}

    def trace(frame, event, _):
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in places[frame.f_code]:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    # Python 3.12 tells of opcodes only if some frame had asked for them before the tracing began.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_whatever_is_interrupted_counts_no_copy_that_is_not_under_way(session):
    (worker,) = session(actors=1)
    for number in range(3):
        conveyor.get(worker.make.remote(number), timeout=LONG)
    codes = {staging.Pinned.take.__code__, staging.fetch_bytes.__code__}

    def get(refs):
        conveyor.get(refs.pop(), timeout=LONG)

    for place in itertools.count(1):
        refs = [worker.make.remote(place)]
        conveyor.wait(refs, timeout=LONG)
        went_on = interrupted(place, codes, functools.partial(get, refs))
        here = staging.current()
        _, under_way = here.counts()
        assert sum(block.copies for block in here._blocks.values()) == under_way, place
        if not went_on:
            break
    assert place > 10
