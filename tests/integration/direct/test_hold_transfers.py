"""Transfers that a test holds back, or has fail."""

import os
import signal
import threading
import time

import inside
import numpy as np
import pytest
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError, RuntimeStateError, TaskError, WaitTimeoutError
from conveyor.testing import InjectedFault, fail_transfers, hold_transfers


@conveyor.remote
class Keeper:
    @conveyor.method(tensor_transport="auto")
    def make(self, size=1000):
        return np.ones(size)

    @conveyor.method(tensor_transport="auto", num_returns=2)
    def two(self):
        return np.ones(3), np.ones(4)

    def total(self, value):
        return float(value.sum())

    def total_with(self, refs, timeout):
        conveyor.wait(refs, num_returns=len(refs))  # the timeout is for the fetch alone
        return [float(conveyor.get(ref, timeout=timeout).sum()) for ref in refs]

    def pid(self):
        return os.getpid()

    def held(self, other, held, go):
        with hold_transfers(other):
            open(held, "w").close()
            hold(go)


@pytest.fixture
def pair(local):
    return Keeper.options(name="ann").remote(), Keeper.options(name="bob").remote()


def made(actor, **options):
    ref = actor.make.remote(**options)
    conveyor.wait([ref])
    return ref


def test_who_fetches_waits_for_the_end(pair, wait_until):
    ann, bob = pair
    ref, theirs = made(ann), made(bob)
    with hold_transfers(ann):
        total = bob.total.remote(ref)
        requested = bob.total_with.remote([ref], None)
        wait_until(lambda: inside.status_of("bob").fetches_from == "ann")
        assert "fetching a value that ann keeps, which has not come yet" in str(
            inside.status_of("bob")
        )
        # The keeper takes no part, and what others keep can be had.
        assert get(ann.total.remote(ref)) == 1000
        assert get(theirs).sum() == 1000
        assert conveyor.wait([total, requested], timeout=0)[0] == []
    assert get(total) == 1000
    assert get(requested) == [1000]
    assert inside.status_of("bob").fetches_from is None
    assert get(ref).sum() == 1000


def test_a_timeout_is_kept(pair):
    ann, bob = pair
    ref, (first, second) = made(ann), ann.two.remote()
    conveyor.wait([first, second], num_returns=2)
    with hold_transfers(ann):
        for one in (ref, ref[1:3], second, [first, ref], {"a": first}):
            with pytest.raises(WaitTimeoutError, match="hold_transfers holds it back"):
                conveyor.get(one, timeout=0.3)
        with pytest.raises(WaitTimeoutError, match="a value that ann keeps"):
            ref.get(timeout=0)
        with pytest.raises(WaitTimeoutError):
            conveyor.get(ref, timeout=0.02, into=np.zeros(1000))
        # One that has to wait for the result first.
        with pytest.raises(WaitTimeoutError):
            conveyor.get(ann.make.remote(), timeout=0.2)
        with pytest.raises((WaitTimeoutError, TaskError), match="holds it back"):
            get(bob.total_with.remote([ref], 2))
    assert get(ref).sum() == 1000
    assert [one.sum() for one in conveyor.get([first, second, ref], timeout=WAIT)] == [3, 4, 1000]


def test_the_keeper_dies_meanwhile(pair, wait_until):
    ann, bob = pair
    ref = made(ann)
    pid = get(ann.pid.remote())
    with hold_transfers(ann):
        total = bob.total.remote(ref)
        wait_until(lambda: inside.status_of("bob").fetches_from == "ann")
        killer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
        killer.start()
        before = time.monotonic()
        with pytest.raises(ActorDiedError, match="ann"):
            get(ref)
        with pytest.raises(ActorDiedError, match="ann"):
            get(total)
        assert time.monotonic() - before < WAIT / 2


def test_a_value_whose_keeper_has_just_died_is_not_read_any_more(local):
    """Its death is known before the kernel has let go of its memory."""
    ann = Keeper.options(name="ann").remote()
    ref, pid = made(ann), get(ann.pid.remote())
    with hold_transfers(ann):
        inside.announce_death("ann")
        with pytest.raises(ActorDiedError, match="ann"):
            get(ref)
        os.kill(pid, signal.SIGKILL)


def test_a_successor_begins_without(local, wait_until):
    ann = Keeper.options(name="ann", max_restarts=1).remote()
    pid = get(ann.pid.remote())
    with hold_transfers(ann), fail_transfers(ann):
        os.kill(pid, signal.SIGKILL)

        def successor():
            try:
                return get(ann.pid.remote()) != pid
            except ActorDiedError:
                return False

        wait_until(successor)
        assert get(made(ann)).sum() == 1000
    assert get(made(ann)).sum() == 1000


def test_ctrl_c_ends_the_wait(pair):
    ann, _ = pair
    ref = made(ann)
    with hold_transfers(ann):
        interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))

        def wait():
            interrupt.start()  # here, so that none comes before it is awaited
            get(ref)

        with pytest.raises(KeyboardInterrupt):
            wait()
        interrupt.join()
    assert get(ref).sum() == 1000


def test_several_hold_and_all_must_end(pair, tmp_path, wait_until):
    ann, bob = pair
    ref = made(ann)
    held, go = tmp_path / "held", tmp_path / "go"
    other = bob.held.remote(ann, str(held), str(go))
    wait_until(held.exists)
    with hold_transfers(ann):
        pass
    with pytest.raises(WaitTimeoutError):
        conveyor.get(ref, timeout=0.02)
    go.touch()
    get(other)
    assert get(ref).sum() == 1000


def test_what_this_process_keeps(pair, wait_until):
    _, bob = pair
    mine = conveyor.put(np.ones(5), tensor_transport="auto")
    with hold_transfers():
        total = bob.total.remote(mine)
        wait_until(lambda: inside.status_of("bob").fetches_from == "driver")
        assert get(mine).sum() == 5  # it is here
    assert get(total) == 5


def test_transfers_fail(pair):
    ann, bob = pair
    ref, (first, _second) = made(ann), ann.two.remote()
    with fail_transfers(ann):
        for one in (ref, ref[1:3], first):
            with pytest.raises(InjectedFault, match="a value that ann keeps cannot be fetched"):
                get(one)
        with pytest.raises((InjectedFault, TaskError), match="fail_transfers"):
            get(bob.total.remote(ref))
        assert get(ann.total.remote(ref)) == 1000
    assert get(ref).sum() == 1000
    assert get(bob.total.remote(ref)) == 1000


def test_in_a_graph(pair, wait_until):
    ann, bob = pair
    with InputNode() as inp:
        dag = bob.total.bind(inp)
    with dag.compile() as graph:
        ref = made(ann)
        with hold_transfers(ann):
            result = graph.execute(ref)
            wait_until(lambda: "fetching a value that ann keeps" in str(graph.status()))
        assert get(result) == 1000


def test_nothing_is_fetched_in_one_process():
    conveyor.init(engine="inline")
    try:
        with pytest.raises(RuntimeStateError, match="inline"), hold_transfers(Keeper.remote()):
            pass
    finally:
        conveyor.shutdown()


@pytest.mark.parametrize("change", [hold_transfers, fail_transfers])
def test_what_is_no_actor(local, change):
    with pytest.raises(TypeError, match="an actor is needed, not 5"), change(5):
        pass


def test_several_into_memory_that_are_held_back(pair):
    ann, _ = pair
    ref = made(ann)
    with hold_transfers(ann), pytest.raises(WaitTimeoutError):
        conveyor.get({"one": ref}, into={"one": np.zeros(1000)}, timeout=0.1)
