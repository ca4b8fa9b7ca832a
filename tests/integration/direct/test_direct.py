"""Values that stay on the actor that made them."""

import os
import signal
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from integration_helpers import WAIT, get, hold
from nodes_apart import APART

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.direct import listing
from conveyor.exceptions import ActorDiedError, ObjectLostError, WaitTimeoutError
from conveyor.experimental import wait_tensor_freed
from conveyor.runtime import process


@conveyor.remote
class Holder:
    def __init__(self):
        self.array = None

    @conveyor.method(tensor_transport="auto")
    def make(self, size=1000, value=1.0):
        self.array = np.full(size, value)
        return self.array

    @conveyor.method(tensor_transport="auto")
    def give(self, value):
        return value

    @conveyor.method(tensor_transport="auto")
    def many(self, count, size=1000):
        return {"parts": [np.full(size, float(i)) for i in range(count)], "count": count}

    @conveyor.method(tensor_transport="auto", num_returns=2)
    def two(self):
        return np.zeros(3), np.ones(4)

    @conveyor.method(tensor_transport="auto")
    def items(self, count):
        for i in range(count):
            yield np.full(5, float(i))

    @conveyor.method(tensor_transport="auto", snapshot=True)
    def copy(self, size=1000):
        self.array = np.full(size, 1.0)
        return self.array

    def add(self):
        self.array += 1

    def plain(self, size=1000):
        return np.full(size, 2.0)

    def total(self, value):
        return float(value.sum())

    def sum_of(self, *, value):
        return float(value.sum())

    def total_of_all(self, value):
        return sum(float(part.sum()) for part in value["parts"])

    def is_same(self, value):
        return value is self.array

    def write(self, value):
        value += 1
        return float(value.sum())

    def get_inside(self, refs):
        return [float(conveyor.get(ref).sum()) for ref in refs]

    def keep(self, refs):
        self.refs = refs

    def hand_on(self, other):
        return conveyor.get(other.total.remote(self.refs[0]))

    def put(self, size):
        return [conveyor.put(np.full(size, 3.0), tensor_transport="auto")]

    def stored(self):
        return [(one.nbytes, one.transport) for one in conveyor.objects() if one.route == "here"]

    def write_when_free(self, timeout=WAIT):
        wait_tensor_freed(self.array, timeout=timeout)
        self.array += 1
        return float(self.array.sum())

    def pid(self):
        return os.getpid()

    def hold(self, path):
        hold(path)


@pytest.fixture
def pair(local):
    return Holder.remote(), Holder.remote()


def nothing_is_stored(actor, wait_until):
    wait_until(lambda: get(actor.stored.remote()) == [], WAIT, "all to be let go of")


def test_a_result_stays_and_whoever_needs_it_gets_it(pair):
    maker, other = pair
    ref = maker.make.remote()
    assert get(other.total.remote(ref)) == 1000
    assert get(other.sum_of.remote(value=ref)) == 1000
    assert get(ref).tolist() == [1.0] * 1000
    assert get(maker.stored.remote()) == [(8000, "auto")]


def test_on_its_own_actor_it_is_the_same_object(pair):
    maker, _ = pair
    ref = maker.make.remote()
    assert get(maker.is_same.remote(ref)) is True


def test_what_is_got_can_be_written_to_and_is_each_ones_own(pair):
    maker, other = pair
    ref = maker.make.remote(4)
    mine = get(ref)
    mine += 5
    assert get(other.write.remote(ref)) == 8
    assert get(ref).tolist() == [1.0] * 4


def test_it_is_freed_with_the_last_reference(pair, wait_until):
    maker, other = pair
    ref = maker.make.remote()
    value = get(ref)
    total = other.total.remote(ref)
    del ref
    assert get(total) == 1000
    nothing_is_stored(maker, wait_until)
    assert value.sum() == 1000


