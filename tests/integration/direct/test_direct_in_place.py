"""Values that stay with their maker, in its arena, and are read there."""

import os
import signal

import numpy as np
import pytest
import torch
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import ActorDiedError, WaitTimeoutError
from conveyor.experimental import wait_tensor_freed

PRELOAD = ["torch"]

MB = 1 << 20


@conveyor.remote
class Maker:
    def __init__(self):
        self.made = None

    @conveyor.method(tensor_transport="auto")
    def array(self, count=1000, value=1.0):
        self.made = conveyor.empty((count,), "float64")
        self.made[:] = value
        return self.made

    @conveyor.method(tensor_transport="auto")
    def tensor(self, count=1000, value=1.0):
        self.made = conveyor.empty_tensor((count,), torch.float64)
        self.made.fill_(value)
        return self.made

    @conveyor.method(tensor_transport="auto", snapshot=True)
    def copied(self, count=1000, value=1.0):
        return conveyor.empty((count,), "float64") * 0 + value

    @conveyor.method(tensor_transport="auto")
    def nested(self, count=1000):
        whole = conveyor.empty((2 * count,), "float64")
        whole[:] = np.arange(2 * count)
        return {"halves": [whole[:count], whole[count:]], "other": np.ones(count), "name": "x"}

    @conveyor.method(tensor_transport="auto")
    def same(self):
        return self.made

    def write(self, value):
        self.made[:] = value

    def drop(self):
        self.made = None

    def fill(self, count, value):
        """Blocks of the same size are used for others, were they free."""
        others = [conveyor.empty((count,), "float64") for _ in range(8)]
        for other in others:
            other[:] = value
        return len(others)

    def free(self):
        wait_tensor_freed(self.made, timeout=0.1)

    def pid(self):
        return os.getpid()

    def fork(self):
        """The child has what its parent had, and waits."""
        go = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(go[1])
            os.read(go[0], 1)
            os._exit(0)
        os.close(go[0])
        self.go = go[1]

    def end_child(self):
        os.close(self.go)
        return os.waitpid(self.child, 0)[1]


@conveyor.remote
class Reader:
    def __init__(self):
        self.kept = None

    def keep(self, value):
        self.kept = value
        return maps_others(value)

    def keep_inside(self, refs):
        self.kept = conveyor.get(refs[0])
        return maps_others(self.kept)

    def total(self):
        return float(self.kept.sum())

    def drop(self):
        self.kept = None

    def write(self):
        self.kept[0] = 100
        return float(self.kept[0])

    def fetched(self, maker, count):
        """Of a call of its own: it owns the reference."""
        self.ref = maker.array.remote(count, 5.0)
        self.kept = conveyor.get(self.ref, timeout=WAIT)
        return maps_others(self.kept)

    def hand(self, reader):
        """Pass on what it owns."""
        return conveyor.get(reader.keep.remote(self.ref), timeout=WAIT)

    def pid(self):
        return os.getpid()

    def forked(self):
        """The child reads what its parent holds, and the parent lets go of it meanwhile."""
        ready, go = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(0 if float(self.kept.sum()) == self.expected else 1)
        self.kept = None
        os.read(ready[0], 1)
        self.child, self.go = child, go[1]

    def expect(self, value):
        self.expected = value

    def joined(self):
        os.write(self.go, b"x")
        return os.waitpid(self.child, 0)[1]


def maps_others(value):
    """Whether the memory of a value is a file that others have."""
    address = value.data_ptr() if hasattr(value, "data_ptr") else value.ctypes.data
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return "conveyor-arena" in line and line.split()[1][3] == "p"
    return False


@pytest.fixture
def maker(session):
    return Maker.remote()


@pytest.fixture
def reader(session):
    return Reader.remote()


@pytest.mark.parametrize("count", [1, 1000, 20_000, 8 * MB])
def test_an_array_is_read_where_it_was_made(maker, count):
    ref = maker.array.remote(count, 2.0)
    value = get(ref)
    assert maps_others(value) == (value.nbytes >= 64 << 10)
    assert value.flags.writeable
    assert value.shape == (count,)
    assert value.min() == value.max() == 2.0
    assert (get(ref) == 2.0).all()


@pytest.mark.parametrize("count", [1000, 20_000, 8 * MB])
def test_another_actor_reads_it_there_too(maker, reader, count):
    ref = maker.array.remote(count, 2.0)
    assert get(reader.keep.remote(ref)) == (8 * count >= 64 << 10)
    assert get(reader.total.remote()) == 2.0 * count
    # It is asked for later, by the reference alone, and may be copied.
    get(reader.keep_inside.remote([ref]))
    assert get(reader.total.remote()) == 2.0 * count


@pytest.mark.parametrize("count", [100, 20_000, 8 * MB])
def test_what_is_written_to_a_tensor_is_its_readers_own(maker, reader, count):
    ref = maker.tensor.remote(count, 3.0)
    get(reader.keep.remote(ref))
    assert get(reader.write.remote()) == 100.0
    assert get(reader.total.remote()) == 3.0 * (count - 1) + 100.0
    other = get(ref)
    assert (other == 3.0).all()
    assert maps_others(other) == (other.nbytes >= 64 << 10)


@pytest.mark.parametrize("count", [100, 20_000])
def test_what_is_written_to_an_array_is_its_readers_own(maker, count):
    ref = maker.array.remote(count, 3.0)
    value, other = get(ref), get(ref)
    value += 1
    assert (value == 4.0).all()
    assert (other == 3.0).all()
    assert (get(ref) == 3.0).all()


