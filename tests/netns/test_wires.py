"""The cables do what is said of them."""

import contextlib
import socket

import netem
import pytest
import relay
import wire
from namespaces import Namespace
from wire import IN, OUT, Weather

pytestmark = pytest.mark.cold_start
WAIT = 60
PACKETS = 400


@pytest.fixture(scope="module")
def three():
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(3):
            made.append(Namespace())
            stack.callback(made[-1].close)
        yield made


class Letters:
    """A UDP socket of each host. Each says what it has to host 0, or gets it."""

    def __init__(self, hosts):
        self.sockets = []
        for i, host in enumerate(hosts):
            with host.entered():
                self.sockets.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            self.sockets[i].bind((wire.address(i), 9))
            self.sockets[i].settimeout(WAIT)
            self.sockets[i].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)

    def send(self, source, target, text):
        self.sockets[source].sendto(text.encode(), (wire.address(target), 9))

    def receive(self, host):
        return self.sockets[host].recv(100).decode()

    def all_until(self, host, last):
        found = []
        while (text := self.receive(host)) != last:
            found.append(text)
        return found

    def close(self):
        for one in self.sockets:
            one.close()


@pytest.mark.parametrize("kind", [relay.RelayNetwork, netem.NetemNetwork])
def test_each_host_reaches_each(three, kind):
    """The veth pairs of the one are there without netem, too."""
    network = kind(three) if kind is netem.NetemNetwork else kind(three, 1)
    try:
        with contextlib.closing(Letters(three)) as letters:
            for source in range(3):
                for target in range(3):
                    letters.send(source, target, f"{source} to {target}")
                    assert letters.receive(target) == f"{source} to {target}"
    finally:
        network.close()


@pytest.fixture
def network(three):
    made = wire.network(three)
    yield made
    made.close()


@pytest.fixture
def letters(three, network):
    made = Letters(three)
    yield made
    made.close()


def test_packets_are_lost_and_overtake_each_other(letters, network):
    cable = network.wire(1)
    cable.set(delay=0.01, jitter=0.05, loss=0.2)
    for number in range(PACKETS):
        letters.send(0, 1, str(number))
    cable.set(delay=0.2)
    letters.send(0, 1, "last")
    got = letters.all_until(1, "last")
    assert PACKETS / 2 < len(got) < PACKETS
    assert len(set(got)) == len(got)
    assert got != sorted(got, key=int)
    counts = network.wire(1).counts(IN)
    assert counts.lost == PACKETS - len(got)
    assert counts.overtaken is None or counts.overtaken > 0


def test_a_cable_is_cut_in_one_way(letters, network):
    cable = network.wire(1)
    cable.cut(IN)
    letters.send(0, 1, "lost")
    letters.send(1, 0, "out")
    assert letters.receive(0) == "out"
    cable.cut(OUT)
    letters.send(1, 0, "lost")
    letters.send(0, 1, "in")
    assert letters.receive(1) == "in"
    letters.send(2, 0, "from another")
    assert letters.receive(0) == "from another"
    cable.heal()
    letters.send(1, 0, "again")
    assert letters.receive(0) == "again"


def test_what_is_on_its_way_when_it_is_cut_is_lost(letters, network):
    cable = network.wire(1)
    cable.set(delay=1.0)
    letters.send(0, 1, "on its way")
    cable.cut()
    cable.set()
    cable.heal()
    letters.send(0, 1, "later")
    assert letters.receive(1) == "later"
    cable.set(delay=1.5)  # the other would have come by then
    letters.send(0, 1, "last")
    assert letters.receive(1) == "last"


def test_the_weather_in_netems_words():
    assert netem.netem(Weather(0.01, 0.05, 0.015)) == [
        *("netem", "limit", "100000", "delay", "35000us", "25000us", "loss", "1.5%")
    ]
    assert netem.netem(wire.CUT)[-1] == "100%"
