"""Actors of the local engine, through the public API."""

import asyncio
import gc
import os
import random
import re
import sys
import threading
import time

import cloudpickle
import numpy as np
import psutil
import pytest
from integration_helpers import WAIT, hold

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import (
    ActorDiedError,
    ConveyorError,
    TaskError,
    WaitTimeoutError,
)

# Actors need not import this file, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


class PlainEcho:
    def __init__(self):
        self.calls = []

    def echo(self, x):
        return x

    def pid(self):
        return os.getpid()

    def hold(self, path, x=None):
        hold(path)
        return x

    def note(self, x):
        self.calls.append(x)

    def noted(self):
        return self.calls

    def fail(self, text):
        raise ValueError(text)

    def add(self, a, b=0, *, c=0):
        return a + b + c

    @conveyor.method(num_returns=2)
    def pair(self, a, b):
        return a, b

    def several(self, n):
        return list(range(n))


Echo = conveyor.remote(PlainEcho)


@pytest.fixture(scope="module")
def echo(session):
    return Echo.remote()


@pytest.fixture(scope="module")
def other(session):
    return Echo.remote()


# Calls


def test_call_returns_a_value(echo):
    assert conveyor.get(echo.echo.remote("hello"), timeout=WAIT) == "hello"


def test_arguments_by_name_and_default(echo):
    refs = [echo.add.remote(1), echo.add.remote(1, 2), echo.add.remote(b=2, a=1, c=3)]
    assert conveyor.get(refs, timeout=WAIT) == [1, 3, 6]


def test_calls_of_one_caller_run_in_order(echo):
    for i in range(500):
        echo.note.remote(i)
    assert conveyor.get(echo.noted.remote(), timeout=WAIT)[-500:] == list(range(500))


def test_a_result_can_be_got_again(echo):
    ref = echo.echo.remote([1, 2])
    assert conveyor.get(ref, timeout=WAIT) == conveyor.get(ref, timeout=WAIT) == [1, 2]
    assert ref.get() == [1, 2]
    assert ref.done()


def test_num_returns_declared_and_by_option(echo):
    a, b = echo.pair.remote(1, 2)
    assert conveyor.get([b, a], timeout=WAIT) == [2, 1]
    refs = echo.several.options(num_returns=3).remote(3)
    assert conveyor.get(refs, timeout=WAIT) == [0, 1, 2]
    wrong = echo.several.options(num_returns=3).remote(2)
    with pytest.raises(ValueError, match="num_returns=3"):
        conveyor.get(wrong[0], timeout=WAIT)


def test_ten_thousand_calls_without_a_get(echo):
    refs = [echo.echo.remote(i) for i in range(10_000)]
    assert conveyor.get(refs[-1], timeout=60) == 9_999
    assert conveyor.get(refs, timeout=60) == list(range(10_000))


def test_ten_thousand_dropped_calls(echo):
    before = len(conveyor.get(echo.noted.remote(), timeout=WAIT))
    for i in range(10_000):
        echo.note.remote(i)
    noted = conveyor.get(echo.noted.remote(), timeout=60)
    assert noted[before:] == list(range(10_000))


def test_big_arguments_and_results(echo):
    data = np.random.default_rng(0).bytes(32 << 20)
    assert conveyor.get(echo.echo.remote(data), timeout=WAIT) == data
    array = np.arange(4 << 20)
    np.testing.assert_array_equal(conveyor.get(echo.echo.remote(array), timeout=WAIT), array)


def test_many_big_outstanding_results(echo):
    refs = [echo.echo.remote(np.full(1 << 17, i)) for i in range(100)]
    for i, ref in enumerate(refs):
        value = conveyor.get(ref, timeout=WAIT)
        assert value[0] == value[-1] == i


