"""References that are arguments of calls, to values that have stayed: who passes one on sends what it has
received, as it is."""

import os

import numpy as np
import psutil
import pytest
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.codec.pickling import pickler
from conveyor.exceptions import ActorDiedError


@conveyor.remote
class Holder:
    @conveyor.method(tensor_transport="auto")
    def make(self, value=1.0, size=500):
        return np.full(size, value)

    @conveyor.method(tensor_transport="auto")
    def many(self, count):
        return [np.full(2, float(i)) for i in range(count)]

    @conveyor.method(tensor_transport="auto")
    def in_place(self, value, size=500):
        made = conveyor.empty((size,), "float64")
        made[:] = value
        return made

    @conveyor.method(tensor_transport="auto")
    def fails(self):
        raise KeyError("x")

    def plain(self):
        return np.full(500, 2.0)

    def total(self, *values):
        return [float(np.sum(value)) for value in values]

    def named(self, first, *, second):
        return [float(np.sum(first)), float(np.sum(second))]

    def are_one(self, first, second):
        return first is second

    def kinds(self, *values):
        return [type(value).__name__ for value in values]

    def are_writable(self, *values):
        return [value.flags.writeable for value in values]

    def permissions(self, *values):
        """Of the mappings of arenas that the values lie in."""
        found = []
        with open("/proc/self/maps") as maps:
            mappings = [line.split() for line in maps if "conveyor-arena" in line]
        for value in values:
            for bounds, permissions, *_ in mappings:
                begin, end = (int(part, 16) for part in bounds.split("-"))
                if begin <= value.ctypes.data < end:
                    found.append(permissions)
        return found

    def total_of(self, other, ref):
        return conveyor.get(other.total.remote(ref[0], 3))

    def stored(self):
        return sum(one.route == "here" for one in conveyor.objects())

    def hold(self, path):
        hold(path)


@pytest.fixture
def pair(local):
    return Holder.remote(), Holder.remote()


@pytest.fixture
def pickles(monkeypatch):
    """What this process pickles, by its type."""
    found = []

    def dump(value, sent):
        found.append(type(value).__name__)
        return before(value, sent)

    before = pickler.dump
    monkeypatch.setattr(pickler, "dump", dump)
    return found


def test_nothing_is_pickled_where_all_arguments_are_plain_or_have_stayed(pair, pickles):
    maker, other = pair
    first, second = maker.make.remote(1.0), maker.make.remote(2.0)
    get([first, second])
    assert get(other.total.remote(first, 3, second, (4.5, 5.5))) == [500, 3, 1000, 10]
    assert get(other.kinds.remote(first, None, "x", b"y", (), 1.5)) == [
        "ndarray",
        "NoneType",
        "str",
        "bytes",
        "tuple",
        "float",
    ]
    assert pickles == []
    # What nobody has pickled says what it is all the same.
    assert get(other.total.remote(first, [np.float64(1), 2])) == [500, 3]
    assert pickles == ["tuple"]


def test_what_was_not_there_when_the_call_was_made(pair, latches, pickles):
    maker, other = pair
    go = latches()
    maker.hold.remote(go.path)
    total = other.total.remote(maker.make.remote(), 7)
    go.open()
    assert get(total) == [500, 7]
    assert pickles == []


def test_what_is_passed_twice_comes_as_one_object(pair):
    maker, other = pair
    first, second = maker.make.remote(), maker.make.remote()
    assert get(other.are_one.remote(first, first)) is True
    assert get(other.are_one.remote(first, second)) is False
    assert get(other.are_writable.remote(first, second)) == [True, True]


def test_on_its_own_actor_it_is_the_same_object(pair):
    maker, _ = pair
    ref = maker.make.remote()
    assert get(maker.are_one.remote(ref, ref)) is True


def test_beside_arguments_by_name_and_those_that_travel(pair):
    maker, other = pair
    kept, plain = maker.make.remote(), maker.plain.remote()
    assert get(other.named.remote(kept, second=maker.make.remote(3.0))) == [500, 1500]
    assert get(other.total.remote(kept, plain, np.ones(3))) == [500, 1000, 3]


def test_a_value_of_more_parts_than_a_short_frame_names(pair):
    maker, other = pair
    ref = maker.many.remote(5000)  # 16 bytes for each
    assert get(other.total.remote(ref, 1)) == [2 * sum(range(5000)), 1]


def test_the_call_keeps_what_it_was_given(pair, latches, wait_until):
    maker, other = pair
    go = latches()
    before = other.hold.remote(go.path)
    refs = [maker.make.remote(1.0), maker.make.remote(2.0)]
    get(refs)
    total = other.total.remote(refs[0], 5, refs[1])
    refs.clear()
    assert get(maker.stored.remote()) == 2
    go.open()
    assert get(total) == [500, 5, 1000]
    get(before)
    wait_until(lambda: get(maker.stored.remote()) == 0, WAIT, "both to be let go of")


def test_what_lies_in_its_makers_arena_is_read_there(pair):
    """It has no memory of its reader's, who has private pages over its maker's."""
    maker, other = pair
    placed, private = maker.in_place.remote(1.0, 20_000), maker.make.remote(1.0, 20_000)
    assert get(other.permissions.remote(placed, private)) == ["rw-p", "rw-s"]
    assert get(other.are_writable.remote(placed, private)) == [True, True]
    assert get(other.total.remote(placed, private)) == [20_000, 20_000]


def test_an_actor_passes_on_what_it_owns_and_what_it_was_given(pair):
    maker, other = pair
    third = Holder.remote()
    ref = maker.in_place.remote(4.0)
    assert get(third.total_of.remote(other, [ref])) == [2000, 3]


def test_what_has_failed_fails_the_call(pair):
    maker, other = pair
    with pytest.raises(KeyError):
        get(other.total.remote(maker.fails.remote(), 1))


def test_its_actor_dies_before_it_is_fetched(pair, latches, wait_until):
    maker, other = pair
    go = latches()
    other.hold.remote(go.path)
    ref = maker.make.remote()
    get(ref)
    total = other.total.remote(ref, 1)
    pid = get(maker.__ray_call__.remote(lambda _: os.getpid()))
    conveyor.kill(maker)
    # Until it is gone its memory is there, and may be read.
    wait_until(lambda: not psutil.pid_exists(pid), WAIT)
    go.open()
    with pytest.raises(ActorDiedError, match="Holder has died, and with it"):
        get(total)
    assert get(other.total.remote(1)) == [1]  # that was this call's alone
