"""What an actor has its host fetch, when its connection to that ends."""

import errno
import socket
import threading

from conveyor.runtime.actor.requests.far_memory import FarMemoryClient
from conveyor.runtime.far_memory import Wanted
from conveyor.runtime.refs.messages import Files

WAIT = 60
WANTED = Wanted((3, 1), 7, 0, bytes(16), joined=True)


def test_the_end_of_a_connection_is_no_end_of_what_was_asked_for_over_the_next(wait_until):
    hosts_ends, goes_on = [], threading.Event()

    def ask(_):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hosts_ends.append(there)
        return None, Files([here.detach()])

    client = FarMemoryClient(ask, 1)
    on_end = client._on_end

    def end_late():
        assert goes_on.wait(WAIT)
        on_end()

    client._on_end = end_late
    first, second = [], []
    client.fetch(WANTED, None, first.append)
    hosts_ends[0].close()
    wait_until(lambda: client._connection.ended, WAIT)
    client.fetch(WANTED, None, second.append)
    assert len(hosts_ends) == 2
    goes_on.set()
    wait_until(lambda: first, WAIT)
    assert first[0].error == errno.ECONNRESET
    assert list(client._waiting) == [2]
    assert not second
    hosts_ends[1].close()
    wait_until(lambda: second, WAIT)
    client.close()