def test_calls_from_several_threads(echo):
    results = {}

    def call(k):
        refs = [echo.echo.remote((k, i)) for i in range(200)]
        results[k] = [conveyor.get(ref, timeout=WAIT) for ref in refs]

    threads = [threading.Thread(target=call, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {k: [(k, i) for i in range(200)] for k in range(4)}


def test_inherited_static_and_class_methods_and_call():
    class Child(PlainEcho):
        @staticmethod
        def twice(x):
            return 2 * x

        @classmethod
        def name(cls):
            return cls.__name__

        def __call__(self, x):
            return x + 1

    actor = conveyor.remote(Child).remote()
    refs = [actor.echo.remote(1), actor.twice.remote(2), actor.name.remote()]
    refs.append(actor.__call__.remote(4))
    assert conveyor.get(refs, timeout=WAIT) == [1, 4, "Child", 5]


# References


def test_get_a_list_keeps_its_order(echo, other):
    refs = [(echo if i % 2 else other).echo.remote(i) for i in range(20)]
    assert conveyor.get(refs[::-1], timeout=WAIT) == list(range(20))[::-1]
    assert conveyor.get([], timeout=WAIT) == []


def test_put_and_pass_on(echo):
    array = np.arange(100_000)
    ref = conveyor.put(array)
    array[:] = 0  # a put value is a snapshot
    np.testing.assert_array_equal(conveyor.get(ref), np.arange(100_000))
    got = conveyor.get(echo.echo.remote(ref), timeout=WAIT)
    np.testing.assert_array_equal(got, np.arange(100_000))


def test_wait_for_some(echo, other, latches):
    go = latches()
    slow = echo.hold.remote(go.path, "slow")
    fast = [other.echo.remote(i) for i in range(3)]
    ready, rest = conveyor.wait([slow, *fast], num_returns=3, timeout=WAIT)
    assert ready == fast
    assert rest == [slow]
    assert conveyor.wait([slow], timeout=0) == ([], [slow])
    assert conveyor.wait([slow], timeout=0.05) == ([], [slow])
    go.open()
    assert conveyor.wait([slow], timeout=WAIT) == ([slow], [])
    assert conveyor.get(slow) == "slow"


def test_wait_takes_what_is_done_wherever_it_stands(echo, other, latches):
    go = latches()
    held = [echo.hold.remote(go.path) for _ in range(6)]
    done = [other.echo.remote(i) for i in range(4)] + [conveyor.put(i) for i in range(2)]
    assert conveyor.wait(done, num_returns=6, timeout=WAIT) == (done, [])
    chance = random.Random(30)
    for _ in range(300):
        refs = chance.sample(done + held, chance.randint(1, 12))
        given = refs.copy()
        wanted = chance.randint(1, len(refs))
        timeout = chance.choice((0, 0, 0, 0.001))
        ready, rest = conveyor.wait(refs, num_returns=wanted, timeout=timeout)
        assert ready == [ref for ref in refs if ref in done][:wanted]
        assert rest == [ref for ref in refs if ref not in ready]
        assert refs == given  # the caller's own list
    go.open()
    assert conveyor.wait([*held, *done], num_returns=12, timeout=WAIT) == ([*held, *done], [])


def test_wait_counts_errors_as_ready(echo):
    ref = echo.fail.remote("no")
    assert conveyor.wait([ref], timeout=WAIT) == ([ref], [])


def test_a_chain_of_references(echo, other):
    ref = echo.echo.remote(0)
    for i in range(50):
        ref = (other if i % 2 else echo).add.remote(ref, b=1)
    assert conveyor.get(ref, timeout=WAIT) == 50


def test_pending_references_do_not_block_the_caller(echo, other, latches):
    go = latches()
    pending = echo.hold.remote(go.path, 5)
    start = time.monotonic()
    result = other.add.remote(pending, b=pending)
    assert time.monotonic() - start < 5
    assert not result.done()
    go.open()
    assert conveyor.get(result, timeout=WAIT) == 10


def test_a_call_that_waits_for_its_argument_goes_off_by_itself(echo, other, latches):
    # Nobody gets anything: the last call must happen all the same.
    go, seen = latches(), latches()

    class Toucher:
        def touch(self, path):
            open(path, "w").close()

    toucher = conveyor.remote(Toucher).remote()
    toucher.touch.remote(other.echo.remote(echo.hold.remote(go.path, seen.path)))
    go.open()
    end = time.monotonic() + WAIT
    while not seen.is_open:
        assert time.monotonic() < end
        time.sleep(0.002)


def test_calls_behind_a_pending_one_keep_their_order(echo, other, latches):
    go = latches()
    before = len(conveyor.get(other.noted.remote(), timeout=WAIT))
    other.note.remote(echo.hold.remote(go.path, "first"))
    other.note.remote("second")
    go.open()
    assert conveyor.get(other.noted.remote(), timeout=WAIT)[before:] == ["first", "second"]


def test_a_failed_argument_fails_the_call(echo, other):
    ref = other.echo.remote(other.echo.remote(echo.fail.remote("the first cause")))
    with pytest.raises(ValueError, match="the first cause") as caught:
        conveyor.get(ref, timeout=WAIT)
    assert isinstance(caught.value, TaskError)
    assert "fail" in caught.value.node
    assert conveyor.get(other.echo.remote(1), timeout=WAIT) == 1


def test_a_reference_inside_a_container_stays_one(echo):
    ref = echo.echo.remote(1)
    (back,) = conveyor.get(echo.echo.remote([ref]), timeout=WAIT)
    assert conveyor.get(back, timeout=WAIT) == 1


def test_an_element_reference_is_an_argument(echo, other):
    a, b = echo.pair.remote(3, 4)
    assert conveyor.get(other.add.remote(a, b), timeout=WAIT) == 7


def test_get_with_a_timeout_can_be_tried_again(echo, latches):
    go = latches()
    ref = echo.hold.remote(go.path, "there")
    for timeout in (0, 0.02):
        with pytest.raises(WaitTimeoutError, match=r"hold") as caught:
            conveyor.get(ref, timeout=timeout)
        assert isinstance(caught.value, TimeoutError)
    go.open()
    assert conveyor.get(ref, timeout=WAIT) == "there"


# Concurrency


def test_async_methods_run_concurrently():
    class ChannelPeer:
        def __init__(self):
            self.event = asyncio.Event()

        async def wait(self):
            await self.event.wait()
            return "met"

        async def come(self):
            self.event.set()

        def plain(self):
            return "plain"

    actor = conveyor.remote(ChannelPeer).remote()
    waiters = [actor.wait.remote() for _ in range(20)]
    assert conveyor.get(actor.plain.remote(), timeout=WAIT) == "plain"
    assert not waiters[0].done()
    actor.come.remote()
    assert conveyor.get(waiters, timeout=WAIT) == ["met"] * 20


def test_async_methods_call_other_actors(echo):
    class Asker:
        async def ask(self, handle, x):
            return await handle.echo.remote(x) + 1

        async def ask_all(self, handle, n):
            return await asyncio.gather(*[handle.echo.remote(i) for i in range(n)])

    actor = conveyor.remote(Asker).remote()
    assert conveyor.get(actor.ask.remote(echo, 1), timeout=WAIT) == 2
    assert conveyor.get(actor.ask_all.remote(echo, 100), timeout=WAIT) == list(range(100))


class Counting:
    def __init__(self, parties):
        self.barrier = threading.Barrier(parties)
        self.running = self.most = 0
        self.lock = threading.Lock()

    def meet(self):
        self.barrier.wait(30)
        return threading.current_thread() is threading.main_thread()

    def work(self):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(0.002)
        with self.lock:
            self.running -= 1

    def seen(self):
        return self.most


def test_max_concurrency_runs_so_many_at_a_time():
    actor = conveyor.remote(Counting).options(max_concurrency=3).remote(3)
    assert len(conveyor.get([actor.meet.remote() for _ in range(3)], timeout=WAIT)) == 3
    conveyor.get([actor.work.remote() for _ in range(30)], timeout=WAIT)
    assert 2 <= conveyor.get(actor.seen.remote(), timeout=WAIT) <= 3


def test_async_max_concurrency():
    class Async:
        def __init__(self):
            self.running = self.most = 0
            self.met = asyncio.Event()

        async def work(self):
            self.running += 1
            self.most = max(self.most, self.running)
            if self.running == 2:
                self.met.set()
            # The second call may come late.
            await asyncio.wait_for(self.met.wait(), WAIT)
            for _ in range(5):
                await asyncio.sleep(0)
            self.running -= 1
            return self.most

    actor = conveyor.remote(Async).options(max_concurrency=2).remote()
    assert max(conveyor.get([actor.work.remote() for _ in range(20)], timeout=WAIT)) == 2


def test_without_it_calls_run_one_by_one_on_the_main_thread(echo):
    actor = conveyor.remote(Counting).remote(1)
    results = []

    def call():
        results.extend(conveyor.get([actor.work.remote() for _ in range(10)], timeout=WAIT))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert len(results) == 40
    assert conveyor.get(actor.seen.remote(), timeout=WAIT) == 1
    assert conveyor.get(actor.meet.remote(), timeout=WAIT) is True


def test_thread_locals_of_the_constructor_are_there():
    class Local:
        def __init__(self):
            self.local = threading.local()
            self.local.x = 7

        def get(self):
            return self.local.x

    actor = conveyor.remote(Local).remote()
    assert conveyor.get(actor.get.remote(), timeout=WAIT) == 7
    with conveyor.dag.InputNode() as inp:
        dag = conveyor.remote(PlainEcho).remote().echo.bind(inp)
    assert dag is not None


# Handles


class Caller:
    def __init__(self, target=None):
        self.target = target

    def call(self, x, target=None):
        return conveyor.get((target or self.target).echo.remote(x), timeout=60)

    def call_in(self, box, x):
        return conveyor.get(box["handle"][0].echo.remote(x), timeout=60)

    def many(self, n):
        return conveyor.get([self.target.echo.remote(i) for i in range(n)], timeout=60)

    def ref_chain(self, other, x):
        return conveyor.get(other.add.remote(self.target.echo.remote(x), b=1), timeout=60)

    def make(self, x):
        child = Echo.remote()
        return child, conveyor.get(child.pid.remote(), timeout=60), x

    def find(self, name):
        return self.call("found", conveyor.get_actor(name))

    def kill(self, target):
        conveyor.kill(target)

    def fail(self, text):
        conveyor.get(self.target.fail.remote(text), timeout=60)

    def wait(self, path):
        slow, fast = self.target.hold.remote(path, 1), self.target.echo.remote(2)
        ready, rest = conveyor.wait([slow, fast], num_returns=1, timeout=0.05)
        return len(ready), len(rest)

    def put(self, x):
        return conveyor.get(self.target.echo.remote(conveyor.put(x)), timeout=60)


def test_handles_passed_to_other_actors(echo, other):
    caller = conveyor.remote(Caller).remote(echo)
    assert conveyor.get(caller.call.remote("by constructor"), timeout=WAIT) == "by constructor"
    assert conveyor.get(caller.call.remote("by argument", other), timeout=WAIT) == "by argument"
    assert conveyor.get(caller.call_in.remote({"handle": [other]}, "in"), timeout=WAIT) == "in"
    assert conveyor.get(caller.many.remote(1000), timeout=60) == list(range(1000))
    assert conveyor.get(caller.ref_chain.remote(other, 1), timeout=WAIT) == 2
    assert conveyor.get(caller.put.remote([1]), timeout=WAIT) == [1]


def test_wait_inside_an_actor(echo, latches):
    go = latches()
    caller = conveyor.remote(Caller).remote(echo)
    assert conveyor.get(caller.wait.remote(go.path), timeout=WAIT) == (0, 2)
    go.open()


def test_a_handle_comes_back_as_the_same_actor(echo):
    back = conveyor.get(echo.echo.remote(echo), timeout=WAIT)
    assert back == echo
    assert hash(back) == hash(echo)
    assert conveyor.get(back.echo.remote(1), timeout=WAIT) == 1


def test_errors_pass_through_a_calling_actor(echo):
    caller = conveyor.remote(Caller).remote(echo)
    with pytest.raises(ValueError, match="from afar") as caught:
        conveyor.get(caller.fail.remote("from afar"), timeout=WAIT)
    assert isinstance(caught.value, TaskError)


def test_actors_created_by_actors():
    caller = conveyor.remote(Caller).remote()
    child, pid, _ = conveyor.get(caller.make.remote(0), timeout=WAIT)
    assert pid != os.getpid()
    assert conveyor.get(child.pid.remote(), timeout=WAIT) == pid
    # It is the session's, not its maker's.
    conveyor.kill(caller)
    assert conveyor.get(child.echo.remote("still"), timeout=WAIT) == "still"


def test_actors_in_a_graph_that_actors_created():
    caller = conveyor.remote(Caller).remote()
    child, _, _ = conveyor.get(caller.make.remote(0), timeout=WAIT)
    with conveyor.dag.InputNode() as inp:
        dag = child.echo.bind(inp)
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(1), timeout=WAIT) == 1


def test_names(echo):
    actor = Echo.options(name="the one").remote()
    found = conveyor.get_actor("the one")
    assert found == actor
    assert conveyor.get(found.echo.remote(1), timeout=WAIT) == 1
    with pytest.raises(ValueError, match="the one"):
        Echo.options(name="the one").remote()
    caller = conveyor.remote(Caller).remote()
    assert conveyor.get(caller.find.remote("the one"), timeout=WAIT) == "found"
    with pytest.raises(ValueError, match="nobody"):
        conveyor.get_actor("nobody")
    conveyor.kill(actor)


def test_a_name_is_free_again_after_kill(wait_until):
    first = Echo.options(name="again").remote()
    pid = conveyor.get(first.pid.remote(), timeout=WAIT)
    conveyor.kill(first)

    def second():
        try:
            return Echo.options(name="again").remote()
        except ValueError:
            return None

    actor = wait_until(second, WAIT, "the name")
    assert conveyor.get(actor.pid.remote(), timeout=WAIT) != pid
    conveyor.kill(actor)


def test_a_named_actor_outlives_its_handles():
    actor = Echo.options(name="stays").remote()
    pid = conveyor.get(actor.pid.remote(), timeout=WAIT)
    del actor
    assert conveyor.get(conveyor.get_actor("stays").pid.remote(), timeout=WAIT) == pid
    conveyor.kill(conveyor.get_actor("stays"))


def test_a_name_is_free_as_soon_as_its_actor_is_killed():
    for _ in range(3):
        actor = Echo.options(name="taken").remote()
        pid = conveyor.get(actor.pid.remote(), timeout=WAIT)
        conveyor.kill(actor)
        with pytest.raises(ValueError, match="no actor named 'taken'; named actors: none"):
            conveyor.get_actor("taken")
        again = Echo.options(name="taken", get_if_exists=True).remote()
        assert conveyor.get(again.pid.remote(), timeout=WAIT) != pid
        with pytest.raises(ValueError, match="there is an actor named 'taken' already"):
            Echo.options(name="taken").remote()
        conveyor.kill(again)


# Ends


def test_an_actor_ends_when_its_last_handle_is_gone(wait_until):
    actor = Echo.remote()
    pid = conveyor.get(actor.pid.remote(), timeout=WAIT)
    assert psutil.pid_exists(pid)
    del actor
    # Nothing else happens in this process: it must not need to.
    wait_until(lambda: not psutil.pid_exists(pid), WAIT, "the actor's end")


@pytest.mark.parametrize("end", ["teardown", "drop"])
def test_a_graph_lets_go_of_all_its_actors_though_one_was_killed(end, wait_until):
    actors = [Echo.remote() for _ in range(4)]
    pids = conveyor.get([actor.pid.remote() for actor in actors], timeout=WAIT)
    with InputNode() as inp:
        node = inp
        for actor in actors:
            node = actor.echo.bind(node)
    graph = node.compile()
    assert graph.execute(1).get(timeout=WAIT) == 1
    conveyor.kill(actors[0])
    conveyor.kill(actors[2])
    del actors, actor, node, inp  # from now on only the graph needs them
    if end == "teardown":
        graph.teardown()
    del graph
    gc.collect()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), WAIT, "the end of all")


