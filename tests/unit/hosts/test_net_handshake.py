"""Who is let in by a host of the session: those who know its token and run the same, and nobody else."""

import contextlib
import ctypes
import os
import queue
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from no_descriptors import is_turned_away, none_at_all

from conveyor.cluster import addresses
from conveyor.cluster.connections import Listener
from conveyor.cluster.handshake import (
    HandshakeError,
    Identity,
    admission,
    ask_admission,
    dial,
    dial_node,
    hand_over,
    introduce,
    new_token,
)
from conveyor.cluster.tls import Tls, make_certificate

TOKEN = new_token()
HERE, THERE = Identity(0, "1.2.3"), Identity(1, "1.2.3")


@contextlib.contextmanager
def listening(**options):
    came = queue.Queue()
    options = {"time_limit": float(WAIT), **options}
    listener = Listener(("127.0.0.1", 0), TOKEN, HERE, lambda *who: came.put(who), **options)
    try:
        yield listener, came
    finally:
        listener.close()


#: s; a bound for what takes milliseconds.
WAIT = 60


def admitted(address, token=TOKEN, **options):
    """A connection that has said no more than its first message."""
    sock = socket.create_connection(address, **options)
    ask_admission(sock, token, time.monotonic() + WAIT)
    return sock


def soon(condition):
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
    return True


def test_two_hosts_of_a_session_know_each_other():
    with listening() as (listener, came):
        sock, other = dial(listener.address, TOKEN, THERE, WAIT)
        theirs, who = came.get(timeout=60)
        assert (other, who) == (HERE, THERE)
        with sock, theirs:
            theirs.settimeout(WAIT)
            sock.sendall(b"what follows is the pump's")
            assert theirs.recv(100) == b"what follows is the pump's"
        assert (listener.let_in, listener.strangers) == (1, 0)


def test_another_host_of_the_session_at_an_address_is_not_taken_for_the_one_that_was_there():
    with listening() as (listener, came):
        with pytest.raises(
            HandshakeError, match=r"host 0 of the session is at .* where host 2 was"
        ):
            dial_node(2, listener.address, TOKEN, THERE, 60)
        with came.get(timeout=60)[0] as theirs:
            theirs.settimeout(60)
            assert theirs.recv(1) == b""
        with dial_node(0, listener.address, TOKEN, THERE, 60), came.get(timeout=60)[0]:
            pass


def test_a_process_with_many_descriptors_dials_all_the_same():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("a process may not have so many descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = []
    try:
        with listening() as (listener, came):
            while not taken or taken[-1] < 1100:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            sock, other = dial(listener.address, TOKEN, THERE, WAIT)
            with sock, came.get(timeout=60)[0]:
                assert sock.fileno() > 1023
                assert other == HERE
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_wrong_token_is_refused_on_both_sides():
    with listening() as (listener, came):
        with pytest.raises(HandshakeError, match="hung up on this one's proof"):
            dial(listener.address, new_token(), THERE, WAIT)
        soon(lambda: listener.strangers == 1)
        assert "token" in listener.reasons[0]
        assert came.empty()


def test_a_listener_that_does_not_know_the_token_is_refused():
    here, there = socket.socketpair()
    failed = queue.Queue()

    def impostor():
        # It has no proof to give, so it passes back what it has heard.
        hello = there.recv(1000)
        there.sendall(hello)
        proof = there.recv(1000)
        there.sendall(proof + b"\1")
        there.close()
        failed.put(None)

    threading.Thread(target=impostor).start()
    with here, pytest.raises(HandshakeError, match="does not know this session's token"):
        introduce(here, TOKEN, THERE, time.monotonic() + WAIT)
    failed.get(timeout=60)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10, bytes(200), b"\xff" * 200]
)
def test_garbage_is_dropped_and_counted(garbage):
    with listening() as (listener, came):
        with socket.create_connection(listener.address) as sock:
            sock.sendall(garbage)
            sock.settimeout(WAIT)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1000) == b""  # and is told nothing
        soon(lambda: listener.strangers == 1)
        assert "does not speak" in listener.reasons[0]
        dial(listener.address, TOKEN, THERE, WAIT)[0].close()
        came.get(timeout=60)[0].close()


