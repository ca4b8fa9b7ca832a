"""Actors of several nodes that wait for each other in a circle, and those that only look like it."""

import os
import random
import sys
import threading
import time

import cloudpickle
import inside
import numpy as np
import pytest

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError, DeadlockError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("far")

WAIT = 60
HERE, THERE = {"resources": {"first": 0.01}}, {"resources": {"second": 0.01}}


@conveyor.remote
class Node:
    """Calls along a path of handles: each gets what the next one returns."""

    def meet(self, **peers):
        self.peers = peers

    def also(self, **peers):
        self.peers.update(peers)

    def name(self):
        return "alive"

    def walk(self, path, pause=0.0):
        time.sleep(pause)
        if path in ("", "end"):  # the end, or what the step before has returned
            return "end"
        return conveyor.get(self.peers[path[0]].walk.remote(path[1:], pause))

    def to_one_that_stays(self, path, inside):
        """As ``walk``; the last one never returns, and tells that it is in its method by a file."""
        if path:
            return conveyor.get(self.peers[path[0]].to_one_that_stays.remote(path[1:], inside))
        open(inside, "w").close()
        while True:
            time.sleep(0.002)

    def with_wait(self, path):
        ref = self.peers[path[0]].walk.remote(path[1:])
        conveyor.wait([ref])
        return conveyor.get(ref)

    def items(self, path):
        yield "first"
        yield self.walk(path)

    def items_of(self, path):
        return list(self.peers[path[0]].items.remote(path[1:]))[-1]

    def as_argument(self, path):
        """The call waits for its argument, which waits for this very actor."""
        return conveyor.get(self.peers["b"].echo.remote(self.peers[path[0]].walk.remote(path[1:])))

    def echo(self, value):
        return value

    def lend(self, path):
        return [self.peers[path[0]].walk.remote(path[1:])]

    def get_lent(self, refs, inside=None):
        if inside is not None:
            open(inside, "w").close()
        return conveyor.get(refs[0])

    def walk_after(self, path, inside):
        """As ``walk``, once the other one is in its method: else it may be served before."""
        while not os.path.exists(inside):
            time.sleep(0.002)
        os.unlink(inside)
        return self.walk(path)

    def lent(self, lender, path):
        """Gets a ref that another actor has made, of a call that comes back to this one."""
        (ref,) = conveyor.get(self.peers[lender].lend.remote(path))
        return conveyor.get(ref)

    def start(self, folder, path):
        """Call the next one once every member of the circle is in its method."""
        open(f"{folder}/{os.getpid()}", "w").close()
        end = time.monotonic() + WAIT
        while len(os.listdir(folder)) < 2:
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.002)
        return conveyor.get(self.peers[path[0]].walk.remote(path[1:]))

    def big_then_back(self, go, nbytes):
        """Its result is on its way for long; and it calls back whoever gets it as soon as it is sent."""
        self.then = go
        return np.zeros(nbytes, np.uint8)

    def call_back(self, path):
        return self.walk(path)

    def get_big(self, name, nbytes):
        peer = self.peers[name]
        big = peer.big_then_back.remote(None, nbytes)
        back = peer.call_back.remote("a")
        return conveyor.get(big).nbytes, back is not None

    def over_graph(self, names, path):
        with InputNode() as inp:
            step = inp
            for name in names:
                step = self.peers[name].walk.bind(step)
        with step.compile() as graph:
            return conveyor.get(graph.execute(path))

    def execute(self, graph, path):
        return conveyor.get(graph.execute(path))

    def fill(self, graph, path):
        return len([graph.execute(path) for _ in range(100)])

    def lend_graph(self, names, path):
        with InputNode() as inp:
            step = inp
            for name in names:
                step = self.peers[name].walk.bind(step)
        self.graph = step.compile()
        return [self.graph.execute(path)]

    def end_lent_graph(self):
        self.graph.teardown()

    def lent_of_graph(self, lender, names, path):
        """Gets a result of a graph that another actor executes."""
        (ref,) = conveyor.get(self.peers[lender].lend_graph.remote(names, path))
        return conveyor.get(ref)

    def pass_on(self, name, refs, inside=None):
        """The call waits here for its argument, which others make."""
        if inside is not None:
            open(inside, "w").close()
        return conveyor.get(self.peers[name].echo.remote(refs[0]))

    def slow(self, x, seconds, done=None):
        time.sleep(seconds)
        if done is not None:
            open(done, "w").close()
        return x

    def wait_in_graph(self, names, seconds, done):
        """An execution that takes its time, while the first of its actors, which has done its part, waits
        for this one."""
        first, last = (self.peers[name] for name in names)
        with InputNode() as inp:
            step = last.slow.bind(first.slow.bind(inp, 0, done), seconds)
        self.graph = step.compile()
        ref = self.graph.execute(1)
        while not os.path.exists(done):
            time.sleep(0.002)
        self.waits = first.walk.remote("a")
        return conveyor.get(ref)

    def end_graph(self):
        got = conveyor.get(self.waits)
        self.graph.teardown()
        return got


