"""Unix sockets on which both ends prove themselves."""

import os
import pickle
import queue
import select
import socket
import threading
from contextlib import ExitStack, contextmanager

import pytest

from conveyor import local_sockets
from conveyor.local_sockets import LocalListener, UnprovenPeerError, new_key, new_name, prove

KEY = new_key()
KINDS = [socket.SOCK_STREAM, socket.SOCK_SEQPACKET]


traces = []


class Ran:
    """A pickle that leaves a trace."""

    def __reduce__(self):
        return traces.append, ("ran",)


@contextmanager
def listening(kind=socket.SOCK_STREAM, keys=None, **options):
    """A listener, served on a thread of its own; who has come, by number."""
    came, over = queue.Queue(), threading.Event()
    keys = {7: KEY} if keys is None else keys
    listener = LocalListener(new_name(), kind, keys.get, lambda *one: came.put(one), **options)

    def serve():
        poll = select.poll()
        poll.register(listener.fileno(), select.POLLIN)
        while not over.is_set():
            poll.poll()
            listener.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener, came
    finally:
        over.set()
        listener.stop()
        thread.join(60)
        listener.close()
        while not came.empty():
            came.get()[0].close()


@contextmanager
def connected(listener, kind=socket.SOCK_STREAM):
    with socket.socket(socket.AF_UNIX, kind) as connection:
        connection.connect("\0" + listener.name)
        connection.settimeout(60)
        yield connection


def is_dropped(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("kind", KINDS)
def test_both_ends_are_proved_and_then_it_is_theirs(kind):
    with listening(kind) as (listener, came), connected(listener, kind) as connection:
        prove(connection, KEY, 7)
        theirs, number = came.get(timeout=60)
        with theirs:
            assert number == 7
            connection.send(b"what follows is theirs")
            assert theirs.recv(100) == b"what follows is theirs"
    assert listener.strangers == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "said",
    [
        b"c",
        pickle.dumps(Ran()),
        (100).to_bytes(4, "little") + pickle.dumps(Ran()),
        b"conveyor" + bytes(56),
        b"\xff" * 64,
        bytes(1 << 16),
    ],
    ids=["a byte", "pickle", "framed pickle", "no proof", "no hello", "long"],
)
def test_what_is_no_hello_is_never_looked_at(kind, said):
    with listening(kind) as (listener, came), connected(listener, kind) as connection:
        connection.send(said)
        assert is_dropped(connection)
        assert listener.strangers == 1
        assert came.empty()
    assert not traces


@pytest.mark.parametrize(
    ("key", "number"), [(new_key(), 7), (KEY, 8), (b"", 7)], ids=["other key", "number", "no key"]
)
def test_another_key_or_number_is_refused(key, number):
    with listening() as (listener, came), connected(listener) as connection:
        with pytest.raises(UnprovenPeerError, match="hung up"):
            prove(connection, key, number)
        assert came.empty()


def test_what_was_overheard_proves_no_listener():
    """Another process that has the name passes back what it hears, or what it likes."""
    for answer in (lambda hello: hello, lambda hello: hello[-32:], lambda hello: bytes(32)):
        here, there = socket.socketpair()
        with here, there:

            def listen(there=there, answer=answer):
                there.sendall(answer(there.recv(1000)))

            thread = threading.Thread(target=listen)
            thread.start()
            with pytest.raises(UnprovenPeerError, match="does not know the key"):
                prove(here, KEY, 7)
            thread.join(60)


def test_a_listener_of_another_user_is_told_nothing(monkeypatch):
    here, there = socket.socketpair()
    with here, there:
        monkeypatch.setattr(local_sockets.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(UnprovenPeerError, match="another user"):
            prove(here, KEY, 7)
        there.setblocking(False)
        with pytest.raises(BlockingIOError):
            there.recv(1)


def test_a_process_of_another_user_is_dropped_before_it_is_heard(monkeypatch):
    with listening() as (listener, came), connected(listener) as connection:
        prove(connection, KEY, 7)
        came.get(timeout=60)[0].close()
        monkeypatch.setattr(local_sockets, "owner", lambda _: (1, os.geteuid() + 1))
        with connected(listener) as other:
            assert is_dropped(other)
        assert came.empty()


def test_the_silent_ones_take_no_thread_and_keep_nobody_out():
    with listening() as (listener, came), ExitStack() as stack:
        before = threading.active_count()
        silent = [stack.enter_context(connected(listener)) for _ in range(100)]
        with connected(listener) as connection:
            prove(connection, KEY, 7)
            came.get(timeout=60)[0].close()
        assert threading.active_count() == before
        assert is_dropped(silent[0])
        assert listener.strangers >= 100 - local_sockets._MAX_UNPROVEN


def test_a_crowd_is_let_in_bit_by_bit():
    listener = LocalListener(new_name(), socket.SOCK_STREAM, {7: KEY}.get, lambda *_: None)
    with ExitStack() as stack:
        stack.callback(listener.close)
        stack.callback(listener.stop)
        for _ in range(60):
            stack.enter_context(connected(listener))
        rounds = 0
        while select.select([listener], [], [], 0)[0]:
            listener.serve()
            rounds += 1
        assert rounds >= 60 / local_sockets._AT_ONCE
