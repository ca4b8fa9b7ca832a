"""Refs inside of arguments and of results: they arrive as refs, live as long as anybody has them or a
value that refers to them, and are let go of afterwards."""

import asyncio
import gc
import operator
import os
import pickle
import sys
import threading

import cloudpickle
import inside
import numpy as np
import pytest
from integration_helpers import WAIT, compiled, get, hold, large

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, GraphTornDownError, WaitTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Member:
    def __init__(self, *args):
        self.kept = list(args)

    def produce(self, values):
        return [conveyor.put(value) for value in values]

    def consume(self, refs):
        return [conveyor.get(ref) for ref in refs]

    def total(self, refs):
        return float(sum(conveyor.get(ref).sum() for ref in refs))

    def keep(self, *refs):
        self.kept.extend(refs)

    def get_kept(self, *_):
        def deep(x):
            return [deep(v) for v in x] if isinstance(x, list) else conveyor.get(x)

        return deep(self.kept)

    def drop(self):
        self.kept.clear()
        gc.collect()

    def pass_on(self, other, refs):
        return conveyor.get(other.consume.remote(refs))

    def calls(self, other, x):
        """A ref of a call that this actor makes."""
        return [other.slow.remote(x)]

    def slow(self, x):
        return x

    def hold(self, refs, go):
        hold(go)
        return [conveyor.get(ref) for ref in refs]

    def late(self, value, go):
        hold(go)
        return [conveyor.put(value), value]

    def echo(self, x):
        return x

    def pass_kept_on(self, other):
        return conveyor.get(other.consume.remote([ref for (ref,) in self.kept]))

    def change_kept(self, number):
        conveyor.get(self.kept[number][0]).append("changed")

    def is_kept(self, refs):
        return [ref is mine for ref, (mine,) in zip(refs, self.kept, strict=True)]

    def loads_what_is_kept(self, pickled):
        return pickle.loads(pickled) is self.kept[0][0]

    def start_member(self, refs, **options):
        return conveyor.remote(Member).options(**options).remote(refs)

    def ones(self, n):
        return np.ones(n)

    def in_place(self, n):
        array = conveyor.empty(n)
        array[:] = 1
        return array

    def die(self):
        os._exit(3)

    def drop_results_of(self, other):
        for _ in range(10):
            other.produce.remote([5])
        return conveyor.get(other.echo.remote(0))

    async def later(self, x, go):
        while not os.path.exists(go):
            await asyncio.sleep(0.002)

    def known(self):
        return inside.known_refs()


@pytest.fixture(scope="module", autouse=True)
def session(leaves_nothing):
    with leaves_nothing():
        conveyor.init()
        yield
        conveyor.shutdown()


@pytest.fixture
def members():
    return [conveyor.remote(Member).remote() for _ in range(3)]


@pytest.fixture(autouse=True)
def nothing_is_kept(session, wait_until):
    yield
    gc.collect()
    wait_until(lambda: inside.kept() == 0, WAIT, "the end of all exported results")


def test_a_consumer_gets_each_of_the_refs_that_a_producer_has_put(members):
    sender, receiver, third = members
    values = [np.ones(200_000), np.full(10, 2.0)]
    refs = sender.produce.remote(values)
    assert get(receiver.total.remote(refs)) == 200_020
    assert get(receiver.total.remote(refs)) == 200_020  # again, without having been got here
    assert get(third.total.remote(get(refs))) == 200_020
    assert get(sender.total.remote(refs)) == 200_020
    assert [get(ref).shape for ref in get(refs)] == [(200_000,), (10,)]


def test_through_three_processes(members):
    a, b, c = members
    made = conveyor.put([1]), a.echo.remote({"k": 2}), get(a.produce.remote([3]))[0]
    assert get(a.pass_on.remote(b, made)) == [[1], {"k": 2}, 3]
    assert get(a.pass_on.remote(b, a.produce.remote([4]))) == [4]
    theirs = a.calls.remote(b, "x")
    assert get(c.consume.remote(theirs)) == ["x"]


def test_refs_that_are_not_done_arrive_and_can_be_waited_for(members, latches):
    a, b, c = members
    go = latches()
    held = a.hold.remote([], go.path)
    waiting = b.consume.remote([held, c.echo.remote(1)])
    with pytest.raises(WaitTimeoutError):
        waiting.get(timeout=0.05)
    go.open()
    assert get(waiting) == [[], 1]


