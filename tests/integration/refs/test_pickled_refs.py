"""Pickled refs: loaded in the driver and in actors, and what is kept for them."""

import asyncio
import copy
import gc
import os
import pickle
import signal
import sys
import threading

import cloudpickle
import inside
import numpy as np
import pytest
from integration_helpers import WAIT, get, hold, large

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    ExecutionCancelledError,
    RuntimeStateError,
    TaskError,
    WaitTimeoutError,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Actor:
    def __init__(self):
        self.kept = None

    def echo(self, x):
        return x

    def hold(self, x, go):
        hold(go)
        return x

    def fail(self, x):
        raise ValueError(x)

    def ones(self, n):
        return np.ones(n)

    def load(self, pickled):
        """Load a pickled ref and get it."""
        self.kept = None
        return pickle.loads(pickled).get(timeout=WAIT)

    def load_and_keep(self, pickled):
        self.kept = pickle.loads(pickled)

    def load_and_die(self, pickled):
        self.kept = pickle.loads(pickled)
        os.kill(os.getpid(), signal.SIGKILL)

    def get_kept(self):
        return self.kept.get(timeout=WAIT)

    def done(self):
        return self.kept.done()

    def wait(self):
        done, left = conveyor.wait([self.kept], timeout=WAIT)
        return len(done), len(left)

    def peek(self):
        try:
            self.kept.get(timeout=0.01)
        except WaitTimeoutError as error:
            return str(error)

    def drop(self):
        self.kept = None
        gc.collect()

    def pickle_kept(self):
        return pickle.dumps(self.kept)

    def cancel_kept(self):
        return self.kept.cancel()

    def call(self, other, *args):
        """A ref of this actor's own."""
        return [other.echo.remote(*args)]

    def call_hold(self, other, *args):
        return [other.hold.remote(*args)]

    def call_fail(self, other):
        return [other.fail.remote("deep")]

    def own_then_die(self, other, go):
        self.kept = other.hold.remote("x", go)
        return pickle.dumps(self.kept)

    def own_done(self, other):
        ref = other.echo.remote(np.ones(50_000))
        ref.get()
        self.kept = ref
        return pickle.dumps(ref)

    def is_original(self):
        self.kept = conveyor.put(1)
        return pickle.loads(pickle.dumps(self.kept)) is self.kept

    def pid(self):
        return os.getpid()

    def rss(self):
        gc.collect()
        return len(os.listdir("/proc/self/fd")), inside.known_refs()

    def bytes_of(self, x):
        return len(x)


class Async(Actor):
    async def await_kept(self):
        return await self.kept


@pytest.fixture(scope="module")
def a(session):
    return conveyor.remote(Actor).remote()


@pytest.fixture(scope="module")
def b(session):
    return conveyor.remote(Actor).remote()


@pytest.fixture(autouse=True)
def nothing_is_kept(session, wait_until, a, b):
    yield
    get([a.drop.remote(), b.drop.remote()])
    wait_until(lambda: inside.kept() == 0, WAIT, "the end of all exported results")


# The driver's refs


def test_a_ref_of_the_driver_is_used_in_an_actor(a, b):
    ref = b.echo.remote({"k": [1]})
    assert get(a.load.remote(pickle.dumps(ref))) == {"k": [1]}
    assert get(ref) == {"k": [1]}
    assert get(a.load.remote(pickle.dumps(conveyor.put("put")))) == "put"


def test_refs_of_graphs_too(a, b):
    with InputNode() as inp:
        dag = MultiOutputNode([b.echo.bind(inp), inp], effects=[b.echo.bind(inp)])
    with dag.compile() as graph:
        for ref in graph.execute("x"):
            assert get(a.load.remote(pickle.dumps(ref))) == "x"


def test_before_it_is_done(a, b, latches):
    go = latches()
    ref = b.hold.remote("late", go.path)
    get(a.load_and_keep.remote(pickle.dumps(ref)))
    assert get(a.done.remote()) is False
    message = get(a.peek.remote())
    assert "a pickled ref" in message
    assert "of the driver" in message
    waiting, value = a.wait.remote(), a.get_kept.remote()
    go.open()
    assert get(waiting) == (1, 0)
    assert get(value) == "late"
    assert get(a.done.remote()) is True
    assert get(a.get_kept.remote()) == "late"


def test_awaited_in_an_actor(b, latches):
    actor = conveyor.remote(Async).remote()
    go = latches()
    ref = b.hold.remote("late", go.path)
    get(actor.load_and_keep.remote(pickle.dumps(ref)))
    value = actor.await_kept.remote()
    go.open()
    assert get(value) == "late"
    get(actor.drop.remote())


