"""Cancelling executions and calls, and executions with a deadline."""

import asyncio
import concurrent.futures
import gc
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import inside
import numpy as np
import pytest
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    CapacityError,
    ConveyorError,
    DeadlineExceededError,
    ExecutionCancelledError,
    GraphError,
    WaitTimeoutError,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Stage:
    def __init__(self):
        self.seen = []

    def echo(self, x):
        self.seen.append(x)
        return x

    def hold(self, x, started, go):
        self.seen.append(("hold", x))
        Path(started).touch()
        hold(go)
        return x

    def noted(self):
        seen, self.seen = self.seen, []
        return seen

    def pid(self):
        return os.getpid()

    def big(self, x, started, go):
        self.hold(x, started, go)
        return np.full(200_000, x)

    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds

    @conveyor.method(num_returns=2)
    def two(self, started, go):
        self.hold(0, started, go)
        return 1, 2


@conveyor.remote
class Coroutines:
    def __init__(self):
        self.seen = []

    async def hold(self, x, started=None):
        self.seen.append(("begins", x))
        if started:
            Path(started).touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.seen.append(("cancelled", x))
            raise
        return x

    async def stubborn(self, x, started):
        Path(started).touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "cleaned up"

    async def echo(self, x):
        return x

    async def noted(self):
        seen, self.seen = self.seen, []
        return seen


class Held:
    """A chain of two actors whose first one is held."""

    def __init__(self, latches, make=Stage, depth=4):
        self.a, self.b = make.remote(), Stage.remote()
        self.started, self.go = latches(), latches()
        with InputNode() as inp:
            self.dag = self.b.echo.bind(self.a.hold.bind(inp, self.started.path, self.go.path))
        self.graph = self.dag.compile(depth=depth, name="held")


pytestmark = pytest.mark.usefixtures("session")

#: Deadlines to be tried in turn, until one is time enough on this machine for what comes before it.
SLOWER = (0.3, 1.5, 8.0, 40.0)


# Graphs


def test_a_cancelled_execution_raises_at_once_and_its_other_tasks_are_skipped(latches, wait_until):
    held = Held(latches)
    running, queued = held.graph.execute(1), held.graph.execute(2)
    wait_until(lambda: held.started.is_open)
    assert not running.cancelled()
    assert running.cancel()
    assert queued.cancel()
    for ref, number in ((running, 0), (queued, 1)):
        assert ref.done()
        assert ref.cancelled()
        assert not ref.cancel()
        for _ in range(2):
            with pytest.raises(ExecutionCancelledError, match=f"held, execution {number} "):
                ref.get()
        with pytest.raises(ConveyorError):
            ref.get()
        with pytest.raises(concurrent.futures.CancelledError):
            ref.get()
    held.go.open()
    # The method that ran was not interrupted; nothing else of the two was run.
    assert get(held.graph.execute(3)) == 3
    assert get(held.a.noted.remote()) == [("hold", 1), ("hold", 3)]
    assert get(held.b.noted.remote()) == [3]


def test_depth_comes_back_and_nothing_is_kept(latches, wait_until):
    a = Stage.remote()
    with InputNode() as inp:
        graph = a.echo.bind(inp).compile(depth=3)
    for i in range(1000):
        ref = graph.execute(i)
        if i % 3:
            ref.cancel()
        else:
            assert get(ref) == i
    del ref
    assert get([graph.execute(i) for i in range(3)]) == [0, 1, 2]
    inside.window_of(graph).drain()
    assert inside.window_of(graph).stashed == 0


def test_a_done_execution_cannot_be_cancelled():
    a = Stage.remote()
    with InputNode() as inp:
        graph = a.echo.bind(inp).compile()
    ref = graph.execute(1)
    assert get(ref) == 1
    assert not ref.cancel()
    assert not ref.cancelled()
    there = graph.execute(2)
    conveyor.wait([there], timeout=WAIT)
    assert not there.cancel()
    assert get(there) == 2


