"""Transports of the user's own for values that stay, whose methods do what they should not."""

import contextlib
import functools
import gc
import itertools
import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from dataclasses import dataclass, replace

import pytest
from integration_helpers import WAIT, get
from integration_managers import (
    DIES,
    FAILS_TO_RECEIVE,
    FAILS_TO_SEND,
    KILLS,
    NEVER_SENDS,
    Files,
    Sockets,
)

import conveyor
from conveyor.direct.managers import manager as hooks
from conveyor.direct.managers.registry import route
from conveyor.direct.managers.transfers import Source
from conveyor.exceptions import ActorDiedError, TransportError, WaitTimeoutError
from conveyor.experimental import CommunicatorMetadata, register_tensor_transport

torch = pytest.importorskip("torch")

PRELOAD = ["torch"]
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]


@conveyor.remote
class Peer:
    def tensor(self, mark=1.0):
        return torch.full((4,), float(mark))

    def sum(self, value):
        return float(value.sum())

    def alone(self):
        made = torch.ones(4)
        self.watched = weakref.ref(made)
        return made

    def is_gone(self):
        gc.collect()
        return self.watched() is None

    def pid(self):
        return os.getpid()


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


def receiving_all(manager):
    """Receives whatever the mark is. A receiver that raises before would have the sender fail as well, and
    what that one says may come first."""

    def receive(self, obj_id, meta, communicator):
        return manager.recv_multiple_tensors(self, obj_id, replace(meta, mark=0), communicator)

    return receive


class Wordless(Exception):
    def __str__(self):
        raise ValueError("no words")


@pytest.mark.parametrize("manager", [Files, Sockets])
def test_errors_whose_message_cannot_be_made(peers, named, manager):
    maker, user = peers

    def receive(self, obj_id, meta, communicator, target_buffers=None):
        came = all_of_it(self, obj_id, meta, communicator)
        if meta.mark == FAILS_TO_RECEIVE:
            raise Wordless
        return came

    all_of_it = receiving_all(manager)

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
    end = time.monotonic() + WAIT
    while not logged:  # its time may be over before it has begun to receive
        # The abort of the sender of one try may come as late as in the next one, which it then ends.
        with pytest.raises((WaitTimeoutError, TransportError), match=name) as raised:
            conveyor.get(ref, timeout=1)
        assert "cannot abort" not in str(raised.value)
        assert time.monotonic() < end
    assert [line.partition("abort_transport()")[2] for line in logged] == [
        f" of the transport {name!r} has failed: cannot abort"
    ]
    still_works(name, maker, user)


@pytest.mark.parametrize("manager", [Files, Sockets])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_errors_that_are_no_exceptions_fail_the_transfer_alone(peers, named, manager, error):
    maker, user = peers

    def receive(self, obj_id, meta, communicator, target_buffers=None):
        came = all_of_it(self, obj_id, meta, communicator)
        if meta.mark == FAILS_TO_RECEIVE:
            raise error("unplugged")
        return came

    all_of_it = receiving_all(manager)
    name = named(manager, recv_multiple_tensors=receive)
    ref = maker.tensor.options(tensor_transport=name).remote(FAILS_TO_RECEIVE)
    failing = [user.sum.remote(ref)]
    if manager is Sockets or error is not KeyboardInterrupt:
        failing.append(ref)  # on the driver's main thread that one is Ctrl-C
    for one in failing:
        with pytest.raises(TransportError, match=f"{error.__name__}: unplugged"):
            get(one)
    still_works(name, maker, user)


@pytest.mark.parametrize("manager", [Files, Sockets])
def test_a_signal_may_end_the_program_while_a_value_is_fetched(peers, named, manager):
    def receive(self, obj_id, meta, communicator, target_buffers=None):
        if meta.mark == KILLS:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
            assert came.wait(WAIT)
        if manager is Sockets and meta.mark == KILLS:
            self.listening.pop(communicator.address).close()
            raise OSError("too late")
        return manager.recv_multiple_tensors(self, obj_id, meta, communicator, target_buffers)

    def handler(*_):
        came.set()
        raise SystemExit(3)

    came, name = threading.Event(), named(manager)
    maker, user = peers
    ref = maker.tensor.options(tensor_transport=name).remote(KILLS)
    conveyor.wait([ref], timeout=WAIT)
    before = signal.signal(signal.SIGALRM, handler)
    taken = route(name).manager
    try:
        taken.recv_multiple_tensors = functools.partial(receive, taken)
        with pytest.raises(SystemExit):
            get(ref)
    finally:
        signal.signal(signal.SIGALRM, before)
        del taken.recv_multiple_tensors
    still_works(name, maker, user)


@pytest.mark.parametrize("manager", [Files, Sockets])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda tensor: 1, "a int came"),
        (lambda tensor: tensor.numpy(), "a ndarray came"),
        (lambda tensor: tensor.to("meta"), "one of torch.strided on device 'meta' came"),
        (lambda tensor: tensor.to_sparse(), "one of torch.sparse_coo on device 'cpu' came"),
    ],
)
def test_what_comes_is_what_was_announced(peers, named, manager, what, words):
    def receive(self, *given):
        came = manager.recv_multiple_tensors(self, *given)
        return [what(one) if one[0] == 1 else one for one in came]

    maker, user = peers
    name = named(manager, recv_multiple_tensors=receive)
    ref = maker.tensor.options(tensor_transport=name).remote()
    for failing in (ref, user.sum.remote(ref)):
        with pytest.raises(
            TransportError, match=f"a dense torch tensor was announced, and {words}"
        ):
            get(failing)
    still_works(name, maker, user)


