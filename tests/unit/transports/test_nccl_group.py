"""NCCL's functions are called as they want to be: with a stand-in for the library, since there is no GPU."""

import contextlib
import ctypes
import threading
import types

import pytest

pytest.importorskip("torch")

from conveyor.transport.nccl import group


class Library:
    """What ``libnccl`` does, as far as it is called."""

    def __init__(self, version=22703, busy=0, fails=0):
        self.version, self.busy, self.fails = version, busy, fails
        self.called = []
        self.ncclGetErrorString = lambda code: f"error {code}".encode()

    def ncclGetVersion(self, version):
        version._obj.value = self.version
        return 0

    def ncclGetUniqueId(self, identity):
        ctypes.memset(identity, 65, ctypes.sizeof(identity._obj))
        return 0

    def ncclCommInitRankConfig(self, communicator, ranks, identity, rank, config):
        communicator._obj.value = 77
        self.called.append(("init", ranks, bytes(identity), rank, config._obj.blocking))
        return self.fails or (7 if self.busy else 0)

    def ncclCommGetAsyncError(self, communicator, state):
        self.busy -= 1
        state._obj.value = 7 if self.busy > 0 else 0
        return 0

    def ncclSend(self, where, count, dtype, peer, communicator, stream):
        told = where.value, count.value, dtype, peer, communicator.value, stream.value
        self.called.append(("send", *told))
        return self.fails

    def ncclCommAbort(self, communicator):
        self.called.append(("abort", communicator.value))
        return 0


@pytest.fixture
def library(monkeypatch):
    def use(**options):
        made = Library(**options)
        monkeypatch.setattr(group, "load", lambda: made)
        return made

    return use


def a_group(rank=0):
    device = types.SimpleNamespace(
        using=lambda stream: contextlib.nullcontext(), current_stream=lambda index: None
    )
    return group.NcclGroup(device, 0, b"A" * 128, rank)


def test_it_connects_sends_and_ends(library):
    used = library(busy=3)
    assert group.NcclGroup.new_identity() == b"A" * 128
    made = a_group(rank=1)
    made.connect()
    memory = types.SimpleNamespace(data_ptr=lambda: 4096, numel=lambda: 1 << 33)
    stream = types.SimpleNamespace(stream=types.SimpleNamespace(cuda_stream=5))
    made.send(memory, stream)
    made.abort()
    made.abort()
    assert used.called == [
        ("init", 2, b"A" * 128, 1, 0),
        ("send", 4096, 1 << 33, 1, 0, 77, 5),
        ("abort", 77),
    ]
    with pytest.raises(ConnectionAbortedError):
        made.send(memory, stream)


def test_who_waits_for_the_other_rank_can_be_ended(library):
    library(busy=1 << 40)
    made, ended = a_group(), []

    def connect():
        with pytest.raises(ConnectionAbortedError):
            made.connect()
        ended.append(True)

    thread = threading.Thread(target=connect)
    thread.start()
    made.abort()
    thread.join(60)
    assert ended


def test_errors_say_what_nccl_says(library):
    library(fails=5)
    with pytest.raises(
        RuntimeError,
        match=r"ncclCommInitRankConfig has failed: error 5 \(two actors on one GPU need NCCL 2.30.0, "
        r"and NCCL_MULTI_RANK_GPU_ENABLE=1; this is 2.27.3\)",
    ):
        a_group().connect()


def test_what_is_missing(library, monkeypatch):
    library(version=21304)
    assert group.NcclGroup.missing() == "NCCL 2.13.4 is older than 2.14.0"
    library()
    assert group.NcclGroup.missing() is None
    assert group.can_share() == "NCCL 2.27.3 is older than 2.30.0"

    def nowhere():
        raise OSError("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(group, "load", nowhere)
    assert "NCCL is not to be found: libnccl.so.2" in group.NcclGroup.missing()