def test_errors_arrive_as_they_are(a, b):
    with pytest.raises(ValueError, match="broken") as caught:
        get(a.load.remote(pickle.dumps(b.fail.remote("broken"))))
    assert isinstance(caught.value, TaskError)
    dying = conveyor.remote(Actor).remote()
    ref = dying.hold.remote(1, "never")
    get(a.load_and_keep.remote(pickle.dumps(ref)))
    conveyor.kill(dying)
    with pytest.raises(ActorDiedError, match="killed"):
        get(a.get_kept.remote())


def test_a_cancelled_ref_is_cancelled_everywhere(a, b, latches):
    go = latches()
    ref = b.hold.remote(1, go.path)
    get(a.load_and_keep.remote(pickle.dumps(ref)))
    with pytest.raises(RuntimeStateError, match="in the process that made it"):
        get(a.cancel_kept.remote())
    ref.cancel()
    with pytest.raises(ExecutionCancelledError):
        get(a.get_kept.remote())
    go.open()


def test_it_is_passed_on_and_comes_back(a, b, latches):
    go = latches()
    held = conveyor.remote(Actor).remote()
    ref = held.hold.remote("round", go.path)
    get(a.load_and_keep.remote(pickle.dumps(ref)))
    get(b.load_and_keep.remote(get(a.pickle_kept.remote())))
    assert pickle.loads(get(b.pickle_kept.remote())) is ref
    go.open()
    assert get([a.get_kept.remote(), b.get_kept.remote()]) == ["round", "round"]


def test_the_original_may_be_garbage(a, b, latches):
    go = latches()
    ref = b.hold.remote("still there", go.path)
    pickled = pickle.dumps(ref)
    del ref
    gc.collect()
    go.open()
    assert get(a.load.remote(pickled)) == "still there"


def test_large_values_are_shared(a, b):
    ref = b.ones.remote(1 << 20)
    pickled = pickle.dumps(ref)
    total = get(a.load.remote(pickled)).sum()
    assert total == 1 << 20
    assert len(pickled) < 1000


def test_in_the_driver_itself(a):
    ref = a.echo.remote(1)
    assert pickle.loads(pickle.dumps(ref)) is ref
    assert copy.copy(ref) is ref
    assert copy.deepcopy([ref])[0] is ref
    part, _ = a.echo.options(num_returns=2).remote((1, 2))
    assert pickle.loads(pickle.dumps([part]))[0] is part


# Actors' refs


def test_an_actor_returns_refs_of_its_own(a, b):
    (ref,) = get(a.call.remote(b, "through"))
    assert get(ref) == "through"
    assert ref.done()
    assert get(b.echo.remote(ref)) == "through"
    (failed,) = get(a.call_fail.remote(b))
    with pytest.raises(ValueError, match="deep"):
        get(failed)
    (put,) = get(a.call.remote(b, conveyor.put(5)))
    assert get(put) == 5


def test_waiting_for_an_actors_ref(a, b, latches):
    go = latches()
    (ref,) = get(a.call_hold.remote(b, "late", go.path))
    assert not ref.done()
    with pytest.raises(WaitTimeoutError, match="of actor"):
        ref.get(timeout=0.01)
    with pytest.raises(RuntimeStateError, match="cancelled in the process"):
        ref.cancel()
    threading.Timer(0.02, go.open).start()
    assert conveyor.wait([ref], timeout=WAIT) == ([ref], [])

    async def main():
        return await ref

    assert asyncio.run(main()) == "late"


