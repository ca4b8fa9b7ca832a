"""Edges with a transport between nodes that share no memory: the frames go over the session's connections,
the tensors by gloo, NIXL, what stands for NCCL, or a transport of the user's."""

import itertools
import os
import signal
import socket
import sys
from concurrent.futures import Future

import cloudpickle
import pytest
import torch

import conveyor
from conveyor import testing, transport
from conveyor.dag import InputNode
from conveyor.exceptions import (
    ActorDiedError,
    DeadlineExceededError,
    ExecutionCancelledError,
    GraphError,
    WaitTimeoutError,
)
from conveyor.testing import FaultyTransport

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT = 60
HERE, THERE = {"resources": {"first": 0.01}}, {"resources": {"second": 0.01}}
#: Two nodes of one machine are not to be connected by its memory.
NETWORK = {"runtime_env": {"env_vars": {"UCX_TLS": "tcp,self"}}}


class Worker:
    def make(self, count):
        return {"tensor": torch.full((count,), float(count)), "count": count}

    def total(self, value):
        return value["count"], value["tensor"].numel(), float(value["tensor"].double().sum())

    def fail_on_odd(self, count):
        if count % 2:
            raise ValueError(f"{count} is odd")
        return self.make(count)

    def pid(self):
        return os.getpid()

    def listens(self):
        """At which addresses this process has sockets of TCP that listen: Ray's and ours."""
        import psutil

        found = psutil.Process().net_connections("tcp")
        return {one.laddr.ip for one in found if one.status == "LISTEN"}


def worker(where, **options):
    return conveyor.remote(Worker).options(**where, **NETWORK, **options).remote()


@pytest.fixture(scope="module")
def pair(far):
    made = worker(HERE), worker(THERE)
    yield made
    for one in made:
        conveyor.kill(one)


def get(ref):
    return conveyor.get(ref, timeout=WAIT)


def total_over(name, a, b, method="make", take="total", **options):
    with InputNode() as inp:
        made = getattr(a, method).bind(inp).with_tensor_transport(name)
        return getattr(b, take).bind(made).compile(**options)


def skip_without(name):
    why_not = transport.get(name).viable()
    if why_not is not None:
        pytest.skip(f"{name}: {why_not}")


both = pytest.mark.parametrize("name", ["gloo", "nixl"])


@both
@pytest.mark.parametrize("turned", [False, True], ids=["there", "back"])
def test_tensors_go_between_nodes(pair, name, turned):
    skip_without(name)
    a, b = pair[::-1] if turned else pair
    with total_over(name, a, b, "fail_on_odd", depth=4) as graph:
        assert f"its tensors by {name}, asked for by with_tensor_transport" in graph.explain()
        sizes = [2, 1 << 20, 3, 0, 1 << 10, 2, 5, 1 << 22]
        refs = [graph.execute(size) for size in sizes]
        for size, ref in zip(sizes, refs, strict=True):
            if size % 2:
                with pytest.raises(ValueError, match=f"{size} is odd"):
                    get(ref)
            else:
                assert get(ref) == (size, size, size**2)


def test_what_gloo_opens_listens_at_one_address(pair):
    before = [get(one.listens.remote()) for one in pair]
    with total_over("gloo", *pair) as graph:
        get(graph.execute(4))
        for one, known in zip(pair, before, strict=True):
            new = get(one.listens.remote()) - known
            assert not new & {"0.0.0.0", "::", ""}


@both
@pytest.mark.parametrize("killed", ["writer", "reader"])
def test_an_actor_that_is_killed_in_a_transfer(pair, wait_until, name, killed):
    """One that is stopped has not moved all of it."""
    skip_without(name)
    a, b = worker(HERE), worker(THERE)
    victim, other = (a, b) if killed == "writer" else (b, a)
    graph = total_over(name, a, b)
    assert get(graph.execute(4)) == (4, 4, 16)
    pid = get(victim.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    ref = graph.execute(1 << 24)
    with pytest.raises(WaitTimeoutError):
        conveyor.get(ref, timeout=0.3)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match="Worker"):
        get(ref)
    graph.teardown()
    # Nobody else has taken harm.
    kept = pair[1] if killed == "writer" else pair[0]
    ends = (kept, other) if killed == "reader" else (kept, pair[0])
    with total_over(name, *ends) as again:
        assert get(again.execute(8)) == (8, 8, 64)
    conveyor.kill(other)


@pytest.fixture
def registered(far):
    """Registers transports for one test."""
    made = []

    def register(one):
        transport.register(one)
        made.append(one.name)
        return one.name

    yield register
    for name in made:
        transport.unregister(name)


@both
def test_who_no_longer_waits_does_not_keep_the_edge(pair, registered, name):
    """A transfer that never ends by itself, over each transport: a deadline and a cancellation end it, and
    the next one comes."""
    skip_without(name)
    stuck = registered(FaultyTransport(over=name, stuck=[0, 1]))
    with total_over(stuck, *pair, depth=4) as graph:
        late = graph.execute(4, deadline=0.3)
        with pytest.raises(DeadlineExceededError):
            get(late)
        cancelled = graph.execute(4)
        conveyor.cancel(cancelled)
        with pytest.raises(ExecutionCancelledError):
            get(cancelled)
        assert get(graph.execute(4)) == (4, 4, 16)


