"""Tensors that go over gloo and NIXL: what these leave alone and let go of, and who is freed by what."""

import os
import re
import signal
import threading
from contextlib import suppress

import psutil
import pytest

import conveyor
from conveyor import transport
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, GraphTornDownError

torch = pytest.importorskip("torch")
PRELOAD = ["torch"]
pytestmark = [pytest.mark.usefixtures("session"), pytest.mark.alone]

#: What takes a moment to be moved.
HUGE = 256 << 20


class Worker:
    """Makes and takes tensors, and says what its process has."""

    def pid(self):
        return os.getpid()

    def bytes(self, count):
        import torch

        return torch.arange(count % 251, count % 251 + 8, dtype=torch.uint8).repeat(count // 8)

    def add(self, tensor):
        return len(tensor), int(tensor[0]), int(tensor[-1])

    def typed(self, dtype):
        import torch

        return torch.arange(100).to(torch.float32).to(getattr(torch, dtype))

    def look(self, tensor):
        import torch

        return str(tensor.dtype), tensor.to(torch.complex64).sum().item()

    def listens(self):
        """The addresses of its sockets that do."""
        found = psutil.Process().net_connections()
        return sorted([c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN])

    def connected(self):
        return sum(bool(c.raddr) for c in psutil.Process().net_connections())

    def holds(self):
        """Descriptors, native threads, megabytes."""
        me = psutil.Process()
        return me.num_fds(), me.num_threads(), me.memory_info().rss >> 20

    def threads(self):
        """How many there are of a transport."""
        names = "conveyor-gloo", "conveyor-nixl", "conveyor-nixl-offers"
        return sum(thread.name in names for thread in threading.enumerate())

    def begin_own_group(self):
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def end_own_group(self):
        import torch.distributed as dist

        dist.destroy_process_group()

    def own_group(self):
        """Whether the program's own group is there, and what it does."""
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            return None
        one = torch.ones(3)
        dist.all_reduce(one)
        return dist.get_world_size(), one.sum().item()


Remote = conveyor.remote(Worker)


@pytest.fixture(scope="module", params=["gloo", "nixl"])
def name(request):
    """The transport."""
    why_not = transport.get(request.param).viable()
    if why_not is not None:
        pytest.skip(f"{request.param}: {why_not}")
    return request.param


@pytest.fixture(scope="module")
def pair(session):
    """Two that no test kills."""
    made = Remote.remote(), Remote.remote()
    yield made
    for one in made:
        conveyor.kill(one)


@pytest.fixture
def mortals():
    made = Remote.remote(), Remote.remote()
    yield made
    for one in made:
        conveyor.kill(one)


def graph_of(name, a, b, make="bytes", take="add", **options):
    with InputNode() as inp:
        made = getattr(a, make).bind(inp).with_tensor_transport(name)
        return getattr(b, take).bind(made).compile(**options)


def requested(actor, method):
    return conveyor.get(getattr(actor, method).remote(), timeout=60)


def expected(count):
    return count, count % 251, count % 251 + 7


def test_the_plan_says_it(name, pair):
    with graph_of(name, *pair) as graph:
        # Between hosts it says from where to where before that.
        told = rf"{name}, (depth 16: )?asked for by with_tensor_transport"
        assert re.search(told, graph.explain())


@pytest.mark.parametrize("count", [0, 8, 8 << 20])
def test_sizes(name, pair, count):
    with InputNode() as inp:
        made = pair[0].bytes.bind(inp).with_tensor_transport(name)
        graph = pair[1].add.bind(made) if count else pair[1].look.bind(made)
    with graph.compile() as compiled:
        for _ in range(2):
            got = compiled.execute(count).get(timeout=30)
            assert got == (expected(count) if count else ("torch.uint8", 0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_dtypes_that_travel_as_bytes(name, pair, dtype):
    with graph_of(name, *pair, "typed", "look") as graph:
        wanted = torch.arange(100).to(torch.float32).to(getattr(torch, dtype))
        got = graph.execute(dtype).get(timeout=30)
    assert got == (f"torch.{dtype}", wanted.to(torch.complex64).sum().item())


def test_the_programs_own_group_is_left_alone(name, pair):
    a, b = pair
    requested(a, "begin_own_group")
    assert requested(a, "own_group") == (1, 3.0)
    with graph_of(name, a, b) as graph:
        for _ in range(3):
            assert graph.execute(800).get(timeout=60) == expected(800)
        assert requested(a, "own_group") == (1, 3.0)
        assert requested(b, "own_group") is None
    assert requested(a, "own_group") == (1, 3.0)
    assert requested(b, "own_group") is None
    requested(a, "end_own_group")


def test_it_listens_on_loopback_only_and_no_longer_than_its_graph(name, pair, wait_until):
    nothing = [[], []]

    def none_listens():  # a reader calls a writer that is gone for some seconds
        wait_until(lambda: [requested(one, "listens") for one in pair] == nothing)

    none_listens()  # after other tests
    with graph_of(name, *pair) as graph:
        graph.execute(800).get(timeout=60)
        found = [requested(one, "listens") for one in pair]
        assert all(len(own) == 1 and own[0].startswith("127.0.0.") for own in found)
    none_listens()
    wait_until(lambda: [requested(one, "connected") for one in pair] == [0, 0])


def test_two_graphs_at_once(name, pair):
    a, b = pair
    with graph_of(name, a, b, depth=4) as one, graph_of(name, b, a, depth=4) as other:
        refs = [
            (number, graph.execute(number << 10))
            for number in range(1, 13)
            for graph in (one, other)
        ]
        for number, ref in refs:
            assert ref.get(timeout=60) == expected(number << 10)


def test_a_slow_reader_holds_up_no_other(name, pair):
    """A stopped one takes nothing; what the others are sent does not wait for it."""
    a, b = pair
    c = Remote.remote()
    with InputNode() as inp:
        made = a.bytes.bind(inp).with_tensor_transport(name)
        dag = MultiOutputNode([b.add.bind(made), c.add.bind(made)])
    graph = dag.compile(depth=4, fail_fast=False)
    stopped = psutil.Process(requested(c, "pid"))
    first, _ = graph.execute(8 << 20)
    assert first.get(timeout=60) == expected(8 << 20)
    stopped.suspend()
    pairs = [graph.execute(8 << 20) for _ in range(3)]
    assert [first.get(timeout=60) for first, _ in pairs] == [expected(8 << 20)] * 3
    stopped.resume()
    assert [second.get(timeout=60) for _, second in pairs] == [expected(8 << 20)] * 3
    graph.teardown()
    conveyor.kill(c)


@pytest.mark.parametrize("which", ["writer", "reader"])
def test_a_frozen_peer_frees_the_others_when_the_graph_is_taken_down(name, pair, which, wait_until):
    a, b = pair
    frozen, other = (a, b) if which == "writer" else (b, a)
    # A reader calls a writer that is gone for some seconds.
    wait_until(lambda: requested(other, "threads") == 0)
    graph = graph_of(name, a, b, depth=4)
    assert graph.execute(800).get(timeout=60) == expected(800)
    stopped = psutil.Process(requested(frozen, "pid"))
    refs = [graph.execute(64 << 20) for _ in range(3)]
    stopped.suspend()
    down = threading.Thread(target=graph.teardown)
    down.start()
    wait_until(lambda: requested(other, "threads") == 0, timeout=60)
    stopped.send_signal(signal.SIGCONT)
    down.join(20)
    assert not down.is_alive()
    for ref in refs:
        with suppress(GraphTornDownError):  # unless it was done before
            assert ref.get(timeout=60) == expected(64 << 20)
    with graph_of(name, a, b) as again:
        assert again.execute(800).get(timeout=60) == expected(800)


@pytest.mark.parametrize("which", ["writer", "frozen reader"])
def test_a_peer_that_dies_in_the_middle_is_named(name, mortals, which, wait_until):
    a, b = mortals
    victim, other = (a, b) if which == "writer" else (b, a)
    with graph_of(name, a, b, depth=4) as graph:
        graph.execute(800).get(timeout=60)
        process = psutil.Process(requested(victim, "pid"))
        if which == "frozen reader":
            process.suspend()
        refs = [graph.execute(64 << 20) for _ in range(3)]
        process.kill()
        with pytest.raises(ActorDiedError, match="died"):
            refs[-1].get(timeout=60)
    wait_until(lambda: requested(other, "threads") == 0)


def test_nothing_is_left_of_transfers_that_were_broken_off(name, pair, wait_until):
    a, b = pair

    def broken_off():
        graph = graph_of(name, a, b, depth=4)
        graph.execute(800).get(timeout=60)
        for _ in range(2):
            graph.execute(HUGE)
        graph.teardown()

    def held():
        return [requested(one, "holds") for one in pair]

    def no_more_than(before):
        return all(
            fds <= b_fds and threads <= b_threads and rss <= b_rss + 64
            for (fds, threads, rss), (b_fds, b_threads, b_rss) in zip(held(), before, strict=True)
        )

    broken_off()
    wait_until(lambda: [requested(one, "threads") for one in pair] == [0, 0])
    before = held()
    for _ in range(2):
        broken_off()
    wait_until(lambda: no_more_than(before))


def test_a_graph_that_is_restarted_goes_on(name, wait_until):
    a, b = (Remote.options(max_restarts=1).remote() for _ in range(2))
    with graph_of(name, a, b, depth=4) as graph:
        assert graph.execute(800).get(timeout=60) == expected(800)
        ref = graph.execute(64 << 20)
        os.kill(requested(b, "pid"), signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            ref.get(timeout=60)
        graph.restart()
        assert graph.execute(8 << 20).get(timeout=60) == expected(8 << 20)
    for one in (a, b):
        conveyor.kill(one)
