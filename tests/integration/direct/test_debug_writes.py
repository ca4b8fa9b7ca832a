"""Writes to memory that others may fetch: ``init(debug_writes=True)``."""

import logging
import os
import time

import numpy as np
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor import _core
from conveyor.exceptions import SharedWriteError, TaskError
from conveyor.experimental import wait_tensor_freed


@conveyor.remote
class Keeper:
    @conveyor.method(tensor_transport="auto")
    def make(self, size=1000):
        self.array = np.ones(size)
        return {"array": self.array, "other": np.zeros(7)}

    @conveyor.method(tensor_transport="auto", snapshot=True)
    def copy(self):
        self.array = np.ones(10)
        return self.array

    @conveyor.method(tensor_transport="auto")
    def in_arena(self):
        self.array = conveyor.empty((50_000,), "float64")
        self.array[:] = 1
        return self.array

    def write(self, index=3):
        self.array[index] += 1

    def write_when_free(self):
        wait_tensor_freed(self.array, timeout=WAIT)
        self.array += 1

    def total(self, value):
        return float(value["array"].sum())

    def checks(self):
        return _core.checks_writes()


@pytest.fixture(params=["local", "inline"])
def watched(request, leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine=request.param, debug_writes=True)
        yield request.param
        conveyor.shutdown()


@pytest.fixture
def local_watched(leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine="local", debug_writes=True)
        yield
        conveyor.shutdown()


def test_what_nobody_writes_to_is_fetched(watched):
    ann, bob = Keeper.options(name="ann").remote(), Keeper.options(name="bob").remote()
    for size in (0, 1, 5, 100_000):
        ref = ann.make.remote(size)
        assert get(bob.total.remote(ref)) == get(ann.total.remote(ref)) == size
        assert get(ref)["array"].sum() == size
    snapshot = ann.copy.remote()
    assert get(snapshot).tolist() == [1.0] * 10
    get(ann.write.remote())
    assert get(snapshot).tolist() == [1.0] * 10


@pytest.mark.parametrize("index", [0, 3, 4098])
def test_who_fetches_what_was_written_to_is_told(local_watched, index):
    ann, bob = Keeper.options(name="ann").remote(), Keeper.options(name="bob").remote()
    ref = ann.make.remote(5000)
    assert get(bob.total.remote(ref)) == 5000
    get(ann.write.remote(index))
    with pytest.raises(SharedWriteError) as told:
        get(ref)
    for said in ("40,056 bytes", ref.value_id(), "ann", "method make has", "snapshot=True"):
        assert said in str(told.value)
    # So are another actor, and its maker.
    for actor in (bob, ann):
        with pytest.raises((SharedWriteError, TaskError), match="written to"):
            get(actor.total.remote(ref))
    with pytest.raises(SharedWriteError):
        conveyor.get(ref, into=[np.zeros(5000), np.zeros(7)])


def test_in_the_process_that_keeps_it(watched):
    array = np.ones(5)
    ref = conveyor.put(array, tensor_transport="auto")
    assert get(ref) is array
    array[2] = 7
    with pytest.raises(SharedWriteError, match=r"40 bytes .* that driver keeps was"):
        get(ref)
    array[2] = 1
    assert get(ref) is array


def test_a_write_that_nobody_fetches_is_told_at_the_end(local_watched, caplog, wait_until):
    array = np.ones(5)
    ref = conveyor.put(array, tensor_transport="auto")
    name = ref.value_id()
    array[2] = 7
    with caplog.at_level(logging.ERROR):
        del ref
        wait_until(lambda: name in caplog.text)
    assert "was written to while others could fetch it" in caplog.text


def test_who_waits_until_it_is_free_may_write(local_watched, caplog, wait_until):
    ann, bob = Keeper.remote(), Keeper.remote()
    ref = ann.make.remote()
    total = bob.total.remote(ref)
    writes = ann.write_when_free.remote()
    assert get(total) == 1000
    del ref
    get(writes)
    assert caplog.text == ""


def test_a_write_while_it_is_read_is_told(local_watched, latches):
    """What is fetched is of one moment, or it is told."""
    ann = Keeper.options(max_concurrency=2).remote()
    ref = ann.make.remote(300_000)
    conveyor.wait([ref])
    get(ref)

    def busy(holder, path):
        while not os.path.exists(path):
            holder.array += 1

    enough = latches()
    writes = ann.__ray_call__.remote(busy, enough.path)
    tries = told = 0
    end = time.monotonic() + WAIT
    while (tries < 100 or not told) and time.monotonic() < end:
        tries += 1
        try:
            values = set(get(ref)["array"].tolist())
            assert values == {1.0}
        except SharedWriteError:
            told += 1
    enough.open()
    get(writes)
    assert told


def test_parts_are_not_looked_at(local_watched):
    array = np.ones((4, 4))
    ref = conveyor.put(array, tensor_transport="auto")
    actor = Keeper.remote()
    part = actor.__ray_call__.remote(lambda self, rows: rows.tolist(), ref[1:2])
    assert get(part) == [[1.0] * 4]


def test_where_it_is_requested_for(monkeypatch):
    monkeypatch.setenv("CONVEYOR_DEBUG_WRITES", "1")
    conveyor.init()
    assert _core.checks_writes()
    assert get(Keeper.remote().checks.remote())
    conveyor.shutdown()
    conveyor.init(debug_writes=False, env_vars={"OTHER": "1"})
    assert not _core.checks_writes()
    assert not get(Keeper.remote().checks.remote())
    array = np.ones(5)
    ref = conveyor.put(array, tensor_transport="auto")
    array[0] = 2
    assert get(ref)[0] == 2
    conveyor.shutdown()
    monkeypatch.delenv("CONVEYOR_DEBUG_WRITES")
    conveyor.init()
    assert not _core.checks_writes()
    conveyor.shutdown()
    with pytest.raises(TypeError, match="debug_writes"):
        conveyor.init(debug_writes="yes")


def test_every_byte_and_its_place_count():
    def checksum(*arrays):
        return _core.checksum_of(_core.ranges_of(list(arrays)))

    rand = np.random.default_rng(1)
    for size in (1, 7, 8, 9, 31, 32, 33, 64, 100, 1000):
        array = rand.integers(0, 256, size, np.uint8)
        seen = {checksum(array), checksum(array, array), checksum(array[:0], array)}
        assert checksum(array.copy()) == checksum(array)
        for place in range(size):
            for bit in (0, 7):
                array[place] ^= 1 << bit
                seen.add(checksum(array))
                array[place] ^= 1 << bit
        assert len(seen) == 3 + 2 * size


def test_what_lies_in_an_arena_is_looked_at_as_well(local_watched):
    holder = Keeper.remote()
    ref = holder.in_arena.remote()
    assert get(ref).sum() == 50_000
    get(holder.write.remote())
    with pytest.raises(SharedWriteError, match="in_arena"):
        get(ref)