def test_calls_of_a_dropped_actor_are_still_answered(latches, wait_until):
    go = latches()
    actor = Echo.remote()
    pid = conveyor.get(actor.pid.remote(), timeout=WAIT)
    refs = [actor.hold.remote(go.path, 1), *[actor.echo.remote(i) for i in range(200)]]
    del actor
    go.open()
    assert conveyor.get(refs, timeout=WAIT) == [1, *range(200)]
    wait_until(lambda: not psutil.pid_exists(pid), WAIT, "the actor's end")


def test_a_reference_does_not_keep_its_actor_from_answering():
    ref = Echo.remote().echo.remote("from a temporary")
    assert conveyor.get(ref, timeout=WAIT) == "from a temporary"


def test_kill(wait_until):
    actor = Echo.remote()
    pid = conveyor.get(actor.pid.remote(), timeout=WAIT)
    conveyor.kill(actor)
    with pytest.raises(ActorDiedError, match="kill"):
        conveyor.get(actor.echo.remote(1), timeout=WAIT)
    conveyor.kill(actor)
    wait_until(lambda: not psutil.pid_exists(pid), WAIT, "the actor's end")


def test_kill_wakes_who_waits(latches):
    go, inside = latches(), latches()
    actor = conveyor.remote(Blocker).remote()
    ref = actor.hold.remote(inside.path, go.path)
    hold(inside.path)
    threading.Timer(0.05, conveyor.kill, [actor]).start()
    with pytest.raises(ActorDiedError):
        conveyor.get(ref, timeout=WAIT)