def test_who_waits_is_woken(latches, wait_until):
    held = Held(latches)
    ref = held.graph.execute(1)
    outcomes = []

    def wait(how):
        try:
            how()
        except BaseException as error:
            outcomes.append(type(error))

    def awaited():
        async def main():
            await ref

        asyncio.run(main())

    waits = [
        ref.get,
        lambda: ref.get(timeout=WAIT),
        lambda: conveyor.get([ref]),
        awaited,
        lambda: (conveyor.wait([ref], timeout=WAIT), ref.get(timeout=0)),
    ]
    threads = [threading.Thread(target=wait, args=(how,)) for how in waits]
    for thread in threads:
        thread.start()
    wait_until(lambda: held.started.is_open)
    time.sleep(0.05)  # let them sleep; what is tested does not depend on it
    assert ref.cancel()
    for thread in threads:
        thread.join(WAIT)
    assert outcomes == [ExecutionCancelledError] * len(waits)


def test_all_refs_of_an_execution_are_cancelled(latches, wait_until):
    a, b = Stage.remote(), Stage.remote()
    started, go = latches(), latches()
    with InputNode() as inp:
        held = a.hold.bind(inp, started.path, go.path)
        dag = MultiOutputNode([b.echo.bind(inp), held, inp], effects=[b.echo.bind(held)])
    graph = dag.compile()
    first, second, whole = graph.execute("x")
    wait_until(lambda: started.is_open)
    dropped = graph.execute("y")[1]
    del dropped
    assert not whole.done()  # its effect has not been
    assert first.cancel()
    assert second.cancelled()
    with pytest.raises(ExecutionCancelledError):
        second.get()
    with pytest.raises(ExecutionCancelledError):
        whole.get()
    with pytest.raises(ExecutionCancelledError):
        first.get()
    go.open()
    assert get(graph.execute("z")) == ["z", "z", "z"]
    inside.window_of(graph).drain()
    assert inside.window_of(graph).stashed == 0


def test_a_running_coroutine_is_cancelled(latches, wait_until):
    a, b = Coroutines.remote(), Stage.remote()
    started = latches()
    with InputNode() as inp:
        graph = b.echo.bind(a.hold.bind(inp, started.path)).compile()
    ref = graph.execute("x")
    wait_until(lambda: started.is_open)
    ref.cancel()
    wait_until(lambda: ("cancelled", "x") in get(a.noted.remote()))
    assert get(b.noted.remote()) == []
    with InputNode() as inp:
        other = b.echo.bind(a.echo.bind(inp)).compile()
    assert get(other.execute(1)) == 1
    ref = graph.execute("y")
    ref.cancel()
    graph.teardown()


def test_a_coroutine_may_clean_up(latches, wait_until):
    a = Coroutines.remote()
    started = latches()
    with InputNode() as inp:
        graph = a.stubborn.bind(inp, started.path).compile(depth=1)
    ref = graph.execute(1)
    wait_until(lambda: started.is_open)
    ref.cancel()
    # There is room again only when it has ended.
    second = graph.execute(2, timeout=WAIT)
    assert second.cancel()
    with pytest.raises(ExecutionCancelledError):
        ref.get()


def test_cancelling_many_from_many_threads_leaves_the_graph_usable():
    a, b = Stage.remote(), Coroutines.remote()
    with InputNode() as inp:
        graph = b.echo.bind(a.echo.bind(inp)).compile(depth=8)
    wrong = []

    def work(seed):
        for i in range(150):
            ref = graph.execute((seed, i))
            cancelled = i % 2 == 0 and ref.cancel()
            try:
                value = ref.get(timeout=WAIT)
                if cancelled or value != (seed, i):
                    wrong.append((value, cancelled))
            except ExecutionCancelledError:
                if not cancelled:
                    wrong.append("raised")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert wrong == []
    inside.window_of(graph).drain()
    assert inside.window_of(graph).stashed == 0


def test_large_results_of_cancelled_executions_are_freed(latches, wait_until):
    a = Stage.remote()
    started, go = latches(), latches()
    with InputNode() as inp:
        graph = a.big.bind(inp, started.path, go.path).compile()
    refs = [graph.execute(i) for i in range(3)]
    wait_until(lambda: started.is_open)
    gc.collect()  # what tests before this one have left
    before = conveyor._core.live_leases()
    for ref in refs:
        ref.cancel()
    go.open()
    last = graph.execute(7)
    assert get(last)[0] == 7
    del last
    wait_until(lambda: conveyor._core.live_leases() <= before)