@pytest.fixture
def nothing_is_idle(monkeypatch):
    """Memory that is free stays where it is, in sessions that begin now."""
    monkeypatch.setattr(process, "IDLE_SECONDS", 600.0)


def test_it_is_freed_though_other_memory_of_the_arena_is_free(nothing_is_idle, pair, wait_until):
    maker, _ = pair
    get(maker.plain.remote(100_000))  # a block that will be free, and is not due for minutes
    ref = maker.make.remote()
    get(ref)
    del ref
    nothing_is_stored(maker, wait_until)


def test_a_call_that_waits_its_turn_keeps_it(pair, tmp_path, wait_until):
    maker, other = pair
    go = tmp_path / "go"
    held = other.hold.remote(str(go))
    ref = maker.make.remote()
    total = other.total.remote(ref)
    get(maker.pid.remote())
    del ref
    assert get(maker.stored.remote()) == [(8000, "auto")]
    go.touch()
    get(held)
    assert get(total) == 1000
    nothing_is_stored(maker, wait_until)


def test_a_result_that_nobody_has_requested_for_is_freed(pair, wait_until):
    maker, _ = pair
    maker.make.remote()
    nothing_is_stored(maker, wait_until)


def test_values_of_many_parts(pair):
    maker, other = pair
    ref = maker.many.remote(3000, 10)
    assert get(other.total_of_all.remote(ref)) == sum(range(3000)) * 10
    got = get(ref)
    assert got["count"] == 3000
    assert [int(part[0]) for part in got["parts"]] == list(range(3000))


@pytest.mark.parametrize("value", [None, 7, "text", [1, {"a": (2, 3)}], np.zeros(0)])
def test_values_without_memory_travel_as_any_other(pair, value):
    maker, _ = pair
    got = get(maker.give.remote(value))
    assert type(got) is type(value)
    assert np.array_equal(got, value) if isinstance(value, np.ndarray) else got == value


def test_several_results(pair, wait_until):
    maker, other = pair
    zeros, ones = maker.two.remote()
    assert get(other.total.remote(ones)) == 4
    assert get(zeros).tolist() == [0.0] * 3
    assert get([zeros, ones])[1].tolist() == [1.0] * 4
    assert len(get(maker.stored.remote())) == 2
    del zeros, ones
    nothing_is_stored(maker, wait_until)


def test_items_of_a_generator(pair, wait_until):
    maker, other = pair
    totals = [get(other.total.remote(item)) for item in maker.items.remote(4)]
    assert totals == [0.0, 5.0, 10.0, 15.0]
    nothing_is_stored(maker, wait_until)


def test_for_one_call_alone(pair):
    maker, other = pair
    ref = maker.plain.options(tensor_transport="auto").remote()
    assert get(other.total.remote(ref)) == 2000
    assert get(maker.stored.remote()) == [(8000, "auto")]
    usual = maker.make.options(tensor_transport=None).remote(2)
    assert get(usual).tolist() == [1.0, 1.0]
    assert len(get(maker.stored.remote())) == 1


def test_inside_of_other_values(pair, wait_until):
    maker, other = pair
    refs = [maker.make.remote(10, float(i)) for i in range(3)]
    assert get(other.get_inside.remote(refs)) == [0.0, 10.0, 20.0]
    get(other.keep.remote(refs[1:2]))
    del refs
    assert get(other.hand_on.remote(maker)) == 10.0
    wait_until(lambda: len(get(maker.stored.remote())) == 1)
    get(other.keep.remote(None))
    nothing_is_stored(maker, wait_until)


def test_what_an_actor_has_put(pair, wait_until):
    maker, other = pair
    [ref] = get(maker.put.remote(6))
    assert get(ref).tolist() == [3.0] * 6
    assert get(other.total.remote(ref)) == 18
    assert get(other.get_inside.remote([ref])) == [18.0]
    assert len(get(maker.stored.remote())) == 1
    del ref
    nothing_is_stored(maker, wait_until)