class Blocker:
    def hold(self, inside, go):
        open(inside, "w").close()
        hold(go)


def test_kill_from_an_actor(other):
    victim = Echo.remote()
    conveyor.get(victim.echo.remote(1), timeout=WAIT)
    killer = conveyor.remote(Caller).remote()
    conveyor.get(killer.kill.remote(victim), timeout=WAIT)
    with pytest.raises(ActorDiedError):
        conveyor.get(victim.echo.remote(1), timeout=WAIT)


# Constructors


def test_a_constructor_error_reaches_the_first_call():
    class Broken:
        def __init__(self, text):
            raise KeyError(text)

        def echo(self, x):
            return x

    actor = conveyor.remote(Broken).remote("never made")
    for _ in range(2):
        with pytest.raises(KeyError, match="never made") as caught:
            conveyor.get(actor.echo.remote(1), timeout=WAIT)
        assert isinstance(caught.value, TaskError)
        assert "__init__" in caught.value.remote_traceback


def test_a_constructor_error_reaches_a_graph():
    class Broken:
        def __init__(self):
            raise KeyError("never made")

        def echo(self, x):
            return x

    actor = conveyor.remote(Broken).remote()
    with conveyor.dag.InputNode() as inp:
        dag = actor.echo.bind(inp)
    with pytest.raises(KeyError, match="never made"), dag.compile() as graph:
        conveyor.get(graph.execute(1), timeout=WAIT)


