"""Sessions one after the other, and what is left of them: nothing."""

import asyncio
import gc
import os
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import partial

import cloudpickle
import numpy as np
import psutil
import pytest
from integration_helpers import WAIT

import conveyor
from conveyor.dag import InputNode
from conveyor.driver import actors as record
from conveyor.driver import actors as table
from conveyor.exceptions import ActorDiedError, ConveyorError, RuntimeStateError
from conveyor.runtime import context

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def no_session():
    yield
    conveyor.shutdown()


@conveyor.remote
class Actor:
    def echo(self, x):
        return x

    def pid(self):
        return os.getpid()

    def ones(self, n):
        return np.ones(n)

    def spawn(self):
        import subprocess

        return subprocess.Popen(["sleep", "60"]).pid

    def hold(self, x):
        threading.Event().wait(60)

    def take(self, handles):
        self.taken = handles

    def ask(self, number):
        return conveyor.get(self.taken[number].pid.remote(), timeout=WAIT)


def use(n=2):
    actors = [Actor.remote() for _ in range(n)]
    with InputNode() as inp:
        x = inp
        for actor in actors:
            x = actor.echo.bind(x)
    graph = x.compile()
    assert conveyor.get(graph.execute(1), timeout=WAIT) == 1
    array = conveyor.get(actors[0].ones.remote(200_000), timeout=WAIT)
    assert array.sum() == 200_000
    return actors, graph


def test_shutdown_without_a_session():
    assert not conveyor.is_initialized()
    conveyor.shutdown()
    assert not conveyor.is_initialized()


def test_a_session_leaves_nothing(leaves_nothing):
    use(0 + 1)
    conveyor.shutdown()  # imports and the like have happened
    with leaves_nothing():
        use()
        assert conveyor.is_initialized()
        conveyor.shutdown()
        assert not conveyor.is_initialized()


def test_nothing_is_kept_for_links_to_actors_that_have_ended(wait_until):
    """An actor that lives long may call any number of others."""
    caller = Actor.remote()
    table = context.current().table
    record = table.record(caller._id)
    for number in range(3):
        called = Actor.remote()
        conveyor.get(caller.take.remote({number: called}), timeout=WAIT)
        assert conveyor.get(caller.ask.remote(number), timeout=WAIT)
        assert len(record.mailboxes) == len(table.record(called._id).callers) == 1
        conveyor.kill(called)
        wait_until(lambda: not record.mailboxes, WAIT)


def test_a_session_leaves_nothing_though_its_objects_are_held(leaves_nothing, wait_until):
    with leaves_nothing():
        kept = use()
        conveyor.shutdown()
        del kept
    before = set(psutil.Process().children(recursive=True))
    kept = use()
    conveyor.shutdown()
    # Handles and graphs of the ended session hold no process.
    wait_until(lambda: before.issuperset(psutil.Process().children(recursive=True)))
    del kept


def test_an_event_loop_that_outlives_the_session_leaves_no_descriptor(leaves_nothing):
    async def wait_a_little(ref):
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(_awaited(ref)), 0.01)

    with leaves_nothing():
        actor = Actor.remote()
        ref = actor.hold.remote(1)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(wait_a_little(ref))
        bell = context.current().inbox
        conveyor.shutdown()  # the loop is still watching the doorbell
        (waiting,) = asyncio.all_tasks(loop)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(waiting)
        loop.close()
        del ref, loop, waiting
    assert bell.eventfd < 0


async def _awaited(ref):
    return await ref


def test_many_sessions(leaves_nothing):
    with leaves_nothing():
        for _ in range(5):
            conveyor.init()
            use(1)
            conveyor.shutdown()


def test_shutdown_ends_busy_and_stopped_actors(leaves_nothing):
    with leaves_nothing():
        a, b = Actor.remote(), Actor.remote()
        pid = conveyor.get(b.pid.remote(), timeout=WAIT)
        a.hold.remote(1)
        os.kill(pid, signal.SIGSTOP)
        del a, b
        conveyor.shutdown()


def test_shutdown_while_a_graph_runs(leaves_nothing):
    with leaves_nothing():
        actor = Actor.remote()
        with InputNode() as inp:
            graph = actor.hold.bind(inp).compile()
        outcome = []
        thread = threading.Thread(target=_get_into, args=(graph.execute(1), outcome))
        thread.start()
        conveyor.shutdown()
        thread.join(WAIT)
        assert not thread.is_alive()
        assert isinstance(outcome.pop(), ConveyorError)
        del actor, graph, inp, thread


def _get_into(ref, outcome):
    try:
        outcome.append(conveyor.get(ref, timeout=WAIT))
    except BaseException as error:
        outcome.append(error.with_traceback(None))


def test_calls_and_gets_after_shutdown_are_clear_errors():
    actors, graph = use()
    ref = actors[0].echo.remote(1)
    got = actors[0].echo.remote(2)
    assert conveyor.get(got, timeout=WAIT) == 2
    conveyor.shutdown()
    with pytest.raises(RuntimeStateError):
        actors[0].echo.remote(1)
    with pytest.raises(ConveyorError):
        graph.execute(1)
    with pytest.raises(RuntimeStateError), InputNode() as inp:
        actors[0].echo.bind(inp)
    assert got.get() == 2
    with suppress(ConveyorError):  # or it had come already
        assert ref.get(timeout=WAIT) == 1


