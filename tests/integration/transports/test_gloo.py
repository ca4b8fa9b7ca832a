"""Gloo: connections that are lost, and where there is none."""

import fcntl
import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

import conveyor
from conveyor import transport
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError, GraphError, TransportError

torch = pytest.importorskip("torch")
PRELOAD = ["torch"]
# An end that has lost its connection waits for as long as the other one's death may take to be known.
NODE_TIMEOUT = 5.0
pytestmark = [
    pytest.mark.usefixtures("session"),
    pytest.mark.skipif(
        not torch.distributed.is_gloo_available(), reason="this build of torch has no gloo"
    ),
]


@conveyor.remote
class Worker:
    def make(self, count):
        import torch

        return torch.full((count,), float(count))

    def total(self, tensor):
        return float(tensor.sum())

    def threads(self):
        return sum(thread.name == "conveyor-gloo" for thread in threading.enumerate())

    def fail_to_connect(self, times):
        """Have this process fail to make the next groups."""
        from conveyor.transport.gloo import endpoint

        make, left = endpoint.Pair, [None] * times

        def fail(*arguments):
            if left:
                left.pop()
                raise OSError("no way there")
            return make(*arguments)

        endpoint.Pair = fail

    def pid(self):
        return os.getpid()

    def cut(self, other):
        """Break all connections of this process with that one."""
        import socket

        theirs = {(one.raddr, one.laddr) for one in psutil.Process(other).net_connections()}
        for connection in psutil.Process().net_connections():
            if connection.raddr and (connection.laddr, connection.raddr) in theirs:
                one = socket.socket(fileno=os.dup(connection.fd))
                one.shutdown(socket.SHUT_RDWR)
                one.close()


@pytest.fixture(scope="module")
def pair(session):
    made = Worker.remote(), Worker.remote()
    yield made
    for one in made:
        conveyor.kill(one)


@pytest.mark.parametrize("which", [0, 1])
def test_a_connection_that_is_lost_is_made_anew(pair, which):
    with InputNode() as inp:
        made = pair[0].make.bind(inp).with_tensor_transport("gloo")
        graph = pair[1].total.bind(made).compile()
    assert graph.execute(10).get(timeout=60) == 100
    other = conveyor.get(pair[1 - which].pid.remote(), timeout=60)
    conveyor.get(pair[which].cut.remote(other), timeout=60)
    with pytest.raises(TransportError, match=r"the connection with Worker\S* is lost"):
        graph.execute(10).get(timeout=60)
    for number in (1, 2, 3):
        assert graph.execute(number).get(timeout=60) == number**2
    graph.teardown()


def test_where_there_is_no_gloo(monkeypatch, pair):
    gloo = transport.get("gloo")
    assert gloo.viable() is None
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert gloo.viable() == "this build of torch has no gloo"
    with pytest.raises(RuntimeError, match="has no gloo"):
        gloo.open(None)
    a, b = pair
    with InputNode() as inp:
        root = b.total.bind(a.make.bind(inp).with_tensor_transport("gloo"))
    with pytest.raises(GraphError, match="'gloo', which cannot be used: this build of torch"):
        root.compile()
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gloo.viable() == "torch is not installed: pip install 'conveyor[torch]'"


def test_files_that_the_program_has_locked_stay_so(tmp_path):
    """To close a duplicate of a file's descriptor would give back the locks that the process has on it."""

    @conveyor.remote
    class Locks:
        def lock(self, path):
            self.file = Path(path).open("w")  # noqa: SIM115 - the lock lasts as long as it
            fcntl.lockf(self.file, fcntl.LOCK_EX)

        def make(self, x):
            return torch.full((8,), float(x))

        def total(self, tensor):
            return tensor.sum().item()

    a, b = Locks.remote(), Locks.remote()
    path = str(tmp_path / "locked")
    conveyor.get(a.lock.remote(path))
    with InputNode() as x:
        made = a.make.bind(x).with_tensor_transport("gloo")
        graph = b.total.bind(made).compile()
    with graph:
        assert conveyor.get(graph.execute(3)) == 24.0
        with open(path, "w") as other, pytest.raises(BlockingIOError):
            fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_graphs_that_are_taken_down_while_they_connect_leave_no_threads(pair, wait_until):
    """An end that has gone on without the other one would wait for it for minutes."""
    for _ in range(20):
        with InputNode() as inp:
            made = pair[0].make.bind(inp).with_tensor_transport("gloo")
            pair[1].total.bind(made).compile().teardown()
    wait_until(lambda: not any(conveyor.get([one.threads.remote() for one in pair])), timeout=30)


