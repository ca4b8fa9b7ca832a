"""Communicators of the user's move tensors between the actors that they list."""

import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, GraphError, TransportError
from conveyor.experimental.channel import Communicator, TorchTensorType

torch = pytest.importorskip("torch")

PRELOAD = ["torch"]
pytestmark = pytest.mark.torch


class Sockets(Communicator):
    """Sends each tensor over a connection of its own; a send waits until it has been received."""

    def __init__(self, folder, actors, fails=(), stalls=()):
        self.folder = str(folder)
        self.actors = list(actors)
        self.fails = set(fails)
        self.stalls = set(stalls)
        self.rank = None
        self.listening = {}
        self.busy = threading.Lock
        self.over = False

    def initialize(self, rank):
        self.rank = rank
        self.busy = threading.Lock()
        self.note("initialized")
        self.check_fault("initialize")

    def note(self, what):
        with open(f"{self.folder}/log", "a") as log:
            log.write(f"{self.rank} {what}\n")

    def check_fault(self, what):
        # Once for all copies: a file says that it has happened.
        for faults, stalls in ((self.fails, False), (self.stalls, True)):
            mark = Path(f"{self.folder}/{what}-{self.rank}")
            if (what, self.rank) in faults and not mark.exists():
                mark.touch()
                if stalls:
                    while not self.over:
                        time.sleep(0.005)
                raise OSError(f"{what} of {self.rank} goes wrong")

    def get_actor_handles(self):
        return self.actors

    def get_rank(self, actor):
        return self.actors.index(actor)

    def get_self_rank(self):
        return self.rank

    def get_transport_name(self):
        return "sockets"

    def path(self, source, target):
        return f"{self.folder}/{source}-{target}"

    def send(self, value, peer_rank):
        assert self.busy.acquire(blocking=False), "two calls at once"
        try:
            self.check_fault("send")
            data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
            to = self.path(self.rank, peer_rank)
            while not self.over:
                connection = socket.socket(socket.AF_UNIX)
                with connection:
                    try:
                        connection.connect(to)
                    except OSError:
                        time.sleep(0.0005)
                        continue
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)
                    return
            raise OSError("destroyed")
        finally:
            self.busy.release()

    def recv(self, shape, dtype, peer_rank, allocator):
        assert self.busy.acquire(blocking=False), "two calls at once"
        try:
            self.check_fault("recv")
            made = allocator(shape, dtype)
            path = Path(self.path(peer_rank, self.rank))
            with socket.socket(socket.AF_UNIX) as listener:
                path.unlink(missing_ok=True)
                listener.bind(str(path))
                listener.listen()
                listener.settimeout(0.01)
                while not self.over:
                    try:
                        connection, _ = listener.accept()
                    except TimeoutError:
                        continue
                    path.unlink(missing_ok=True)
                    with connection:
                        data = bytearray()
                        while more := connection.recv(1 << 20):
                            data += more
                        connection.sendall(b"k")
                    if data:
                        made.reshape(-1).view(torch.uint8).copy_(
                            torch.frombuffer(data, dtype=torch.uint8)
                        )
                    return made
            raise OSError("destroyed")
        finally:
            self.busy.release()

    def destroy(self):
        self.over = True
        self.note("destroyed")


@conveyor.remote(max_restarts=1)
class Peer:
    def make(self, number):
        return {
            "big": torch.full((1000,), float(number)),
            "tail": torch.arange(number),
            "n": number,
        }

    def take(self, *values):
        for value in values:
            assert value["tail"].tolist() == list(range(value["n"]))
        return [float(value["big"].mean()) for value in values]

    def same(self, value):
        return value

    def add(self, *values):
        number = sum(value["n"] for value in values)
        assert all(float(v["big"].mean()) == v["n"] for v in values)
        return self.make(number)


@pytest.fixture(scope="module")
def peers(session):
    return [Peer.remote() for _ in range(3)]


def got(ref):
    return conveyor.get(ref, timeout=60)


def log_of(folder):
    return Path(f"{folder}/log").read_text().splitlines()


