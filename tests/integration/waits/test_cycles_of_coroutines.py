"""Cycles of waits that go through coroutines: steps of graphs, which do not run side by side within one
graph, and calls. And what only looks like one: it is answered, or ends in its own way."""

import asyncio
import contextlib
import contextvars
import os
import random
import signal
import sys
import time

import cloudpickle
import pytest
import test_cycles_load
from integration_helpers import WAIT
from test_cycles import deadlocks

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError, DeadlockError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")
load = test_cycles_load.load


class Plain:
    """Walks along a path: each waits for the next, an actor (a small letter) or a graph (a large one)."""

    def meet(self, **peers):
        self.peers = peers
        self.told = asyncio.Event()

    def begin(self, path):
        peer = self.peers[path[0]]
        return peer.execute(path[1:]) if path[0].isupper() else peer.walk.remote(path[1:])

    def walk(self, path):
        return conveyor.get(self.begin(path)) if path not in ("", "pong") else "pong"

    def pid(self):
        return os.getpid()


class PassesOn(Plain):
    def walk(self, path):
        return path


class Coroutine(Plain):
    async def walk(self, path):
        return await self.begin(path) if path not in ("", "pong") else "pong"

    async def tell(self):
        self.told.set()

    async def telling(self):
        await self.told.wait()
        raise LookupError("told")


class InATask(Coroutine):
    async def walk(self, path):
        return await asyncio.create_task(super().walk(path))


class Gathers(Coroutine):
    async def walk(self, path):
        if path in ("", "pong"):
            return "pong"
        return (await asyncio.gather(self.begin(path), self.begin(path)))[-1]


class WithoutTimeout(Coroutine):
    async def walk(self, path):
        return await asyncio.wait_for(super().walk(path), None)


class Submits(Coroutine):
    async def walk(self, path):
        if path in ("", "pong"):
            return "pong"
        if path[0].isupper():
            return await (await self.peers[path[0]].execute_async(path[1:]))
        return await self.begin(path)


class AsArgument(Coroutine):
    """The execution waits for its argument."""

    async def walk(self, path):
        if path in ("", "pong"):
            return "pong"
        graph = self.peers[path[0]]
        return await (await graph.execute_async(await graph.execute_async(path[1:])))


class Streams(Coroutine):
    async def walk(self, path):
        if path in ("", "pong"):
            return "pong"
        return [item async for item in self.peers[path[0]].items.remote(path[1:])][-1]

    async def items(self, path):
        yield "first"
        yield await Coroutine.walk(self, path)


WAYS = [Coroutine, InATask, Gathers, WithoutTimeout, Submits]
KINDS = {
    "n": (PassesOn, {}),
    "p": (Plain, {}),
    "t": (Plain, {"max_concurrency": 3}),
    "c": (Coroutine, {}),
}


def steps(*handles):
    with InputNode() as node:
        step = node
        for handle in handles:
            step = handle.walk.bind(step)
        return step.compile()


class World:
    """Actors by small letters, graphs by large ones."""

    def __init__(self, kinds, graphs):
        self.actors = {}
        for letter, (cls, options) in zip("abcdefg", kinds, strict=False):
            name = f"{letter}-{random.getrandbits(32):x}"
            self.actors[letter] = conveyor.remote(cls).options(name=name, **options).remote()
        self.graphs = {
            name: steps(*(self.actors[letter] for letter in on)) for name, on in graphs.items()
        }
        self.meet(*self.actors)

    def meet(self, *letters):
        known = {**self.actors, **self.graphs}
        met = [self.actors[letter].meet.remote(**known) for letter in letters]
        conveyor.get(met, timeout=WAIT)

    def walk(self, path):
        """The ref of a walk that the driver begins."""
        return self.begin(path[0], path[1:])

    def begin(self, name, path):
        if name.isupper():
            return self.graphs[name].execute(path)
        return self.actors[name].walk.remote(path)

    def check(self):
        """All are at work again."""
        every = [self.begin(name, "pong") for name in (*self.actors, *self.graphs)]
        assert conveyor.get(every, timeout=WAIT) == ["pong"] * len(every)

    def end(self):
        for graph in self.graphs.values():
            with contextlib.suppress(ActorDiedError):
                graph.teardown()
        self.graphs.clear()
        for actor in self.actors.values():
            conveyor.kill(actor)
        self.actors.clear()