def test_they_live_as_long_as_a_value_that_refers_to_them(members):
    a, b, _ = members
    put = conveyor.put({"list": [conveyor.put(1)]})
    result = a.produce.remote([2])
    get(b.keep.remote([put, result]))
    gc.collect()
    for _ in range(2):
        assert get(get(put)["list"][0]) == 1
        assert get(get(result)[0]) == 2
    outer = [put, result]
    del put, result
    get(a.keep.remote(outer))
    del outer
    gc.collect()
    for _ in range(2):
        assert get(a.consume.remote([conveyor.put(5)])) == [5]
    # What it keeps are refs to values with refs.
    kept = get(a.echo.remote(0))
    assert kept == 0
    get([a.drop.remote(), b.drop.remote()])


def test_kept_there_they_outlive_everything_here(members):
    a, b, _ = members
    ref = b.ones.remote(100_000)
    get(a.keep.remote([ref]))
    (own,) = get(b.produce.remote([large("b's")]))
    get(a.keep.remote([own]))
    # What an actor has put, it tells the driver behind its answer.
    assert conveyor.wait([ref, own], num_returns=2, timeout=WAIT)[1] == []
    del ref, own
    gc.collect()
    conveyor.kill(b)
    values = get(a.get_kept.remote())
    assert values[0][0].sum() == 100_000
    assert values[1] == [large("b's")]
    assert inside.kept() == 2
    get(a.drop.remote())


def test_small_values_that_are_there_travel_with_their_refs(members):
    a, b, c = members
    values = [1, -(2**40), None, True, 1.5, "text", b"bytes", [1, {"two": (2,)}], 1 << 200]
    refs = [conveyor.put(value) for value in values] + [b.slow.remote(7), b.slow.remote([8])]
    assert get(refs) == [*values, 7, [8]]
    assert all(map(operator.is_, get(a.echo.remote(refs)), refs))  # the refs themselves
    get(a.keep.remote(*([ref] for ref in refs)))
    assert inside.kept() == 0
    del refs
    gc.collect()
    conveyor.kill(b)
    assert get(a.get_kept.remote()) == [[value] for value in (*values, 7, [8])]
    assert get(a.pass_kept_on.remote(c)) == [*values, 7, [8]]
    get(a.change_kept.remote(7))
    assert get(a.get_kept.remote())[7] == [values[7]]


def test_a_ref_that_comes_pending_and_then_with_its_value_is_one(members, latches):
    a, b, c = members
    go = latches()
    ref = b.hold.remote([], go.path)
    get(a.keep.remote([ref]))
    go.open()
    assert get(ref) == []
    assert get(a.is_kept.remote([ref])) == [True]
    assert get(a.pass_kept_on.remote(c)) == [[]]
    get(a.drop.remote())
    # The other way round: the pickle that was made when it was pending is loaded last.
    later = latches()
    ref = b.hold.remote([], later.path)
    pending = pickle.dumps(ref)
    later.open()
    assert get(ref) == []
    get(a.keep.remote([ref]))
    assert get(a.is_kept.remote([pickle.loads(pending)])) == [True]
    assert get(a.loads_what_is_kept.remote(pending))


def test_dropped_there_they_are_let_go_of(members, wait_until):
    a, b, _ = members
    refs = [conveyor.put(large(i)) for i in range(20)]
    get(a.keep.remote(refs))
    get(b.consume.remote(refs))
    del refs
    gc.collect()
    wait_until(lambda: inside.kept() == 20)
    get(a.drop.remote())
    wait_until(lambda: inside.kept() == 0)
    wait_until(lambda: get(a.known.remote()) == get(b.known.remote()) == 0)


def test_results_that_nobody_gets_let_go_of_their_refs(members, wait_until):
    a, b, _ = members
    graph = compiled(lambda inp: a.produce.bind(inp))
    for _ in range(30):
        a.produce.remote([1, 2])
        graph.execute([3])
    dropped = [a.produce.remote([4]) for _ in range(5)]
    conveyor.wait(dropped, num_returns=5, timeout=WAIT)
    del dropped
    # In an actor that drops results that it never got.
    get(b.drop_results_of.remote(a))
    # What has come and nobody wants goes with the next result that is looked for, or with the graph.
    get(a.echo.remote(0))
    graph.teardown()
    del graph
    gc.collect()
    wait_until(lambda: inside.kept() == 0)


