"""A reader over NIXL that cannot have a transfer gives it back all the same."""

from concurrent.futures import Future

import pytest

pytest.importorskip("torch")

import torch

from conveyor.transport.base import TensorSpec
from conveyor.transport.nixl import endpoint as module
from conveyor.transport.packing import Layout

COUNT = 1 << 16


class Instant:
    """A fetcher that has read everything at once."""

    def __init__(self, start_thread, address):
        assert not address

    def join(self, agent):
        pass

    leave = join

    def close(self):
        pass

    def fetch(self, fetch):
        fetch.done.set_result(fetch.buffer)


class Wire:
    edge, members, rank = "an edge", ("Writer", "Reader"), 1
    hosts, known_dead_within = (), 1.0

    def __init__(self):
        self.come, self.told = [], []

    def receive(self):
        come, self.come = self.come, []
        return come

    def send(self, message):
        self.told.append(message.transfer)

    def start_thread(self, target, name):
        raise AssertionError("it needs none")


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.setattr(module, "_fetchers", module._Shared(Instant))
    made = module.Reader(Wire())
    yield made
    made.close()


def receive(reader, transfer, count=COUNT):
    spec = TensorSpec.of(torch.zeros(count))
    offered = module._Offered(transfer, "theirs", 0, b"where", 4096, Layout.of([spec]).size)
    reader._wire.come.append((0, offered))
    future = reader.receive([spec], b"", transfer)
    reader.progress()
    return future


def breaking_once(monkeypatch, owner, name, error):
    real = getattr(owner, name)

    def breaks(*args):
        monkeypatch.setattr(owner, name, real)
        raise error

    monkeypatch.setattr(owner, name, breaks)


def test_no_memory_is_that_transfers_error(reader, monkeypatch):
    assert len(receive(reader, 0).result(0)) == 1
    breaking_once(monkeypatch, reader._pool, "take", MemoryError("none"))
    with pytest.raises(MemoryError, match="none"):
        receive(reader, 1).result(0)
    assert len(receive(reader, 2).result(0)) == 1
    assert reader._wire.told == [0, 1, 2]


def test_an_interrupt_comes_out_and_gives_back(reader, monkeypatch):
    breaking_once(monkeypatch, reader._pool, "take", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        receive(reader, 0)
    assert len(receive(reader, 1).result(0)) == 1
    assert reader._wire.told == [0, 1]


@pytest.mark.parametrize("count", [COUNT, 0])
def test_tensors_that_cannot_be_made_are_that_transfers_error(reader, monkeypatch, count):
    breaking_once(monkeypatch, Layout, "open", MemoryError("no more"))
    with pytest.raises(MemoryError, match="no more"):
        receive(reader, 0, count).result(0)
    assert reader._wire.told == [0]


def test_what_was_aborted_meanwhile_is_left_alone(reader, monkeypatch):
    held = []
    monkeypatch.setattr(reader._fetcher, "fetch", held.append, raising=False)
    future = receive(reader, 0)
    assert isinstance(future, Future)
    reader.abort(OSError("torn down"))
    held[0].done.set_result(held[0].buffer)
    with pytest.raises(OSError, match="torn down"):
        future.result(0)
