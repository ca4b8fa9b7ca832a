"""Where `conveyor status` asks the driver of a session with other hosts."""

import socket
import threading
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import pytest
from no_descriptors import none_at_all

from conveyor.cluster.display import OWN_NODE, Display, NodeSeen, in_words
from conveyor.cluster.servers import Supply
from conveyor.futures import Future
from conveyor.graph.telemetry import SeenAll
from conveyor.local_sockets import KEY_BYTES, prove
from conveyor.runtime.events import EventLoop


@pytest.fixture
def events():
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def display(events):
    made = Display(events, lambda stacks: [NodeSeen("a node", (), f"stacks: {stacks}")])
    yield made
    made.close()


def said_by(display):
    """The key and the name of its socket, as its file holds them."""
    with open(f"/proc/self/fd/{display._file.fileno()}", "rb") as file:
        told = file.read()
    return told[:KEY_BYTES], b"\0" + told[KEY_BYTES:]


def answer_of(display):
    key, name = said_by(display)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(name)
        sock.settimeout(60)
        prove(sock, key)
        sock.sendall(b"?")
        return b"".join(iter(lambda: sock.recv(1000), b""))


def names_in(answer):
    return [node.name for node in msgspec.msgpack.decode(answer, type=list[NodeSeen])]


def test_who_asks_is_answered(display):
    assert names_in(answer_of(display)) == ["a node"]


def test_without_the_key_nobody_is_answered(display):
    _, name = said_by(display)
    for said in (b"s", b"?" * 200):
        with socket.socket(socket.AF_UNIX) as sock, suppress(ConnectionResetError):
            sock.connect(name)
            sock.settimeout(60)
            sock.sendall(said)
            assert sock.recv(1000) == b""
    assert names_in(answer_of(display)) == ["a node"]


def test_without_a_descriptor_who_asks_waits_and_the_loop_goes_on_with_the_rest(
    events, display, wait_until
):
    key, name = said_by(display)
    others = threading.Event()
    display._listener._pauses = SimpleNamespace(next=lambda: 600.0, begin_anew=lambda: None)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        with none_at_all():
            sock.connect(name)
            wait_until(lambda: events._resting, 60)
            events.call(others.set)
            assert others.wait(60)
        # It may be that there is one again: who has come is answered then.
        events.call(lambda: events.rest(display._listener.fileno(), 0.0))
        prove(sock, key)
        sock.sendall(b"?")
        assert sock.recv(1) != b""


def test_it_ends_while_somebody_is_let_in(events, display, capfd):
    entered, goes_on = threading.Event(), threading.Event()
    listener = display._listener
    serve = listener.serve

    def slow():
        entered.set()
        assert goes_on.wait(60)
        return serve()

    listener.serve = slow
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(said_by(display)[1])
        assert entered.wait(60)
        display.close()
        goes_on.set()
        events.close()
    assert listener._socket.fileno() == -1
    assert display._file.closed
    assert capfd.readouterr().err == ""


def test_what_fetches_wait_for_is_said_in_words(wait_until):
    tries, fetched = [], []

    def refuse():
        tries.append(True)
        raise ConnectionRefusedError("nobody listens there")

    def fetch():
        try:
            supply.fetch(1, 1)
        except OSError as error:
            fetched.append(error)

    supply = Supply(refuse)
    assert supply.trouble == ""
    thread = threading.Thread(target=fetch)
    thread.start()
    wait_until(lambda: len(tries) >= 3, 60)
    answer = Future()
    answer.set_result(SeenAll([], {0: supply.trouble, 7: supply.trouble}))
    names = {0: OWN_NODE, 1: "node one"}
    seen = NodeSeen.of("one", answer, 1.0, names)
    (said,) = seen.troubles  # of a host that is gone nothing is said
    assert said.startswith(
        "values that lie on the driver's node are waited for, to which no connection comes about since "
    )
    assert said.endswith("nobody listens there)")
    assert in_words({1: supply.trouble, 0: ""}, names)[0].startswith(
        "values that lie on node one are waited for"
    )
    supply.close()
    thread.join(60)
    assert "nobody listens there" in str(fetched[0])
    assert supply.trouble == ""


def test_a_node_that_does_not_answer_is_said_not_to():
    assert NodeSeen.of("one", Future(), 2.0, {}).unknown == "it has not answered for 2 s"
    failed = Future()
    failed.set_exception(OSError("it has ended"))
    assert NodeSeen.of("one", failed, 2.0, {}).unknown == "it has ended"