def ports_of(process):
    """Those of its connections. Other tests beside this one have theirs."""
    found = process.net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_ESTABLISHED}


def half_sent(ports):
    """Whether a connection over the loopback interface from one of these has something left to send."""
    local, established = "0100007F", "01"
    with open("/proc/net/tcp") as table:
        next(table)
        for line in table:
            _, here, there, state, queues, *_ = line.split()
            connected = here.startswith(local) and there.startswith(local) and state == established
            of_these = int(here.rpartition(":")[2], 16) in ports
            if of_these and connected and not queues.startswith("00000000:"):
                return True
    return False


@pytest.mark.parametrize("which", [0, 1])
def test_a_transfer_that_is_half_done_ends_with_its_graph(which, wait_until):
    """Gloo tells a transfer that has begun nothing of the end of its connection."""
    pair = writer, reader = Worker.remote(), Worker.remote()
    process = psutil.Process(conveyor.get(pair[which].pid.remote()))
    with InputNode() as inp:
        made = writer.make.bind(inp).with_tensor_transport("gloo")
        graph = reader.total.bind(made).compile()
    assert conveyor.get(graph.execute(2)) == 4
    ports = ports_of(psutil.Process(conveyor.get(writer.pid.remote())))
    assert ports
    while True:
        ref = graph.execute(1 << 26)
        # All of it may be sent between two looks: then once more.
        wait_until(
            lambda ref=ref: half_sent(ports) or conveyor.wait([ref], timeout=0)[0], timeout=60
        )
        process.suspend()
        if half_sent(ports):
            break
        process.resume()  # it was the last of it
        conveyor.get(ref)
    conveyor.kill(pair[which])
    with pytest.raises(ActorDiedError):
        conveyor.get(ref)
    graph.teardown()
    wait_until(lambda: conveyor.get(pair[1 - which].threads.remote()) == 0)


def test_a_transfer_can_be_aborted():
    """It takes functions of torch that Python is not given: this fails where they are not found."""
    from conveyor.transport.gloo.pairs import Pair, PairAddresses, Rendezvous, abort

    stores = Rendezvous(), Rendezvous()
    made = {}

    def connect(rank):
        made[rank] = Pair(stores[rank], PairAddresses(("127.0.0.1", "127.0.0.2"), rank))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    stores[1].meet(stores[0].addresses())
    threads[1].join()
    stores[0].meet(stores[1].both()[0])
    threads[0].join()
    send, receive = made[0]._group.send, made[1]._group.recv
    for work in (send([torch.zeros(8)], 1, 7), receive([torch.zeros(8)], 0, 8)):
        waiting = threading.Thread(target=work.wait, args=(timedelta(days=1),))
        waiting.start()
        assert abort(work)
        waiting.join(20)
        assert not waiting.is_alive()
    for one in made.values():
        one.close()


def test_a_reader_that_cannot_connect_says_why_and_tries_again():
    reader = Worker.remote()
    writer = Worker.remote()
    conveyor.get(reader.fail_to_connect.remote(1))
    with InputNode() as inp:
        made = writer.make.bind(inp).with_tensor_transport("gloo")
        graph = reader.total.bind(made).compile()
    # No error is raised where the writer has heard of it before it sent anything.
    with suppress(TransportError):
        assert graph.execute(10).get(timeout=60) == 100
    conveyor.get(reader.fail_to_connect.remote(1))
    # So that what comes next is lost, or connects anew.
    conveyor.get(writer.cut.remote(conveyor.get(reader.pid.remote())))
    told = []
    for number in (2, 3, 4):
        try:
            assert graph.execute(number).get(timeout=60) == number**2
        except TransportError as error:
            told.append(str(error))
    assert all("is lost" in words or "no way there" in words for words in told)
    assert len(told) < 3
    for number in (2, 3):
        assert graph.execute(number).get(timeout=60) == number**2
    graph.teardown()