# Deadlines


def test_after_the_deadline_get_says_what_had_run(latches, wait_until):
    a, b, c = Stage.remote(), Stage.remote(), Stage.remote()
    started, go = latches(), latches()
    with InputNode() as inp:
        dag = c.echo.bind(b.hold.bind(a.echo.bind(inp), started.path, go.path))
    graph = dag.compile(name="late")
    for number, seconds in enumerate(SLOWER):
        ref = graph.execute(1, deadline=seconds)
        with pytest.raises(DeadlineExceededError) as caught:
            ref.get()
        message = str(caught.value)
        assert f"late, execution {number}" in message
        assert f"{seconds} s" in message
        if "had run: none" not in message:  # else that was not time enough for the first task
            break
    a_name, b_name, c_name = (actor._id.name for actor in (a, b, c))
    assert f"had run: {a_name}.echo; not in time: {b_name}.hold, {c_name}.echo" in message
    assert isinstance(caught.value, TimeoutError)
    assert not isinstance(caught.value, WaitTimeoutError)
    assert ref.done()
    assert not ref.cancelled()
    assert not ref.cancel()
    go.open()
    assert get(graph.execute(2)) == 2
    assert get(c.noted.remote()) == [2]


def test_what_is_skipped_first_is_named():
    a, b = Stage.remote(), Stage.remote()
    with InputNode() as inp:
        graph = b.echo.bind(a.sleep.bind(inp)).compile()
    ref = graph.execute(0.2, deadline=0.05)
    assert get(graph.execute(0)) == 0  # the one before has come out
    name = a._id.name
    with pytest.raises(DeadlineExceededError, match=f"the first of them was {name}.sleep"):
        ref.get()
    assert get(b.noted.remote()) == [0]


def test_in_time_is_in_time():
    a, b = Stage.remote(), Coroutines.remote()
    with InputNode() as inp:
        graph = b.echo.bind(a.echo.bind(inp)).compile(depth=4)
    refs = [graph.execute(i, deadline=WAIT) for i in range(4)]
    assert get(refs) == [0, 1, 2, 3]
    assert [get(graph.execute(i)) for i in range(20)] == list(range(20))
    for used_up in (0, -3, -0.5):
        late = graph.execute(1, deadline=used_up)
        with pytest.raises(
            DeadlineExceededError, match=r"its deadline \(no time was left\) has passed"
        ):
            late.get()
    # Words of an execution with a deadline are used again by one without.
    assert [get(graph.execute(i)) for i in range(20)] == list(range(20))


def test_a_result_that_came_too_late_is_none_whenever_it_is_requested_for():
    a = Stage.remote()
    with InputNode() as inp:
        graph = a.sleep.bind(inp).compile()
    ref = graph.execute(0.1, deadline=0.03)
    get(graph.execute(0))
    with pytest.raises(DeadlineExceededError, match="had run: none"):
        ref.get()


@pytest.mark.parametrize("inputs", [1, 2])
def test_later_executions_with_deadlines_leave_what_is_known_of_one_that_was_late(inputs):
    a, b = Stage.remote(), Stage.remote()
    with InputNode() as inp:
        if inputs == 1:
            graph = b.echo.bind(a.sleep.bind(inp)).compile(depth=2)
        else:
            last = a.echo.bind(b.echo.bind(a.sleep.bind(inp[0])))
            graph = MultiOutputNode([last, b.echo.bind(inp[1])]).compile(depth=2)
    late = graph.execute(*[0.2] * inputs, deadline=0.05)
    for _ in range(8):
        get(graph.execute(*[0] * inputs, deadline=WAIT))
    with pytest.raises(DeadlineExceededError, match=rf"not in time: .*{b._id.name}\.echo"):
        get(late)


