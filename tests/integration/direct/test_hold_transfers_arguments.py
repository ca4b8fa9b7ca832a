"""Arguments of async actors whose transfers a test holds back: the event loop runs on."""

import asyncio
import os
import signal

import inside
import numpy as np
import pytest
from integration_helpers import get

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError, ExecutionCancelledError, WaitTimeoutError
from conveyor.testing import InjectedFault, fail_transfers, hold_transfers


@conveyor.remote
class Keeper:
    @conveyor.method(tensor_transport="auto")
    def make(self, size=1000):
        return np.arange(size)

    def pid(self):
        return os.getpid()


@conveyor.remote
class Loop:
    """All its methods run in one event loop."""

    def __init__(self):
        self.ticks, self.begun = 0, []

    async def tick(self, until):
        """Run on until somebody has said so."""
        while until not in self.begun:
            self.ticks += 1
            await asyncio.sleep(0)
        return self.ticks

    async def total(self, x, name=None):
        self.begun.append(name)
        return int(x.sum())

    def total_at_once(self, x, name=None):
        self.begun.append(name)
        return int(x.sum())

    async def with_more(self, x, refs, function):
        """With refs inside, and with what is defined where it comes from."""
        return function(int(x.sum()) + sum([await ref for ref in refs]))

    async def write(self, x):
        x += 1
        return int(x.sum())

    async def note(self, name):
        self.begun.append(name)
        return list(self.begun)

    async def seen(self):
        return self.ticks, list(self.begun)

    def at_exit(self, path):
        self.path = path

    def __conveyor_exit__(self):
        if hasattr(self, "path"):
            with open(self.path, "w") as file:
                file.write(repr(self.begun))


@conveyor.remote
class Caller:
    """Another caller than the driver."""

    def __init__(self, loop):
        self.loop = loop

    def begin(self, ref, name):
        self.ref = self.loop.total.remote(ref[0], name)

    def result(self):
        return conveyor.get(self.ref)

    def seen(self):
        return conveyor.get(self.loop.seen.remote())

    def note(self, name):
        return conveyor.get(self.loop.note.remote(name))

    def pid(self):
        return os.getpid()


@conveyor.remote
class Made:
    def __init__(self, x):
        self.x = x

    async def total(self):
        return int(self.x.sum())


@conveyor.remote
class Into:
    """Has memory for what it receives."""

    def __init__(self):
        self.one, self.other = np.zeros(1000, int), np.zeros(1000, int)

    @conveyor.method(receive_into={"one": "one", "other": lambda self: self.other})
    async def take(self, one, other):
        return one is self.one and other is self.other, int(one.sum() + other.sum())

    @conveyor.method(receive_into={"one": "one"})
    async def items(self, one):
        yield int(one.sum())

    async def total(self):
        return int(self.one.sum())


@pytest.fixture
def actors(local):
    loop = Loop.options(name="the loop").remote()
    return Keeper.options(name="ann").remote(), loop, Caller.remote(loop)


def made(actor, *args):
    ref = actor.make.remote(*args)
    conveyor.wait([ref])
    return ref


def fetching():
    """The value that some process of the session waits for."""
    found = [status.fetching for status in inside.statuses()]
    return next((one for one in found if one is not None), None)


def test_the_loop_runs_on(actors, wait_until):
    ann, loop, caller = actors
    ref = made(ann)
    ticking = loop.tick.remote("x")
    with hold_transfers(ann):
        total = loop.total.remote(ref, "x")
        wait_until(fetching)
        before, begun = get(caller.seen.remote())
        wait_until(lambda: get(caller.seen.remote())[0] > before + 100)
        assert begun == []
        assert fetching().value == ref.value_id()
        with pytest.raises(WaitTimeoutError, match=r"ann keeps, which has not come yet.*held back"):
            conveyor.get(total, timeout=0.05)
    assert get(total) == 499500
    assert get(ticking) > before + 100
    wait_until(lambda: not fetching())


def test_calls_of_one_caller_begin_in_order(actors, wait_until):
    ann, loop, caller = actors
    refs = [made(ann), made(ann)]
    with hold_transfers(ann):
        first = loop.total_at_once.remote(refs[0], "first")
        wait_until(fetching)
        rest = [
            loop.total.remote(refs[1], "second"),
            loop.note.remote("third"),
            loop.total.remote(refs[1], "fourth"),
        ]
        assert get(caller.note.remote("another")) == ["another"]
        assert conveyor.wait([first, *rest], timeout=0)[0] == []
    assert get(first) == get(rest[0]) == get(rest[2]) == 499500
    assert get(rest[1]) == ["another", "first", "second", "third"]
    assert get(loop.seen.remote())[1] == ["another", "first", "second", "third", "fourth"]