def test_what_was_overheard_is_good_for_nothing():
    heard = []

    class Overheard:
        def __init__(self, sock):
            self.sock = sock

        def __getattr__(self, name):
            return getattr(self.sock, name)

        def sendall(self, data):
            heard.append(bytes(data))
            self.sock.sendall(data)

    with listening() as (listener, came):
        with admitted(listener.address) as here:
            introduce(Overheard(here), TOKEN, THERE, time.monotonic() + WAIT)
        came.get(timeout=60)[0].close()
    assert len(heard) == 2
    with listening() as (listener, came):
        with admitted(listener.address) as sock:
            sock.settimeout(WAIT)
            sock.sendall(heard[0])
            sock.recv(1000)
            sock.sendall(heard[1])
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1000) == b""
        soon(lambda: listener.strangers == 1)
        assert came.empty()


@pytest.mark.parametrize("connect", [socket.create_connection, admitted])
def test_who_is_slow_has_a_limit_and_holds_up_nobody(connect):
    """Before it is admitted, and behind that."""
    with listening(time_limit=0.5) as (listener, came):
        slow = [connect(listener.address) for _ in range(4)]
        sent = 0
        with contextlib.suppress(OSError):
            # One byte after the other, so that each read succeeds; never all that is to be read.
            while listener.strangers < 4 and sent < 60:
                for sock in slow:
                    sock.send(b"conveyor".ljust(72)[sent : sent + 1])
                sent += 1
                time.sleep(0.05)
        assert sent < 60
        soon(lambda: listener.strangers == 4)
        assert all("in time" in why for why in listener.reasons)
        dial(listener.address, TOKEN, THERE, WAIT)[0].close()
        came.get(timeout=60)[0].close()
        for sock in slow:
            sock.close()


def test_what_is_admitted_is_bounded():
    """Whoever has overheard a first message may say it again, and gets no further."""
    with listening(most_pending=4, time_limit=600.0) as (listener, came):
        overheard = admission(TOKEN)
        several = [socket.create_connection(listener.address) for _ in range(20)]
        for sock in several:
            sock.settimeout(WAIT)
            sock.sendall(overheard)
            assert sock.recv(1) == b"\1"
        soon(lambda: listener.dropped == 16)
        assert "conveyor-handshake" not in [t.name for t in threading.enumerate()]
        dial(listener.address, TOKEN, THERE, WAIT)[0].close()
        came.get(timeout=60)[0].close()
        for sock in several:
            sock.close()


def test_many_that_come_at_once_do_not_push_each_other_out():
    """As the agents of a large cluster do, and all nodes after the network was away."""
    with listening() as (listener, came):
        several = [admitted(listener.address) for _ in range(200)]
        for i, sock in enumerate(several):
            introduce(sock, TOKEN, Identity(1 + i, "1.2.3"), time.monotonic() + WAIT)
        for sock in several:
            came.get(timeout=WAIT)[0].close()
            sock.close()
        assert (listener.let_in, listener.dropped) == (200, 0)