def test_waits_of_all_kinds_end_at_the_deadline(latches):
    held = Held(latches)

    def start(deadline=0.1):
        return held.graph.execute(1, deadline=deadline)

    ref = start()
    assert conveyor.wait([ref]) == ([ref], [])
    with pytest.raises(DeadlineExceededError):
        ref.get(timeout=0)
    ref = start()

    async def main():
        await ref

    with pytest.raises(DeadlineExceededError):
        asyncio.run(main())
    for seconds in SLOWER[1:]:
        ref = start(deadline=seconds)
        try:
            with pytest.raises(WaitTimeoutError):
                ref.get(timeout=0.01)
            break
        except DeadlineExceededError:  # that had passed before anybody waited
            assert seconds != SLOWER[-1]
    with pytest.raises(DeadlineExceededError):
        conveyor.get([ref], timeout=WAIT)
    ref = start()
    call = held.b.echo.remote(ref)  # it waits for the deadline in the pump
    with pytest.raises(DeadlineExceededError):
        get(call)


def test_room_does_not_come_before_the_deadline(latches):
    held = Held(latches, depth=1)
    held.graph.execute(1)
    with pytest.raises(DeadlineExceededError, match="before it could begin"):
        held.graph.execute(2, deadline=0.05)
    with pytest.raises(DeadlineExceededError):
        asyncio.run(held.graph.execute_async(2, deadline=0.05))
    with pytest.raises(CapacityError):
        held.graph.try_execute(2, deadline=WAIT)
    held.go.open()
    assert get(held.graph.execute(3)) == 3


def test_a_deadline_cancels_a_coroutine(latches, wait_until):
    a = Coroutines.remote()
    with InputNode() as inp:
        graph = a.hold.bind(inp).compile()
    for seconds in SLOWER:
        ref = graph.execute("x", deadline=seconds)
        with pytest.raises(DeadlineExceededError):
            ref.get()
        seen = get(a.noted.remote())
        if seen:  # else the deadline had passed before it could begin
            break
    assert seen[0] == ("begins", "x")
    wait_until(lambda: seen.extend(get(a.noted.remote())) or ("cancelled", "x") in seen)


def test_a_graph_has_a_deadline_of_its_own_and_an_input_of_that_name_wins(latches):
    a = Stage.remote()
    with InputNode() as inp:
        graph = a.sleep.bind(inp).compile(deadline=0.05)
    with pytest.raises(DeadlineExceededError):
        graph.execute(0.1).get()
    assert get(graph.execute(0.1, deadline=WAIT)) == 0.1
    with InputNode() as inp:
        named = a.echo.bind(inp.deadline).compile()
    assert get(named.execute(deadline="a value")) == "a value"
    assert get(named.try_execute(deadline=0)) == 0
    with pytest.raises(TypeError, match="deadline must be a number"):
        graph.execute(1, deadline="soon")
    with pytest.raises(GraphError, match="deadline"):
        a.echo.bind(inp).compile(deadline=-1)


def test_results_with_a_deadline_may_be_many(latches, wait_until):
    a, b = Stage.remote(), Stage.remote()
    started, go = latches(), latches()
    with InputNode() as inp:
        dag = MultiOutputNode([b.echo.bind(inp), a.hold.bind(inp, started.path, go.path)])
    graph = dag.compile(fail_fast=False)
    for seconds in SLOWER:
        fast, slow = graph.execute("x", deadline=seconds)
        conveyor.wait([fast], timeout=WAIT)
        with pytest.raises(DeadlineExceededError):
            slow.get()
        try:
            assert fast.get() == "x"
            break
        except DeadlineExceededError:  # that was not time enough for it
            assert seconds != SLOWER[-1]


def test_an_actor_that_dies_ends_an_execution_with_a_deadline(latches, wait_until):
    held = Held(latches)
    ref = held.graph.execute(1, deadline=WAIT)
    wait_until(lambda: held.started.is_open)
    os.kill(get(held.b.pid.remote()), signal.SIGKILL)
    with pytest.raises(conveyor.exceptions.ActorDiedError):
        ref.get()
    assert not ref.cancel()


# Calls