def test_what_its_maker_writes_is_seen_by_who_has_it(maker):
    value = get(maker.array.remote(20_000, 1.0))
    get(maker.write.remote(4.0))
    assert (value == 4.0).all()


def test_a_snapshot_is_copied_and_so_is_what_is_received_into(maker):
    copied = get(maker.copied.remote(20_000, 1.0))
    assert not maps_others(copied)
    assert (copied == 1.0).all()
    target = np.zeros(20_000)
    assert conveyor.get(maker.array.remote(20_000, 5.0), into=target, timeout=WAIT) is target
    get(maker.write.remote(6.0))
    assert (target == 5.0).all()


def test_views_and_what_lies_remote_come_together(maker, reader):
    value = get(maker.nested.remote(50_000))
    first, second = value["halves"]
    assert maps_others(first)
    assert maps_others(second)
    assert not maps_others(value["other"])
    assert (np.concatenate([first, second]) == np.arange(100_000)).all()
    assert (value["other"] == 1).all()
    assert value["name"] == "x"


def test_the_memory_is_not_used_again_while_somebody_has_it(maker, reader):
    count = 2 * MB
    ref = maker.array.remote(count, 2.0)
    assert get(reader.keep.remote(ref))
    value = get(ref)
    del ref
    get(maker.drop.remote())
    get(maker.fill.remote(count, 9.0))
    get(maker.fill.remote(count, 9.0))
    assert (value == 2.0).all()
    assert get(reader.total.remote()) == 2.0 * count
    assert any(
        "driver" in one.holders for one in conveyor.objects() if one.holder.startswith("Maker")
    )


def test_it_goes_when_the_last_array_has_gone(maker, reader, wait_until):
    ref = maker.array.remote(20_000, 2.0)
    get(reader.keep.remote(ref))
    number = ref.value_id()
    del ref
    with pytest.raises(conveyor.exceptions.ConveyorError) as error:
        get(maker.free.remote())
    assert isinstance(error.value, WaitTimeoutError) or "timeout" in str(error.value).lower()
    get(reader.drop.remote())
    wait_until(lambda: number not in [one.id for one in conveyor.objects()])


def test_a_reader_that_is_killed_holds_nothing(maker, reader, wait_until):
    ref = maker.array.remote(20_000, 2.0)
    assert get(reader.keep.remote(ref))
    number = ref.value_id()
    del ref
    assert number in [one.id for one in conveyor.objects()]
    os.kill(get(reader.pid.remote()), signal.SIGKILL)
    wait_until(lambda: number not in [one.id for one in conveyor.objects()])


@pytest.mark.parametrize("count", [20_000, 8 * MB])
def test_what_has_come_stays_when_its_maker_is_killed(maker, reader, count):
    ref = maker.array.remote(count, 2.0)
    assert get(reader.keep.remote(ref))
    value = get(ref)
    os.kill(get(maker.pid.remote()), signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        get(maker.pid.remote())
    assert (value == 2.0).all()
    assert get(reader.total.remote()) == 2.0 * count
    with pytest.raises(ActorDiedError):
        get(ref)


@pytest.mark.parametrize("count", [20_000, 8 * MB])
def test_what_has_come_stays_when_its_maker_ends(session, reader, count, wait_until):
    maker = Maker.remote()
    pid = get(maker.pid.remote())
    ref = maker.array.remote(count, 2.0)
    assert get(reader.keep.remote(ref))
    value = get(ref)
    del ref
    conveyor.kill(maker)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert (value == 2.0).all()
    assert get(reader.total.remote()) == 2.0 * count


def test_who_reads_in_place_keeps_the_maker(session, reader, wait_until):
    maker = Maker.remote()
    pid = get(maker.pid.remote())
    ref = maker.array.remote(8 * MB, 2.0)
    assert get(reader.keep.remote(ref))
    value = get(ref)
    del ref, maker  # the last handle
    assert (value == 2.0).all()
    assert get(reader.total.remote()) == 2.0 * 8 * MB
    del value
    get(reader.drop.remote())
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_child_of_a_reader_has_it_as_long_as_it_lives(maker, reader):
    count = 2 * MB
    ref = maker.array.remote(count, 2.0)
    assert get(reader.keep.remote(ref))
    get(reader.expect.remote(2.0 * count))
    del ref
    get(reader.forked.remote())
    get(maker.drop.remote())
    get(maker.fill.remote(count, 9.0))
    assert get(reader.joined.remote()) == 0


def test_a_child_of_the_maker_changes_nothing(maker, reader):
    count = 2 * MB
    ref = maker.array.remote(count, 2.0)
    get(ref)
    get(maker.fork.remote())
    value = get(ref)
    assert (value == 2.0).all()
    assert get(reader.keep.remote(ref))
    del ref
    get(maker.drop.remote())
    assert get(maker.end_child.remote()) == 0
    get(maker.fill.remote(count, 9.0))
    assert (value == 2.0).all()
    assert get(reader.total.remote()) == 2.0 * count


def test_what_the_driver_puts_is_read_in_place(session, reader):
    made = conveyor.empty((20_000,), "float64")
    made[:] = 7.0
    ref = conveyor.put(made, tensor_transport="auto")
    assert get(reader.keep.remote(ref))
    del ref, made
    others = [conveyor.empty((20_000,), "float64") for _ in range(8)]
    for other in others:
        other[:] = 9.0
    assert get(reader.total.remote()) == 7.0 * 20_000
