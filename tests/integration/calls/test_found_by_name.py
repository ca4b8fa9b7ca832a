"""Actors that other threads and actors find by name while they are being started."""

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.api.actors import ActorHandle
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError, ConstructorError, TaskError

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


@conveyor.remote
class Fragile:
    """Its constructor raises where there is the file ``broken``."""

    def __init__(self, broken, inside=None, go_on=None):
        if inside is not None:
            inside.touch()
            hold(go_on)
        if broken.exists():
            raise OSError("device busy")

    def leave(self):
        sys.exit(0)

    def same(self, x):
        return x


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


def broken_one(path):
    """An actor with the name "fragile" whose constructor has raised, and which no longer has to."""
    broken = path / "broken"
    broken.touch()
    actor = Fragile.options(name="fragile").remote(broken)
    assert_not_made(actor)
    broken.unlink()
    return actor


def assert_not_made(actor):
    with pytest.raises(ConstructorError, match="device busy"):
        get(actor.same.remote(1))


def graph_of(actor):
    with InputNode() as inp:
        return actor.same.bind(inp).compile()


def restarted(graph):
    """The graph, when it works again."""
    with pytest.raises(ConstructorError, match="device busy"):
        get(graph.execute(1))
    graph.restart()
    assert get(graph.execute(2)) == 2
    return graph


@pytest.mark.parametrize("exists", [False, True])
def test_a_name_is_free_where_the_constructor_has_raised(exists, tmp_path):
    failed = broken_one(tmp_path)
    with pytest.raises(ValueError, match="no actor named 'fragile'; named actors: none"):
        conveyor.get_actor("fragile")
    options = {"name": "fragile", "get_if_exists": exists}
    actor = Fragile.options(**options).remote(tmp_path / "broken")
    assert actor != failed
    assert get(actor.same.remote(3)) == 3
    assert conveyor.get_actor("fragile") == actor
    with pytest.raises(ValueError, match="there is an actor named 'fragile' already"):
        Fragile.options(name="fragile").remote(tmp_path / "broken")
    assert_not_made(failed)
    del failed
    assert conveyor.get_actor("fragile") == actor
    assert get(actor.same.remote(4)) == 4


def test_who_makes_an_actor_gets_its_constructors_error_though_others_have_dropped_it(
    monkeypatch, tmp_path
):
    """Another thread finds the actor, drops it and gives its name away before its maker has a handle."""
    broken, inside, go_on = (tmp_path / name for name in ("broken", "inside", "go on"))
    broken.touch()
    others, told = [], []

    def find():
        hold(inside)
        found = conveyor.get_actor("fragile")
        go_on.touch()
        with pytest.raises(ConstructorError, match="device busy"):
            get(found.same.remote(1))
        del found
        others.append(Named.options(name="fragile").remote())
        told.append(get(others[0].call.remote(0)))

    thread = threading.Thread(target=find)
    make = ActorHandle.__init__

    def late(handle, *args):
        if threading.current_thread() is not thread:
            thread.join(WAIT)
        make(handle, *args)

    monkeypatch.setattr(ActorHandle, "__init__", late)
    thread.start()
    actor = Fragile.options(name="fragile").remote(broken, inside, go_on)
    assert told
    for _ in range(300):  # longer than its end would take
        with pytest.raises(ConstructorError, match="device busy"):
            get(actor.same.remote(1))


def test_actors_get_a_name_whose_constructor_has_raised(tmp_path):
    @conveyor.remote
    class Maker:
        def make(self, broken):
            actor = Fragile.options(name="fragile", get_if_exists=True).remote(broken)
            try:
                return actor, get(actor.same.remote(3))
            except ConstructorError as error:
                return actor, str(error.cause)

    broken = tmp_path / "broken"
    maker = Maker.remote()
    for _ in range(3):
        broken.touch()
        failed, text = get(maker.make.remote(broken))
        assert text == "device busy"
        broken.unlink()
        actor, value = get(maker.make.remote(broken))
        assert value == 3
        assert conveyor.get_actor("fragile") == actor
        assert_not_made(failed)
        conveyor.kill(actor)


def test_max_restarts_keep_no_name_where_the_constructor_has_raised(tmp_path):
    broken = tmp_path / "broken"
    broken.touch()
    failed = Fragile.options(name="fragile", max_restarts=-1).remote(broken)
    assert_not_made(failed)
    with pytest.raises(ValueError, match="no actor named 'fragile'"):
        conveyor.get_actor("fragile")


def test_a_constructor_that_has_raised_and_runs_again_gives_the_name_back(tmp_path):
    failed = broken_one(tmp_path)
    graph = restarted(graph_of(failed))
    assert conveyor.get_actor("fragile") == failed
    graph.teardown()


@pytest.mark.parametrize("made", [False, True])
def test_an_actor_comes_back_without_its_name_if_another_has_it(made, tmp_path):
    if made:
        first = Fragile.options(name="fragile").remote(tmp_path / "broken")
        graph = graph_of(first)
        with pytest.raises(ActorDiedError):
            get(first.leave.remote())
    else:
        first = broken_one(tmp_path)
        graph = graph_of(first)
    actor = Fragile.options(name="fragile").remote(tmp_path / "broken")
    if made:
        graph.restart()
    else:
        restarted(graph)
    assert get(graph.execute(2)) == get(first.same.remote(2)) == 2
    assert conveyor.get_actor("fragile") == actor != first
    assert get(actor.same.remote(3)) == 3
    graph.teardown()


def test_an_actor_comes_back_with_its_name_if_the_one_that_has_it_was_not_made(tmp_path):
    first = Fragile.options(name="fragile").remote(tmp_path / "other")
    graph = graph_of(first)
    with pytest.raises(ActorDiedError):
        get(first.leave.remote())
    failed = broken_one(tmp_path)
    graph.restart()
    assert conveyor.get_actor("fragile") == first != failed
    assert_not_made(failed)
    graph.teardown()


def test_an_actor_is_found_until_its_constructor_raises(tmp_path):
    broken, inside, go_on = (tmp_path / name for name in ["broken", "inside", "go_on"])
    broken.touch()
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(Fragile.options(name="fragile").remote, broken, inside, go_on)
        hold(inside)
        found = Fragile.options(name="fragile", get_if_exists=True).remote(broken)
        assert conveyor.get_actor("fragile") == found
        go_on.touch()
        assert making.result(WAIT) == found
    assert_not_made(found)
