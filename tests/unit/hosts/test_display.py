"""Where `conveyor status` asks the driver of a session with other hosts."""

import contextlib
import socket
import threading
from types import SimpleNamespace

import msgspec
import pytest
from no_descriptors import no_descriptors

from conveyor.engine.events import EventLoop
from conveyor.engine.net.display import Display, NodeSeen


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


def test_who_asks_is_answered(display):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(display._listener.getsockname())
        sock.sendall(b"?")
        answer = b"".join(iter(lambda: sock.recv(1000), b""))
    assert msgspec.msgpack.decode(answer, type=list[NodeSeen])[0].name == "a node"


def test_without_a_descriptor_who_asks_is_turned_away(display, capfd):
    """The loop would come there again at once, with an error each time."""
    address = display._listener.getsockname()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        with no_descriptors():
            sock.connect(address)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    assert capfd.readouterr().err == ""
    test_who_asks_is_answered(display)


def test_without_any_descriptor_the_loop_goes_on_with_the_rest(events, display, wait_until):
    """Not even the spare one is there: somebody was quicker to take it."""
    pauses, others = [600.0], threading.Event()
    display._pauses = SimpleNamespace(next=lambda: pauses[-1], begin_anew=lambda: None)
    display._spare.close()
    with socket.socket(socket.AF_UNIX) as sock:
        with no_descriptors():
            sock.connect(display._listener.getsockname())
            wait_until(lambda: events._resting, 60)
            events.call(others.set)
            assert others.wait(60)
        # It may be that there is one again: who has come is answered then.
        events.call(lambda: events.rest(display._listener.fileno(), 0.0))
        sock.settimeout(60)
        sock.sendall(b"?")
        assert sock.recv(1) != b""
    assert not display._spare._file.closed
