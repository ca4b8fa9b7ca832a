"""Nodes that share no memory and cannot be connected: why, and that the session goes on."""

import socket
import sys

import cloudpickle
import pytest
from msgspec.structs import replace
from ray_nodes import HERE, THERE, TIMEOUT, Adds, get

import conveyor
from conveyor.cluster.handshake import new_token
from conveyor.engines.ray import agents, bootstrap
from conveyor.exceptions import ActorStartError, ConveyorError, RuntimeStateError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


Stage = conveyor.remote(Adds)


def other_version(monkeypatch):
    monkeypatch.setattr(bootstrap, "version", lambda: "Conveyor 0.0 on Python 2.7")


def told(monkeypatch, kind, **what):
    made = getattr(agents, kind)
    monkeypatch.setattr(agents, kind, lambda *args: replace(made(*args), **what))


def other_token(monkeypatch):
    told(monkeypatch, "Secrets", token=new_token())


def dead_address(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        told(monkeypatch, "Terms", address=nobody.getsockname())


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (other_version, r"there is Conveyor .*, and the driver is Conveyor 0\.0 on Python 2\.7"),
        (other_token, "it knows another one"),
        (dead_address, r"host 127\.0\.0\.1:\d+ cannot be reached: Connection refused"),
    ],
)
def test_a_node_that_cannot_be_connected(session, monkeypatch, wrong, text):
    with monkeypatch.context() as patched:
        wrong(patched)
        with pytest.raises(ActorStartError, match="Ray has placed it on node") as caught:
            get(Stage.options(**THERE).remote().run.remote(1))
    caught.match(text)
    # One line for who reads it, not Ray's story of it.
    assert "Traceback" not in str(caught.value)
    assert get(Stage.options(**HERE).remote().run.remote(1)) == 2


def test_the_next_one_is_connected(session):
    there = Stage.options(**THERE).remote()
    assert get(there.run.remote(1)) == 2


def test_a_handle_of_a_session_before(session):
    there, here = Stage.options(**THERE).remote(), Stage.options(**HERE).remote()
    conveyor.shutdown()
    conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT)
    with pytest.raises(RuntimeStateError, match="session"):
        there.run.remote(1)
    again = Stage.options(**THERE).remote()
    for old in here, there:
        with pytest.raises(ConveyorError, match="it belongs to a session that has ended"):
            again.ask.remote(old, 1)
    assert get(again.run.remote(1)) == 2


@pytest.fixture(scope="module")
def session(two_nodes, leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT)
        yield
        conveyor.shutdown()