def test_tensors_go_by_a_communicator(peers, tmp_path, wait_until):
    a, b, c = peers
    sockets = Sockets(tmp_path, peers)
    with InputNode() as inp:
        made = a.make.bind(inp).with_tensor_transport(sockets)
        graph = MultiOutputNode([b.take.bind(made), c.take.bind(made), made]).compile()
    # Between hosts it says from where to where before that.
    said = r"communicator sockets, (depth 16: )?asked for by with_tensor_transport"
    assert re.search(said, graph.explain())
    refs = [graph.execute(number) for number in range(10)]
    for number, (left, right, result) in enumerate(refs):
        assert got(left) == got(right) == [number]
        assert got(result)["n"] == number
    graph.teardown()
    wait_until(lambda: len(log_of(tmp_path)) == 6)
    assert sorted(log_of(tmp_path)) == sorted(
        f"{rank} {what}" for rank in range(3) for what in ("initialized", "destroyed")
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_transfers_that_cross_do_not_wait_for_each_other(peers, tmp_path, order):
    """Every actor sends to all others and receives of them, in one graph, with sends that wait."""
    sockets = Sockets(tmp_path, [peers[rank] for rank in order])
    with InputNode() as inp:
        first = [p.make.bind(inp).with_tensor_transport(sockets) for p in peers]
        # Each takes what it gets in another order.
        turned = [first[i:] + first[:i] for i in range(3)]
        second = [
            p.add.bind(*values).with_tensor_transport(sockets)
            for p, values in zip(peers, turned, strict=True)
        ]
        third = [p.take.bind(*reversed(second)) for p in peers]
        graph = MultiOutputNode(third).compile(depth=8)
    refs = [graph.execute(number) for number in range(8)]
    for number, results in enumerate(refs):
        assert got(results) == [[3 * number] * 3] * 3
    graph.teardown()


def test_the_default_communicator(peers, tmp_path):
    a, b, _ = peers
    sockets = Sockets(tmp_path, [b, a])
    for name in ("accelerator", "nccl"):
        with InputNode() as inp:
            hint = TorchTensorType(transport=name, _static_shape=False)
            root = b.take.bind(a.make.bind(inp).with_type_hint(hint))
        with root.experimental_compile(_default_communicator=sockets) as graph:
            assert got(graph.execute(4)) == [4]
            assert "communicator sockets" in graph.explain()
        with pytest.raises(
            GraphError, match=r"names no communicator, and .*default_communicator=None"
        ):
            root.compile(default_communicator=None)
    for wrong in ("other", 3, b):
        with pytest.raises(ValueError, match="default_communicator must be 'create', None or a"):
            root.experimental_compile(_default_communicator=wrong)


def test_an_actor_compiles_with_a_communicator(peers, tmp_path):
    a, b, _ = peers

    @conveyor.remote
    class Compiler:
        def run(self, communicator, a, b):
            with InputNode() as inp:
                made = a.make.bind(inp).with_tensor_transport("accelerator")
                root = b.take.bind(made)
            with root.compile(default_communicator=communicator) as graph:
                return [got(graph.execute(number)) for number in range(3)]

    compiler = Compiler.remote()
    sockets = Sockets(tmp_path, [a, b])
    assert got(compiler.run.remote(sockets, a, b)) == [[0], [1], [2]]


class Odd(Sockets):
    """Says of itself what a test wants."""

    def __init__(self, folder, actors, **answers):
        super().__init__(folder, actors)
        self.answers = answers

    def get_rank(self, actor):
        return self.answers.get("rank", super().get_rank(actor))

    def get_transport_name(self):
        return self.answers.get("name", "sockets")

    def get_world_size(self):
        return self.answers.get("size", len(self.actors))


def test_bad_communicators(peers, tmp_path):
    a, b, c = peers

    def refused(communicator, said):
        with InputNode() as inp:
            made = a.make.bind(inp).with_tensor_transport(communicator)
            with pytest.raises(GraphError, match=rf"make: .*{said}"):
                b.take.bind(made).compile()

    refused(
        Sockets(tmp_path, [a, c]), "Peer#2 takes part, and is no member .* which has Peer, Peer#3"
    )
    refused(Sockets(tmp_path, []), "no member .* which has none")
    refused(Sockets(tmp_path, [a, b, a]), "lists the actor Peer twice")
    refused(Sockets(tmp_path, [a, "b"]), "lists 'b', which is no actor")
    refused(Odd(tmp_path, [a, b], rank=1), r"ranks \[1, 1\]")
    refused(Odd(tmp_path, [a, b], size=3), "the size 3")
    refused(Odd(tmp_path, [a, b], name=7), r"get_transport_name\(\) of a Odd gives 7")
    refused(Odd(tmp_path, [a, b], note=(n for n in ())), "cannot be sent to its actors: ")
    with pytest.raises(ValueError, match="unknown transport"):
        InputNode().with_tensor_transport(object())
    with pytest.raises(TypeError, match="abstract"):
        Communicator()
    sockets = Sockets(tmp_path, [a, b])
    with (
        InputNode() as inp,
        pytest.raises(GraphError, match=r"input: .*'communicator sockets'.*only actors take part"),
    ):
        b.same.bind(inp.with_tensor_transport(sockets)).compile()
    with InputNode() as inp, pytest.raises(GraphError, match="only actors take part"):
        a.make.bind(inp).with_tensor_transport(sockets).compile()


@pytest.mark.parametrize("what", ["send", "recv", "initialize"])
@pytest.mark.parametrize("turned", [False, True], ids=["sends first", "receives first"])
def test_one_that_fails_fails_one_execution(peers, tmp_path, what, turned):
    a, b, _ = peers
    writer = 1 if turned else 0
    failing = writer if what != "recv" else 1 - writer
    sockets = Sockets(tmp_path, [b, a] if turned else [a, b], fails=[(what, failing)])
    with InputNode() as inp:
        made = a.make.bind(inp).with_tensor_transport(sockets)
        graph = b.take.bind(made).compile(depth=4)
    with pytest.raises(TransportError, match=rf"{what} of {failing} goes wrong") as told:
        got(graph.execute(0))
    assert re.search(
        r"edge #1 \(Peer.make\): tensors could not be .* 'communicator sockets'", str(told.value)
    )
    for number in range(1, 4):
        assert got(graph.execute(number)) == [number]
    graph.teardown()


def test_one_that_never_answers_harms_only_its_transfers(peers, tmp_path):
    a, b, c = peers
    sockets = Sockets(tmp_path, [a, b], stalls=[("send", 0)])
    with InputNode() as inp:
        graph = b.take.bind(a.make.bind(inp).with_tensor_transport(sockets)).compile()
    stuck = graph.execute(1)
    # Both actors serve calls and other graphs.
    assert got(b.take.remote(a.make.remote(3))) == [3]
    with InputNode() as inp, c.take.bind(a.make.bind(inp)).compile() as other:
        assert got(other.execute(2)) == [2]
    with pytest.raises(conveyor.exceptions.WaitTimeoutError, match="waiting for the tensors of"):
        stuck.get(timeout=1)
    began = time.monotonic()
    graph.teardown()
    assert time.monotonic() - began < 15
    assert got(b.take.remote(a.make.remote(3))) == [3]


def test_a_member_that_dies(peers, tmp_path):
    a, b, _ = peers
    sockets = Sockets(tmp_path, [b, a])
    with InputNode() as inp:
        graph = b.take.bind(a.make.bind(inp).with_tensor_transport(sockets)).compile()
    assert got(graph.execute(1)) == [1]
    conveyor.kill(a, no_restart=False)
    # It is started again, and the graph is deployed anew with it.
    results = []
    for number in range(2, 6):
        try:
            results.append(got(graph.execute(number)))
        except ActorDiedError:
            results.append(None)
    assert results[-1] == [5]
    graph.teardown()


def test_on_the_inline_engine_tensors_travel_in_frames(tmp_path):
    """In a program of its own, beside this module's session."""
    program = f"""
import conveyor, torch
from conveyor.dag import InputNode
from test_communicators import Peer, Sockets

conveyor.init(engine="inline")
a, b = Peer.remote(), Peer.remote()
with InputNode() as inp:
    made = a.make.bind(inp).with_tensor_transport(Sockets({str(tmp_path)!r}, [a, b]))
    graph = b.take.bind(made).compile()
assert conveyor.get(graph.execute(3)) == [3]
assert "communicator sockets" in graph.explain()
with InputNode() as inp:
    made = a.make.bind(inp).with_tensor_transport(Sockets({str(tmp_path)!r}, [a]))
    try:
        b.take.bind(made).compile()
    except conveyor.exceptions.GraphError as error:
        print(error)
conveyor.shutdown()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "is no member of the communicator sockets" in done.stdout
    assert not (tmp_path / "log").exists()
