"""Values that are read in the arena of their maker by way of an owner that may die: readers announce it."""

import contextlib
import os
import random
import signal
import time

import pytest
from integration_helpers import WAIT, get
from test_direct_in_place import MB, Maker, Reader, maps_others

import conveyor
from conveyor.exceptions import ActorDiedError, ObjectLostError, WaitTimeoutError

PRELOAD = ["torch"]

COUNT = 2 * MB

#: Of one process: a page of the process table's.
MOST = 512


@conveyor.remote
class Owner:
    """Has references to what others keep."""

    def own(self, maker, count):
        self.ref = maker.array.remote(count, 5.0)
        conveyor.wait([self.ref], timeout=WAIT)
        return self.ref.value_id()

    def owned(self, maker, count):
        self.own(maker, count)
        return [self.ref]

    def hand(self, reader):
        return conveyor.get(reader.keep.remote(self.ref), timeout=WAIT)

    def disown(self):
        self.ref = None

    def pid(self):
        return os.getpid()


@conveyor.remote
class Many:
    """A maker, an owner and a reader of many values."""

    @conveyor.method(tensor_transport="auto")
    def one(self):
        made = conveyor.empty((8192,), "float64")
        made[:] = 3.0
        return made

    def own(self, maker, count):
        self.refs = [maker.one.remote() for _ in range(count)]
        conveyor.wait(self.refs, num_returns=count, timeout=WAIT)

    def hand(self, reader):
        return conveyor.get([reader.take.remote(ref) for ref in self.refs], timeout=WAIT)

    def take(self, value):
        self.kept = [*getattr(self, "kept", []), value]
        return maps_others(value)

    def drop(self):
        self.kept = []

    def totals(self):
        return {float(value.sum()) for value in self.kept}


@pytest.fixture
def maker(session):
    return Maker.remote()


@pytest.fixture
def owner(session):
    return Owner.remote()


@pytest.fixture
def reader(session):
    return Reader.remote()


def is_there(number):
    """Whether the value of that id is kept."""
    return number in [one.id for one in conveyor.objects()]


def holders(number):
    return [one.holders for one in conveyor.objects() if one.id == number]


