"""``await`` on graphs and calls: no flag, any loop, nothing blocked."""

import asyncio
import contextlib
import gc
import os
import sys
import threading
import time
import weakref

import cloudpickle
import pytest
from integration_helpers import WAIT, chain, hold, measured

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, SerializationError, TaskError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


@conveyor.remote
class Actor:
    def echo(self, x):
        return x

    def fail(self, x):
        raise ValueError(x)

    def hold(self, path):
        hold(path)
        return "held"

    def hold_first(self, x, path):
        if x == 0:
            hold(path)
        return x

    def die(self, x):
        os._exit(1)


@pytest.fixture(scope="module")
def a(session):
    return Actor.remote()


@pytest.fixture(scope="module")
def b(session):
    return Actor.remote()


@pytest.fixture(scope="module")
def echo(a, b):
    graph = chain(a.echo, b.echo).compile(depth=4)
    # pytest holds what a fixture gives until after the session's end; a graph holds memory.
    yield weakref.proxy(graph)
    graph.teardown()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


class Ticker:
    """A task that notes the longest time the loop did not run it."""

    async def __aenter__(self):
        self.longest = 0.0
        self.ticks = 0
        self.task = asyncio.create_task(self.tick())
        return self

    async def tick(self):
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            self.longest = max(self.longest, now - last)
            self.ticks += 1
            last = now

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def test_execute_async_and_await(echo):
    async def main():
        for i in range(50):
            ref = await echo.execute_async(i)
            assert await ref == i
            assert await ref == i

    run(main())


def test_gather_of_many(echo, a):
    async def one(i):
        return await (await echo.execute_async(i))

    async def main():
        assert await asyncio.gather(*[one(i) for i in range(300)]) == list(range(300))
        refs = [a.echo.remote(i) for i in range(300)]
        assert await asyncio.gather(*refs) == list(range(300))

    run(main())


def test_several_outputs(a, b):
    with InputNode() as inp:
        dag = MultiOutputNode([a.echo.bind(inp), b.echo.bind(inp), a.echo.bind(inp)])

    async def main(graph):
        async def one(i):
            return await asyncio.gather(*await graph.execute_async(i))

        for results in zip(*await asyncio.gather(*[one(i) for i in range(60)]), strict=True):
            assert list(results) == list(range(60))

    with dag.compile(depth=3) as graph:
        run(main(graph))


def test_get_and_await_mixed(echo, a):
    async def main():
        awaited = await echo.execute_async("x")
        assert conveyor.get(awaited, timeout=WAIT) == "x"
        assert await awaited == "x"
        refs = [echo.execute(i) for i in range(3)]
        assert await refs[2] == 2
        assert conveyor.get(refs, timeout=WAIT) == [0, 1, 2]
        call = a.echo.remote("call")
        assert await call == "call"
        assert await conveyor.put("put") == "put"

    run(main())


def test_wait_and_shield_and_as_completed(a, b, latches):
    go = latches()

    async def main():
        slow = asyncio.ensure_future(get(a.hold.remote(go.path)))
        fast = asyncio.ensure_future(get(b.echo.remote("fast")))
        done, pending = await asyncio.wait({slow, fast}, return_when=asyncio.FIRST_COMPLETED)
        assert (done, pending) == ({fast}, {slow})
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(slow), 0.05)
        go.open()
        assert await slow == "held"

    async def get(ref):
        return await ref

    run(main())


def test_errors(a, echo):
    async def main():
        with pytest.raises(ValueError, match="no") as caught:
            await a.fail.remote("no")
        assert isinstance(caught.value, TaskError)
        with chain(a.fail).compile() as graph:
            refs = [await graph.execute_async(str(i)) for i in range(5)]
            results = await asyncio.gather(*refs, return_exceptions=True)
            assert all(isinstance(r, ValueError) for r in results)
        with pytest.raises(SerializationError):
            await echo.execute_async(i for i in range(3))
        with pytest.raises(TypeError):
            await echo.execute_async(1, 2)
        # One bad input harms no later one.
        assert await (await echo.execute_async("after")) == "after"

    run(main())


def test_death_while_awaiting(a):
    victim = Actor.remote()

    async def main():
        with chain(a.echo, victim.die).compile() as graph:
            ref = await graph.execute_async(1)
            with pytest.raises(ActorDiedError):
                await ref
            with pytest.raises(ActorDiedError):
                await graph.execute_async(2)
        with pytest.raises(ActorDiedError):
            await victim.echo.remote(1)

    run(main())


def test_the_loop_is_not_blocked_while_waiting(a, b, latches):
    go = latches()

    async def main():
        with InputNode() as inp:
            dag = b.echo.bind(a.hold.bind(inp))
        with dag.compile(depth=1) as graph:
            async with Ticker() as ticker:
                ref = await graph.execute_async(go.path)
                room = asyncio.create_task(graph.execute_async(go.path))
                waiter = asyncio.ensure_future(get(ref))
                await until(lambda: ticker.ticks >= 30)
                assert not room.done()
                assert not waiter.done()
                go.open()
                assert await waiter == "held"
                assert await (await room) == "held"
            # A blocked loop would stand still until the latch opened, which it would never do.
            assert ticker.longest < WAIT / 2

    async def get(ref):
        return await ref

    async def until(condition):
        while not condition():
            await asyncio.sleep(0.005)

    run(main())