@pytest.fixture
def world():
    made = []

    def world(kinds, graphs):
        kinds = [KINDS[kind] if isinstance(kind, str) else kind for kind in kinds]
        made.append(World(kinds, graphs))
        return made[-1]

    yield world
    while made:  # the fixture outlives the session
        made.pop().end()


CYCLES = {
    "own graph": ("c", {"G": "a"}, "GG"),
    "own graph, behind another": ("cnp", {"G": "bac"}, "GG"),
    "two graphs": ("cc", {"G": "a", "H": "b"}, "GHG"),
    "two graphs on one actor": ("c", {"G": "a", "H": "a"}, "GHG"),
    "two graphs that share their actors": ("cc", {"G": "ab", "H": "ba"}, "GHG"),
    "three graphs": ("ccc", {"G": "a", "H": "b", "K": "c"}, "GHKG"),
    "three graphs on two actors": ("cc", {"G": "a", "H": "b", "K": "a"}, "GHKG"),
    "with an async call": ("cc", {"G": "a"}, "GbG"),
    "with async calls": ("ccc", {"G": "a"}, "GbcbG"),
    "with a call of its own actor": ("c", {"G": "a"}, "GaG"),
    "with a call": ("cp", {"G": "a"}, "GbG"),
    "with a call in a thread": ("ct", {"G": "a"}, "GbG"),
    "with calls of all kinds": ("cptc", {"G": "a"}, "GbcdG"),
    "with a sync step": ("cp", {"G": "a", "H": "b"}, "GHG"),
    "with a sync step beside threads": ("ct", {"G": "a", "H": "b"}, "GHG"),
    "with a sync step and a call": ("cpc", {"G": "a", "H": "b"}, "GHcG"),
    "begun by a call": ("cc", {"G": "a"}, "bGbG"),
}


@pytest.mark.parametrize(("kinds", "graphs", "path"), CYCLES.values(), ids=CYCLES)
def test_a_cycle_is_named(world, kinds, graphs, path):
    world = world(kinds, graphs)
    for _ in range(2):
        error = deadlocks(world.walk(path), ".walk waits for ", "of its graph")
        ring = path[path.index("G") + 1 :]
        on = {letter for name in ring for letter in (graphs[name] if name.isupper() else name)}
        assert {name.split("-")[0] for name in error.cycle} <= on
        world.check()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", ["GG", "GHG", "GbG"])
def test_however_it_is_awaited(world, way, path):
    world = world([(way, {}), (way, {})], {"G": "a", "H": "b"})
    deadlocks(world.walk(path), " waits for ")
    world.check()


def test_an_argument_of_a_later_execution(world):
    world = world([(AsArgument, {})], {"G": "a"})
    deadlocks(world.walk("GG"), " waits for ")
    world.check()


def test_items_of_a_generator(world):
    world = world([(Streams, {}), (Streams, {})], {"G": "a"})
    deadlocks(world.walk("GbG"), ".items waits for ", ".walk waits for ")
    world.check()


def test_room_in_its_own_graph(world):
    class Fills(Coroutine):
        async def walk(self, path):
            for _ in range(100 if path == "fill" else 0):
                await self.peers["G"].execute_async("")
            return "pong"

    world = world([(Fills, {})], {"G": "a"})
    deadlocks(world.begin("G", "fill"), " waits for ")
    world.check()