@pytest.mark.parametrize("manager", [Files, Sockets])
def test_a_manager_may_keep_the_lists_that_it_is_given(peers, named, manager):
    def extract(self, obj_id, tensors):
        found = manager.extract_tensor_transport_metadata(self, obj_id, tensors)
        tensors.clear()
        return found

    def send(self, tensors, meta, communicator):
        manager.send_multiple_tensors(self, tensors, meta, communicator)
        tensors.clear()

    name = named(manager, extract_tensor_transport_metadata=extract, send_multiple_tensors=send)
    still_works(name, *peers)


def close_listeners(name):
    """Of transfers that nobody could be asked for."""
    listening = route(name).manager.listening
    while listening:
        listening.popitem()[1].close()


def test_a_producer_that_is_stopped_takes_no_longer_than_the_timeout(peers, named):
    """Nobody takes the connections, and a socket has room for 128 of them."""
    name = named(Sockets)
    maker, user = peers
    pid, ref = get(maker.pid.remote()), maker.tensor.options(tensor_transport=name).remote()
    assert get(ref).tolist() == [1.0] * 4
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(140):
            with pytest.raises(WaitTimeoutError, match=name):
                conveyor.get(ref, timeout=0.001)
    finally:
        os.kill(pid, signal.SIGCONT)
        close_listeners(name)
    still_works(name, maker, user)


def test_a_stopped_producer_need_not_read_what_it_is_sent(peers, named):
    @dataclass
    class Large(CommunicatorMetadata):
        address: bytes
        rest: bytes

    def communicator(self, src_actor, dst_actor, backend):
        made = Sockets.get_communicator_metadata(self, src_actor, dst_actor, backend)
        return Large(made.address, bytes(8 << 20))

    name = named(Sockets, get_communicator_metadata=communicator)
    maker, user = peers
    pid, ref = get(maker.pid.remote()), maker.tensor.options(tensor_transport=name).remote()
    assert get(ref).tolist() == [1.0] * 4
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WaitTimeoutError, match=name):
            conveyor.get(ref, timeout=0.1)
    finally:
        os.kill(pid, signal.SIGCONT)
        close_listeners(name)
    still_works(name, maker, user)


@pytest.mark.parametrize("manager", [Files, Sockets])
def test_nothing_but_its_references_keeps_a_value(peers, named, wait_until, manager):
    """No pickler either, which gets no other value here: truth values are not pickled."""
    maker, _ = peers
    ref = maker.alone.options(tensor_transport=named(manager)).remote()
    conveyor.wait([ref], timeout=WAIT)
    assert not get(maker.is_gone.remote())
    del ref
    wait_until(lambda: get(maker.is_gone.remote()), WAIT, "it to be let go of")


def test_a_producers_death_is_told_before_it_is_known(peers, named, monkeypatch):
    """Its sockets say that it is gone while the session may still take it for alive."""
    name = named(Sockets)
    maker, _ = peers
    ref = maker.tensor.options(tensor_transport=name).remote(DIES)
    conveyor.wait([ref], timeout=WAIT)
    monkeypatch.setattr(Source, "gone", lambda source: False)
    with pytest.raises(ActorDiedError, match="Peer"):
        get(ref)


class Runs:
    """A pickle that leaves a trace where it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def sockets_of(pid):
    """The names of the sockets at which that process listens."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}").removeprefix("socket:[").rstrip("]"))
    with open("/proc/net/unix") as lines:
        words = [line.split() for line in lines]
    return [w[7] for w in words if len(w) == 8 and w[7].startswith("@") and w[6] in inodes]


def test_strangers_run_no_code_and_take_no_thread(peers, named, tmp_path):
    """Whoever shares the network namespace can read the name of the socket where a value is asked for."""
    maker, user = peers
    name = named(Sockets)
    ref = maker.tensor.options(tensor_transport=name).remote(2)
    pid = get(maker.pid.remote())
    conveyor.wait([ref])
    names, before = sockets_of(pid), threads_of(pid)
    assert names
    trace = str(tmp_path / "ran")
    question = pickle.dumps((1, pickle.dumps(Runs(trace))))
    sayings = [
        b"",
        pickle.dumps(Runs(trace)),
        len(question).to_bytes(4, "little") + question,
        len(pickle.dumps(Runs(trace))).to_bytes(4, "little") + pickle.dumps(Runs(trace)),
        b"\xff" * 1000,
    ]
    with contextlib.ExitStack() as stack:
        for socket_name in names:
            for said in sayings * 10:
                one = stack.enter_context(socket.socket(socket.AF_UNIX))
                one.connect("\0" + socket_name[1:])
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    one.sendall(said)
        # Those that have come before it have been looked at by then.
        assert get(user.sum.remote(ref)) == 8.0
        assert threads_of(pid) < before + 10
    assert not os.path.exists(trace)
    still_works(name, maker, user)


def threads_of(pid):
    return len(os.listdir(f"/proc/{pid}/task"))