def test_what_the_driver_has_put(pair, wait_until):
    _, other = pair
    array = np.ones(500)
    ref = conveyor.put(array, tensor_transport="auto")
    assert conveyor.get(ref) is array
    assert get(other.total.remote(ref)) == 500
    assert get(other.get_inside.remote([ref])) == [500.0]
    array += 1  # it is the same memory
    assert get(other.total.remote(ref)) == 1000
    with pytest.raises(WaitTimeoutError, match="a value lies there"):
        wait_tensor_freed(array[10:20], timeout=0.01)
    del ref
    wait_tensor_freed(array, timeout=WAIT)
    assert conveyor.objects() == []


def test_as_an_input_of_a_graph(pair, wait_until):
    maker, other = pair
    with InputNode() as inp:
        graph = other.total.bind(inp).compile()
    ref = maker.make.remote()
    assert graph.execute(ref).get(timeout=WAIT) == 1000
    del ref
    nothing_is_stored(maker, wait_until)
    graph.teardown()


@pytest.mark.parametrize("multi", [False, True])
def test_as_a_result_of_a_graph(pair, wait_until, multi):
    maker, other = pair
    with InputNode() as inp:
        made = maker.make.bind(inp)
        graph = (MultiOutputNode([made, other.total.bind(made)]) if multi else made).compile()
    result = graph.execute(500)
    ref = result[0] if multi else result
    assert get(other.total.remote(ref)) == 500
    with pytest.warns(UserWarning, match="passed back to the actor that created it"):
        assert get(maker.is_same.remote(ref)) is True
    assert ref.get(timeout=WAIT).tolist() == [1.0] * 500
    if multi:
        assert result[1].get(timeout=WAIT) == 500
    assert "stays on its actor" in str(graph.explain())
    assert len(get(maker.stored.remote())) == 1
    del ref, result
    nothing_is_stored(maker, wait_until)
    graph.teardown()


def test_memory_is_written_to_again_once_it_is_free(pair):
    maker, other = pair
    ref = maker.make.remote()
    written = maker.write_when_free.remote()
    total = other.total.remote(ref)  # fetched from an actor that is in a method
    assert get(total) == 1000
    del ref
    assert get(written) == 2000


@conveyor.remote(max_concurrency=2)
class Threads(Holder.__wrapped__):
    def total_later(self, value, go):
        hold(go)
        return float(value.sum())


@conveyor.remote
class Coroutines(Holder.__wrapped__):
    async def total_later(self, value, go):
        import asyncio

        while not os.path.exists(go):
            await asyncio.sleep(0.001)
        return float(value.sum())

    async def write_when_free(self, timeout=WAIT):
        import asyncio

        return await asyncio.to_thread(Holder.__wrapped__.write_when_free, self, timeout)


@pytest.mark.parametrize("kind", [Threads, Coroutines])
def test_memory_is_not_free_while_a_method_of_its_own_actor_has_it(local, tmp_path, kind):
    go = str(tmp_path / "go")
    maker = kind.remote()
    ref = maker.make.remote()
    total = maker.total_later.remote(ref, go)
    del ref
    with pytest.raises(WaitTimeoutError):
        get(maker.write_when_free.remote(0.05))
    written = maker.write_when_free.remote()
    (tmp_path / "go").touch()
    assert get(total) == 1000
    assert get(written) == 2000


def test_waiting_for_memory_that_is_needed_ends_with_its_timeout(pair):
    maker, _ = pair
    ref = maker.make.remote()
    with pytest.raises(TimeoutError, match="reference to it is held"):
        get(maker.write_when_free.remote(0.05))
    assert get(ref).sum() == 1000


def fails(ref):
    try:
        get(ref)
    except ActorDiedError:
        return True