def test_coroutines_in_all_places(world):
    world = world([(Coroutine, {"max_concurrency": 2}), (Plain, {})], {})
    refs = [world.walk("aba") for _ in range(2)]
    values, errors = [], []
    for ref in refs:
        try:
            values.append(conveyor.get(ref, timeout=WAIT))
        except DeadlockError as error:
            errors.append(str(error))
    # The error of one is the place of another.
    assert errors
    assert "its turn (max_concurrency is 2)" in errors[0]
    assert "raise max_concurrency: every coroutine waits" in errors[0]
    assert set(values) <= {"pong"}
    world.check()


@pytest.mark.parametrize("path", ["ba", "bba"])
def test_a_thread_that_waits_while_others_are_free(world, path):
    """No coroutine among them: the call that waits is known by itself there, too."""
    world = world("pt", {})
    deadlocks(world.walk("a" + path), "max_concurrency")
    world.check()


# What only looks like a cycle


ANSWERED = {
    "a call of an actor of the cycle": ("cc", {"G": "a", "H": "b"}, "GHa"),
    "calls back and forth": ("cc", {"G": "a"}, "Gbabab"),
    "another graph of the same actor": ("cc", {"G": "a", "H": "b", "K": "a"}, "GHKb"),
    "a call in a thread that is free": ("ct", {"G": "a"}, "Gbab"),
}


@pytest.mark.parametrize(("kinds", "graphs", "path"), ANSWERED.values(), ids=ANSWERED)
def test_it_is_answered(world, kinds, graphs, path):
    world = world(kinds, graphs)
    refs = [world.walk(path) for _ in range(20)]
    assert conveyor.get(refs, timeout=WAIT) == ["pong"] * 20


def find_another(world):
    """Time enough to find cycles: one is found, by the same actors."""
    deadlocks(world.begin("X", "X"), " waits for ")
    deadlocks(world.begin("Y", "Y"), " waits for ")


class Patient(Coroutine):
    """Its steps of G have another way out."""

    async def walk(self, path):
        if path[:1] != "!":
            return await super().walk(path)
        return await getattr(self, path[1:])()

    async def together(self):
        return await asyncio.gather(self.begin("G"), self.telling())

    async def first(self):
        tasks = {asyncio.ensure_future(self.begin("G")), asyncio.create_task(self.telling())}
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def in_the_background(self):
        """What is awaited in another task than the step's keeps the step from nothing."""
        task = asyncio.create_task(super().walk("G"))
        try:
            return await self.telling()
        finally:
            task.cancel()

    async def with_a_timeout(self):
        try:
            return await asyncio.wait_for(self.begin("G"), 1)
        except asyncio.TimeoutError:
            raise LookupError("the time is over") from None

    async def with_a_timer(self):
        asyncio.get_running_loop().call_later(1, asyncio.current_task().cancel)
        try:
            return await self.begin("G")
        except asyncio.CancelledError:
            raise LookupError("the time is over") from None

    async def with_a_timer_of_another_task(self):
        """One that was begun elsewhere, as a call's would be, waits for one of the step's."""

        async def wait_for(task):
            asyncio.get_running_loop().call_later(1, asyncio.current_task().cancel)
            await task

        inner = asyncio.create_task(super().walk("G"))
        try:
            await contextvars.Context().run(asyncio.create_task, wait_for(inner))
        except asyncio.CancelledError:
            raise LookupError("the time is over") from None

    async def with_a_timeout_around(self):
        try:
            return await asyncio.wait_for(self.begin("b!too_long"), 1)
        except asyncio.TimeoutError:
            raise LookupError("the time is over") from None


class Slow(Coroutine):
    async def walk(self, path):
        # Where it is a call, it waits for the step that waits for it.
        return await super().walk("G" if path == "!too_long" else path)


PATIENT = [name for name in vars(Patient) if not name.startswith("_") and name != "walk"]


