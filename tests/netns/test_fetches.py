"""Files that one host fetches from another, over a network that loses packets without a word."""

import contextlib
import os
import socket
import threading

import pytest
import wire
from namespaces import Namespace

from conveyor.cluster.servers import _REQUESTED, SharedFiles, Supply

pytestmark = pytest.mark.cold_start
#: Well above what a connection lives over which nothing is taken, and well below what TCP would try.
WAIT = 90
LARGE = 64 << 20


class Lying:
    """A depot at host 1, to which host 0 connects. ``dialled`` counts that."""

    def __init__(self, stack):
        self.spaces = []
        for _ in range(2):
            self.spaces.append(Namespace())
            stack.callback(self.spaces[-1].close)
        self.network = wire.network(self.spaces)
        stack.callback(self.network.close)
        self.cable = self.network.wire(1)
        self.shared_files = SharedFiles()
        stack.callback(self.shared_files.close)
        with self.spaces[1].entered():
            self._listener = socket.create_server((wire.address(1), 0))
        stack.callback(self._listener.close)
        stack.callback(self._listener.shutdown, socket.SHUT_RDWR)
        self.dialled = 0
        self.supply = Supply(self.dial)
        stack.callback(self.supply.close)
        threading.Thread(target=self._accept).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                self.shared_files.serve(self._listener.accept()[0])

    def dial(self):
        self.dialled += 1
        with self.spaces[0].entered():
            sock = socket.socket()
        try:
            sock.settimeout(1.0)
            sock.connect(self._listener.getsockname())
        except BaseException:
            sock.close()
            raise
        return sock

    def put(self, data):
        fd = os.memfd_create("value")
        try:
            os.write(fd, data)
            return self.shared_files.put(fd)
        finally:
            os.close(fd)


@pytest.fixture
def lying():
    with contextlib.ExitStack() as stack:
        yield Lying(stack)


def fetched(supply, number, data):
    fd = supply.fetch(number, len(data))
    try:
        return os.pread(fd, len(data), 0) == data
    finally:
        os.close(fd)


def test_a_question_that_is_lost_is_requested_again_over_another_connection(lying, wait_until):
    """TCP alone would say it again and again, ever more seldom, for a quarter of an hour."""
    number = lying.put(b"a value")
    assert fetched(lying.supply, number, b"a value")
    assert lying.dialled == 1
    lying.cable.cut()
    came = []
    fetches = threading.Thread(
        target=lambda: came.append(fetched(lying.supply, number, b"a value"))
    )
    fetches.start()
    wait_until(lambda: lying.dialled > 1, WAIT)
    assert not came
    lying.cable.heal()
    fetches.join(WAIT)
    assert came == [True]


def test_a_file_that_nobody_takes_is_not_sent_for_ever(lying, wait_until):
    """Whoever has asked for it cannot be heard to have gone."""
    number = lying.put(bytes(LARGE))
    with lying.dial() as sock:
        sock.settimeout(WAIT)
        sock.sendall(_REQUESTED.pack(number, 0, LARGE))
        assert sock.recv(1 << 20)
        wait_until(lambda: lying.shared_files._serving, WAIT)
        lying.cable.cut()
        wait_until(lambda: not lying.shared_files._serving, WAIT)