@conveyor.remote
class Async:
    async def meet(self, **peers):
        self.peers = peers

    async def name(self):
        return "alive"

    async def awaits(self, path):
        return await self.peers[path[0]].awaits.remote(path[1:]) if path else "end"

    async def walk(self, path, pause=0.0):
        return await self.awaits(path)

    async def blocks(self, path):
        return conveyor.get(self.peers[path[0]].walk.remote(path[1:]))


#: The names by which they know each other: class, node and options.
KINDS = {
    "a": (Node, HERE, {}),
    "b": (Node, THERE, {}),
    "c": (Node, THERE, {}),
    "d": (Node, HERE, {}),
    "s": (Node, HERE, {"max_concurrency": 2}),
    "t": (Node, THERE, {"max_concurrency": 2}),
    "k": (Async, HERE, {}),
    "l": (Async, THERE, {}),
    "m": (Async, HERE, {"max_concurrency": 1}),
    "n": (Async, THERE, {"max_concurrency": 1}),
}


@pytest.fixture(scope="module")
def actors(far):
    made = {
        name: cls.options(name=f"the {name}", **where, **options).remote()
        for name, (cls, where, options) in KINDS.items()
    }
    conveyor.get([actor.meet.remote(**made) for actor in made.values()], timeout=2 * WAIT)
    yield made
    for actor in made.values():
        conveyor.kill(actor)


@pytest.fixture
def take(actors):
    """Actors by their names; afterwards all of them do again what is asked of them."""
    yield lambda names: [actors[name] for name in names]
    assert all_alive(*actors.values())


def get(ref):
    return conveyor.get(ref, timeout=WAIT)


def names(*nodes):
    return {node._id.name for node in nodes}


def deadlocks(ref, *nodes):
    with pytest.raises(DeadlockError) as caught:
        get(ref)
    assert set(caught.value.cycle) == names(*nodes)
    assert "(on " in str(caught.value)  # where who is waited for is
    return caught.value


def all_alive(*nodes):
    """Also: what one who was told of a circle had been asked by the others of it is done."""
    return get([node.name.remote() for node in nodes]) == ["alive"] * len(nodes)


@pytest.mark.parametrize("way", ["walk", "with_wait", "items_of", "as_argument"])
def test_two_actors(take, way):
    a, b = take("ab")
    deadlocks(getattr(a, way).remote("ba"), a, b)
    assert all_alive(a, b)
    deadlocks(getattr(b, way).remote("ab"), a, b)


def test_it_is_found_soon(take):
    a, b = take("ab")
    took = []
    while not took or (
        min(took) >= 1 and len(took) < 20
    ):  # other work of the machine makes it longer
        start = time.monotonic()
        deadlocks(a.walk.remote("ba"), a, b)
        took.append(time.monotonic() - start)
    assert min(took) < 1, took


def test_the_circle_is_named(take):
    a, b = take("ab")
    error = str(deadlocks(a.walk.remote("ba"), a, b))
    assert "the a.walk waits for the b.walk (on " in error
    assert "the b.walk waits for the a.walk (on the driver's node)" in error
    assert "max_concurrency" in error