def test_steps_of_graphs_go_on(actors, wait_until):
    ann, loop, _ = actors
    ref = made(ann)
    with InputNode() as name:
        graph = loop.note.bind(name).compile()
    with hold_transfers(ann):
        total = loop.total.remote(ref, "x")
        wait_until(fetching)
        assert get(graph.execute("y")) == ["y"]
    assert get(total) == 499500


def test_what_came_may_be_written_to(actors, wait_until):
    """As if nothing had been awaited: small values, large ones, and several."""
    ann, loop, _ = actors
    for size in 1000, 100_000:
        ref = made(ann, size)
        with hold_transfers(ann):
            total = loop.write.remote(ref)
            wait_until(fetching)
        assert get(total) == size * (size - 1) // 2 + size
        assert get(loop.write.remote(ref)) == get(total)
        assert int(get(ref).sum()) == size * (size - 1) // 2


def test_what_comes_with_them(actors, wait_until):
    """Refs inside of arguments are held meanwhile, also those that nobody else has; what is defined by value
    is known to the calls behind it."""
    ann, loop, _ = actors
    far, refs = made(ann), [conveyor.put(1), conveyor.put(2)]

    def double(x):
        return 2 * x

    with hold_transfers(ann):
        first = loop.with_more.remote(far, refs, double)
        wait_until(fetching)
        second = loop.with_more.remote(np.ones(3), refs, double)
        cancelled = loop.with_more.remote(far, refs, double)
        third = loop.with_more.remote(far, refs, double)
        del refs
        assert cancelled.cancel()
    assert get([first, second, third]) == [2 * 499503, 2 * 6, 2 * 499503]


def test_what_is_received_into_memory_that_is_there(local, wait_until):
    ann, into = Keeper.remote(), Into.remote()
    refs = [made(ann), made(ann)]
    with hold_transfers(ann):
        taken = into.take.remote(*refs)
        items = into.items.remote(refs[0])
        wait_until(fetching)
        assert get(into.total.remote()) == 0
    assert get(taken) == (True, 2 * 499500)
    assert list(items) == [499500]
    assert get(into.total.remote()) == 499500


def test_who_cancels_gets_through(actors, wait_until):
    ann, loop, _ = actors
    ref = made(ann)
    with hold_transfers(ann):
        total = loop.total.remote(ref, "x")
        behind = loop.note.remote("y")
        wait_until(fetching)
        assert total.cancel()
        assert get(behind) == ["y"]
        with pytest.raises(ExecutionCancelledError):
            get(total)
        wait_until(lambda: not fetching())
    assert get(loop.seen.remote())[1] == ["y"]


def test_errors_of_a_transfer(actors, wait_until):
    ann, loop, _ = actors
    ref = made(ann)
    pid = get(ann.pid.remote())
    with fail_transfers(ann), pytest.raises(InjectedFault):
        get(loop.total.remote(ref, "x"))
    with hold_transfers(ann):
        total = loop.total.remote(ref, "x")
        behind = loop.note.remote("y")
        wait_until(fetching)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError, match="ann"):
            get(total)
        assert get(behind) == ["y"]
    wait_until(lambda: not fetching())


def test_the_callers_death(actors, wait_until):
    """What it has asked for is done, as if it lived."""
    _, loop, caller = actors
    ref = conveyor.put(np.arange(1000), tensor_transport="auto")
    pid = get(caller.pid.remote())
    with hold_transfers():
        get(caller.begin.remote([ref], "x"))
        wait_until(fetching)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            get(caller.result.remote())
        later = Caller.remote(loop)
        assert get(later.note.remote("y")) == ["y"]
    wait_until(lambda: get(later.seen.remote())[1] in (["y", "x"],))
    wait_until(lambda: not fetching())


@pytest.mark.usefixtures("time_to_end")
def test_the_actor_ends_in_good_order(local, wait_until, tmp_path):
    """What is queued is done first, and so is what is on its way."""
    ann, loop = Keeper.remote(), Loop.remote()
    ref = made(ann)
    get(loop.at_exit.remote(str(tmp_path / "end")))
    with hold_transfers(ann):
        total = loop.total.remote(ref, "x")
        wait_until(fetching)
        del loop
    assert get(total) == 499500
    wait_until((tmp_path / "end").exists)


def test_the_actor_ends_at_once(actors, wait_until):
    ann, loop, _ = actors
    ref = made(ann)
    with hold_transfers(ann):
        total = loop.total.remote(ref, "x")
        wait_until(fetching)
        conveyor.kill(loop)
        with pytest.raises(ActorDiedError, match="the loop"):
            get(total)


def test_an_actor_whose_constructor_waits(local, wait_until):
    ann = Keeper.options(name="ann").remote()
    ref = made(ann)
    with hold_transfers(ann):
        made_of = Made.options(name="the loop").remote(ref)
        total = made_of.total.remote()
        wait_until(fetching)
    assert get(total) == 499500
