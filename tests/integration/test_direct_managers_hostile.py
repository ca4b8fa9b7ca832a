"""Transports of the user's own for values that stay, whose methods do what they should not."""

import itertools
import os
import sys

import pytest
from integration_helpers import WAIT, get
from integration_managers import FAILS_TO_RECEIVE, FAILS_TO_SEND, NEVER_SENDS, Files, Sockets

import conveyor
from conveyor.direct.managers import hooks
from conveyor.exceptions import TransportError, WaitTimeoutError
from conveyor.experimental import register_tensor_transport

torch = pytest.importorskip("torch")

PRELOAD = ["torch"]
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]


@conveyor.remote
class Peer:
    def tensor(self, mark=1.0):
        return torch.full((4,), float(mark))

    def sum(self, value):
        return float(value.sum())


numbers = itertools.count()


@pytest.fixture
def named(session, tmp_path):
    """Registers a manager by a name that nobody has."""

    def register(manager, **overridden):
        manager = type(manager.__name__, (manager,), {"folder": str(tmp_path), **overridden})
        name = f"hostile{os.getpid()}-{next(numbers)}"
        register_tensor_transport(name, ["cpu"], manager)
        return name

    return register


@pytest.fixture
def peers(session):
    made = Peer.remote(), Peer.remote()
    yield made
    for one in made:
        conveyor.kill(one)


def still_works(name, maker, user):
    ref = maker.tensor.options(tensor_transport=name).remote(2)
    assert get(user.sum.remote(ref)) == 8.0
    assert get(ref).tolist() == [2.0] * 4


class Wordless(Exception):
    def __str__(self):
        raise ValueError("no words")


@pytest.mark.parametrize("manager", [Files, Sockets])
def test_errors_whose_message_cannot_be_made(peers, named, manager):
    maker, user = peers

    def receive(self, obj_id, meta, communicator, target_buffers=None):
        if meta.mark == FAILS_TO_RECEIVE:
            if manager is Sockets:
                self.listening.pop(communicator.address).close()
            raise Wordless
        return manager.recv_multiple_tensors(self, obj_id, meta, communicator, target_buffers)

    def send(self, tensors, meta, communicator):
        if meta.mark == FAILS_TO_SEND:
            raise Wordless
        manager.send_multiple_tensors(self, tensors, meta, communicator)

    name = named(manager, recv_multiple_tensors=receive, send_multiple_tensors=send)
    marks = [FAILS_TO_RECEIVE] if manager is Files else [FAILS_TO_RECEIVE, FAILS_TO_SEND]
    for mark in marks:
        ref = maker.tensor.options(tensor_transport=name).remote(mark)
        for failing in (ref, user.sum.remote(ref)):
            with pytest.raises(TransportError, match="Wordless: <str"):
                get(failing)
    still_works(name, maker, user)


def test_an_abort_that_raises_is_not_what_has_happened(peers, named, monkeypatch):
    def abort(self, obj_id, communicator):
        Sockets.abort_transport(self, obj_id, communicator)
        raise OSError("cannot abort")

    name = named(Sockets, abort_transport=abort)
    maker, user = peers
    logged = []

    def log(text, *args, exc_info):
        # A record of logging's would keep the frames, and so the value.
        logged.append(f"{text % args}: {sys.exc_info()[1]}")

    monkeypatch.setattr(hooks._log, "warning", log)
    ref = maker.tensor.options(tensor_transport=name).remote(NEVER_SENDS)
    conveyor.wait([ref], timeout=WAIT)
    with pytest.raises(WaitTimeoutError, match=name):
        conveyor.get(ref, timeout=0.05)
    assert [line.partition("abort_transport()")[2] for line in logged] == [
        f" of the transport {name!r} has failed: cannot abort"
    ]
    still_works(name, maker, user)
