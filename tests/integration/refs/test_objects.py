"""What all processes of a session keep: ``conveyor.objects()``."""

import os
import random
import signal
import threading

import numpy as np
import pytest
from integration_helpers import WAIT, get, hold
from nodes_apart import APART

import conveyor
from conveyor import _core
from conveyor.direct.store import TABLE

#: How who is not ann gets what she keeps: she is on another node than the driver and bob, if they are apart.
FROM_ANN = "network" if APART else "read"


@conveyor.remote
class Keeper:
    def __init__(self):
        self.refs = []

    @conveyor.method(tensor_transport="auto")
    def make(self, size=1000):
        return np.ones(size)

    @conveyor.method(tensor_transport="auto", snapshot=True)
    def copy(self, size=1000):
        return np.ones(size)

    @conveyor.method(tensor_transport="auto", num_returns=2)
    def two(self):
        return np.zeros(3), np.ones(4)

    def put(self, size):
        self.refs.append(conveyor.put(np.ones(size), tensor_transport="shm"))
        return self.refs[-1].value_id()

    def keep(self, refs):
        self.refs += refs

    def use(self):
        return [conveyor.get(ref).size for ref in self.refs]

    def pass_on(self, other):
        return conveyor.get(other.keep.remote(self.refs))

    def drop(self):
        self.refs.clear()

    def total(self, value):
        return float(value.sum())

    def listed(self):
        return conveyor.objects()

    def pid(self):
        return os.getpid()

    def hold(self, path):
        hold(path)


def named(*names):
    return [Keeper.options(name=name).remote() for name in names]


def by_id():
    return {one.id: one for one in conveyor.objects()}


@pytest.fixture
def pair(local):
    return named("ann", "bob")


def test_every_process_lists_what_all_of_them_keep(pair, wait_until):
    ann, bob = pair
    made, copied = ann.make.remote(10), bob.copy.remote(20)
    mine = conveyor.put([np.ones(5), np.ones(6)], tensor_transport="shm")
    theirs = get(ann.put.remote(7))
    ids = [made.value_id(), copied.value_id(), mine.value_id(), theirs]
    holders = [("driver",)] * 3 + [("ann",)]
    # Who has made one holds it until that has been received.
    wait_until(lambda: [one.holders for one in map(by_id().get, ids)] == holders)
    found = by_id()
    assert set(found) == set(ids)
    assert [found[one].holder for one in ids] == ["ann", "bob", "driver", "ann"]
    assert [found[one].nbytes for one in ids] == [80, 160, 88, 56]
    assert [found[one].transport for one in ids] == ["auto", "auto", "shm", "shm"]
    assert [found[one].snapshot for one in ids] == [False, True, False, False]
    assert [found[one].route for one in ids] == [FROM_ANN, "read", "here", FROM_ANN]
    assert [found[one].holders for one in ids] == holders
    ages = [one.age for one in conveyor.objects()]
    assert ages == sorted(ages, reverse=True)
    assert all(0 <= age < WAIT for age in ages)
    # A snapshot is read also where it is kept.
    for actor, here in ((ann, {ids[0], ids[3]}), (bob, set())):
        listed = {one.id: one for one in get(actor.listed.remote())}
        assert {one for one in ids if listed[one].route == "here"} == here
        assert {one: (listed[one].holder, listed[one].holders) for one in ids} == {
            one: (found[one].holder, found[one].holders) for one in ids
        }


def test_in_one_process(engine):
    mine = conveyor.put(np.ones(3), tensor_transport="auto")
    assert [(one.id, one.holder, one.route) for one in conveyor.objects()] == [
        (mine.value_id(), "driver", "here")
    ]