def test_three_actors(take):
    a, b, c = take("abc")
    deadlocks(a.walk.remote("bca"), a, b, c)
    assert all_alive(b, c)  # before that, their call of `a` may come to its turn late
    # The driver and `a` wait for a circle that they are not part of, which is on one node.
    with pytest.raises(DeadlockError) as caught:
        get(a.walk.remote("bcb"))
    assert set(caught.value.cycle) == names(b, c)
    assert all_alive(b, c)
    # And for one over both nodes.
    deadlocks(b.walk.remote("cac"), a, c)


def test_two_calls_that_cross(take, tmp_path):
    a, b = take("ab")
    refs = [a.start.remote(str(tmp_path), "b"), b.start.remote(str(tmp_path), "a")]
    outcomes = []
    for ref in refs:
        try:
            outcomes.append(get(ref))
        except DeadlockError:
            outcomes.append(DeadlockError)
    # One is told; the other is served then.
    assert sorted(outcomes, key=str) == [DeadlockError, "end"]


def test_a_ref_that_another_actor_has_made(take):
    a, c = take("ac")
    deadlocks(a.lent.remote("b", "ca"), a, c)


def test_with_max_concurrency_there_is_none(take):
    (s,) = take("s")
    assert get(s.walk.remote("bs")) == "end"


def test_when_every_thread_waits(take):
    s, t = take("st")
    error = deadlocks(s.walk.remote("tsts"), s, t)
    assert "raise max_concurrency" in str(error).lower()


def test_coroutines_that_await(take):
    (k,) = take("k")
    assert get(k.awaits.remote("lklk")) == "end"


def test_an_event_loop_that_is_blocked(take):
    k, b = take("kb")
    assert "event loop" in str(deadlocks(k.blocks.remote("bk"), k, b))


def test_coroutines_where_no_more_may_run(take):
    m, n = take("mn")
    deadlocks(m.awaits.remote("nm"), m, n)


def test_an_execution_that_comes_back(take):
    a, b, d = take("abd")
    deadlocks(a.over_graph.remote("b", "a"), a, b)
    assert all_alive(a, b)
    deadlocks(b.over_graph.remote("d", "b"), b, d)
    assert all_alive(b, d)
    deadlocks(a.over_graph.remote("bd", "a"), a, b)


def steps(*nodes):
    with InputNode() as inp:
        step = inp
        for node in nodes:
            step = node.walk.bind(step)
    return step.compile()


@pytest.mark.parametrize("way", ["execute", "fill"])
def test_a_graph_of_the_drivers_that_an_actor_executes(take, way, wait_until):
    a, b, d = take("abd")
    with steps(b, d) as graph:
        # The step on `b` waits for `a`, which waits for the execution, or for room for another one.
        deadlocks(getattr(a, way).remote(graph, "a"), a, b)
        assert all_alive(a, b, d)
        # One that was begun before would wait for `a`, which would wait for the one behind it.
        wait_until(lambda: graph.status().executions == ())
        assert get(a.execute.remote(graph, "")) == "end"
        # Its own step is what an actor waits for.
        with pytest.raises(DeadlockError) as caught:
            get(b.execute.remote(graph, ""))
        assert set(caught.value.cycle) == names(b)
    with steps(d, b) as graph:
        with pytest.raises(DeadlockError) as caught:
            get(getattr(a, way).remote(graph, "ba"))
        # Of several executions one may have failed on `d` already, and wait for its step on `b`.
        named = set(caught.value.cycle)
        assert named == names(a, b, d) or (way == "fill" and named == names(a, b))
        assert all_alive(a, b, d)


def test_a_result_of_a_graph_that_was_passed_on(take, tmp_path):
    a, b, c, d = take("abcd")
    inside = str(tmp_path / "inside")
    with InputNode() as inp:
        last = d.walk.bind(b.walk_after.bind(inp, inside))
    with last.compile() as graph:
        deadlocks(a.get_lent.remote([graph.execute("a")], inside), a, b)
        assert all_alive(a, b, d)
        # The same where it is an argument, for which a call waits.
        deadlocks(a.pass_on.remote("c", [graph.execute("a")], inside), a, b)
        assert all_alive(a, b, d)
        assert get(a.get_lent.remote([graph.execute("c")], inside)) == "end"
    deadlocks(a.lent_of_graph.remote("c", "bd", "a"), a, b)
    assert all_alive(a, b, c, d)
    get(c.end_lent_graph.remote())