def test_constructor_arguments_by_reference_and_by_name(echo):
    class Made:
        def __init__(self, a, *, b):
            self.value = a, b

        def get(self):
            return self.value

    actor = conveyor.remote(Made).remote(echo.echo.remote(1), b=conveyor.put(2))
    assert conveyor.get(actor.get.remote(), timeout=WAIT) == (1, 2)


# What an actor finds


class Place:
    def where(self):
        return os.getcwd()

    def env(self, name):
        return os.environ.get(name)

    def path(self):
        return sys.path

    def random(self):
        return random.random(), float(np.random.rand())

    def threads(self):
        import torch

        return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")

    def say(self, out, err):
        print(out)
        print(err, file=sys.stderr)


def test_cwd_environment_and_path_are_the_drivers_of_the_moment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVEYOR_TEST_VARIABLE", "set")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    actor = conveyor.remote(Place).remote()
    monkeypatch.chdir("/")
    monkeypatch.delenv("CONVEYOR_TEST_VARIABLE")
    assert conveyor.get(actor.where.remote(), timeout=WAIT) == str(tmp_path)
    assert conveyor.get(actor.env.remote("CONVEYOR_TEST_VARIABLE"), timeout=WAIT) == "set"
    assert str(tmp_path / "lib") in conveyor.get(actor.path.remote(), timeout=WAIT)