def test_refs_say_which_value_they_name(pair):
    ann, bob = pair
    usual = ann.total.remote(np.ones(2))
    assert usual.value_id() is None
    first, second = ann.two.remote()
    assert first.route() == FROM_ANN
    assert len({first.value_id(), second.value_id()}) == 2
    assert {first.value_id(), second.value_id()} == set(by_id())
    assert second[1:].value_id() == second.value_id()
    get(bob.keep.remote([second]))
    ids = get(bob.__ray_call__.remote(lambda self: [ref.value_id() for ref in self.refs]))
    assert ids == [second.value_id()]
    routes = get(bob.__ray_call__.remote(lambda self: [ref.route() for ref in self.refs]))
    assert routes == [FROM_ANN]


def test_a_keeper_that_computes_is_listed(pair, tmp_path):
    ann, bob = pair
    ref = ann.make.remote()
    conveyor.wait([ref])
    path = tmp_path / "go"
    running = ann.hold.remote(str(path))
    try:
        assert [one.holder for one in conveyor.objects()] == ["ann"]
        os.kill(get(bob.pid.remote()), signal.SIGSTOP)
        assert [one.id for one in conveyor.objects()] == [ref.value_id()]
    finally:
        os.kill(bob_pid(bob), signal.SIGCONT)
        path.touch()
    get(running)


def bob_pid(actor):
    process_table = conveyor.runtime.context.current().process.process_table
    return next(
        process_table.pid(slot)
        for slot in range(process_table.used)
        if process_table.name(slot) == "bob"
    )


def test_what_has_gone_is_not_listed(pair, wait_until):
    ann, bob = pair
    refs = [ann.make.remote(), ann.copy.remote(), conveyor.put(np.ones(3), tensor_transport="auto")]
    conveyor.wait(refs, num_returns=3)
    assert len(conveyor.objects()) == 3
    while refs:
        refs.pop()
        wait_until(lambda: len(conveyor.objects()) == len(refs))
    kept = [ann.make.remote(), bob.make.remote()]
    conveyor.wait(kept, num_returns=2)
    os.kill(get(ann.pid.remote()), signal.SIGKILL)
    wait_until(lambda: [one.holder for one in conveyor.objects()] == ["bob"])


def test_holders_along_a_chain(local, wait_until):
    ann, bob, eve = named("ann", "bob", "eve")

    def held_by(*names):
        # Who has passed one on holds it until that has been received, and so on: it is told while it changes.
        def are_holders():
            [one] = conveyor.objects()
            return set(one.holders) == set(names)

        return wait_until(are_holders, what=f"{names} to hold it")

    ref = ann.make.remote()
    conveyor.wait([ref])
    assert held_by("driver")
    get(bob.keep.remote([ref]))
    get(bob.pass_on.remote(eve))
    assert get(bob.use.remote()) == get(eve.use.remote()) == [1000]
    assert held_by("driver", "bob", "eve")
    get(bob.drop.remote())
    assert held_by("driver", "eve")
    # The driver is the rendezvous, so the value is kept there as long as anybody has a copy.
    del ref
    assert held_by("driver", "eve")
    os.kill(get(eve.pid.remote()), signal.SIGKILL)
    wait_until(lambda: conveyor.objects() == [])


def test_who_has_a_call_to_begin_holds_what_it_takes(pair, tmp_path, wait_until):
    ann, bob = pair
    path = tmp_path / "go"
    running = bob.hold.remote(str(path))
    mine = conveyor.put(np.ones(3), tensor_transport="auto")
    made = ann.make.remote(3)
    conveyor.wait([made])
    totals = [bob.total.remote(mine), bob.total.remote(made)]
    ids = [mine.value_id(), made.value_id()]
    del mine, made
    wait_until(
        lambda: all(set(one.holders) >= {"bob"} for one in conveyor.objects()),
    )
    assert {one.id for one in conveyor.objects()} == set(ids)
    path.touch()
    assert get(totals) == [3.0, 3.0]
    get(running)
    wait_until(lambda: conveyor.objects() == [])