def test_a_graph_of_the_drivers_is_not_held_up_by_who_has_done_his_part(take, tmp_path):
    """`a` waits for the execution while `b`, whose step is done, waits for `a`: it comes all the same."""
    a, b, c = take("abc")
    done = tmp_path / "done"
    with InputNode() as inp:
        graph = c.slow.bind(b.slow.bind(inp, 0, str(done)), 1.5).compile()
    with graph:
        for way in ("execute", "get_lent", "pass_on"):
            if way == "execute":
                waits = a.execute.remote(graph, 1)
            elif way == "get_lent":
                waits = a.get_lent.remote([graph.execute(1)])
            else:
                waits = a.pass_on.remote("d", [graph.execute(1)])
            while not done.exists():
                time.sleep(0.002)
            back = b.walk.remote("a")
            assert get(waits) == 1
            assert get(back) == "end"
            done.unlink()


def test_an_execution_is_not_held_up_by_who_has_done_his_part(take, tmp_path):
    a, b = take("ab")
    assert get(a.wait_in_graph.remote("bc", 1.5, str(tmp_path / "done"))) == 1
    assert all_alive(b)  # so it has come back to `a`
    assert get(a.end_graph.remote()) == "end"


def test_a_result_that_is_on_its_way_is_no_wait(take):
    a, b = take("ab")
    for _ in range(3):
        assert get(a.get_big.remote("b", 64 << 20)) == (64 << 20, True)
        # Until `b` has been called back it takes no call: the next one of `a`, which may come to its turn
        # before `b`'s, would be a circle.
        assert all_alive(b)


def test_no_false_alarm_in_a_storm_of_nested_calls(take):
    # a < b < c < d in every path, so there never is a circle; pauses have all of them wait for long.
    a, b, c, d = take("abcd")
    paths = [(a, "bcd"), (a, "cd"), (b, "cd"), (b, "d"), (c, "d"), (a, "d"), (d, ""), (a, "b")]
    failures = []

    def storm(seed):
        rng = random.Random(seed)
        try:
            for _ in range(8):
                start, path = rng.choice(paths)
                assert get(start.walk.remote(path, rng.choice([0, 0.02, 0.1]))) == "end"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=storm, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures[0]


def test_a_connection_that_breaks_meanwhile(take):
    a, b = take("ab")
    pump = inside.pump()
    host = inside.record_of(b).node.number
    over = threading.Event()

    def cut():
        while not over.wait(0.05):
            pump.disconnect(host, "the test has cut it")

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        deadlocks(a.walk.remote("ba"), a, b)
        assert all_alive(a, b)
        assert get(a.walk.remote("b", 0.3)) == "end"
    finally:
        over.set()
        cutter.join()
    assert all_alive(a, b)


@pytest.fixture
def third(two_nodes):
    """A node that is there for one test, and is lost in it."""
    node = two_nodes.add_node(num_cpus=1, resources={"third": 1})
    yield node
    if node in two_nodes.worker_nodes:
        two_nodes.remove_node(node, allow_graceful=False)


def test_three_nodes_one_of_which_is_lost(take, third, two_nodes, latches, wait_until):
    a, b = take("ab")
    e = Node.options(name="the e", resources={"third": 0.01}).remote()
    get(e.meet.remote(a=a, b=b, e=e))
    get([actor.also.remote(e=e) for actor in (a, b)])
    # The driver's node has no part in this one.
    deadlocks(b.walk.remote("eb"), b, e)
    assert all_alive(b, e)
    deadlocks(a.walk.remote("bea"), a, b, e)
    assert all_alive(a, b, e)
    # Who waits for a node that is lost is told of that, and nothing of it is left in what is found later.
    inside = latches()
    ref = a.to_one_that_stays.remote("be", inside.path)
    wait_until(lambda: inside.is_open, WAIT)
    two_nodes.remove_node(third, allow_graceful=False)
    with pytest.raises(ActorDiedError):
        get(ref)
    deadlocks(a.walk.remote("ba"), a, b)