def test_env_vars_of_an_actor_are_its_own():
    place = conveyor.remote(Place)
    a = place.options(env_vars={"CONVEYOR_TEST_MINE": "a"}).remote()
    b = place.options(runtime_env={"env_vars": {"CONVEYOR_TEST_MINE": "b"}}).remote()
    refs = [x.env.remote("CONVEYOR_TEST_MINE") for x in (a, b)]
    assert conveyor.get(refs, timeout=WAIT) == ["a", "b"]
    assert "CONVEYOR_TEST_MINE" not in os.environ


def test_modules_of_the_drivers_path_are_found(tmp_path, monkeypatch):
    (tmp_path / "just_written.py").write_text(
        "class Thing:\n    def get(self):\n        return __name__\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import just_written

    actor = conveyor.remote(just_written.Thing).remote()
    assert conveyor.get(actor.get.remote(), timeout=WAIT) == "just_written"


def test_random_numbers_differ_between_actors():
    actors = [conveyor.remote(Place).remote() for _ in range(3)]
    numbers = conveyor.get([a.random.remote() for a in actors], timeout=WAIT)
    assert len({a for a, _ in numbers}) == 3
    assert len({b for _, b in numbers}) == 3


def test_num_cpus_are_threads_of_libraries():
    pytest.importorskip("torch")
    actor = conveyor.remote(Place).options(num_cpus=1).remote()
    two = conveyor.remote(Place).options(num_cpus=2).remote()
    assert conveyor.get(actor.threads.remote(), timeout=60) == (1, "1")
    assert conveyor.get(two.threads.remote(), timeout=60) == (2, "2")


def test_output_reaches_the_driver_with_the_actors_name(capsys, wait_until):
    actor = conveyor.remote(Place).options(name="Talker").remote()
    conveyor.get(actor.say.remote("to out", "to err"), timeout=WAIT)
    seen = {"out": "", "err": ""}

    def both():
        captured = capsys.readouterr()
        seen["out"] += captured.out
        seen["err"] += captured.err
        return "to out" in seen["out"] and "to err" in seen["err"]

    wait_until(both, WAIT, "the actor's output")
    # Actors of earlier tests may have said something as well, of their ends.
    for stream, text in seen.items():
        assert re.search(rf"^\(Talker pid=\d+\) to {stream}$", text, re.MULTILINE)
    conveyor.kill(actor)


def test_errors_have_one_base(echo):
    with pytest.raises(ConveyorError):
        conveyor.get(echo.fail.remote("x"), timeout=WAIT)
