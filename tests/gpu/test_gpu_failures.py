"""What happens on a GPU when actors on it die, fail, or are told to stop in the middle."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import cloudpickle
import pytest

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import (
    ActorDiedError,
    ActorRestartedError,
    DeadlineExceededError,
    ExecutionCancelledError,
    TaskError,
    WaitTimeoutError,
)
from conveyor.experimental import wait_tensor_freed

torch = pytest.importorskip("torch")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("on_gpu_preloaded", "limited")

KIND = "cuda"
MIB = 1 << 20
#: Seconds that a kernel takes which is killed with its actor, and one that is waited for.
FOR_EVER, A_WHILE = 60, 0.5
#: Seconds in which a death is told, and for what has to be done in much less.
SOON, WAIT = 1, 8
SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"


def kernel(seconds):
    """Have the GPU do something for so long, on the current stream, at the rate of an H100 (2 GHz)."""
    torch.cuda._sleep(int(seconds * 2e9))


@conveyor.remote(num_gpus=0.05)
class Worker:
    """All of them are on one GPU."""

    def __init__(self):
        os.environ[SHARE] = "1"
        self.kept = []
        self.begins = float(torch.ones(1, device=KIND).sum())

    def pid(self):
        return os.getpid()

    def late(self, value, seconds=0, done=None):
        """A tensor whose values are there long after the method has returned."""
        made = torch.zeros(MIB, dtype=torch.uint8, device=KIND)
        if seconds:
            kernel(seconds)
        made.fill_(value)
        if done is not None:
            Path(done).touch()
        return made

    @conveyor.method(tensor_transport="auto")
    def keep_late(self, value, seconds=0):
        self.kept = [self.late(value, seconds)]
        return self.kept[0]

    def large(self, nbytes):
        return torch.ones(nbytes, dtype=torch.uint8, device=KIND)

    def broken(self, number):
        """A tensor behind a kernel that fails, and no more can be done on the GPU in this process."""
        made = torch.ones(MIB, dtype=torch.uint8, device=KIND)
        if number:
            torch.zeros(4, device=KIND)[torch.tensor([number], device=KIND)] += 1
        return made

    def broken_and_told(self):
        self.broken(1 << 20)
        torch.cuda.synchronize()

    def ends(self, tensor, begun=None):
        if begun is not None:
            Path(begun).touch()
        return int(tensor[0]), int(tensor[-1])

    def held(self, tensor, go):
        """A method that runs until it may end, without looking at what it has got."""
        Path(go + ".begun").touch()
        while not os.path.exists(go):
            time.sleep(0.002)
        return tensor.numel()

    def keep(self, tensor):
        self.kept.append(tensor)

    def behind(self, seconds):
        """What is enqueued next is done so much later."""
        kernel(seconds)

    def room(self, nbytes):
        """Leave so many bytes of the GPU to this process; ``None``: all of it."""
        torch.cuda.empty_cache()
        there = torch.cuda.get_device_properties(0).total_memory
        left = there if nbytes is None else torch.cuda.memory_reserved() + nbytes
        torch.cuda.set_per_process_memory_fraction(min(left / there, 1.0))

    def used(self):
        """Bytes of tensors that are alive here, when all that was enqueued is done."""
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def freed(self):
        wait_tensor_freed(self.kept[0], WAIT)
        self.kept.clear()
        return True

    def sum(self):
        return int(torch.ones(1000, device=KIND).sum())


def get(ref, timeout=WAIT):
    return conveyor.get(ref, timeout=timeout)


@pytest.fixture
def make():
    """Makes workers that end with the test."""
    made = []

    def one(**options):
        made.append(Worker.options(**options).remote())
        return made[-1]

    yield one
    for worker in made:
        conveyor.kill(worker)


def transfers(producer, consumer, name, method="late", reader="ends", given=3, **options):
    """A graph in which the one sends a tensor to the other. Its input has ``given`` arguments for the
    producer, and one for the consumer if there is one more."""
    with InputNode() as inp:
        made = getattr(producer, method).bind(*[inp[i] for i in range(given)])
        made = made.with_tensor_transport(name)
        dag = getattr(consumer, reader).bind(made, inp[given])
    return dag.compile(**options)


def works(producer, consumer, name):
    """Whether the two can send tensors to each other, from now on."""
    with transfers(producer, consumer, name) as graph:
        return get(graph.execute(5, 0, None, None)) == (5, 5)


def becomes(true):
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end, "it has not come to be"
        time.sleep(0.002)


def appears(path):
    becomes(lambda: os.path.exists(path))


def skip_without(name):
    if name == "nccl":
        from conveyor.transport.nccl.group import can_share

        why_not = can_share()
        if why_not is not None:
            pytest.skip(f"two actors cannot be on one GPU: {why_not}")


names = pytest.mark.parametrize("name", ["cuda_ipc", "nccl"])
overlaps = pytest.mark.parametrize("overlap", [False, True], ids=["program", "overlap"])


@overlaps
@names
def test_a_producer_that_is_killed_while_its_kernels_run(make, tmp_path, name, overlap):
    skip_without(name)
    producer, consumer = make(name=f"mortal {name} {overlap}"), make()
    graph = transfers(producer, consumer, name, overlap=overlap)
    assert get(graph.execute(1, 0, None, None)) == (1, 1)
    pid = get(producer.pid.remote())
    done = str(tmp_path / "done")
    ref = graph.execute(2, FOR_EVER, done, None)
    appears(done)
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match=f"mortal {name} {overlap}"):
        get(ref)
    assert time.monotonic() - begin < SOON
    assert get(consumer.sum.remote()) == 1000
    graph.teardown()
    assert works(make(), consumer, name)


def test_a_producer_that_is_killed_before_a_value_that_it_keeps_is_there(make):
    producer, consumer = make(name="mortal keeper"), make()
    get(consumer.ends.remote(producer.keep_late.remote(1)))
    pid = get(producer.pid.remote())
    ref = producer.keep_late.remote(2, FOR_EVER)
    conveyor.wait([ref], timeout=WAIT)
    assert ref.route() == "ipc"
    got = consumer.ends.remote(ref)
    with pytest.raises(WaitTimeoutError):
        get(got, 0.3)  # it waits for the values by now
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match="mortal keeper"):
        get(got)
    with pytest.raises(ActorDiedError, match="mortal keeper"):
        get(ref)
    assert time.monotonic() - begin < SOON
    assert get(consumer.ends.remote(make().keep_late.remote(3))) == (3, 3)
    assert works(make(), consumer, "cuda_ipc")


@overlaps
def test_a_consumer_that_is_killed_before_it_has_read(make, overlap):
    """Its copies are enqueued behind other work of its own, and never done."""
    producer, consumer = make(), make(name=f"mortal reader {overlap}")
    assert works(producer, make(), "cuda_ipc")
    before = get(producer.used.remote())
    with InputNode() as inp:
        made = producer.late.bind(inp).with_tensor_transport("cuda_ipc")
        graph = consumer.keep.bind(made).compile(overlap=overlap, depth=2)
    for n in range(3):
        get(graph.execute(n))
    pid = get(consumer.pid.remote())
    get(consumer.behind.remote(FOR_EVER))
    for n in range(3):  # in memory whose copies are not done
        get(graph.execute(n))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match=f"mortal reader {overlap}"):
        get(graph.execute(9))
    assert get(producer.sum.remote()) == 1000
    graph.teardown()
    assert works(producer, make(), "cuda_ipc")
    assert get(producer.used.remote()) <= before


def test_a_consumer_that_is_killed_while_it_fetches(make):
    producer, consumer = make(), make(name="mortal fetcher")
    before = get(producer.used.remote())
    ref = producer.keep_late.remote(1)
    assert get(consumer.ends.remote(ref)) == (1, 1)
    pid = get(consumer.pid.remote())
    get(consumer.behind.remote(FOR_EVER))
    got = consumer.ends.remote(ref)
    with pytest.raises(WaitTimeoutError):
        get(got, 0.3)
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match="mortal fetcher"):
        get(got)
    assert time.monotonic() - begin < SOON
    assert get(make().ends.remote(ref)) == (1, 1)
    del ref, got
    assert get(producer.freed.remote())
    assert get(producer.used.remote()) <= before
    assert works(producer, make(), "cuda_ipc")


@pytest.mark.parametrize("what", ["kill", "teardown"])
def test_nccl_with_a_send_that_nobody_receives(make, tmp_path, what):
    skip_without("nccl")
    producer, consumer = make(), make(name=f"deaf {what}")
    go = str(tmp_path / "go")
    graph = transfers(producer, consumer, "nccl", reader="held", depth=4)
    Path(go).touch()
    assert get(graph.execute(1, 0, None, go)) == MIB
    pid = get(consumer.pid.remote())
    Path(go).unlink()
    Path(go + ".begun").unlink()
    refs = [graph.execute(n, 0, None, go) for n in range(3)]
    appears(go + ".begun")
    if what == "kill":
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError, match="deaf kill"):
            get(refs[-1])
    else:
        Path(go).touch()
    graph.teardown()
    assert get(producer.sum.remote()) == 1000
    assert works(producer, make(), "nccl")


@overlaps
@names
def test_a_graph_that_is_torn_down_while_tensors_are_on_their_way(make, tmp_path, name, overlap):
    skip_without(name)
    producer, consumer = make(), make()
    before = None
    for number in range(2):
        graph = transfers(producer, consumer, name, overlap=overlap)
        assert get(graph.execute(1, 0, None, None)) == (1, 1)
        done = str(tmp_path / f"done {number}")
        graph.execute(2, A_WHILE, done, None)
        appears(done)
        graph.teardown()
        assert get([producer.sum.remote(), consumer.sum.remote()]) == [1000, 1000]
        used = get([producer.used.remote(), consumer.used.remote()])
        before = before or used
        assert all(now <= then for now, then in zip(used, before, strict=True))
    assert works(producer, consumer, name)


@overlaps
@names
def test_an_execution_that_is_given_up_while_its_tensor_is_on_its_way(
    make, tmp_path, name, overlap
):
    skip_without(name)
    producer, consumer = make(), make()
    with transfers(producer, consumer, name, overlap=overlap, depth=4) as graph:
        assert get(graph.execute(1, 0, None, None)) == (1, 1)
        done = str(tmp_path / "done")
        refs = [graph.execute(2, A_WHILE, done, None), graph.execute(3, 0, None, None)]
        appears(done)
        refs[0].cancel()
        with pytest.raises(ExecutionCancelledError):
            get(refs[0])
        assert get(refs[1]) == (3, 3)
        late = graph.execute(4, A_WHILE, None, None, deadline=0.2)
        with pytest.raises(DeadlineExceededError):
            get(late)
        assert get(graph.execute(5, 0, None, None)) == (5, 5)


def test_a_producer_without_room(make):
    producer, consumer = make(name="without room"), make()
    with transfers(producer, consumer, "cuda_ipc", method="large", given=1) as graph:
        assert get(graph.execute(MIB, None)) == (1, 1)
        with pytest.raises(torch.OutOfMemoryError) as told:
            get(graph.execute(1 << 50, None))
        assert isinstance(told.value, TaskError)
        assert told.value.actor == "without room"
        assert get(graph.execute(MIB, None)) == (1, 1)
    with pytest.raises(torch.OutOfMemoryError):
        get(producer.large.remote(1 << 50))
    assert get(consumer.ends.remote(producer.large.remote(MIB))) == (1, 1)


def goes_on(graph):
    """Have it execute until an execution is well."""
    end = time.monotonic() + WAIT
    while True:
        with suppress(TaskError):
            assert get(graph.execute(2 * MIB, None)) == (1, 1)
            return
        assert time.monotonic() < end


@names
def test_a_consumer_without_room(make, name):
    """Its transfer fails, and no other, but for those that are on their way behind it by NCCL: they belong to
    a group that is made anew."""
    skip_without(name)
    producer, consumer = make(), make()
    with transfers(producer, consumer, name, method="large", given=1, depth=4) as graph:
        assert get(graph.execute(MIB, None)) == (1, 1)
        get(consumer.room.remote(64 * MIB))
        sizes = (MIB, 256 * MIB, 2 * MIB) if name == "cuda_ipc" else (MIB, 256 * MIB)
        refs = [graph.execute(nbytes, None) for nbytes in sizes]
        assert get(refs[0]) == (1, 1)
        with pytest.raises(Exception, match="out of memory") as told:
            get(refs[1])
        assert not isinstance(told.value, (WaitTimeoutError, ActorDiedError))
        if name == "cuda_ipc":
            assert get(refs[2]) == (1, 1)
        else:  # what is announced before the group is made anew fails with it
            goes_on(graph)
        get(consumer.room.remote(None))
        assert get(graph.execute(256 * MIB, None)) == (1, 1)


def test_a_fetch_or_an_argument_without_room(make):
    producer, consumer = make(), make()
    stays = producer.large.options(tensor_transport="auto").remote(256 * MIB)
    travels = producer.large.remote(256 * MIB)
    get(consumer.room.remote(64 * MIB))
    for ref in (stays, travels):
        with pytest.raises(Exception, match="out of memory") as told:
            get(consumer.ends.remote(ref))
        assert not isinstance(told.value, (WaitTimeoutError, ActorDiedError))
    assert get(consumer.ends.remote(producer.keep_late.remote(4))) == (4, 4)
    get(consumer.room.remote(None))
    assert get([consumer.ends.remote(ref) for ref in (stays, travels)]) == [(1, 1)] * 2


def test_a_kernel_that_fails_is_told_with_its_actor(make):
    broken, other, third = make(name="broken"), make(), make()
    with pytest.raises(TaskError, match=r"CUDA error|device-side assert") as told:
        get(broken.broken_and_told.remote())
    assert told.value.actor == "broken"
    with pytest.raises(TaskError, match=r"CUDA error|device-side assert"):  # it sticks
        get(broken.sum.remote())
    assert works(other, third, "cuda_ipc")
    assert get(other.ends.remote(third.keep_late.remote(3))) == (3, 3)


@pytest.mark.parametrize("name", ["frame", "cuda_ipc", "nccl", "direct"])
def test_a_kernel_that_fails_while_its_tensor_is_sent(make, name):
    """Nobody has waited for it at the writer. Whoever is to have the tensor gets an error, and lives on."""
    skip_without(name)
    broken, reader = make(name=f"broken for {name}"), make()
    begin = time.monotonic()
    if name == "direct":
        ref = reader.ends.remote(broken.broken.options(tensor_transport="auto").remote(1 << 20))
        with pytest.raises(Exception, match=r"broken for direct|CUDA|cuda") as told:
            get(ref)
    else:
        with InputNode() as inp:
            made = broken.broken.bind(inp)
            if name != "frame":
                made = made.with_tensor_transport(name)
            graph = reader.ends.bind(made).compile()
        assert get(graph.execute(0)) == (1, 1)
        with pytest.raises(Exception, match=f"broken for {name}|CUDA|cuda") as told:
            get(graph.execute(1 << 20))
        conveyor.kill(broken)
        graph.teardown()
    assert not isinstance(told.value, WaitTimeoutError), "nobody was told"
    assert time.monotonic() - begin < WAIT
    assert get(reader.sum.remote()) == 1000
    assert works(make(), reader, "cuda_ipc")


@names
def test_a_graph_goes_on_with_an_actor_that_is_started_again(make, tmp_path, name):
    skip_without(name)
    producer, consumer = make(max_restarts=2), make(max_restarts=2)
    with transfers(producer, consumer, name) as graph:
        for number, mortal in enumerate((producer, consumer)):
            assert get(graph.execute(1, 0, None, None)) == (1, 1)
            pid = get(mortal.pid.remote())
            done = str(tmp_path / f"done {number}")
            ref = graph.execute(2, A_WHILE, done, None)
            appears(done)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ActorRestartedError):
                get(ref)
            assert get(graph.execute(3, 0, None, None)) == (3, 3)
