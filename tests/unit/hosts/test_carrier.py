"""Connections between processes of two hosts, and the files that go with what is said over them."""

import contextlib
import errno
import os
import socket
import threading
import time

import pytest

from conveyor import descriptors
from conveyor.cluster import carrier, servers, serving
from conveyor.cluster.carrier import Carrier
from conveyor.cluster.servers import SharedFiles, Supply
from conveyor.exceptions import OutOfMemoryError, SystemLimitError
from conveyor.runtime.messages import all_of, receive_pickled, send_pickled

WAIT = 60
LARGE = 3 << 20


def file_with(data):
    fd = os.memfd_create("value")
    os.write(fd, data)
    return fd


def contents(fd):
    return os.pread(fd, os.fstat(fd).st_size, 0)


class Host:
    """What one host has: a depot that the other one dials, and a carrier to it."""

    def __init__(self):
        self.shared_files = SharedFiles()
        self.dialled = []

    def meet(self, other):
        self.carrier = Carrier(self.shared_files, Supply(lambda: self.dial(other)), other.receive)

    def dial(self, other):
        here, there = socket.socketpair()
        self.dialled.append((here, there))
        other.shared_files.serve(there)
        return here

    def receive(self, parcel):
        self.carrier.receive(parcel)

    def end_of(self, line):
        """The socket of the process that has that end of the line."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        its.settimeout(WAIT)
        self.carrier.open(line, ours)
        return its


@pytest.fixture
def hosts(wait_until):
    before = threading.active_count()
    one, other = Host(), Host()
    one.meet(other)
    other.meet(one)
    yield one, other
    for host in (one, other):
        host.carrier.close()
        host.shared_files.close()
        assert len(host.shared_files) == 0
    wait_until(lambda: threading.active_count() <= before, WAIT)


@pytest.fixture
def line(hosts):
    """Both ends of a connection of two processes, as these have them."""
    ends = [host.end_of(1) for host in hosts]
    yield ends
    for sock in ends:
        sock.close()


def test_messages_come_in_their_order_and_the_end_behind_them(line):
    here, there = line
    large = os.urandom(LARGE)
    for i in range(20):
        fds = [file_with(large)] if i % 7 == 0 else []
        send_pickled(here, b"%d" % i, fds)
        for fd in fds:
            os.close(fd)
    here.close()
    for i in range(20):
        data, fds = receive_pickled(there)
        assert data == b"%d" % i
        assert [contents(fd) for fd in fds] == [large] * (i % 7 == 0)
        for fd in fds:
            os.close(fd)
    with pytest.raises(ConnectionError):
        receive_pickled(there)


def test_a_connection_that_breaks_costs_what_was_under_way_on_it(hosts, line):
    one, other = hosts
    here, there = line
    dial, data = other.dial, os.urandom(LARGE)

    def break_the_first(whom):
        sock = dial(whom)
        if len(other.dialled) == 1:
            # Nobody serves it: it ends after a part.
            ours, its = socket.socketpair()
            sock.close()

            def end_early():
                its.recv(24)
                its.sendall(LARGE.to_bytes(8, "big") + data[: LARGE // 3])
                its.close()

            threading.Thread(target=end_early).start()
            return ours
        return sock

    other.carrier._supply._dial = lambda: break_the_first(one)
    fd = file_with(data)
    send_pickled(here, b"", [fd])
    os.close(fd)
    _, (came,) = receive_pickled(there)
    assert contents(came) == data
    assert len(other.dialled) == 2
    os.close(came)


def test_a_host_that_is_lost_ends_its_lines(hosts, wait_until, line):
    one = hosts[0]
    here, there = line
    fd = file_with(b"x")
    one.carrier.hold(fd)
    send_pickled(here, b"", [fd])
    os.close(receive_pickled(there)[1][0])
    one.carrier.close()
    with pytest.raises(ConnectionError):
        receive_pickled(here)
    wait_until(lambda: len(one.shared_files) == 0, WAIT)
    os.close(fd)


@pytest.mark.parametrize("which", ["carrier-in", "carrier-out"])
def test_a_line_for_which_there_is_no_thread_is_over_at_both_ends(hosts, monkeypatch, which):
    one, other = hosts
    there = other.end_of(1)
    start = carrier.threads.start

    def refuse(target, name, *args):
        if name == which:
            raise SystemLimitError(errno.EAGAIN, "no thread is left")
        return start(target, name, *args)

    monkeypatch.setattr(carrier.threads, "start", refuse)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    its.settimeout(WAIT)
    with pytest.raises(SystemLimitError):
        one.carrier.open(1, ours)
    monkeypatch.undo()
    for sock in (its, there):
        with pytest.raises(ConnectionError):
            receive_pickled(sock)
        sock.close()
    assert not one.carrier._connections


def refuse_once(monkeypatch, module, name, number):
    """The next call of that function finds a limit of the system."""
    real, refused = getattr(module, name), []

    def maybe(*args):
        if not refused:
            refused.append(args)
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(module, name, maybe)


@pytest.mark.parametrize(
    ("module", "name", "number", "kind"),
    [
        (descriptors, "memory_file", errno.EMFILE, SystemLimitError),
        (os, "posix_fallocate", errno.ENOMEM, OutOfMemoryError),
        (os, "posix_fallocate", errno.ENOSPC, OutOfMemoryError),
        (os, "posix_fallocate", errno.EFBIG, SystemLimitError),
    ],
)
def test_a_file_for_which_there_is_no_room_costs_its_message_only_its_files(
    hosts, monkeypatch, module, name, number, kind, line
):
    here, there = line
    files = [file_with(b"first"), file_with(b"second")]
    refuse_once(monkeypatch, module, name, number)
    for i, fd in enumerate(files):
        send_pickled(here, b"%d" % i, [fd])
        os.close(fd)
    data, fds = receive_pickled(there)
    assert data == b"0"
    with pytest.raises(kind, match=r"fetch a value of 5 bytes"):
        all_of(fds, 1)
    data, (came,) = receive_pickled(there)
    assert data == b"1"
    assert contents(came) == b"second"
    os.close(came)


def test_a_host_without_a_descriptor_to_dial_with_is_not_one_without_a_connection(hosts, line):
    """It is this host that has none, and it knows that at once."""
    one, other = hosts
    here, there = line
    dial, refused = other.dial, []

    def refuse_the_first():
        if not refused:
            refused.append(1)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return dial(one)

    other.carrier._supply._dial = refuse_the_first
    for data in (b"first", b"second"):
        fd = file_with(data)
        send_pickled(here, data, [fd])
        os.close(fd)
    data, fds = receive_pickled(there)
    assert data == b"first"
    with pytest.raises(SystemLimitError, match="descriptors"):
        all_of(fds, 1)
    _, (came,) = receive_pickled(there)
    assert contents(came) == b"second"
    os.close(came)


def test_a_file_that_cannot_be_kept_for_the_other_host_costs_its_message_only_its_files(
    hosts, line
):
    one = hosts[0]
    here, there = line
    put, puts = one.shared_files.put, []

    def refuse_the_second(fd):
        puts.append(fd)
        if len(puts) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return put(fd)

    one.shared_files.put = refuse_the_second
    fds = [file_with(b"one"), file_with(b"other")]
    send_pickled(here, b"both", fds)
    data, came = receive_pickled(there)
    assert data == b"both"
    with pytest.raises(SystemLimitError, match="descriptors"):
        all_of(came, 2)
    assert len(one.shared_files) == 0
    send_pickled(here, b"again", fds)
    data, came = receive_pickled(there)
    assert [contents(fd) for fd in came] == [b"one", b"other"]
    for fd in (*fds, *came):
        os.close(fd)


def test_an_answer_of_a_shared_files_takes_no_descriptor(monkeypatch):
    """Where there is none, whoever asks would ask again and again."""
    files, (here, there) = SharedFiles(), socket.socketpair()
    fd = file_with(b"a value")
    number = files.put(fd)
    os.close(fd)

    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(descriptors, "duplicate", refuse)
    files.serve(there)
    here.settimeout(WAIT)
    here.sendall(servers._REQUESTED.pack(number, 0, 7))
    assert serving.hear(here, servers._ANSWERED.size + 7)[servers._ANSWERED.size :] == b"a value"
    files.close()
    here.close()


def test_who_asks_for_a_file_that_becomes_shorter_hears_of_it(wait_until):
    files, (here, there) = SharedFiles(), socket.socketpair()
    fd = file_with(os.urandom(LARGE))
    number = files.put(fd)
    files.serve(there)
    here.settimeout(WAIT)
    here.sendall(servers._REQUESTED.pack(number, 0, LARGE))
    serving.hear(here, servers._ANSWERED.size)
    os.truncate(fd, 1)  # while what fits into the sockets is on its way
    with pytest.raises(ConnectionError):
        serving.hear(here, LARGE)
    here.close()
    # The next connection has the rest, or what there is instead.
    supply = servers.Supply(lambda: served(files))
    with pytest.raises(OSError, match="does not have value"):
        supply.fetch(number, LARGE)
    supply.close()
    files.close()
    os.close(fd)


def test_where_no_thread_is_left_a_connection_ends_and_the_next_one_has_the_file(monkeypatch):
    """Who serves it would else be kept from all others."""
    files, start, refused = SharedFiles(), serving.threads.start, []

    def refuse(target, name, *args):
        if name == "request_server" and len(refused) < 3:
            refused.append(name)
            raise SystemLimitError(errno.EAGAIN, "no thread is left")
        return start(target, name, *args)

    monkeypatch.setattr(serving.threads, "start", refuse)
    fd = file_with(b"a value")
    number = files.put(fd)
    os.close(fd)
    supply = servers.Supply(lambda: served(files))
    got = supply.fetch(number, 7)
    assert os.pread(got, 8, 0) == b"a value"
    assert len(refused) == 3
    os.close(got)
    supply.close()
    files.close()


def served(files):
    here, there = socket.socketpair()
    files.serve(there)
    return here


#: Twice what may be on its way.
BOUND = 8 << 20


class Talker(threading.Thread):
    """Says more than anybody has to take. ``said``: messages so far."""

    def __init__(self, sock, message, fd=None, count=1 << 20):
        super().__init__(daemon=True)
        self.sock, self.message, self.fd, self.count, self.said = sock, message, fd, count, 0
        self.start()

    def run(self):
        with contextlib.suppress(OSError):
            while self.said < self.count:
                send_pickled(self.sock, self.message, [] if self.fd is None else [self.fd])
                self.said += 1


def settled(value):
    """What it is when it has not changed for a while."""
    before = None
    while value() != before:
        before = value()
        time.sleep(1)
    return before


@pytest.mark.parametrize("with_files", [False, True])
def test_who_says_more_than_is_taken_waits(hosts, with_files, line):
    """What is on its way is bounded: else all that a slow process is told would be kept for it twice."""
    one, other = hosts
    here, there = line
    here.settimeout(None)
    fd = file_with(b"a value") if with_files else None
    cost = (64 << 10) if with_files else 50_000
    message = b"m" * (1 if with_files else cost)
    talker = Talker(here, message, fd, 1500 if with_files else 600)
    assert settled(lambda: talker.said) < talker.count
    assert other.carrier._connections[1].incoming.qsize() <= BOUND // cost
    assert len(one.shared_files) <= BOUND // cost
    # It goes on as it is taken.
    for _ in range(talker.count):
        data, came = receive_pickled(there)
        assert data == message
        assert [contents(fd) for fd in came] == [b"a value"] * with_files
        for one_of in came:
            os.close(one_of)
    talker.join(WAIT)
    assert talker.said == talker.count
    if fd is not None:
        os.close(fd)


@pytest.mark.parametrize("ends", ["the other process", "the host", "its own process"])
def test_who_waits_for_room_hears_the_end(hosts, ends, wait_until, line):
    one = hosts[0]
    here, there = line
    here.settimeout(None)
    talker = Talker(here, b"m" * 50_000, count=2000)
    assert settled(lambda: talker.said) < talker.count
    if ends == "the other process":
        there.close()
    elif ends == "the host":
        one.carrier.close()
    else:
        here.shutdown(socket.SHUT_RDWR)
    talker.join(WAIT)
    assert not talker.is_alive()
    if ends == "its own process":  # what it has said is heard, and then its end
        heard = 0
        with contextlib.suppress(ConnectionError):
            while True:
                heard += len(receive_pickled(there)[0])
        assert heard == talker.said * 50_000
        there.close()
    wait_until(lambda: not one.carrier._connections, WAIT)
