"""What is offered and read by agents that go wrong."""

import threading
from concurrent.futures import Future

import pytest

pytest.importorskip("torch")

import torch

from conveyor.transport.nixl import endpoint as fetching
from conveyor.transport.nixl import endpoint as module
from conveyor.transport.nixl.endpoint import Fetch, Fetcher, Offer


class Agent:
    """Stands in for NIXL's."""

    name = "pretended"

    def __init__(self):
        self.registered = []
        self.broken = threading.Event()
        self.looked = threading.Event()

    def get_agent_metadata(self):
        return repr(self.registered).encode()

    def register_memory(self, places, kind):
        assert kind == "DRAM"
        self.registered += places
        return places

    def deregister_memory(self, places):
        for place in places:
            self.registered.remove(place)

    def get_new_notifs(self):
        self.looked.set()
        if self.broken.is_set():
            raise RuntimeError("no pigeons")


@pytest.fixture
def agent(monkeypatch):
    made = Agent()
    monkeypatch.setattr(module, "make_agent", lambda purpose, address: made)
    return made


@pytest.fixture
def offers(agent):
    threads = []

    def start(target, name):
        assert name == "nixl-offers"
        threads.append(threading.Thread(target=target))
        threads[-1].start()

    made = module.Offers(start)
    yield made
    made.close()
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_it_looks_only_while_something_is_offered(agent, offers):
    assert not agent.looked.wait(0.05)
    region = offers.take(100, Future())
    assert agent.looked.wait(60)
    offers.give_back(region)


def test_who_waits_for_readers_is_told_that_none_can_come(agent, offers):
    done = Future()
    offers.take(100, done)
    agent.broken.set()
    with pytest.raises(RuntimeError, match="NIXL does not go on: no pigeons"):
        done.result(60)
    with pytest.raises(RuntimeError, match="no pigeons"):
        offers.take(100, Future())


def test_memory_is_offered_again_and_some_of_it_let_go_of(agent, offers):
    regions = [offers.take(1 << 20, Future()) for _ in range(5)]
    version = offers.version
    for region in regions:
        offers.give_back(region)
    assert len(agent.registered) == 3
    assert offers.version > version
    assert offers.metadata == agent.get_agent_metadata()
    assert offers.take(1 << 20, Future()).address in [region.address for region in regions]


def test_what_may_still_be_read_stays(agent, offers):
    regions = [offers.take(1 << 20, Future()) for _ in range(5)]
    for region in regions:
        offers.give_back(region, in_use=True)
    assert len(agent.registered) == 5


class Reading(Agent):
    """Reads nothing, and says what it was asked."""

    def __init__(self):
        super().__init__()
        self.states = ["DONE"]
        self.known = []

    def add_remote_agent(self, metadata):
        self.known.append(metadata)

    def remove_remote_agent(self, name):
        self.known.clear()

    def get_xfer_descs(self, places, kind):
        return places

    def initialize_xfer(self, operation, here, there, name):
        assert self.known
        return object()

    def transfer(self, handle):
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle):
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def release_xfer_handle(self, handle):
        pass


@pytest.fixture
def reading(monkeypatch):
    made = Reading()
    monkeypatch.setattr(fetching, "make_agent", lambda purpose, address: made)
    return made


@pytest.fixture
def fetcher(reading):
    threads = []

    def start(target, name):
        assert name == "nixl"
        threads.append(threading.Thread(target=target))
        threads[-1].start()

    made = Fetcher(start)
    yield made
    made.close()
    threads[0].join(60)
    assert not threads[0].is_alive()


def fetch(version=0):
    return Fetch(Offer("theirs", b"where", version, 4096, 8), torch.empty(8), "Peer", 0.01)


def test_what_takes_its_time_is_waited_for(reading, fetcher):
    reading.states = ["PROC", "PROC", "PROC", "DONE"]
    one = fetch()
    fetcher.fetch(one)
    assert one.done.result(60) is one.buffer
    assert not reading.registered


def test_metadata_is_read_when_it_is_new(reading, fetcher):
    for version in (0, 0, 3, 2, 3):
        one = fetch(version)
        fetcher.fetch(one)
        one.done.result(60)
    assert len(reading.known) == 2


def test_memory_that_cannot_be_read_is_that_transfers_error(reading, fetcher):
    reading.states = ["ERR"]
    one = fetch()
    fetcher.fetch(one)
    with pytest.raises(ConnectionError, match=r"the memory of Peer cannot be read: .* as 'ERR'"):
        one.done.result(60)
    assert not reading.registered
    assert not reading.known
    reading.states = ["DONE"]
    one = fetch()
    fetcher.fetch(one)
    assert one.done.result(60) is one.buffer


def test_an_agent_that_nobody_reads_from_is_forgotten(reading, fetcher):
    fetcher.join("theirs")
    fetcher.join("theirs")
    one = fetch()
    fetcher.fetch(one)
    one.done.result(60)
    fetcher.leave("theirs")
    one = fetch()
    fetcher.fetch(one)
    one.done.result(60)
    assert len(reading.known) == 1
    fetcher.leave("theirs")
    one = fetch()
    fetcher.fetch(one)
    one.done.result(60)
    assert len(reading.known) == 1  # it was told of anew


def test_memory_that_cannot_be_let_go_of_harms_no_transfer(reading, fetcher, monkeypatch, caplog):
    def breaks(places):
        raise RuntimeError("no pigeons")

    monkeypatch.setattr(reading, "deregister_memory", breaks)
    for _ in range(2):
        one = fetch()
        fetcher.fetch(one)
        assert one.done.result(60) is one.buffer
    assert "NIXL does not let go of 8 bytes: no pigeons" in caplog.text


def test_who_waits_is_told_when_nothing_is_read_any_more(fetcher, monkeypatch):
    def breaks(one):
        raise RuntimeError("no pigeons")

    monkeypatch.setattr(fetcher, "_end", breaks)
    for _ in range(2):
        one = fetch()
        fetcher.fetch(one)
        with pytest.raises(RuntimeError, match="NIXL does not go on: no pigeons"):
            one.done.result(60)


def test_where_there_is_no_agent_to_be_had(monkeypatch):
    def none(purpose, address):
        raise RuntimeError("this build of NIXL has no UCX")

    monkeypatch.setattr(fetching, "make_agent", none)
    with pytest.raises(RuntimeError, match="has no UCX"):
        Fetcher(lambda target, name: threading.Thread(target=target).start())