@pytest.mark.parametrize("way", PATIENT)
def test_something_else_may_end_it(world, way):
    world = world([(Patient, {}), (Slow, {})], {"G": "a", "X": "a", "Y": "b"})
    ref = world.begin("G", f"!{way}")
    find_another(world)
    conveyor.get(world.actors["a"].tell.remote(), timeout=WAIT)
    with pytest.raises(LookupError):
        conveyor.get(ref, timeout=WAIT)
    world.check()


def test_one_of_several_comes_late(world):
    """What is left then is a cycle."""

    class Late(Coroutine):
        async def walk(self, path):
            if path != "!":
                return await super().walk(path)
            return await asyncio.gather(self.begin("G"), self.told.wait())

    world = world([(Late, {}), (Coroutine, {})], {"G": "a", "X": "a", "Y": "b"})
    ref = world.begin("G", "!")
    find_another(world)
    conveyor.get(world.actors["a"].tell.remote(), timeout=WAIT)
    deadlocks(ref, ".walk waits for ")
    world.check()


class Remembers(Coroutine):
    async def walk(self, path):
        if path == "!called":
            await self.told.wait()
            path = "G!held"
        elif path == "!held":
            await self.told.wait()
            return "pong"
        elif path == "!":
            path = "b!called"
        try:
            self.outcome = await super().walk(path)
        except BaseException as error:
            self.outcome = error
            raise
        return self.outcome

    async def came_to(self):
        return self.outcome


def test_a_coroutine_of_a_graph_that_has_been_deployed_again(world, wait_until):
    """Its step goes on, and keeps nobody from the steps of the graph as it is now."""
    world = world([(Remembers, {}), (Remembers, {}), KINDS["p"]], {"G": "ac", "X": "a", "Y": "b"})
    a, b, c = world.actors.values()
    before = world.begin("G", "!")  # waits for a call
    find_another(world)
    os.kill(conveyor.get(c.pid.remote(), timeout=WAIT), signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        conveyor.get(before, timeout=WAIT)
    world.graphs["G"].restart()
    # Now the call waits for a step of the same graph, on the actor that waits for the call.
    conveyor.get(b.tell.remote(), timeout=WAIT)
    find_another(world)
    conveyor.get(a.tell.remote(), timeout=WAIT)
    for actor in (b, a):  # the call has its step's result before the old step has the call's
        wait_until(lambda: conveyor.get(actor.came_to.remote(), timeout=WAIT) == "pong")  # noqa: B023
    world.graphs.pop("G").teardown()
    world.meet("a")


@pytest.mark.parametrize(("path", "victim"), [("GHG", "b"), ("GbG", "b"), ("GHcG", "c")])
def test_an_actor_of_a_cycle_is_killed(world, path, victim):
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    for _ in range(6):
        each = world("ccc", {"G": "a", "H": "b"})
        pid = conveyor.get(each.actors[victim].pid.remote(), timeout=WAIT)
        ref = each.walk(path)
        time.sleep(rng.uniform(0, 0.1))  # at any moment, of the search as well
        os.kill(pid, signal.SIGKILL)
        with pytest.raises((DeadlockError, ActorDiedError)):
            conveyor.get(ref, timeout=WAIT)
        for name, graph in each.graphs.items():
            if name == "G":
                assert conveyor.get(graph.execute(""), timeout=WAIT) == "pong", seed
        each.end()


def test_no_false_alarm_under_load(world, load):
    # Each waits only for those behind it, and they are few: they wait for each other all the time.
    world = world("ccptc", {"G": "a", "H": "ba", "K": "d"})
    order = "GHKabcde"  # of what a path goes through
    seed = random.randrange(10**9)
    rng = random.Random(seed)

    def some_path():
        return "".join(sorted(rng.sample(order, rng.randint(1, 4)), key=order.index))

    end = time.monotonic() + 3
    while time.monotonic() < end:
        refs = [world.walk(some_path()) for _ in range(30)]
        assert conveyor.get(refs, timeout=WAIT) == ["pong"] * 30, seed