def kill(actor):
    os.kill(get(actor.pid.remote()), signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        get(actor.pid.remote())


def passed_on(maker, owner, reader):
    """An array of the maker's, whose reference the owner has had, and which the reader holds; its id."""
    number = get(owner.own.remote(maker, COUNT))
    assert get(owner.hand.remote(reader)), "it was copied"
    kill(owner)
    get(maker.drop.remote())
    return number


def test_it_is_read_where_it_lies(maker, owner, reader):
    number = get(owner.own.remote(maker, COUNT))
    assert get(owner.hand.remote(reader))
    assert get(reader.total.remote()) == 5.0 * COUNT
    get(maker.write.remote(6.0))  # it is the maker's own memory
    assert get(reader.total.remote()) == 6.0 * COUNT
    assert any(any(name.startswith("Reader") for name in names) for names in holders(number))


def test_it_stays_when_its_owner_is_killed_and_goes_with_its_reader(
    maker, owner, reader, wait_until
):
    number = passed_on(maker, owner, reader)
    get(maker.fill.remote(COUNT, 9.0))
    get(maker.fill.remote(COUNT, 9.0))
    assert get(reader.total.remote()) == 5.0 * COUNT
    assert [one.nbytes for one in conveyor.objects() if one.id == number] == [8 * COUNT]
    wait_until(lambda: [len(names) for names in holders(number)] == [1])
    assert holders(number)[0][0].startswith("Reader")
    get(reader.drop.remote())
    wait_until(lambda: not is_there(number))


def test_it_goes_where_its_owner_lives(maker, owner, reader, wait_until):
    number = get(owner.own.remote(maker, COUNT))
    assert get(owner.hand.remote(reader))
    get(maker.drop.remote())
    get(owner.disown.remote())
    get(maker.fill.remote(COUNT, 9.0))
    assert get(reader.total.remote()) == 5.0 * COUNT
    get(reader.drop.remote())
    wait_until(lambda: not is_there(number))


def test_nobody_writes_to_it_while_it_is_read(maker, owner, reader, wait_until):
    number = get(owner.own.remote(maker, COUNT))
    assert get(owner.hand.remote(reader))
    kill(owner)
    with pytest.raises(conveyor.exceptions.ConveyorError) as error:
        get(maker.free.remote())
    assert isinstance(error.value, WaitTimeoutError) or "timeout" in str(error.value).lower()
    get(reader.drop.remote())
    wait_until(lambda: not is_there(number))
    get(maker.free.remote())


def test_a_reader_that_is_killed_holds_nothing(maker, owner, reader, wait_until):
    number = passed_on(maker, owner, reader)
    assert is_there(number)
    kill(reader)
    wait_until(lambda: not is_there(number))


def test_a_child_of_the_reader_has_it_as_long_as_it_lives(maker, owner, reader, wait_until):
    number = passed_on(maker, owner, reader)
    get(reader.expect.remote(5.0 * COUNT))
    get(reader.forked.remote())  # and lets go of it itself
    get(maker.fill.remote(COUNT, 9.0))
    assert is_there(number)
    assert get(reader.joined.remote()) == 0
    wait_until(lambda: not is_there(number))


def test_what_has_come_stays_when_its_maker_is_killed(maker, owner, reader):
    passed_on(maker, owner, reader)
    kill(maker)
    assert get(reader.total.remote()) == 5.0 * COUNT
    get(reader.drop.remote())


def test_a_reference_inside_of_a_value(maker, owner):
    (ref,) = get(owner.owned.remote(maker, COUNT))
    value = get(ref)
    assert maps_others(value)
    kill(owner)
    del ref
    get(maker.drop.remote())
    get(maker.fill.remote(COUNT, 9.0))
    assert (value == 5.0).all()


def test_more_than_can_be_announced_are_copied(session):
    maker, owner, reader = Many.remote(), Many.remote(), Many.remote()
    get(owner.own.remote(maker, MOST + 3))
    assert get(owner.hand.remote(reader)) == [True] * MOST + [False] * 3
    assert get(reader.totals.remote()) == {3.0 * 8192}
    get(reader.drop.remote())
    assert get(owner.hand.remote(reader)) == [True] * MOST + [False] * 3


@conveyor.remote
class Churning:
    """Makes one value after the other, whose memory is used again as soon as it is free."""

    @conveyor.method(tensor_transport="auto")
    def one(self, number):
        made = conveyor.empty((20_000,), "int64")
        made[:] = number
        return made

    def pid(self):
        return os.getpid()


@conveyor.remote
class Giver:
    """Owns references, and passes each on."""

    def give(self, maker, reader, first, count):
        for number in range(first, first + count):
            conveyor.get(reader.check.remote(maker.one.remote(number), number), timeout=WAIT)

    def pid(self):
        return os.getpid()


@conveyor.remote
class Checking:
    """Holds some values, and looks whether any is another one by now."""

    def __init__(self):
        self.held = []

    def check(self, value, number):
        self.held = [*self.held[-7:], (value, number)]
        return self.look()

    def look(self):
        wrong = [n for value, n in self.held if value.min() != n or value.max() != n]
        if wrong:
            raise ValueError(f"other bytes in the values {wrong}")
        return len(self.held)

    def drop(self):
        self.held = []

    def pid(self):
        return os.getpid()


@pytest.mark.parametrize("seed", range(3))
def test_kills_at_any_time(session, seed, wait_until):
    """Of owners and readers, while they pass on and read: nobody reads other bytes, and nothing stays."""
    chance = random.Random(seed)
    maker = Churning.remote()
    readers = [Checking.remote() for _ in range(2)]
    for turn in range(2):
        givers = [Giver.remote() for _ in readers]
        victims = [*givers, readers[1]]
        pids = get([one.pid.remote() for one in victims])
        calls = [
            giver.give.remote(maker, reader, 1 + 1000 * turn, 400)
            for giver, reader in zip(givers, readers, strict=True)
        ]
        time.sleep(chance.uniform(0, 0.05))
        os.kill(pids[chance.choice((0, 1, 2))], signal.SIGKILL)
        for call in calls:
            with contextlib.suppress(ActorDiedError, ObjectLostError):
                get(call)  # raises what a reader has found
        assert get(readers[0].look.remote()) >= 0
        try:
            get(readers[1].look.remote())
        except ActorDiedError:
            readers[1] = Checking.remote()
        # One whose call has failed may have its reference until its garbage is collected.
        for giver in givers:
            conveyor.kill(giver)
    get([reader.drop.remote() for reader in readers])
    wait_until(lambda: not [one for one in conveyor.objects() if one.holder.startswith("Churning")])