def test_thousands(pair, wait_until):
    ann, _ = pair
    refs = [conveyor.put(np.ones(n), tensor_transport="auto") for n in range(1, 5001)]
    theirs = [ann.make.remote(n) for n in range(1, 1001)]
    conveyor.wait(theirs, num_returns=len(theirs))
    listed = conveyor.objects()
    mine = [one for one in listed if one.holder == "driver"]
    assert [one.nbytes for one in mine] == [8 * n for n in range(1, 5001)]
    assert [one.id for one in mine] == [ref.value_id() for ref in refs]
    assert len(listed) == 6000
    wait_until(lambda: {one.holders for one in conveyor.objects()} == {("driver",)})
    del refs[::2], theirs[1::2]
    wait_until(lambda: len(conveyor.objects()) == 3000)
    kept = {ref.value_id() for ref in (*refs, *theirs)}
    assert {one.id for one in conveyor.objects()} == kept


def test_a_listing_is_right_while_values_come_and_go(pair):
    """What has been kept all the time is listed, what is listed has been kept, and is told right."""
    ann, _ = pair
    stays = {ann.make.remote(1): 8, conveyor.put(np.ones(2), tensor_transport="shm"): 16}
    usual = {ref.value_id(): size for ref, size in stays.items()}
    known = dict(usual)
    over = threading.Event()

    def churn():
        rand = random.Random(1)
        refs = []
        while not over.is_set():
            size = rand.randrange(1, 200)
            ref = conveyor.put(np.ones(size), tensor_transport="auto", snapshot=rand.random() < 0.5)
            known[ref.value_id()] = 8 * size
            refs.append(ref)
            if len(refs) > rand.randrange(1, 60):
                del refs[: rand.randrange(len(refs))]

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        listings = [(conveyor.objects(), get(ann.listed.remote())) for _ in range(60)]
    finally:
        over.set()
        for thread in threads:
            thread.join()
    for listing in [one for both in listings for one in both]:
        sizes = {one.id: one.nbytes for one in listing}
        assert len(sizes) == len(listing)
        assert sizes == {one: known[one] for one in sizes}
        assert usual.items() <= sizes.items()
    assert any(len(both[1]) > 5 for both in listings)


def test_a_listing_of_what_is_none():
    with pytest.raises(OSError, match="Bad address"):
        _core.read_directory(os.getpid(), 8)
    text = bytearray(256)
    address = np.frombuffer(text, np.uint8).__array_interface__["data"][0]
    with pytest.raises(OSError, match="Protocol"):
        _core.read_directory(os.getpid(), address)


@pytest.mark.parametrize("length", [5000, 300_000])
def test_long_names_do_no_harm(pair, length):
    usual = pair[0].make.remote()
    conveyor.wait([usual], timeout=WAIT)
    stored = TABLE.keep(np.ones(3), [memoryview(bytearray(24))], "x" * length)
    listed = by_id()
    assert listed[usual.value_id()].transport == "auto"
    long = listed[f"{stored.number:016x}"]
    assert long.nbytes == 24
    assert len(long.transport) == min(length, 1 << 17)  # what is longer is cut off
    assert set(long.transport) == {"x"}


class Sparse:
    """A route that takes anything, and notes what it is told."""

    name = "sparse"

    def __init__(self):
        self.told = []

    def offer(self, number, tensors):
        self.told.append(("offer", number))
        return b"note"

    def forget(self, number, note, tensors):
        self.told.append(("forget", number))


class Refuses(np.ndarray):
    @property
    def __array_interface__(self):
        raise LookupError("nowhere")


def test_what_was_offered_is_taken_back_where_its_memory_is_not_known():
    route = Sparse()
    with pytest.raises(LookupError, match="nowhere"):
        TABLE.keep(None, [], "sparse", route, [np.ones(3).view(Refuses)])
    assert [what for what, _ in route.told] == ["offer", "forget"]
    assert len({number for _, number in route.told}) == 1


def test_a_sparse_tensor_may_be_offered():
    torch = pytest.importorskip("torch")
    route = Sparse()
    stored = TABLE.keep(None, [], "sparse", route, [torch.eye(3).to_sparse()])
    del stored
    assert [what for what, _ in route.told] == ["offer", "forget"]