def test_handles_of_an_earlier_session_are_refused():
    old, graph = use(1)
    conveyor.shutdown()
    new, _ = use(1)
    with pytest.raises(RuntimeStateError, match="shut down"):
        old[0].echo.remote(1)
    with pytest.raises(RuntimeStateError):
        conveyor.kill(old[0])
    with pytest.raises(ConveyorError, match="shut down"):
        new[0].echo.remote(old[0])
    with pytest.raises(ConveyorError):
        graph.execute(1)
    del old, graph
    gc.collect()
    # Garbage of the old session ends no actor of the new one.
    assert conveyor.get(new[0].echo.remote(1), timeout=WAIT) == 1


def test_thirty_actors_one_after_the_other(fresh_descriptors, wait_until):
    Actor.remote()
    before = fresh_descriptors()
    for i in range(30):
        actor = Actor.remote()
        assert conveyor.get(actor.echo.remote(i), timeout=WAIT) == i
        if i % 2:
            conveyor.kill(actor)
        del actor
    last = Actor.remote()
    conveyor.get(last.echo.remote(1), timeout=WAIT)
    end = 5 + before

    def few():
        gc.collect()
        conveyor.get(last.echo.remote(1), timeout=WAIT)  # any use of the session tidies up
        return fresh_descriptors() <= end + 20

    wait_until(few, WAIT, f"{before} descriptors or a few more")


@pytest.fixture
def fresh_descriptors():
    return lambda: len(os.listdir("/proc/self/fd"))


def test_values_are_freed_when_they_are_garbage():
    actor = Actor.remote()
    array = conveyor.get(actor.ones.remote(1 << 20), timeout=WAIT)
    alive = weakref.ref(array)
    del array
    assert alive() is None


def test_no_zombies(wait_until):
    actors = [Actor.remote() for _ in range(3)]
    pids = conveyor.get([a.pid.remote() for a in actors], timeout=WAIT)
    for actor in actors:
        conveyor.kill(actor)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), WAIT, "the end of the actors")


def test_kill_minus_nine_of_everything_leaves_no_shared_memory(scripts, wait_until):
    before = set(os.listdir("/dev/shm"))
    program = """
        import os, psutil, time
        import conveyor
        from conveyor.dag import InputNode

        @conveyor.remote
        class Actor:
            def ones(self, n):
                return bytes(n)
            def hold(self):
                time.sleep(60)

        actors = [Actor.remote() for _ in range(3)]
        with InputNode() as inp:
            graph = actors[0].ones.bind(inp).compile()
        value = conveyor.get(graph.execute(1 << 20))
        print(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
        conveyor.get(actors[1].hold.remote())
    """
    driver = scripts.start(program)
    pids = [driver.pid, *map(int, driver.stdout.readline().split())]
    assert len(pids) >= 5  # driver, fork server, three actors
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.wait(WAIT)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), WAIT, "the end of everything")
    left = [n for n in set(os.listdir("/dev/shm")) - before if "conveyor" in n or "psm" in n]
    assert not left


def test_two_drivers_at_the_same_time(scripts):
    program = """
        import conveyor

        @conveyor.remote
        class Actor:
            def echo(self, x):
                return x

        a = Actor.options(name="same name").remote()
        for i in range(300):
            assert conveyor.get(a.echo.remote(i), timeout=60) == i
        print("done")
    """
    drivers = [scripts.start(program, name=f"driver{i}.py") for i in range(2)]
    for driver in drivers:
        out, err = driver.communicate(timeout=200)
        assert out == "done\n", err


def test_what_is_kept_of_an_actor_that_is_gone_is_small():
    import tracemalloc

    class Plain:
        def echo(self, x):
            return x

    start = conveyor.remote(Plain).remote

    def one_more():
        actor = start()
        conveyor.get(actor.echo.remote(1), timeout=WAIT)
        conveyor.kill(actor)

    count = 20
    one_more()
    tracemalloc.start()
    try:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(count):
            one_more()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / count < 12_000


def test_who_is_told_of_ends_waits_for_none(fresh_session, wait_until, monkeypatch):
    """The thread that is told of an actor's end also lets go of handles: it must not wait for an end's code,
    not even for the first one, of which it has told nobody yet."""
    monkeypatch.setattr(record, "_EXIT_CODE_WAIT", 60.0)
    actor, other = Actor.remote(), Actor.remote()
    pids = conveyor.get([actor.pid.remote(), other.pid.remote()])
    deaths = context.current().process.process_table.deaths
    server = psutil.Process(pids[0]).parent()
    server.suspend()  # so that no end is told
    try:
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: context.current().process.process_table.deaths > deaths)
        del actor
        wait_until(lambda: not context.current().cleanup._left)  # it is being let go of
    finally:
        server.resume()
    begun = time.monotonic()
    del other  # which is let go of behind the first one
    wait_until(lambda: not psutil.pid_exists(pids[1]))
    assert time.monotonic() - begun < 30


def _remembers(actors):
    gc.collect()
    return len(list(context.current().table)) == actors


def test_of_dead_actors_that_were_passed_on_the_last_are_remembered(monkeypatch, wait_until):
    monkeypatch.setattr(table, "DEAD_REMEMBERED", 4)
    friend = Actor.remote()
    for count in (2, 9):
        actors = [Actor.remote() for _ in range(count)]
        conveyor.get(friend.take.remote(actors))
        for actor in actors:
            conveyor.kill(actor)
            with pytest.raises(ActorDiedError):
                conveyor.get(actor.pid.remote(), timeout=WAIT)
        del actor
        while actors:  # the first is the first to be forgotten
            del actors[0]
        wait_until(partial(_remembers, 1 + min(count, 4)))
        for number, words in ((0, "ended long ago" if count > 4 else "killed"), (-1, "killed")):
            with pytest.raises(ActorDiedError, match=words):
                conveyor.get(friend.ask.remote(number), timeout=WAIT)