@pytest.mark.parametrize("size", [1, 200_000])
def test_results_that_come_when_their_graph_has_been_left_let_go_of_their_refs(
    members, latches, wait_until, size
):
    a, _, _ = members
    go = latches()
    graph = compiled(lambda inp: a.late.bind(inp, go.path))
    ref = graph.execute(np.ones(size))
    tearing_down = threading.Thread(target=graph.teardown)
    tearing_down.start()
    wait_until(lambda: graph.status().state == "torn down")
    go.open()
    tearing_down.join(WAIT)
    with pytest.raises(GraphTornDownError):
        get(ref)
    wait_until(lambda: inside.kept() == 0)
    wait_until(lambda: get(a.known.remote()) == 0)


def test_an_argument_that_is_never_sent_lets_go_of_its_refs(members, wait_until):
    a, _, _ = members
    ref = conveyor.put(1)
    with pytest.raises(conveyor.exceptions.SerializationError):
        a.echo.remote([ref, threading.Lock()])
    with pytest.raises(conveyor.exceptions.SerializationError):
        conveyor.put([ref, threading.Lock()])
    graph = compiled(lambda inp: a.echo.bind(inp[0]))
    with pytest.raises(conveyor.exceptions.SerializationError):
        graph.execute([ref, threading.Lock()])
    with InputNode() as inp:
        shared = MultiOutputNode([member.echo.bind(inp[0]) for member in members]).compile()
    with pytest.raises(conveyor.exceptions.SerializationError):
        shared.execute([ref, threading.Lock()])
    del ref
    wait_until(lambda: inside.kept() == 0)


@pytest.mark.parametrize("size", [1, 200_000])
def test_each_reader_that_has_left_before_a_value_came_lets_go_of_its_refs(
    members, latches, wait_until, size
):
    """The value has two readers: the driver, which has left when it comes, and an actor."""
    a, b, _ = members
    go = latches()
    with InputNode() as inp:
        made = a.late.bind(inp, go.path)
        graph = MultiOutputNode([made, b.echo.bind(made)]).compile()
    refs = graph.execute(np.ones(size))
    tearing_down = threading.Thread(target=graph.teardown)
    tearing_down.start()
    wait_until(lambda: graph.status().state == "torn down")
    go.open()
    tearing_down.join(WAIT)
    del refs
    gc.collect()
    wait_until(lambda: inside.kept() == 0)


def test_inputs_that_a_torn_down_graph_has_not_read_let_go_of_their_refs(
    members, latches, wait_until
):
    a, _, _ = members
    go = latches()
    graph = compiled(lambda inp: a.later.bind(inp, go.path))
    refs = [graph.execute([conveyor.put(large(i))]) for i in range(4)]
    assert inside.kept() == 4
    graph.teardown()
    wait_until(lambda: inside.kept() <= 1)  # that of the coroutine, if it has begun
    go.open()
    del refs
    gc.collect()
    wait_until(lambda: inside.kept() == 0)


def test_two_readers_of_one_value_each_have_its_refs(members):
    a, b, c = members
    with InputNode() as inp:
        made = a.produce.bind(inp)
        graph = MultiOutputNode([b.consume.bind(made), c.consume.bind(made), made]).compile()
        shared = MultiOutputNode([b.consume.bind(inp), c.consume.bind(inp)]).compile()
    for i in range(3):
        first, second, refs = graph.execute([i])
        assert get(first) == get(second) == [i]
        assert get(get(refs)[0]) == i
        assert get(shared.execute([conveyor.put(i)])) == [[i], [i]]
    graph.teardown()
    shared.teardown()


def test_inputs_and_results_of_graphs(members):
    a, b, c = members
    with InputNode() as inp:
        graph = b.consume.bind(a.echo.bind(inp)).compile()
        parts = MultiOutputNode({"got": b.consume.bind(inp[0]), "given": inp[1]}).compile()
    inner = graph.execute([conveyor.put(1), c.echo.remote(2)])
    assert get(inner) == [1, 2]
    assert get(graph.execute([inner])) == [[1, 2]]
    refs = parts.execute([inner], [inner])
    assert get(refs["got"]) == [[1, 2]]
    assert [get(ref) for ref in get(refs["given"])] == [[1, 2]]


def test_constructors_keep_theirs_for_restarts(members, wait_until):
    a, b, _ = members
    one, two = conveyor.put([1]), b.echo.remote(2)
    mine = conveyor.remote(Member).options(max_restarts=1).remote([one, [two]])
    theirs = get(a.start_member.remote([one, [two]], max_restarts=1))
    del one, two
    gc.collect()
    for member in (mine, theirs):
        assert get(member.get_kept.remote()) == [[[1], [2]]]
        with pytest.raises(ActorDiedError):
            get(member.die.remote())
        assert get(member.get_kept.remote()) == [[[1], [2]]]
        conveyor.kill(member)