def test_an_error_of_one_that_is_let_in_keeps_no_other_out():
    with listening() as (listener, came):
        takes = listener._on_node
        listener._on_node = lambda *who: 1 / 0
        with dial(listener.address, TOKEN, THERE, WAIT)[0] as sock:
            assert sock.recv(1) == b""
        assert soon(lambda: listener.reasons == ["ZeroDivisionError: division by zero"])
        listener._on_node = takes
        dial(listener.address, TOKEN, THERE, WAIT)[0].close()
        came.get(timeout=WAIT)[0].close()


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(
    "said", [b"", b"conveyor", b"\x16\x03\x01" * 40], ids=["silent", "half", "tls"]
)
def test_a_flood_keeps_no_host_out_and_takes_no_thread(source, tls, said):
    """From where hosts come, too, and while this process runs Python."""
    over, opened = threading.Event(), []

    def flood():
        kept = []
        while not over.is_set():
            sock = socket.socket()
            kept.append(sock)
            opened.append(1)
            with contextlib.suppress(OSError):
                sock.bind((source, 0))
                sock.connect(listener.address)
                sock.sendall(said)
            if len(kept) > 300:
                kept.pop(0).close()
        for sock in kept:
            sock.close()

    made = Tls(make_certificate()) if tls else None
    with listening(time_limit=600.0, tls=made) as (listener, came):
        thread = threading.Thread(target=flood)
        thread.start()
        try:
            soon(lambda: len(opened) > 400)
            for _ in range(5):
                sock, other = dial(listener.address, TOKEN, THERE, WAIT, made)
                assert other == HERE
                sock.close()
                came.get(timeout=60)[0].close()
            assert [t.name for t in threading.enumerate()].count("conveyor-handshake") <= 1
        finally:
            over.set()
            thread.join()


def test_a_listener_that_hangs_up_at_once_is_requested_again():
    hung_up = []

    def listen():
        for _ in range(2):
            server.accept()[0].close()
            hung_up.append(True)
        with server.accept()[0] as near, socket.create_connection(listener.address) as far:
            # The messages of a handshake, by turns.
            for size, source, target in zip(
                (72, 1, 80, 80, 32, 33), (near, far) * 3, (far, near) * 3, strict=True
            ):
                target.sendall(source.recv(size, socket.MSG_WAITALL))

    with listening() as (listener, _), socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=listen)
        thread.start()
        sock, other = dial(server.getsockname(), TOKEN, THERE, 60)
        sock.close()
        thread.join(60)
    assert other == HERE
    assert len(hung_up) == 2


def test_without_a_descriptor_one_is_turned_away():
    with listening() as (listener, came):
        assert is_turned_away(listener.address, socket.AF_INET)
        soon(lambda: listener.dropped >= 1)
        dial(listener.address, TOKEN, THERE, WAIT)[0].close()
        came.get(timeout=60)[0].close()


def test_without_any_descriptor_a_listener_waits():
    """Not even the spare one can be had again."""
    with listening() as (listener, came):
        with socket.socket() as sock, none_at_all():
            sock.connect(listener.address)
            soon(lambda: listener.strangers >= 1)
            assert "could not be accepted" in listener.reasons[0]
        dial(listener.address, TOKEN, THERE, WAIT)[0].close()
        came.get(timeout=60)[0].close()


def test_a_connection_that_the_pump_does_not_take_ends():
    def given_up(_fd, _host):
        raise OSError("it was given up")

    sock, heard = socket.socketpair()
    with heard, holding_copies():
        with pytest.raises(OSError, match="given up"):
            hand_over(sock, SimpleNamespace(connect=given_up), 1)
        heard.settimeout(60)
        assert heard.recv(1) == b""


def test_a_stranger_hears_the_end_though_a_forked_child_has_a_copy_of_its_connection():
    with (
        listening(time_limit=600.0) as (listener, _),
        admitted(listener.address) as sock,
        holding_copies(),
    ):
        sock.sendall(b"c" * 200)
        sock.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (Identity(1, "1.2.4"), "conveyor: "),
        (Identity(1, "1.2.3", python=(3, 1)), "python: "),
        (Identity(1, "1.2.3", protocol=99), "protocol: "),
        (Identity(1, "1.2.3", wire=99), "wire: "),
    ],
)
def test_other_versions_are_told_on_both_sides(other, what):
    with listening() as (listener, came):
        with pytest.raises(HandshakeError, match=what):
            dial(listener.address, TOKEN, other, WAIT)
        soon(lambda: listener.strangers == 1)
        assert what in listener.reasons[0]
        assert came.empty()


