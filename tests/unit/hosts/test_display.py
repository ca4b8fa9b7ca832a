"""Where `conveyor status` asks the driver of a session with other hosts."""

import socket
import threading
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import pytest
from no_descriptors import is_turned_away, none_at_all

from conveyor.engine.events import EventLoop
from conveyor.engine.net.depot import Supply
from conveyor.engine.net.display import OWN_NODE, Display, NodeSeen, in_words
from conveyor.futures import Future
from conveyor.runtime.graph.telemetry.afar import SeenAll


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


def answer_of(display):
    """What it says; nothing where others are answered, as many as may be at once."""
    with socket.socket(socket.AF_UNIX) as sock, suppress(ConnectionError):
        # One with a limit of time would not wait for a place among those who are to be let in.
        sock.connect(display._listener.getsockname())
        sock.settimeout(60)
        sock.sendall(b"?")
        return b"".join(iter(lambda: sock.recv(1000), b""))
    return b""


def names_in(answer):
    return [node.name for node in msgspec.msgpack.decode(answer, type=list[NodeSeen])]


def test_who_asks_is_answered(display):
    assert names_in(answer_of(display)) == ["a node"]


def test_without_a_descriptor_who_asks_is_turned_away(display, capfd, wait_until):
    """The loop would come there again at once, with an error each time."""
    assert is_turned_away(display._listener.getsockname())
    assert capfd.readouterr().err == ""
    # Some of those who came may have been let in since.
    assert names_in(wait_until(lambda: answer_of(display), 60)) == ["a node"]


def test_without_any_descriptor_the_loop_goes_on_with_the_rest(events, display, wait_until):
    """Not even the spare one is there: somebody was quicker to take it."""
    pauses, others = [600.0], threading.Event()
    display._pauses = SimpleNamespace(next=lambda: pauses[-1], begin_anew=lambda: None)
    display._spare.close()
    with socket.socket(socket.AF_UNIX) as sock:
        with none_at_all():
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


def test_it_ends_while_somebody_is_let_in(events, display, capfd):
    listener, entered, goes_on = display._listener, threading.Event(), threading.Event()

    class Slow:
        def accept(self):
            entered.set()
            assert goes_on.wait(60)
            return listener.accept()

        def __getattr__(self, name):
            return getattr(listener, name)

    display._listener = Slow()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(listener.getsockname())
        assert entered.wait(60)
        display.close()
        goes_on.set()
        events.close()
    assert listener.fileno() == -1
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
