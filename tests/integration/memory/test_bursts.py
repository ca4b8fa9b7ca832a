"""More values than the memory cap has room for: they wait for what others are about to let go of."""

import asyncio
import os
import signal
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest
from integration_helpers import WAIT, compiled, get, hold

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import (
    ActorDiedError,
    ArenaFullError,
    CapacityError,
    DeadlineExceededError,
    DeadlockError,
    SessionEndedError,
    TaskError,
    WaitTimeoutError,
)
from conveyor.runtime import context

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MB = 1 << 20
CAP = 32 * MB
#: Of which seven fit.
SIZE = 4 * MB
COUNT = 30


def value(i):
    return np.full(SIZE // 8, float(i))


@conveyor.remote
class Actor:
    def __init__(self):
        self.kept = []

    def ready(self):
        pass

    def first(self, x):
        time.sleep(0.002)
        return float(x[0])

    def two(self, x, y):
        return float(y[0])

    def held(self, x, go):
        hold(go)
        return float(x[0])

    def keep(self, x):
        self.kept.append(x)

    def relay(self, other):
        return [
            float(r) for r in conveyor.get([other.first.remote(value(i)) for i in range(COUNT)])
        ]

    def meet(self, other, me):
        """Give ``other`` most of the memory, for a call that waits for this one to end."""
        waits = other.back.remote(np.zeros(3 * CAP // 4 // 8), me)
        late = conveyor.get(other.first.remote(np.zeros(CAP // 2 // 8)))
        return late, conveyor.get(waits)

    def back(self, x, other):
        return conveyor.get(other.first.remote(x[:1]))


@conveyor.remote
class Async:
    async def first(self, x):
        await asyncio.sleep(0.002)
        return float(x[0])

    async def relay(self, other):
        return await asyncio.gather(*[other.first.remote(value(i)) for i in range(COUNT)])


@pytest.fixture(scope="module", autouse=True)
def session():
    conveyor.init(arena_bytes=CAP)
    yield
    conveyor.shutdown()


@pytest.fixture(autouse=True)
def nobody_waits_afterwards(wait_until):
    yield
    runtime = context.running()
    if runtime is not None:
        wait_until(lambda: not runtime.process.shortage.waits)


def actors(count=1, **options):
    made = [Actor.options(**options).remote() for _ in range(count)]
    get([actor.ready.remote() for actor in made])
    return made


def waits():
    return bool(context.running().process.shortage.waits)


def of_calls(actor):
    return get([actor.first.remote(value(i)) for i in range(COUNT)])


def awaited_calls(actor):
    async def all_of_them():
        return await asyncio.gather(*[actor.first.remote(value(i)) for i in range(COUNT)])

    return asyncio.run(all_of_them())


def of_executions(actor, **options):
    with compiled(lambda inp: actor.first.bind(inp), depth=COUNT, **options) as graph:
        return get([graph.execute(value(i)) for i in range(COUNT)])


def of_executions_at_its_own_cap(actor):
    return of_executions(actor, memory_bytes=3 * SIZE)


def awaited_executions(actor):
    async def all_of_them(graph):
        refs = [await graph.execute_async(value(i)) for i in range(COUNT)]
        return [await ref for ref in refs]

    with compiled(lambda inp: actor.first.bind(inp), depth=COUNT) as graph:
        return asyncio.run(all_of_them(graph))


BURSTS = (
    of_calls,
    awaited_calls,
    of_executions,
    of_executions_at_its_own_cap,
    awaited_executions,
)


@pytest.mark.parametrize("burst", BURSTS, ids=lambda burst: burst.__name__)
def test_a_burst_waits_for_what_its_consumers_free(burst):
    (actor,) = actors()
    assert burst(actor) == list(map(float, range(COUNT)))


def test_so_do_those_of_several_threads_and_of_consumers_that_run_several_calls():
    one, several, coroutines = (*actors(), *actors(max_concurrency=3), Async.remote())
    found = {}
    threads = [
        threading.Thread(target=lambda a=actor: found.setdefault(a, of_calls(a)))
        for actor in (one, several, coroutines, one)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[a] for a in (one, several, coroutines)] == [list(map(float, range(COUNT)))] * 3


def test_and_those_of_several_actors_at_once():
    one, other, consumer, last = actors(4)
    sources = [
        one.relay.remote(consumer),
        other.relay.remote(last),
        Async.remote().relay.remote(last),
    ]
    assert get(sources) == [list(map(float, range(COUNT)))] * 3


def test_what_waits_is_as_it_was_when_it_was_given(tmp_path):
    (actor,) = actors()
    x = np.empty(SIZE // 8)
    refs = []
    for i in range(12):
        x[:] = i
        refs.append(actor.held.remote(x, tmp_path / "go"))
    x[:] = -1
    assert waits()
    (tmp_path / "go").touch()
    assert get(refs) == list(map(float, range(12)))


def test_what_is_larger_than_the_cap_is_an_error_at_once(tmp_path):
    actor, other = actors(2)
    busy = [actor.held.remote(value(i), tmp_path / "go") for i in range(9)]
    with pytest.raises(ArenaFullError, match="larger than the session's memory cap"):
        other.first.remote(np.zeros(CAP // 8))
    with (
        compiled(lambda inp: other.first.bind(inp), memory_bytes=SIZE) as graph,
        pytest.raises(ArenaFullError, match="larger than the graph's memory cap"),
    ):
        graph.execute(value(0))
    (tmp_path / "go").touch()
    get(busy)


def test_where_nobody_will_free_anything_it_is_an_error():
    (hoard,) = actors()
    refs = [hoard.keep.remote(value(i)) for i in range(7)]
    with pytest.raises(
        ArenaFullError, match="holds 7 values"
    ) as caught:  # at the latest when all are done
        get([*refs, hoard.keep.remote(value(7))])
    assert caught.value.held[0].bytes > 7 * SIZE
    with (
        compiled(lambda inp: hoard.keep.bind(inp)) as graph,
        pytest.raises(ArenaFullError, match="holds 7 values"),
    ):
        graph.execute(value(0))
    conveyor.kill(hoard)


def test_a_timeout_says_who_holds_the_memory_and_the_wait_can_be_tried_again(tmp_path):
    holder, other = actors(2)
    refs = [holder.held.remote(value(i), tmp_path / "go") for i in range(7)]
    late = other.first.remote(value(7))
    with pytest.raises(WaitTimeoutError, match="1 call waits at the caller for memory") as caught:
        conveyor.get(late, timeout=0.05)
    assert "holds 7 values" in str(caught.value)
    assert "raise the cap" in str(caught.value)
    with compiled(lambda inp: other.first.bind(inp)) as graph:
        with pytest.raises(WaitTimeoutError, match=r"(?s)waiting for memory .* holds 7 values"):
            graph.execute(value(8), timeout=0.05)
        with pytest.raises(DeadlineExceededError, match="for memory"):
            graph.execute(value(8), deadline=0.05)
        with pytest.raises(CapacityError, match="memory cap"):
            graph.try_execute(value(8))
        (tmp_path / "go").touch()
        assert get([late, graph.execute(value(8)), *refs]) == [7, 8, *range(7)]


@pytest.mark.parametrize("parts", [1, 2])
def test_tries_that_fail_wake_nobody(tmp_path, parts):
    """What a try has got by then it gives back, which is no news to who tries."""
    holder, other = actors(2)
    refs = [holder.held.remote(value(i), tmp_path / "go") for i in range(7)]
    # Of two only the first has room.
    given = [value(8)[: SIZE // 8 - (parts - 1) * SIZE // 32].copy() for _ in range(parts)]
    with InputNode() as inp:
        dag = other.first.bind(inp) if parts == 1 else other.two.bind(inp[0], inp[1])
    with dag.compile(memory_bytes=4 * SIZE) as graph:
        begun, used = time.monotonic(), time.process_time()
        with pytest.raises(WaitTimeoutError, match="for memory"):
            graph.execute(*given, timeout=1)
        assert time.monotonic() - begun < 10
        assert time.process_time() - used < 0.5
        (tmp_path / "go").touch()
        assert get([graph.execute(*given), *refs]) == [8, *range(7)]


def test_the_death_of_who_holds_it_frees_it(tmp_path):
    holder, other = actors(2)
    held = [holder.held.remote(value(i), tmp_path / "go") for i in range(9)]
    late = other.first.remote(value(7))
    assert waits()
    conveyor.kill(holder)
    assert get(late) == 7
    for ref in held:
        with pytest.raises(ActorDiedError):
            get(ref)


def test_ctrl_c_ends_the_wait_and_nothing_else(tmp_path, wait_until):
    holder, other = actors(2)
    held = [holder.held.remote(value(i), tmp_path / "go") for i in range(7)]

    def press():
        wait_until(waits)
        os.kill(os.getpid(), signal.SIGINT)

    with compiled(lambda inp: other.first.bind(inp)) as graph:
        thread = threading.Thread(target=press)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            graph.execute(value(8))
        thread.join()
        assert not waits()
        (tmp_path / "go").touch()
        assert get(graph.execute(value(9))) == 9
    get(held)


def test_memory_that_only_the_waiting_actor_could_free_is_a_deadlock():
    one, other = actors(2)
    with pytest.raises(TaskError) as caught:
        get(one.meet.remote(other, one))
    assert isinstance(caught.value.cause, DeadlockError)
    assert "holds memory that is needed" in str(caught.value) or "hold memory" in str(caught.value)


def test_a_cancelled_call_waits_no_longer(tmp_path):
    holder, other = actors(2)
    held = [holder.held.remote(value(i), tmp_path / "go") for i in range(7)]
    late, later = other.first.remote(value(7)), other.first.remote(value(8))
    assert waits()
    conveyor.cancel(late)
    (tmp_path / "go").touch()
    assert get(later) == 8
    get(held)


def test_the_session_s_end_ends_the_wait(tmp_path, wait_until):
    holder, other = actors(2)
    for i in range(7):
        holder.held.remote(value(i), tmp_path / "go")
    late = other.first.remote(value(7))
    ended = []

    def execute(graph):
        with pytest.raises(SessionEndedError):
            graph.execute(value(8))
        ended.append(graph)

    graph = compiled(lambda inp: other.first.bind(inp))
    thread = threading.Thread(target=execute, args=(graph,))
    thread.start()
    wait_until(lambda: len(context.running().process.shortage.waits) == 2)
    end = threading.Thread(target=conveyor.shutdown)
    end.start()
    with pytest.raises(SessionEndedError):
        get(late)
    thread.join(WAIT)
    (tmp_path / "go").touch()  # the holder's grace need not pass
    end.join()
    assert ended == [graph]
    conveyor.init(arena_bytes=CAP)
