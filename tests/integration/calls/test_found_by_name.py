"""Actors that other threads and actors find by name while they are being started."""

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import TaskError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("engine")

FINDERS = 6


@conveyor.remote
class Named:
    def __init__(self, value=0):
        self.value = value
        self.calls = []

    def call(self, caller):
        self.calls.append(caller)
        return id(self), self.value

    def callers(self):
        return sorted(self.calls)


@conveyor.remote(max_concurrency=FINDERS)
class Finder:
    def call(self, name, caller):
        return get(make(name).call.remote(caller))


@conveyor.remote
class Gate:
    def __init__(self):
        self.opened = False

    async def open(self):
        self.opened = True

    async def value(self):
        import asyncio

        while not self.opened:
            await asyncio.sleep(0.001)
        return 7


class Refuses:
    """Can be copied once, and then not be sent."""

    def __init__(self):
        self.copies = 0

    def __reduce__(self):
        self.copies += 1
        if self.copies > 1:
            raise ValueError("stays here")
        return Refuses, ()


def make(name):
    return Named.options(name=name, get_if_exists=True).remote()


def find(name):
    while True:
        try:
            return conveyor.get_actor(name)
        except ValueError:
            continue


def at_once(works):
    """What these return, each on a thread of its own."""
    barrier = threading.Barrier(len(works), timeout=WAIT)

    def run(work):
        barrier.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


@pytest.mark.parametrize("first", ["makes it", "makes it unless it is there"])
def test_threads_find_an_actor_that_one_of_them_starts(first):
    for number in range(5):
        name = f"{first} {number}"
        one = make if first != "makes it" else lambda name: Named.options(name=name).remote()
        others = make if first != "makes it" else find
        ways = [one] + [others] * (FINDERS - 1)
        works = [
            lambda way=way, name=name, i=i: get(way(name).call.remote(i))
            for i, way in enumerate(ways)
        ]
        assert len(set(at_once(works))) == 1
        actor = conveyor.get_actor(name)
        assert get(actor.callers.remote()) == list(range(FINDERS))
        conveyor.kill(actor)


def test_actors_and_the_driver_find_an_actor_that_one_of_them_starts():
    finders = [Finder.remote() for _ in range(2)]
    get([finder.call.remote("before", 0) for finder in finders])
    for number in range(4):
        refs = [f.call.remote(f"shared {number}", i) for i in range(2) for f in finders]
        here = get(make(f"shared {number}").call.remote(9))
        assert {here} == set(get(refs))
        conveyor.kill(conveyor.get_actor(f"shared {number}"))


def test_who_finds_an_actor_calls_it_after_its_constructor():
    gate = Gate.remote()
    maker = threading.Thread(target=lambda: Named.options(name="late").remote(gate.value.remote()))
    maker.start()
    for number in itertools.count():
        if number == 100:
            gate.open.remote()
        try:
            found = conveyor.get_actor("late")
            break
        except ValueError:
            continue
    ref = found.call.remote("early")
    gate.open.remote()
    assert get(ref)[1] == 7
    maker.join()


def test_a_name_is_free_where_the_start_fails():
    for _ in range(3):
        with pytest.raises(TypeError, match="stays here"):
            Named.options(name="never", max_restarts=1).remote(Refuses())
        with pytest.raises(ValueError, match="no actor named 'never'"):
            conveyor.get_actor("never")

    def fail(name):
        with pytest.raises((TypeError, ValueError), match=r"stays here|is an actor named"):
            Named.options(name=name).remote(Refuses())

    works = [lambda way=way: way("later") for way in [fail, fail, make, make]]
    _, _, *made = at_once(works)
    assert made[0] == made[1]
    assert get(made[0].call.remote(1))[1] == 0


def test_a_name_is_taken_for_who_asks_for_a_new_actor():
    first = make("taken")
    with pytest.raises(ValueError, match="there is an actor named 'taken' already"):
        Named.options(name="taken").remote()

    @conveyor.remote
    class Maker:
        def make(self):
            return Named.options(name="taken").remote()

    with pytest.raises((ValueError, TaskError), match="there is an actor named 'taken' already"):
        get(Maker.remote().make.remote())
    assert make("taken") == first