def test_a_host_with_the_listeners_own_number_is_told():
    with listening() as (listener, came):
        with pytest.raises(HandshakeError, match="does not want"):
            dial(listener.address, TOKEN, Identity(0, "1.2.3"), WAIT)
        soon(lambda: listener.strangers == 1)
        assert "host 0 has connected, which is this one's own number" in listener.reasons[0]
        dial(listener.address, TOKEN, THERE, WAIT)[0].close()
        came.get(timeout=60)[0].close()
        assert listener.let_in == 1


#: Dials, and says that it was let in; then closes its connection when it is told to.
_DIALS = """
import sys
from conveyor.cluster.handshake import Identity, dial
dial(("127.0.0.1", int(sys.argv[1])), bytes.fromhex(sys.argv[2]), Identity(1, "1.2.3"), 60)
print("in", flush=True)
sys.stdin.read()
"""


def test_a_host_is_let_in_though_the_interpreter_is_kept_from_all_other_threads():
    """A program may keep it for long: in native code, or by giving it back only for moments."""
    with listening() as (listener, came):
        words = [sys.executable, "-c", _DIALS, str(listener.address[1]), TOKEN.hex()]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:
            one = (ctypes.c_int * 2)(host.stdout.fileno(), select.POLLIN)
            assert ctypes.PyDLL(None).poll(one, 1, WAIT * 1000) == 1  # with the GIL
            assert host.stdout.readline() == b"in\n"
            host.stdin.close()
        came.get(timeout=60)[0].close()


def test_nobody_there_is_an_error_that_says_where():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(ConnectionRefusedError, match=f"{address[1]} cannot be reached"):
        dial(address, TOKEN, THERE, WAIT)


def test_a_try_that_is_not_answered_keeps_no_other_from_being_made():
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(2):  # from now on the system drops who connects
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        start = time.monotonic()
        port = full.getsockname()[1]
        told = rf"host 127\.0\.0\.1:{port} cannot be reached: no answer in 0\.6 s\. Does a firewall"
        with pytest.raises(TimeoutError, match=told):
            dial(full.getsockname(), TOKEN, THERE, 0.6)
        # The system itself gives up after two minutes.
        assert time.monotonic() - start < WAIT


def test_who_is_there_and_says_nothing_is_named():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        told = rf"host 127\.0\.0\.1:{port} has been reached, but .* in time \(0\.1 s\)"
        with pytest.raises(HandshakeError, match=told):
            dial(silent.getsockname(), TOKEN, THERE, 0.1)


@pytest.mark.parametrize(
    ("address", "own"),
    [
        (None, "127.0.0.7"),
        ("lo", "127.0.0.1"),
        ("127.0.0.9", "127.0.0.9"),
        ("127.0.0.0/8", None),
    ],
)
def test_a_node_listens_where_it_was_told_to(address, own):
    wish = addresses.listening(address, None)
    here = wish.begin("127.0.0.7", lambda at: Listener(at, TOKEN, HERE, print))
    here.close()
    assert here.address[0] == (own or wish.own_address("127.0.0.7"))
    assert here.address[0].startswith("127.")


@pytest.mark.parametrize(
    "address", ["no-such-interface", "203.0.113.0/24", "203.0.113.1", "2001:db8::/32"]
)
def test_a_node_without_such_an_address_says_so(address):
    with pytest.raises(
        OSError, match=f"10\\.0\\.0\\.1 has no address .*listen_address='{address}'"
    ):
        addresses.listening(address, None).own_address("10.0.0.1")


def test_a_node_listens_at_the_first_port_that_is_free():
    def listen(at):
        return Listener(at, TOKEN, HERE, print)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        only = addresses.listening("127.0.0.1", (port, port))
        with pytest.raises(
            OSError, match=f"none of the ports {port} to {port} is free at 127.0.0.1"
        ):
            only.begin("127.0.0.1", listen)
        some = addresses.listening("lo", (port, min(port + 50, 65535)))
        one, other = some.begin("", listen), some.begin("", listen)
    for listener in (one, other):
        listener.close()
    assert port < one.address[1] < other.address[1] <= port + 50