@pytest.mark.filterwarnings("error")
def test_what_its_actor_writes_is_seen_but_in_a_snapshot(pair):
    maker, other = pair
    ref = maker.make.remote()
    get(maker.add.remote())
    assert get(ref).sum() == 2000
    for ref in (maker.copy.remote(), maker.make.options(snapshot=True).remote()):
        get(maker.add.remote())
        assert get(ref).sum() == 1000
        assert get(other.total.remote(ref)) == 1000
        assert get(maker.write.remote(ref)) == 2000  # a copy of its own
        assert get(other.total.remote(ref)) == 1000
    array = np.ones(5)
    mine = conveyor.put(array, tensor_transport="auto", snapshot=True)
    array += 1
    got = get(mine)
    got += 1
    assert get(mine).sum() == 5
    wait_tensor_freed(array, timeout=0)  # nobody can fetch that
    with pytest.raises(ValueError, match="snapshot=True is of what stays"):
        maker.plain.options(snapshot=True)
    with pytest.raises(ValueError, match="snapshot=True is of what stays"):
        conveyor.put(array, snapshot=True)


def passed_back(recwarn):
    """Warnings of that. Garbage of tests before this one may have something to tell, too."""
    return [one for one in recwarn.list if "passed back" in str(one.message)]


def test_who_is_passed_a_value_that_is_written_to_remote_is_warned(pair, recwarn):
    maker, other = pair
    ref = maker.make.remote()
    get([maker.total.remote(ref), maker.total.remote(ref)])
    assert not passed_back(recwarn)
    with pytest.warns(UserWarning, match="passed back to the actor that created it, Holder, and"):
        get(other.total.remote(ref))
    recwarn.clear()
    get([other.total.remote(ref), maker.total.remote(ref)])
    assert not passed_back(recwarn)


def test_the_warning_is_of_the_users_line_also_where_the_value_was_not_there_yet(
    pair, recwarn, latches
):
    maker, other = pair
    go = latches()
    third = Holder.remote()
    before = maker.hold.remote(go.path)
    ref = maker.make.remote()
    total, own = other.total.remote(ref), maker.total.remote(ref)
    own_line = sys._getframe().f_lineno - 1
    go.open()
    conveyor.wait([before, own, total], num_returns=3, timeout=WAIT)
    assert get([total, own]) == [1000, 1000]
    [told] = passed_back(recwarn)
    assert (told.filename, told.lineno) == (__file__, own_line)
    recwarn.clear()
    there = maker.make.remote()
    conveyor.wait([there], timeout=WAIT)
    get(third.total.remote(there))
    get(maker.total.remote(there))
    [told] = passed_back(recwarn)
    assert (told.filename, told.lineno) == (__file__, sys._getframe().f_lineno - 2)


def test_where_nobody_may_read_another_ones_memory_values_travel_as_any_other(pair):
    maker, other = pair

    def forbid(self):
        from conveyor.direct import store

        store._known = os.getpid(), False

    get(maker.__ray_call__.remote(forbid))
    ref = maker.make.remote()
    assert get(maker.stored.remote()) == []
    assert get(other.total.remote(ref)) == 1000
    assert get(ref).sum() == 1000


def test_its_actor_dies(pair, wait_until):
    maker, other = pair
    ref = maker.make.remote()
    pid = get(maker.pid.remote())
    assert get(ref).sum() == 1000
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: fails(ref), WAIT)
    with pytest.raises(ActorDiedError, match="Holder has died"):
        get(ref)
    assert ref.route() == "lost"
    with pytest.raises(ActorDiedError, match="Holder has died, and with it a value of 8,000"):
        get(other.total.remote(ref))