def test_a_call_in_the_mailbox_is_skipped(latches, wait_until):
    a = Stage.remote()
    started, go = latches(), latches()
    running = a.hold.remote(1, started.path, go.path)
    queued = [a.echo.remote(i) for i in range(4)]
    wait_until(lambda: started.is_open)
    assert queued[1].cancel()
    assert running.cancel()
    with pytest.raises(ExecutionCancelledError, match="echo"):
        get(queued[1])
    with pytest.raises(ExecutionCancelledError, match="hold"):
        get(running)
    go.open()
    assert get([queued[0], *queued[2:]]) == [0, 2, 3]
    assert not queued[0].cancel()
    assert get(a.noted.remote()) == [("hold", 1), 0, 2, 3]


def test_a_call_that_waits_here_is_withdrawn(latches, wait_until):
    a, b = Stage.remote(), Stage.remote()
    started, go = latches(), latches()
    held = a.hold.remote("held", started.path, go.path)
    waiting = b.echo.remote(held)
    behind = b.echo.remote("behind")
    array = b.echo.remote(np.ones(3))
    assert waiting.cancel()
    with pytest.raises(ExecutionCancelledError):
        get(waiting)
    # What stood behind it goes on without the argument that it waited for.
    assert get(behind) == "behind"
    assert get(array).sum() == 3
    go.open()
    assert get(held) == "held"
    assert "held" not in get(b.noted.remote())[:1]


def test_cancelling_more_calls_than_a_mailbox_has_room_for(latches, wait_until):
    a = Stage.remote()
    started, go = latches(), latches()
    a.hold.remote(1, started.path, go.path)
    refs = [a.echo.remote(i) for i in range(300)]
    wait_until(lambda: started.is_open)
    for ref in refs[::2]:
        assert ref.cancel()
    go.open()
    assert get(refs[1::2]) == list(range(1, 300, 2))
    assert get(a.noted.remote()) == [("hold", 1), *range(1, 300, 2)]


def test_a_running_coroutine_of_a_call_is_cancelled(latches, wait_until):
    a = Coroutines.remote()
    started = latches()
    ref = a.hold.remote("x", started.path)
    wait_until(lambda: started.is_open)
    assert ref.cancel()
    with pytest.raises(ExecutionCancelledError):
        get(ref)
    wait_until(lambda: ("cancelled", "x") in get(a.noted.remote()))


def test_parts_of_a_result_are_cancelled_together(latches, wait_until):
    a = Stage.remote()
    started, go = latches(), latches()
    one, two = a.two.remote(started.path, go.path)
    wait_until(lambda: started.is_open)
    # What it is an element of tells which call that is: an element has no number of its own.
    assert re.fullmatch(r"<ElementRef 1 of <CallRef \S+\.two \(call \d+\), pending>>", repr(two))
    assert one.cancel()
    assert two.cancelled()
    with pytest.raises(ExecutionCancelledError):
        get(two)
    go.open()


def test_a_put_value_cannot_be_cancelled():
    ref = conveyor.put(1)
    assert not ref.cancel()
    assert not ref.cancelled()


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_outputs_that_were_dropped_are_not_missed_by_a_cancel(latches, dropped):
    actors = [Stage.remote() for _ in range(3)]
    started, go = latches(), latches()
    with InputNode() as inp:
        held = actors[0].hold.bind(inp, started.path, go.path)
        dag = MultiOutputNode([actor.echo.bind(held) for actor in actors])
    with dag.compile(depth=2) as graph:
        for n in range(20):
            refs = graph.execute(n)
            other = graph.execute(n)
            del refs[dropped]
            assert refs[n % 2].cancel()
            for ref in refs:
                assert ref.cancelled()
                with pytest.raises(ExecutionCancelledError):
                    ref.get()
            assert not any(ref.cancelled() for ref in other)
            go.open()
            assert get(other) == [n, n, n]
            os.unlink(go.path)


def test_calls_in_a_pool_that_have_not_begun_are_skipped(latches, wait_until):
    a = Stage.options(max_concurrency=2).remote()
    started, go = latches(), latches()
    held = [a.hold.remote(i, started.path, go.path) for i in range(2)]
    queued = [a.echo.remote(i) for i in range(3)]
    wait_until(lambda: started.is_open)
    assert queued[1].cancel()
    go.open()
    assert get(held) == [0, 1]
    assert get([queued[0], queued[2]]) == [0, 2]
    assert 1 not in get(a.noted.remote())
