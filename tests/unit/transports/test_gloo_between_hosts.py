"""Ends of an edge over gloo that listen at different addresses: whichever is the greater, they connect, each
at its own address alone, and again when the connection was lost."""

import os
import socket
import threading
import time

import psutil
import pytest

pytest.importorskip("torch")

import torch

from conveyor.transport import Host
from conveyor.transport.base import TensorSpec
from conveyor.transport.gloo.endpoint import GlooEndpoint
from conveyor.transport.gloo.pairs import addresses_to

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this build of torch has no gloo"
)

WAIT = 60
LOWER, HIGHER = "127.0.0.3", "127.0.0.7"


class Wire:
    """An end; what it sends is put into the boxes of the others."""

    edge, overlap, deployed, known_dead_within = "an edge", False, 1, 0.01
    members = ("Writer", "Reader")

    def __init__(self, rank, hosts, changed):
        self.rank, self.hosts, self.changed = rank, hosts, changed
        self.box, self.other = [], None

    def send(self, message):
        with self.changed:
            self.other.box.append((self.rank, message))
            self.changed.notify_all()

    def receive(self):
        with self.changed:
            come, self.box = self.box, []
        return come

    def notify(self):
        with self.changed:
            self.changed.notify_all()

    def start_thread(self, target, name):
        threading.Thread(target=target, name=name, daemon=True).start()


class Ends:
    """Both ends, whose endpoints one thread calls, as an actor's does."""

    def __init__(self, writer, reader):
        self.changed = threading.Condition()
        hosts = (Host(0, writer), Host(1, reader))
        self.wires = [Wire(rank, hosts, self.changed) for rank in (0, 1)]
        self.wires[0].other, self.wires[1].other = self.wires[1], self.wires[0]
        self.writer, self.reader = [GlooEndpoint(wire) for wire in self.wires]
        self.transfer = 0

    def until(self, done):
        end = time.monotonic() + WAIT
        over = False
        while not over:
            assert time.monotonic() < end
            # Once more behind the end: what was said before it comes.
            over = done()
            self.writer.progress()
            self.reader.progress()
            with self.changed:
                # Futures ring nobody here.
                self.changed.wait(0.01)

    def move(self, tensor):
        self.transfer += 1
        sent = self.writer.send([tensor], self.transfer).begin()
        requested = self.reader.receive([TensorSpec.of(tensor)], b"", self.transfer)
        # A reader that is not told by its own end is by the writer's, see Outbound.
        self.until(lambda: requested.done() or (sent.done() and sent.exception()))
        if not requested.done():
            raise sent.exception()
        return requested.result()[0]

    def close(self):
        for endpoint in (self.writer, self.reader):
            endpoint.abort(RuntimeError("over"))
            endpoint.close()


@pytest.fixture(params=[(LOWER, HIGHER), (HIGHER, LOWER)], ids=["reader calls", "writer calls"])
def ends(request):
    made = Ends(*request.param)
    yield made
    made.close()


def gloo_sockets(status):
    return [
        one
        for one in psutil.Process().net_connections("tcp")
        if one.status == status and one.laddr.ip in (LOWER, HIGHER)
    ]


def test_tensors_come_whichever_end_calls(ends):
    for size in (1, 1000, 1 << 20, 0, 3):
        tensor = torch.arange(size)
        assert torch.equal(ends.move(tensor), tensor)
    listening = {one.laddr.ip for one in gloo_sockets("LISTEN")}
    assert listening == {LOWER, HIGHER}


def test_a_connection_that_is_lost_is_made_anew(ends):
    tensor = torch.arange(100)
    assert torch.equal(ends.move(tensor), tensor)
    for one in gloo_sockets("ESTABLISHED"):
        with socket.socket(fileno=socket.dup(one.fd)) as same:
            same.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionError, match=r"the connection with .* is lost"):
        ends.move(tensor)
    assert torch.equal(ends.move(tensor), tensor)


def test_the_end_finds_who_waits(ends):
    tensor = torch.arange(100)
    assert torch.equal(ends.move(tensor), tensor)
    requested = ends.reader.receive([TensorSpec.of(tensor)], b"", 99)
    ends.reader.abort(RuntimeError("not wanted any more"))
    with pytest.raises(RuntimeError, match="not wanted any more"):
        requested.result(WAIT)


def test_nodes_of_two_versions_of_ip():
    wire = Wire(0, (Host(0, "192.0.2.1"), Host(1, "fd00::2")), threading.Condition())
    with pytest.raises(ValueError, match=r"two of one version of IP"):
        addresses_to(wire, 1)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_an_address_of_the_sixth_version():
    from conveyor.transport.gloo.pairs import _connections

    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        known = ("00000000000000000000000001000000", port)
        with socket.create_connection(("::1", port)), listener.accept()[0] as accepted:
            (there,) = _connections({known}, away=False)
            assert os.readlink(f"/proc/self/fd/{accepted.fileno()}") == f"socket:[{there}]"