def test_more_executions_than_fit(a, latches):
    go = latches()
    with InputNode() as inp:
        dag = a.hold_first.bind(inp, go.path)

    async def main(graph):
        tasks = [asyncio.create_task(graph.execute_async(i)) for i in range(20)]
        async with Ticker() as ticker:
            while ticker.ticks < 10 or sum(t.done() for t in tasks) < 2:
                await asyncio.sleep(0.002)
        assert sum(t.done() for t in tasks) == 2
        go.open()
        refs = await asyncio.gather(*tasks)
        assert sorted(await asyncio.gather(*refs)) == list(range(20))

    with dag.compile(depth=2) as graph:
        run(main(graph))


def test_loops_in_other_threads_while_the_main_thread_waits(echo, a, b, latches):
    go = latches()
    failures = []

    async def work(k):
        for i in range(100):
            ref = await echo.execute_async((k, i))
            assert await ref == (k, i)
            assert await b.echo.remote((k, i)) == (k, i)

    def thread(k):
        try:
            run(work(k))
        except BaseException as error:
            failures.append(error)
        finally:
            finished.append(k)
            if len(finished) == 3:
                go.open()

    finished = []
    held = Actor.remote()
    ref = held.hold.remote(go.path)
    threads = [threading.Thread(target=thread, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    # Parked in get all the while; the last thread lets it go.
    assert conveyor.get(ref, timeout=60) == "held"
    for t in threads:
        t.join(WAIT)
    assert not failures


def test_threads_wait_while_the_main_threads_loop_awaits(echo, latches):
    failures = []

    def thread(k):
        try:
            for i in range(200):
                assert conveyor.get(echo.execute((k, i)), timeout=WAIT) == (k, i)
        except BaseException as error:
            failures.append(error)

    async def main():
        threads = [threading.Thread(target=thread, args=(k,)) for k in range(3)]
        for t in threads:
            t.start()
        for i in range(200):
            assert await (await echo.execute_async(i)) == i
        for t in threads:
            await asyncio.to_thread(t.join, WAIT)

    run(main())
    assert not failures


def test_two_loops_await_the_same_reference(a, latches):
    go = latches()
    ref = a.hold.remote(go.path)
    results = []
    ready = threading.Barrier(3)

    async def main():
        ready.wait(WAIT)
        results.append(await ref)

    threads = [threading.Thread(target=lambda: run(main())) for _ in range(2)]
    for t in threads:
        t.start()
    ready.wait(WAIT)
    go.open()
    for t in threads:
        t.join(WAIT)
    assert results == ["held"] * 2


def test_cancelling_an_awaiting_task(echo, a, latches):
    go = latches()

    async def get(ref):
        return await ref

    with InputNode() as inp:
        graph = a.hold.bind(inp).compile(cancel_with_await=False)

    async def main():
        ref = graph.execute(go.path)
        for _ in range(10):
            task = asyncio.create_task(get(ref))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(get(ref), 0.02)
        go.open()
        # The result is not lost with the task that awaited it.
        assert await ref == "held"
        assert await (await echo.execute_async(1)) == 1

    run(main())


def test_cancelling_a_waiting_submission(a, latches):
    go = latches()
    with InputNode() as inp:
        dag = a.hold_first.bind(inp, go.path)

    async def main(graph):
        first = await graph.execute_async(0)
        waiting = asyncio.create_task(graph.execute_async("cancelled"))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go.open()
        assert await first == 0
        assert await (await graph.execute_async(2)) == 2

    with dag.compile(depth=1) as graph:
        run(main(graph))


def test_several_loops_one_after_the_other(echo, a, wait_until, opened_since):
    async def main(i):
        refs = [await echo.execute_async((i, k)) for k in range(5)]
        assert await asyncio.gather(*refs, a.echo.remote(i)) == [*((i, k) for k in range(5)), i]

    opened = opened_since()
    for i in range(30):
        run(main(i))
    assert conveyor.get(echo.execute("sync"), timeout=WAIT) == "sync"
    gc.collect()
    wait_until(lambda: len(opened()) <= 2, what="what is closed a moment later")


def test_a_reference_made_in_one_loop_awaited_in_the_next(a, latches):
    go = latches()

    with InputNode() as inp:
        graph = a.hold.bind(inp).compile(cancel_with_await=False)

    async def start():
        ref = graph.execute(go.path)
        task = asyncio.ensure_future(get(ref))
        await asyncio.sleep(0.02)
        assert not task.done()
        return ref  # asyncio.run cancels the task

    async def get(ref):
        return await ref

    ref = run(start())
    go.open()
    assert run(get(ref)) == "held"


def test_dropped_references(echo):
    async def main():
        for i in range(200):
            await echo.execute_async(i)
        assert await (await echo.execute_async("last")) == "last"

    run(main())


def test_uvloop_like_use_without_get_event_loop(echo):
    # A loop of one's own, closed by hand.
    loop = asyncio.new_event_loop()
    try:
        ref = loop.run_until_complete(echo.execute_async(5))
        assert loop.run_until_complete(asyncio.wait_for(get(ref), WAIT)) == 5
    finally:
        loop.close()


async def get(ref):
    return await ref


@measured
def test_an_idle_awaiting_loop_uses_no_cpu(a, latches):
    """What threads of tests before this one still do is counted, too."""
    go = latches()

    async def main():
        task = asyncio.ensure_future(get(a.hold.remote(go.path)))
        await asyncio.sleep(0.05)
        before = time.process_time()
        await asyncio.sleep(0.5)
        used = time.process_time() - before
        go.open()
        await task
        return used

    assert run(main()) < 0.1


@conveyor.remote
class Leaver:
    async def wait(self, x):
        await asyncio.sleep(60)

    async def leave(self, x):
        sys.exit(3)

    async def echo(self, x):
        return x

    def leave_now(self, x):
        sys.exit(3)


@pytest.mark.parametrize("methods", [["leave"], ["leave_now"], ["echo", "leave_now"]])
def test_sys_exit_of_an_actor_is_no_cancellation_of_what_else_it_runs(methods):
    leaver = Leaver.remote()
    waiting = chain(leaver.wait).compile()
    leaving = chain(*(getattr(leaver, method) for method in methods)).compile()
    refs = [waiting.execute(1), leaver.wait.remote(1), leaving.execute(1)]
    for ref in refs:
        with pytest.raises(ActorDiedError) as caught:
            ref.get(timeout=WAIT)
        assert caught.value.exit_code in (3, None)
    for graph in (waiting, leaving):
        graph.teardown()


@conveyor.remote
class LastStep:
    """Writes down what it begins: its process cannot be asked any more."""

    def __init__(self, path, sleeps):
        self.path, self.sleeps = path, sleeps

    async def first(self, latch):
        hold(latch)  # what comes meanwhile is found when the loop looks again
        # In the turn of the loop in which that is told to who serves it, this goes on before it.
        for _ in range(self.sleeps):
            await asyncio.sleep(0)

    def leave(self, x):
        self.note("leave")
        sys.exit(3)

    def note(self, what):
        with open(self.path, "a") as file:
            file.write(f"{what}\n")


@pytest.mark.parametrize("sleeps", range(5))
@pytest.mark.parametrize("sent", ["an execution", "a call"])
def test_nothing_is_begun_after_sys_exit_of_an_actor_with_a_loop(tmp_path, latches, sent, sleeps):
    go, path = latches(), tmp_path / "begun"
    actor = LastStep.remote(str(path), sleeps)
    with InputNode() as inp:
        dag = MultiOutputNode([actor.first.bind(inp), actor.leave.bind(inp)])
    with dag.compile(depth=4) as graph:
        refs = graph.execute(go.path)
        later = graph.execute(go.path)[1] if sent == "an execution" else actor.note.remote("call")
        go.open()
        with pytest.raises(ActorDiedError):
            refs[1].get(timeout=WAIT)
        with contextlib.suppress(ActorDiedError):  # a call may have had its turn before
            later.get(timeout=WAIT)
    begun = path.read_text().split()
    assert begun.count("leave") == 1
    assert begun[-1] == "leave"


@conveyor.remote
class Eager:
    """Its loop runs what a task does up to its first wait before the task is made."""

    def __init__(self):
        self.calls = 0

    async def set_up(self):
        loop = asyncio.get_running_loop()
        factory = getattr(asyncio, "eager_task_factory", None)  # since Python 3.12
        loop.set_task_factory(factory or _eager)

    async def add(self, x):
        self.calls += 1
        return x + 1

    async def fail(self, x):
        raise ValueError(x)

    def echo(self, x):
        return x

    async def count(self):
        return self.calls


def _eager(loop, coroutine, **options):
    # Only what runs a step of a graph: other tasks must be ones for asyncio.current_task().
    if "start_step" not in getattr(coroutine, "__qualname__", ""):
        return asyncio.Task(coroutine, loop=loop, **options)
    future = loop.create_future()
    try:
        coroutine.send(None)
    except StopIteration as end:
        future.set_result(end.value)
    return future


@pytest.mark.parametrize("plain_first", [False, True])
def test_a_coroutine_that_ends_before_it_has_been_started(plain_first):
    actor = Eager.remote()
    conveyor.get(actor.set_up.remote())
    with InputNode() as inp:
        node = actor.echo.bind(inp) if plain_first else inp
        dag = actor.add.bind(node)
    with dag.compile() as graph:
        assert [conveyor.get(graph.execute(i), timeout=WAIT) for i in range(3)] == [1, 2, 3]
    assert conveyor.get(actor.count.remote()) == 3
    with InputNode() as inp:
        node = actor.echo.bind(inp) if plain_first else inp
        dag = actor.fail.bind(node)
    with dag.compile() as graph:
        for i in range(2):
            with pytest.raises(ValueError, match=str(i)):
                conveyor.get(graph.execute(i), timeout=WAIT)
