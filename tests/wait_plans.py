"""Random plans of who waits for whom, each with what is true of it: what ends, and what would wait for ever.

In a plan some methods are *held*: they begin, wait until all of them have begun, and then do some things, one
after the other, each of which waits for others. What they wait for are *leaves*, calls and steps that wait
for nobody. So which order they come in does not matter: a leaf is done as soon as its actor has a thread for
it, and has none as long as held methods have them all. From that follows which of the held methods end
(``Plan.stuck`` is all others). Leaves take their time, so waits often look like cycles that are none.

Only if some are stuck may there be a ``DeadlockError``, and then there must be one: it names actors of those,
and opens the cycle for the others. What has a time limit, or is cancelled after some time, is left out of
that, as both may come first; and so is a plan in which actors are killed, and come back.
"""

import asyncio
import os
import random
import sys
import threading
import time
from dataclasses import dataclass, field

import cloudpickle

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import (
    ActorDiedError,
    ConveyorError,
    DeadlockError,
    ExecutionCancelledError,
    WaitTimeoutError,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Seconds that anything may take.
WAIT = 60


def cancel(refs):
    for ref in refs if isinstance(refs, list) else [refs]:
        ref.cancel()


class Body:
    """An actor of a plan. Its methods block the thread that they run in."""

    def meet(self, peers, graphs):
        self.peers = peers
        self.graphs = graphs
        self.own = None
        self.made = []

    def compile_own(self, names):
        """A graph that this actor executes."""
        with InputNode() as inp:
            step = inp
            for name in names:
                step = self.peers[name].step.bind(step)
        self.own = step.compile()

    def end(self):
        if self.own is not None:
            self.own.teardown()
            self.own = None

    def left(self):
        """How many of those that were begun are not done."""
        self.made = [ref for ref in self.made if not ref.done()]
        return len(self.made)

    def leaf(self, pause):
        time.sleep(pause)
        return "leaf"

    def echo(self, value, pause):
        time.sleep(pause)
        return value

    def items(self, pause):
        yield 1
        time.sleep(pause)
        yield 2

    def step(self, pauses):
        """A step that is a leaf: each takes the first of what is left."""
        time.sleep(pauses[0])
        return pauses[1:]

    def held(self, job):
        number, folder, does = job
        open(f"{folder}/{number}", "w").close()
        while not os.path.exists(f"{folder}/go"):
            time.sleep(0.002)
        for one in does:
            try:
                self.wait_for(one)
            except DeadlockError as error:
                return "deadlock", error.cycle, str(error)
            except (WaitTimeoutError, ExecutionCancelledError):
                if one.limit is None:
                    raise
        return "done", (), ""

    def wait_for(self, one):
        if one.kind in _OTHER:
            getattr(self, one.kind)(one)
            return
        refs = self.begin(one)
        if not one.cancels:
            conveyor.get(refs, timeout=one.limit)
            return
        timer = threading.Timer(one.limit, cancel, [refs])
        timer.start()
        try:
            conveyor.get(refs)
        finally:
            timer.cancel()
            timer.join()

    def begin(self, one):
        """What is waited for: a ref, or several."""
        made = self.submit(one)
        self.made += made if isinstance(made, list) else [made]
        return made

    def submit(self, one):
        peers, (first, *others) = self.peers, one.names
        if one.kind == "call":
            return peers[first].leaf.remote(one.pauses[0])
        if one.kind in ("all", "some"):
            return [
                peers[name].leaf.remote(p) for name, p in zip(one.names, one.pauses, strict=True)
            ]
        if one.kind == "argument":
            (second,) = others
            return peers[second].echo.remote(peers[first].leaf.remote(one.pauses[0]), one.pauses[1])
        if one.kind == "execute":
            return self.graphs[one.graph].execute(list(one.pauses))
        assert one.kind == "own"
        return self.own.execute(list(one.pauses))

    def some(self, one):
        refs = self.begin(one)
        conveyor.wait(refs, num_returns=one.enough, timeout=one.limit)

    def lent(self, one):
        (ref,) = conveyor.get(self.peers["helper"].lend.remote(one))
        conveyor.get(ref, timeout=one.limit)

    def stream(self, one):
        assert list(self.peers[one.names[0]].items.remote(one.pauses[0])) == [1, 2]


_OTHER = ("some", "lent", "stream")


class Async(Body):
    """One whose held methods are coroutines, and its leaves too."""

    async def leaf(self, pause):
        await asyncio.sleep(pause)
        return "leaf"

    async def echo(self, value, pause):
        await asyncio.sleep(pause)
        return value

    async def step(self, pauses):
        await asyncio.sleep(pauses[0])
        return pauses[1:]

    async def left(self):
        return super().left()

    async def held(self, job):
        number, folder, does = job
        open(f"{folder}/{number}", "w").close()
        while not os.path.exists(f"{folder}/go"):
            await asyncio.sleep(0.01)
        for one in does:
            try:
                await self.wait_for(one)
            except DeadlockError as error:
                return "deadlock", error.cycle, str(error)
            except (asyncio.TimeoutError, ExecutionCancelledError):
                if one.limit is None:
                    raise
        return "done", (), ""

    async def wait_for(self, one):
        if one.kind == "lent":
            (waited,) = await self.peers["helper"].lend.remote(one)
        elif one.kind in ("execute", "own"):
            graph = self.own if one.kind == "own" else self.graphs[one.graph]
            waited = await graph.execute_async(list(one.pauses))
        else:
            waited = self.begin(one)
        timer = None
        if one.cancels:
            timer = asyncio.get_running_loop().call_later(one.limit, cancel, waited)
        if isinstance(waited, list):
            waited = asyncio.gather(*waited)
        if one.limit is None or timer is not None:
            try:
                await waited
            finally:
                if timer is not None:
                    timer.cancel()
        else:
            await asyncio.wait_for(waited, one.limit)


class Helper(Body):
    """Makes refs for others, and never waits."""

    def lend(self, one):
        first, *others = one.names
        if one.graph is not None:
            ref = self.graphs[one.graph].execute(list(one.pauses))
        else:
            ref = self.peers[first].leaf.remote(one.pauses[0])
        if others and one.graph is None:
            self.made.append(ref)
            ref = self.peers[others[0]].echo.remote(ref, one.pauses[1])
        self.made.append(ref)
        return [ref]


#: The actors: class, how many calls there are side by side, whether steps are beside them, options.
KINDS = {
    "a": (Body, 1, False, {}),
    "b": (Body, 1, False, {}),
    "c": (Body, 1, False, {}),
    "d": (Body, 2, True, {"max_concurrency": 2}),
    "e": (Body, 3, True, {"max_concurrency": 3}),
    "k": (Async, 1000, True, {}),
    "m": (Async, 2, True, {"max_concurrency": 2}),
}
#: The graphs that all have handles of, and those that actors execute themselves.
GRAPHS = {
    "one": "ab",
    "two": "bc",
    "three": "cd",
    "four": "ea",
    "five": "kc",
    "six": "m",
    "seven": "dba",
}
OWN = {"a": "bd", "b": "c", "c": "ea", "d": "ab", "e": "ck", "k": "b", "m": "ca"}


@dataclass(frozen=True)
class Do:
    """Something that waits: for leaves of those actors, or of a graph's."""

    kind: str
    names: tuple = ()
    pauses: tuple = ()
    graph: str | None = None
    enough: int = 0
    limit: float | None = None
    #: When its time is over it is cancelled, by another thread or a timer.
    cancels: bool = False


@dataclass(frozen=True)
class Held:
    """A method that does these one after the other, as a call or as the step of a graph of its own."""

    actor: str
    is_step: bool
    does: tuple


@dataclass
class Plan:
    seed: object
    held: list = field(default_factory=list)
    #: Who is killed, each so many seconds after the one before.
    kills: tuple = ()

    def is_free(self, actor, steps, held):
        """Whether that actor comes to a leaf while those are held."""
        cls, calls, out_of_band, _ = KINDS[actor]
        here = [one for one in held if one.actor == actor]
        if not out_of_band:
            return not here
        if steps:
            # Coroutines of other graphs run beside; of the graphs that have leaves none is held.
            return cls is Async or not any(one.is_step for one in here)
        return sum(not one.is_step for one in here) < calls

    def ends(self, do, held):
        if do.graph is not None or do.kind == "own":
            return all(self.is_free(name, True, held) for name in do.names)
        free = [self.is_free(name, False, held) for name in do.names]
        return sum(free) >= do.enough if do.kind == "some" else all(free)

    @property
    def stuck(self):
        """Those that would never end."""
        held = list(self.held)
        while True:
            left = [
                one
                for one in held
                # A coroutine with a timer of its own is left to that, and counts as one that ends.
                if not all(
                    self.ends(do, held) or (do.limit is not None and KINDS[one.actor][0] is Async)
                    for do in one.does
                )
            ]
            if left == held:
                return held
            held = left

    def holds_up_others(self, one):
        """Whether others that need not wait might have to, for an argument of its."""
        alone = sum(each.actor == one.actor for each in self.held) == 1
        return any(
            not self.is_free(do.names[0], False, self.held)
            and not (do.kind == "argument" and alone and do is one.does[-1] and do.limit is None)
            for do in one.does
            if do.graph is None and do.kind in ("argument", "lent")
        )

    @property
    def has_limits(self):
        return any(do.limit is not None for one in self.held for do in one.does)


def random_plan(seed, most=0.3, kills=False):
    """``most``: seconds that a leaf takes at most. ``kills``: of calls alone, and with actors that end."""
    rng = random.Random(str(seed))
    plan = Plan(seed)
    names = sorted(KINDS)
    likes_limits = rng.random() < 0.3

    def pauses(n):
        return tuple(rng.choice([0, 0, rng.random() * most]) for _ in range(n))

    def do(actor):
        is_async = KINDS[actor][0] is Async
        kinds = ["call", "call", "all", "argument", "lent"]
        kinds += [] if kills else ["execute", "own"]
        kinds += [] if is_async else ["some", "stream"]
        kind = rng.choice(kinds)
        limit = rng.choice([0.05, 0.5, 2.0, 5.0]) if likes_limits and rng.random() < 0.4 else None
        cancels = limit is not None and rng.random() < 0.5
        some = rng.sample(names, rng.randint(1, 3))
        if kind == "execute" or (kind == "lent" and not kills and rng.random() < 0.5):
            graph = rng.choice(sorted(GRAPHS))
            on = tuple(GRAPHS[graph])
            return Do(kind, on, pauses(len(on)), graph, limit=limit)
        if kind == "own":
            on = tuple(OWN[actor])
            return Do(kind, on, pauses(len(on)), limit=limit, cancels=cancels)
        if kind == "call":
            return Do(kind, (some[0],), pauses(1), limit=limit, cancels=cancels)
        if kind == "stream":
            # Of actors whose generators are ordinary ones.
            return Do(kind, (rng.choice("abcde"),), pauses(1))
        if kind in ("lent", "argument"):
            return Do(kind, tuple(rng.sample(names, 2)), pauses(2), limit=limit)
        enough = rng.randint(1, len(some))
        return Do(kind, tuple(some), pauses(len(some)), enough=enough, limit=limit)

    for actor in names:
        calls, out_of_band = KINDS[actor][1:3]
        most_calls = min(calls, 3)
        for _ in range(rng.choice([0, 1, most_calls, rng.randint(0, most_calls)])):
            does = tuple(do(actor) for _ in range(rng.randint(1, 4)))
            plan.held.append(Held(actor, False, does))
        if kills:
            continue
        if (out_of_band or not any(one.actor == actor for one in plan.held)) and rng.random() < 0.3:
            does = tuple(do(actor) for _ in range(rng.randint(1, 3)))
            plan.held.append(Held(actor, True, does))
    # Calls of one process to one actor stay in their order, also behind one that waits for its argument.
    plan.held = [one for one in plan.held if not plan.holds_up_others(one)]
    if kills:
        some = [(rng.random() * 0.5, rng.choice(names)) for _ in range(rng.randint(1, 2))]
        plan.kills = tuple(some)
    if plan.stuck and rng.random() < 0.5:
        # Plans in which nobody is stuck are those in which false alarms are false.
        while plan.stuck:
            plan.held.remove(rng.choice(plan.stuck))
    return plan


class Pool:
    """The actors of plans, which go on from one to the next."""

    def __init__(self, options=lambda name: {}, kills=False):
        """``options``: where an actor is placed, say. ``kills``: it is for plans in which actors are killed,
        and has no graphs."""
        back = {"max_restarts": -1} if kills else {}
        self.actors = {
            name: conveyor.remote(cls)
            .options(name=f"{name}-{random.getrandbits(32):x}", **back, **opts, **options(name))
            .remote()
            for name, (cls, _, _, opts) in KINDS.items()
        }
        self.actors["helper"] = (
            conveyor.remote(Helper).options(max_concurrency=4, **options("helper")).remote()
        )
        self.names = {actor._id.name: name for name, actor in self.actors.items()}
        self.graphs, self.held_steps = {}, {}
        if not kills:
            self.graphs = {name: self._compiled("step", on) for name, on in GRAPHS.items()}
            self.held_steps = {name: self._compiled("held", name) for name in KINDS}
        self._meet()
        for name, on in OWN.items() if not kills else ():
            conveyor.get(self.actors[name].compile_own.remote(on), timeout=WAIT)

    def _meet(self):
        end = time.monotonic() + 2 * WAIT
        for actor in self.actors.values():
            while True:
                try:
                    conveyor.get(actor.meet.remote(self.actors, self.graphs), timeout=2 * WAIT)
                    break
                except ActorDiedError:  # it comes back
                    assert time.monotonic() < end
                    time.sleep(0.01)

    def _compiled(self, method, on):
        with InputNode() as inp:
            step = inp
            for name in on:
                step = getattr(self.actors[name], method).bind(step)
        return step.compile()

    def close(self):
        for name in KINDS:  # not all at once: who tears a graph down waits for its actors
            conveyor.get(self.actors[name].end.remote(), timeout=WAIT)
        for graph in (*self.graphs.values(), *self.held_steps.values()):
            graph.teardown()
        for actor in self.actors.values():
            conveyor.kill(actor)

    def run(self, plan, folder):
        """Do what a plan says, and compare it with what is true of it. Returns how many cycles were found."""
        folder.mkdir()
        refs = {}
        end = time.monotonic() + WAIT
        # Steps last: one that runs, and does not wait yet, keeps its actor's main thread from taking calls.
        for is_step in (False, True):
            for number, one in enumerate(plan.held):
                if one.is_step is is_step:
                    begin = self.held_steps[one.actor].execute if is_step else None
                    begin = begin or self.actors[one.actor].held.remote
                    refs[number] = begin((number, str(folder), one.does))
            while len(os.listdir(folder)) < len(refs):
                begun = sorted(os.listdir(folder))
                assert time.monotonic() < end, f"{plan.seed!r}: begun have {begun}"
                time.sleep(0.002)
        (folder / "go").touch()
        for seconds, name in plan.kills:
            time.sleep(seconds)
            conveyor.kill(self.actors[name], no_restart=False)
        outcomes = []
        for number, one in enumerate(plan.held):
            try:
                outcomes.append(conveyor.get(refs[number], timeout=WAIT))
            except WaitTimeoutError as error:
                raise AssertionError(f"{plan.seed!r}: {one} never ends: {error}") from error
            except ConveyorError as error:
                if plan.kills and isinstance(error, ActorDiedError):
                    continue
                raise AssertionError(f"{plan.seed!r}: {one} fails: {error}") from error
        stuck = plan.stuck
        found = [outcome for outcome in outcomes if outcome[0] == "deadlock"]
        may_be_named = {one.actor for one in stuck}
        for _, cycle, text in found:
            named = {self.names[name] for name in cycle}
            assert named <= may_be_named, f"{plan.seed!r}: {sorted(named)} are in no cycle: {text}"
        if stuck and not plan.has_limits and not plan.kills:
            assert found, f"{plan.seed!r}: a cycle that was not found has ended"
        if plan.kills:
            self._meet()
        # All answer, and nothing is left that the next plan would wait behind.
        while any(conveyor.get([a.left.remote() for a in self.actors.values()], timeout=WAIT)):
            assert time.monotonic() < end + WAIT, f"{plan.seed!r}: something is left"
        return len(found)