def test_the_death_of_who_makes_a_ref_is_its_error(members, latches):
    a, b, c = members
    refs = get(a.calls.remote(b, 1))
    assert get(refs[0]) == 1
    go = latches()
    mine = c.hold.remote([], go.path)
    waiting = b.consume.remote([mine])
    conveyor.kill(c)
    with pytest.raises(ActorDiedError):
        get(waiting)
    with pytest.raises(ActorDiedError):
        get(a.consume.remote([mine]))


def test_many_threads_send_the_same_refs(members):
    a, b, _ = members
    refs = [conveyor.put(i) for i in range(5)] + [a.echo.remote(5)]
    wrong = []

    def send(member):
        for _ in range(20):
            if get(member.consume.remote(refs)) != [0, 1, 2, 3, 4, 5]:
                wrong.append(member)

    threads = [threading.Thread(target=send, args=(m,)) for m in (a, b, a, b)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not wrong


def test_refs_inside_of_a_result_are_there_however_late_it_is_passed_on():
    """The ref of the result is garbage as soon as it stands for its value in a call that waits."""

    @conveyor.remote
    class Maker:
        def make(self):
            return [conveyor.put(1), conveyor.put(2)]

        def use(self, refs):
            return sum(conveyor.get(refs))

    maker, user = Maker.remote(), Maker.remote()
    for _ in range(30):
        assert conveyor.get(user.use.remote(maker.make.remote()), timeout=60) == 3


DECODED = """
    import threading
    import conveyor

    class Value:
        def __getstate__(self):
            return {"x": 1}

        def __setstate__(self, state):
            threads.append(threading.current_thread().name)
            self.x = state["x"]

    threads = []

    @conveyor.remote
    class Actor:
        def make(self):
            return Value()

        def use(self, refs):
            return [conveyor.get(ref).x for ref in refs]

    if __name__ == "__main__":
        one, other = Actor.remote(), Actor.remote()
        ref = one.make.remote()
        assert conveyor.get(ref).x == 1
        assert conveyor.get(other.use.remote([ref])) == [1]
        assert not any("refs-in" in name for name in threads), threads
"""


def test_no_code_of_the_user_s_runs_where_actors_are_answered(scripts):
    """It may wait for what only that thread can bring about."""
    scripts.run(DECODED)


FAILED = """
    import threading
    import conveyor

    threads = []

    class Odd(Exception):
        def __reduce__(self):
            return load, ()

    def load():
        threads.append(threading.current_thread().name)
        return Odd()

    @conveyor.remote
    class Actor:
        def fail(self):
            raise Odd

        def kinds(self, refs):
            found = []
            for ref in refs:
                try:
                    found.append(conveyor.get(ref))
                except Odd:
                    found.append("odd")
            return found

    a, b = Actor.remote(), Actor.remote()
    done = a.fail.remote()
    conveyor.wait([done])
    print(conveyor.get(b.kinds.remote([done, a.fail.remote()])))
    print({"conveyor-refs-in", "conveyor-watcher"} & set(threads))
"""


def test_an_error_is_not_loaded_where_actors_are_answered(scripts):
    """It runs code of the user's, which may wait for what only that thread can bring about."""
    assert scripts.run(FAILED) == "['odd', 'odd']\nset()\n"


@pytest.mark.parametrize("size", [100, 3_000, 100_000])
def test_what_was_made_in_place_is_more_than_a_reference_brings_along(members, size):
    a, b, _ = members
    graph = compiled(lambda inp: a.in_place.bind(inp))
    for ref in (a.in_place.remote(size), graph.execute(size)):
        assert get(ref).sum() == size
        assert get(b.total.remote([ref])) == size
        assert pickle.loads(pickle.dumps(ref)) is ref
    graph.teardown()


def test_references_of_an_actor_before_and_after_a_restart_are_others():
    actor = conveyor.remote(Member).options(max_restarts=1).remote()
    before = get(actor.produce.remote(["old", ["old"]]))
    assert get(actor.consume.remote(before)) == ["old", ["old"]]
    with pytest.raises(ActorDiedError):
        get(actor.die.remote())
    after = get(actor.produce.remote(["new", ["new"]]))
    assert get(after) == ["new", ["new"]]
    assert get(actor.consume.remote(before)) == ["old", ["old"]]
    assert len({ref.hex() for ref in (*before, *after)}) == 4