class ByAddress(transport.Transport):
    """One of a user's own: the reader connects with the writer, where its host can be reached."""

    name = "by address"
    capabilities = transport.Capabilities(frozenset({"cpu"}), between_hosts=True)

    def open(self, wire):
        return ByAddressEndpoint(wire)


class ByAddressEndpoint(transport.Endpoint):
    def __init__(self, wire):
        self.wire = wire
        self.come, self.requested = {}, {}

    def send(self, tensors, transfer):
        data = [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]
        own = self.wire.hosts[self.wire.rank]
        listener = socket.create_server((own.address, 0))

        def serve():
            with listener, listener.accept()[0] as connection:
                connection.sendall(b"".join(data))
            done.set_result(None)

        def begin():
            self.wire.send((transfer, listener.getsockname()))
            self.wire.start_thread(serve, "by-address")
            return done

        done = Future()
        return transport.Sending(begin, withdraw=listener.close)

    def receive(self, specs, note, transfer):
        self.requested[transfer] = specs, Future()
        future = self.requested[transfer][1]
        self.progress()
        return future

    def progress(self):
        self.come.update(message for _, message in self.wire.receive())
        for transfer in self.come.keys() & self.requested.keys():
            specs, future = self.requested.pop(transfer)
            with socket.create_connection(self.come.pop(transfer)) as connection:
                data = bytearray()
                while more := connection.recv(1 << 16):
                    data += more
            made = []
            for spec in specs:
                size = torch.Size(spec.shape).numel() * getattr(torch, spec.dtype).itemsize
                flat = torch.frombuffer(bytearray(data[:size]), dtype=torch.uint8)
                made.append(flat.view(getattr(torch, spec.dtype)).reshape(spec.shape))
                del data[:size]
            future.set_result(made)

    def abort(self, reason):
        while self.requested:
            self.requested.popitem()[1][1].set_exception(reason)

    def close(self):
        self.come.clear()


def test_a_transport_of_the_users_own(pair, registered):
    with total_over(registered(ByAddress()), *pair) as graph:
        for size in (1, 1 << 10):
            assert get(graph.execute(size)) == (size, size, size**2)


def test_one_that_does_not_say_that_it_reaches_so_far_is_refused(pair, registered):
    class Near(ByAddress):
        name = "near"
        capabilities = transport.Capabilities(frozenset({"cpu"}))

    name = registered(Near())
    with pytest.raises(GraphError) as told:
        total_over(name, *pair)
    told.match(
        r"make goes by the transport 'near' from Worker\S* to Worker\S*, which are on different hosts"
    )
    told.match("name one that does, as 'gloo', 'nixl' and 'nccl' do")
    with total_over("gloo", *pair) as graph:  # nothing of it is left
        assert get(graph.execute(4)) == (4, 4, 16)


#: `make test-nodes` has all of them, of all transports.
CHECKS = [one for one in testing.transport_checks() if one.name in ("values", "many_under_way")]


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_the_checks_of_all_transports(far, monkeypatch, check):
    """Their actors are on two nodes in turn."""
    from conveyor.engines.ray import process_engine

    ray_options, call_lock = process_engine.ray_options, itertools.cycle(["first", "second"])

    def placed(options):
        return {**ray_options(options), "resources": {next(call_lock): 0.001}}

    monkeypatch.setattr(process_engine, "ray_options", placed)
    check.run("gloo")


class OnDevice:
    def __init__(self):
        import accelerator

        accelerator.install()

    def make(self, count):
        import accelerator

        return torch.full((count,), float(count), device=accelerator.KIND)

    def total(self, tensor):
        import accelerator

        assert tensor.device.type == accelerator.KIND
        return float(tensor.cpu().double().sum())

    def pid(self):
        return os.getpid()


@pytest.fixture
def simulated(far):
    """An accelerator that this process has, too, and what stands for NCCL on it."""
    import accelerator
    from conveyor.transport.nccl import NcclTransport

    device = accelerator.install()
    transport.register(NcclTransport(device, accelerator.SimGroup, "sim_nccl"))
    actors = [conveyor.remote(OnDevice).options(**where).remote() for where in (HERE, THERE)]
    yield actors
    for one in actors:
        conveyor.kill(one)
    transport.unregister("sim_nccl")


def test_what_stands_for_nccl(simulated):
    for a, b in (simulated, simulated[::-1]):
        with total_over("sim_nccl", a, b) as graph:
            for size in (1, 1 << 16):
                assert get(graph.execute(size)) == size**2


def test_an_end_of_nccl_that_is_killed_in_a_transfer(simulated):
    a, b = simulated
    graph = total_over("sim_nccl", a, b)
    assert get(graph.execute(4)) == 16
    pid = get(b.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    ref = graph.execute(1 << 22)
    with pytest.raises(WaitTimeoutError):
        conveyor.get(ref, timeout=0.3)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match="OnDevice"):
        get(ref)
    graph.teardown()


def test_memory_of_a_device_is_not_opened_on_another_node(simulated):
    with pytest.raises(
        GraphError, match=r"goes by the transport 'sim_ipc' from .* on different hosts"
    ):
        total_over("sim_ipc", *simulated)