@pytest.mark.skipif(APART, reason="what is on another node is not read")
def test_its_actor_dies_and_the_session_does_not_know_yet(pair, wait_until, monkeypatch):
    maker, _ = pair
    ref = maker.make.remote()
    pid = get(maker.pid.remote())
    assert get(ref).sum() == 1000
    unknowing = SimpleNamespace(gone=lambda *_: False, is_remote=lambda _: False)
    process = SimpleNamespace(process_table=unknowing, remote_memory=None)
    session = SimpleNamespace(current=lambda: SimpleNamespace(process=process))
    monkeypatch.setattr(listing, "context", session)
    assert ref.route() == "read"
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: fails(ref), WAIT)
    assert ref.route() == "lost"


def test_refs_tell_what_they_are(pair):
    maker, other = pair
    ref, usual, mine = (
        maker.make.remote(),
        maker.plain.remote(),
        conveyor.put(np.ones(3), tensor_transport="shm"),
    )
    away = "network" if APART else "read"
    assert [one.route() for one in (ref, usual, mine)] == [away, "frame", "here"]
    assert [one.tensor_transport() for one in (ref, usual, mine)] == ["auto", None, "shm"]
    names = [one.hex() for one in (ref, usual, mine)]
    assert len(set(names)) == 3
    get(other.keep.remote([ref]))
    assert ref.hex() == names[0]
    assert get(other.__ray_call__.remote(lambda self: self.refs[0].hex())) == names[0]
    named = get(other.__ray_call__.remote(_named_and_put))
    assert get(named[1]).tolist() == [1.0] * 4
    assert named[1].hex() == named[0]


def _named_and_put(self):
    ref = conveyor.put(np.ones(4), tensor_transport="auto")
    return ref.hex(), ref


def test_an_actor_whose_options_forbid_it():
    with pytest.raises(
        ValueError, match=r"Holder.* has a tensor_transport, and the actor has enable"
    ):
        conveyor.remote(enable_tensor_transport=False)(Holder.__wrapped__)
    conveyor.remote(enable_tensor_transport=True)(Holder.__wrapped__)


def test_its_owner_dies(pair, wait_until):
    maker, owner = pair
    reader = Holder.remote()
    [ref] = get(owner.__ray_call__.remote(lambda self, maker: [maker.make.remote()], maker))
    assert get(ref).sum() == 1000
    conveyor.kill(owner)
    nothing_is_stored(maker, wait_until)
    with pytest.raises(ObjectLostError, match="Holder kept is kept no more"):
        get(ref)
    with pytest.raises(ObjectLostError):
        get(reader.total.remote(ref))


def test_fetching_and_freeing_at_the_same_time(pair, wait_until):
    maker, _ = pair

    def fetch(count):
        for _ in range(count):
            assert get(maker.make.remote(300)).sum() == 300

    threads = [threading.Thread(target=fetch, args=(100,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    nothing_is_stored(maker, wait_until)


@pytest.mark.parametrize("name", ["nothing", "accelerator", 5])
def test_transports_that_there_are_not(pair, name):
    maker, _ = pair
    error = TypeError if name == 5 else ValueError
    for use in (
        lambda: conveyor.method(tensor_transport=name),
        lambda: maker.plain.options(tensor_transport=name),
        lambda: conveyor.put(np.ones(1), tensor_transport=name),
    ):
        with pytest.raises(error, match="transport"):
            use()


def test_the_memory_of_a_whole_value_is_waited_for(pair):
    _, other = pair
    weights = {"deployer": np.ones(100), "more": [np.zeros(5)]}
    ref = conveyor.put(weights["more"][0], tensor_transport="auto")
    hold_it = other.__ray_call__.remote(lambda self, refs: setattr(self, "refs", refs), [ref])
    get(hold_it)
    with pytest.raises(WaitTimeoutError, match=r"is held by .*driver"):
        wait_tensor_freed(weights, timeout=0.01)
    del ref
    get(other.__ray_call__.remote(lambda self: delattr(self, "refs")))
    wait_tensor_freed(weights, timeout=WAIT)
    with pytest.raises(TypeError, match="a torch tensor or a numpy array is needed, not a dict"):
        wait_tensor_freed({})