def test_many_threads_get_one_imported_ref(a, b, latches):
    go = latches()
    (ref,) = get(a.call_hold.remote(b, ["v"], go.path))
    values = []
    threads = [
        threading.Thread(target=lambda: values.append(ref.get(timeout=WAIT))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    go.open()
    for thread in threads:
        thread.join(WAIT)
    assert values == [["v"]] * 6


def test_an_actors_ref_loaded_there_is_the_original(a):
    assert get(a.is_original.remote())


def test_an_actor_that_dies_before_its_ref_is_done(b, latches):
    dying = conveyor.remote(Actor).remote()
    ref = pickle.loads(get(dying.own_then_die.remote(b, latches().path)))
    pid = get(dying.pid.remote())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        get(ref)


def test_a_result_outlives_the_actor_that_had_it(b, wait_until):
    dying = conveyor.remote(Actor).remote()
    ref = pickle.loads(get(dying.own_done.remote(b)))
    assert conveyor.wait([ref], timeout=WAIT)[0]
    conveyor.kill(dying)
    assert get(ref).sum() == 50_000


def test_kill_nine_of_an_actor_that_holds_copies(b, latches, wait_until):
    go = latches()
    holder = conveyor.remote(Actor).remote()
    ref = b.hold.remote("x", go.path)
    get(holder.load_and_keep.remote(pickle.dumps(ref)))
    assert inside.kept() == 1
    os.kill(get(holder.pid.remote()), signal.SIGKILL)
    wait_until(lambda: inside.kept() == 0, WAIT, "the release of what it held")
    go.open()
    assert get(ref) == "x"


def test_a_load_counts_though_the_actor_dies_right_after_it(b, latches, wait_until):
    go = latches()
    ref = b.hold.remote("x", go.path)
    for _ in range(5):
        dying = conveyor.remote(Actor).remote()
        with pytest.raises(ActorDiedError):
            get(dying.load_and_die.remote(pickle.dumps(ref)))
    wait_until(lambda: inside.kept() == 0, what="the release of what they held")
    go.open()
    assert get(ref) == "x"


# What is kept


def test_a_thousand_rounds_leave_nothing(a, b, wait_until, opened_since):
    def round(i):
        ref = b.echo.remote([i] * 10)
        assert get(a.load.remote(pickle.dumps(ref))) == [i] * 10
        (own,) = get(a.call.remote(b, i))
        assert get(own) == i

    round(0)
    wait_until(lambda: inside.kept() == 0)
    opened = opened_since()
    there = get(a.rss.remote())
    for i in range(500):
        round(i)
    large = b.ones.remote(100_000)
    for _ in range(500):
        assert get(a.load.remote(pickle.dumps(large)))[0] == 1
    get(a.drop.remote())
    wait_until(lambda: inside.kept() == 0)
    wait_until(lambda: len(opened()) <= 2, what="what is closed a moment later")
    wait_until(lambda: get(a.rss.remote()) == there, WAIT, "the same as before in the actor")


def test_pickles_that_are_never_loaded_are_forgotten_at_last(a, monkeypatch):
    from conveyor.refs import exports

    monkeypatch.setattr(exports, "MAX_PENDING_BORROWS", 10)
    pickles = [pickle.dumps(conveyor.put(large(i))) for i in range(30)]
    assert inside.kept() == 10
    with pytest.raises(RuntimeStateError, match="kept as long as"):
        pickle.loads(pickles[0])
    with pytest.raises((TaskError, RuntimeStateError), match="kept as long as"):
        get(a.load.remote(pickles[0]))
    assert [pickle.loads(p).get() for p in pickles[20:]] == [large(i) for i in range(20, 30)]


def test_a_pickle_is_loaded_again_as_long_as_a_copy_is_held(a, b):
    ref = b.echo.remote(1)
    pickled = pickle.dumps(ref)
    assert get([a.load.remote(pickled), b.load.remote(pickled), a.load.remote(pickled)]) == [
        1,
        1,
        1,
    ]


# Elsewhere


def test_a_foreign_process_gets_a_clear_error(a, scripts):
    pickled = pickle.dumps(a.echo.remote(1))
    program = f"""
        import pickle
        import conveyor
        for start in (lambda: None, conveyor.init):
            start()
            try:
                pickle.loads({pickled!r})
            except conveyor.exceptions.RuntimeStateError as error:
                print(error)
    """
    first, second = scripts.run(program).splitlines()
    assert "belongs to no session" in first
    assert "belongs to another session" in second
    assert "conveyor.get(ref)" in first
    pickle.loads(pickled)


def test_inline_refs_pickle_within_the_session(scripts):
    program = """
        import pickle
        import conveyor
        conveyor.init(engine="inline")
        class A:
            def echo(self, x): return x
            def load(self, p): return pickle.loads(p).get()
        a = conveyor.remote(A).remote()
        ref = a.echo.remote([1])
        assert pickle.loads(pickle.dumps(ref)) is ref
        assert a.load.remote(pickle.dumps(ref)).get() == [1]
        pickled = pickle.dumps(conveyor.put(2))
        assert pickle.loads(pickled).get() == 2
        conveyor.shutdown()
        try:
            pickle.dumps(ref)
        except conveyor.exceptions.RuntimeStateError as error:
            print(error)
    """
    assert "session has ended" in scripts.run(program)