@pytest.mark.parametrize(
    ("address", "ports", "error"),
    [
        (3, None, "listen_address is the name"),
        ("", None, "listen_address is the name"),
        (None, 4000, "listen_ports is"),
        (None, "40", "listen_ports is"),
        (None, (4000,), "listen_ports is"),
        (None, (4001, 4000), "listen_ports is"),
        (None, (0, 4000), "listen_ports is"),
        (None, (4000, 65536), "listen_ports is"),
        (None, (4000, 4000.5), "listen_ports is"),
    ],
)
def test_what_is_no_address_and_no_port(address, ports, error):
    with pytest.raises((TypeError, ValueError), match=error):
        addresses.listening(address, ports)


def test_one_address_is_listened_at():
    with pytest.raises(ValueError, match="at one address"):
        Listener(("0.0.0.0", 0), TOKEN, HERE, print)


@pytest.mark.parametrize("secure", [False, True])
def test_a_listener_that_is_closed_breaks_off_what_is_under_way(tls, secure):
    with listening(time_limit=60.0, tls=tls if secure else None) as (listener, _):
        sock = admitted(listener.address)
        soon(lambda: ("conveyor-handshake" in [t.name for t in threading.enumerate()]) == secure)
    sock.settimeout(WAIT)
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(10) == b""
    sock.close()


@contextlib.contextmanager
def holding_copies():
    """A forked child has copies of all descriptors of this process."""
    end, waits = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(waits)
        os.read(end, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(waits)
        os.close(end)
        os.waitpid(child, 0)


@pytest.fixture(scope="module")
def tls():
    return Tls(make_certificate())


def test_over_tls_bytes_come_both_ways_and_ends_are_seen(tls):
    with listening(tls=tls) as (listener, came):
        here, _ = dial(listener.address, TOKEN, THERE, WAIT, tls)
        there, _ = came.get(timeout=60)
        assert min(here.fileno(), there.fileno()) >= 512  # above the user's
        sent = bytes(range(256)) * 20_000
        back = threading.Thread(target=lambda: there.sendall(sent))
        forth = threading.Thread(target=lambda: here.sendall(sent))
        back.start()
        forth.start()
        got = {here: bytearray(), there: bytearray()}

        def read(sock):
            while len(got[sock]) < len(sent):
                got[sock] += sock.recv(1 << 20)

        readers = [threading.Thread(target=read, args=(sock,)) for sock in got]
        for thread in readers:
            thread.start()
        for thread in (back, forth, *readers):
            thread.join(WAIT)
            assert not thread.is_alive()
        assert got[here] == got[there] == sent
        here.close()
        there.settimeout(WAIT)
        assert there.recv(1) == b""
        there.close()


@pytest.mark.parametrize("first", ["plain", "secure"])
def test_over_tls_ends_are_seen_though_a_forked_child_has_copies_of_the_sockets(tls, first):
    with listening(tls=tls) as (listener, came):
        plain, _ = dial(listener.address, TOKEN, THERE, WAIT, tls)
        theirs, _ = came.get(timeout=60)
        with holding_copies():
            ends, hears = (plain, theirs) if first == "plain" else (theirs, plain)
            hears.settimeout(60)
            ends.shutdown(socket.SHUT_RDWR)
            assert hears.recv(1) == b""
        for sock in (plain, theirs):
            sock.close()


def test_who_does_not_speak_tls_is_a_stranger(tls):
    with listening(tls=tls, time_limit=1.0) as (listener, came):
        with socket.create_connection(listener.address) as sock:
            sock.sendall(b"c" * 300)
            soon(lambda: listener.strangers == 1)
        with socket.create_connection(listener.address):
            soon(lambda: listener.strangers == 2)  # it says nothing at all
        with admitted(listener.address) as sock:
            sock.sendall(b"c" * 300)
            soon(lambda: listener.strangers == 3)
        assert came.empty()
