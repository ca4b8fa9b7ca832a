"""More values than the memory cap has room for: they wait for what others are about to let go of."""

import asyncio
import gc
import os
import queue
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress

import cloudpickle
import inside
import numpy as np
import pytest
from integration_helpers import WAIT, compiled, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    ArenaFullError,
    CapacityError,
    ConstructorError,
    DeadlineExceededError,
    DeadlockError,
    SerializationError,
    SessionEndedError,
    TaskError,
    WaitTimeoutError,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MB = 1 << 20
CAP = 32 * MB
#: Of which seven fit.
SIZE = 4 * MB
COUNT = 30
#: So many results are there before one waits.
FULL = 7


def value(i):
    return np.full(SIZE // 8, float(i))


@conveyor.remote
class Actor:
    def __init__(self):
        self.kept = []

    def ready(self):
        pass

    def made(self, i, seconds=0):
        time.sleep(seconds)
        return value(i)

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

    def more(self, x):
        return x + 1

    def same(self, x):
        return x

    def twice(self, x):
        return np.concatenate([x, x + 1])

    def half(self, x):
        return x[: len(x) // 2].copy()

    def two_of(self, x):
        return x, x + 1

    def make(self, i):
        return value(i)

    def chain(self, other, x):
        return float(conveyor.get(other.first.remote(x)))

    def ask(self, x, other):
        return float(conveyor.get(other.make.remote(5))[0]) + x[0]

    def touch(self, x, path):
        path.touch()

    def receive(self, receiver, count=COUNT):
        self.kept.append(receiver)  # or it would be closed
        return [float(receiver.receive()[0]) for _ in range(count)]

    def send(self, sender):
        for i in range(COUNT):
            sender.send(value(i))

    def in_place(self, i):
        x = conveyor.empty(SIZE // 8)
        x[:] = i
        return x

    def items(self, _=None):
        for i in range(COUNT):
            yield value(i)

    def pid(self):
        return os.getpid()

    def too_large(self):
        yield 1
        yield conveyor.empty(CAP)


@conveyor.remote
class Async:
    async def first(self, x):
        await asyncio.sleep(0.002)
        return float(x[0])

    async def more(self, x):
        return x + 1

    async def make(self, i):
        return value(i)

    async def items(self, _=None):
        for i in range(COUNT):
            yield value(i)

    async def step(self, add):
        """Change one array, and return it."""
        self.state = getattr(self, "state", np.zeros(SIZE // 8))
        self.state += add
        return self.state

    async def relay(self, other):
        return await asyncio.gather(*[other.first.remote(value(i)) for i in range(COUNT)])


@conveyor.remote
class Relay:
    """Calls another actor, which so holds this one's memory."""

    def __init__(self, holder):
        self.holder = holder
        self.refs = []

    def give(self, go):
        self.refs = [self.holder.held.remote(value(i), go) for i in range(7)]
        return len(self.refs)


@conveyor.remote
def more(x):
    return x + 1


@pytest.fixture(scope="module", autouse=True)
def session():
    conveyor.init(arena_bytes=CAP)
    yield
    conveyor.shutdown()


@pytest.fixture(autouse=True)
def nobody_waits_afterwards(tmp_path, wait_until):
    yield
    (tmp_path / "go").touch()  # also where the test has failed before it did
    if conveyor.is_initialized():
        wait_until(lambda: not inside.waits_for_memory())


def actors(count=1, **options):
    made = [Actor.options(**options).remote() for _ in range(count)]
    get([actor.ready.remote() for actor in made])
    return made


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
    assert inside.waits_for_memory()
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
    assert inside.waits_for_memory()
    conveyor.kill(holder)
    assert get(late) == 7
    for ref in held:
        with pytest.raises(ActorDiedError):
            get(ref)


def test_ctrl_c_ends_the_wait_and_nothing_else(tmp_path, wait_until):
    holder, other = actors(2)
    held = [holder.held.remote(value(i), tmp_path / "go") for i in range(7)]

    def press():
        wait_until(inside.waits_for_memory)
        os.kill(os.getpid(), signal.SIGINT)

    with compiled(lambda inp: other.first.bind(inp)) as graph:
        thread = threading.Thread(target=press)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            graph.execute(value(8))
        thread.join()
        assert not inside.waits_for_memory()
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
    assert inside.waits_for_memory()
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
    wait_until(lambda: inside.waits_for_memory() == 2)
    end = threading.Thread(target=conveyor.shutdown)
    end.start()
    with pytest.raises(SessionEndedError):
        get(late)
    thread.join(WAIT)
    (tmp_path / "go").touch()  # the holder's grace need not pass
    end.join()
    assert ended == [graph]
    conveyor.init(arena_bytes=CAP)


# Results


def in_turn(refs):
    """What comes of each, whose memory is free before the next one is got."""
    refs.reverse()
    found = []
    while refs:
        found.append(float(get(refs.pop())[0]))
    return found


def method_of(kind):
    if kind == "function":
        return more
    if kind == "coroutine":
        return Async.remote().more
    (actor,) = actors(max_concurrency=3 if kind == "threads" else 1)
    return actor.more


@pytest.mark.parametrize("kind", ["method", "threads", "coroutine", "function"])
def test_results_wait_for_what_the_program_lets_go_of(kind):
    """Arguments fill the cap, and each result takes the place of its own."""
    method = method_of(kind)
    refs = [method.remote(value(i)) for i in range(COUNT)]
    assert in_turn(refs) == list(map(float, range(1, COUNT + 1)))


def test_so_do_those_of_several_actors():
    several = actors(4)
    refs = [several[i % 4].more.remote(value(i)) for i in range(2 * COUNT)]
    assert in_turn(refs) == list(map(float, range(1, 2 * COUNT + 1)))


@pytest.mark.parametrize("name", ["same", "twice"])
def test_whatever_they_have_of_their_arguments_and_however_large_they_are(name):
    (actor,) = actors()
    refs = [getattr(actor, name).remote(value(i)) for i in range(COUNT)]
    assert in_turn(refs) == list(map(float, range(COUNT)))


def test_and_several_results_of_a_call():
    (actor,) = actors()
    refs = [actor.two_of.options(num_returns=2).remote(value(i)) for i in range(COUNT)]
    found = [float(get(ref)[0]) for two in iter(lambda: refs and refs.pop(0), []) for ref in two]
    assert found == [float(i + k) for i in range(COUNT) for k in (0, 1)]


@pytest.mark.parametrize("name", ["make", "in_place"])
def test_and_those_without_large_arguments(name):
    (actor,) = actors()
    refs = [getattr(actor, name).remote(i) for i in range(COUNT)]
    assert in_turn(refs) == list(map(float, range(COUNT)))


@pytest.mark.parametrize("options", [{}, {"memory_bytes": 4 * SIZE}], ids=["session", "graph"])
def test_outputs_of_executions_wait_while_another_thread_gets_them(options):
    (actor,) = actors()
    made = queue.SimpleQueue()
    with compiled(lambda inp: actor.more.bind(inp), depth=COUNT, **options) as graph:

        def execute():
            for i in range(COUNT):
                made.put(graph.execute(value(i)))

        thread = threading.Thread(target=execute)
        thread.start()
        found = [float(get(made.get(timeout=WAIT))[0]) for _ in range(COUNT)]
        thread.join()
    assert found == list(map(float, range(1, COUNT + 1)))


@pytest.mark.parametrize("options", [{}, {"memory_bytes": 7 * SIZE}], ids=["session", "graph"])
def test_values_that_grow_on_their_way_through_a_graph_come_through(options):
    first, second, third = actors(3)
    with compiled(
        lambda inp: third.first.bind(second.twice.bind(first.twice.bind(inp))),
        depth=COUNT,
        **options,
    ) as graph:
        assert get([graph.execute(value(i)) for i in range(COUNT)]) == list(
            map(float, range(COUNT))
        )


@pytest.mark.parametrize("options", [{}, {"memory_bytes": CAP}], ids=["session", "graph"])
def test_a_fast_actor_s_later_outputs_keep_no_slow_one_s_earlier_ones_from_coming(options):
    """They may hold all memory by the time that the slow ones have made what the program gets first."""
    fast, slow, slower = actors(3)
    with InputNode() as inp:
        made = [fast.made.bind(inp), slow.made.bind(inp, 0.02), slower.made.bind(inp, 0.05)]
        dag = MultiOutputNode(made)
    with dag.compile(depth=COUNT, **options) as graph:
        refs = [graph.execute(i) for i in range(COUNT)]
        found = []
        while refs:
            found.append([float(one[0]) for one in get(refs.pop(0))])
    assert found == [[i] * 3 for i in map(float, range(COUNT))]


def test_nor_do_those_of_calls():
    makers = actors(3)
    refs = [makers[i % 3].made.remote(i, 0.01 * (i % 3)) for i in range(2 * COUNT)]
    assert in_turn(refs) == list(map(float, range(2 * COUNT)))


def test_values_of_a_channel_wait_as_for_room():
    one, other = actors(2)
    sender, receiver = conveyor.channel.open(depth=64)
    found = other.receive.remote(receiver)
    for i in range(COUNT):
        sender.send(value(i))
    assert get(found) == list(map(float, range(COUNT)))
    sender, receiver = conveyor.channel.open(depth=64)
    sent = one.send.remote(sender)
    assert [float(receiver.receive()[0]) for _ in range(COUNT)] == list(map(float, range(COUNT)))
    get(sent)


def test_so_do_those_that_tasks_send():
    (actor,) = actors()
    sender, receiver = conveyor.channel.open(depth=64)

    async def send():
        for i in range(COUNT):
            await sender.send_async(value(i))

    found = actor.receive.remote(receiver)
    asyncio.run(send())
    assert get(found) == list(map(float, range(COUNT)))


def test_a_channel_s_timeout_says_who_holds_the_memory(tmp_path):
    holder, other = actors(2)
    sender, receiver = conveyor.channel.open(depth=64)
    first = other.receive.remote(receiver, 1)
    sender.send(value(0))
    assert get(first) == [0]  # the ends have met, and its memory is free
    found = other.receive.remote(receiver, COUNT - 1)
    held = [holder.held.remote(value(i), tmp_path / "go") for i in range(7)]
    with pytest.raises(
        WaitTimeoutError, match=r"(?s)memory for a value of channel.* holds 7 values"
    ):
        sender.send(value(0), timeout=0.05)
    (tmp_path / "go").touch()
    for i in range(1, COUNT):
        sender.send(value(i))
    assert get(found) == list(map(float, range(1, COUNT)))
    get(held)


def test_a_channel_that_nobody_reads_is_an_error_soon():
    (actor,) = actors()
    sender, receiver = conveyor.channel.open(depth=64)
    first = actor.receive.remote(receiver, 1)
    for i in range(8):  # the first is received
        sender.send(value(i))
    with pytest.raises(ArenaFullError, match=r"holds 7 values .* of channel"):
        sender.send(value(8))
    assert get(first) == [0]
    assert get(actor.receive.remote(receiver, 7)) == list(map(float, range(1, 8)))


@pytest.mark.parametrize("make", [Actor, Async])
def test_items_of_streams_wait(make):
    actor = make.remote()
    assert [float(item[0]) for item in actor.items.remote()] == list(map(float, range(COUNT)))
    with compiled(lambda inp: make.remote().items.bind(inp), depth=COUNT) as graph:
        found = [float(item[0]) for item in graph.execute(0)]
    assert found == list(map(float, range(COUNT)))


def test_memory_that_is_requested_for_waits():
    (actor,) = actors()
    refs = []
    for i in range(COUNT):
        x = conveyor.empty(SIZE // 8)
        x[:] = i
        refs.append(actor.first.remote(x))
        del x
    assert get(refs) == list(map(float, range(COUNT)))


def test_an_attempt_that_has_waited_keeps_no_values(wait_until):
    """Without a collection of garbage."""
    (actor,) = actors()
    gc.collect()
    gc.disable()
    try:
        in_turn([actor.more.remote(value(i)) for i in range(COUNT)])
        test_memory_that_is_requested_for_waits()
        with pytest.raises(ArenaFullError):
            get([actor.make.remote(i) for i in range(FULL + 2)])
        arrays = [conveyor.empty(SIZE // 8) for _ in range(7)]  # all is free
        del arrays
    finally:
        gc.enable()


def test_results_that_a_waiting_program_holds_are_an_error_soon_and_harm_no_other():
    (actor,) = actors()
    refs = [actor.make.remote(i) for i in range(FULL + 2)]
    begun = time.monotonic()
    with pytest.raises(ArenaFullError, match=r"holds 7 values .* of results"):
        get(refs)
    assert time.monotonic() - begun < 10
    assert in_turn(refs[:FULL]) == list(map(float, range(FULL)))
    refs.clear()
    assert get(actor.make.remote(1))[0] == 1


def test_results_that_the_program_holds_make_its_next_execution_an_error_soon():
    (actor,) = actors()
    over = threading.Event()
    other = threading.Thread(target=over.wait)  # which might let go of some, as far as is known
    other.start()
    with compiled(lambda inp: actor.more.bind(inp)) as graph:
        _, kept = full_of_results()
        begun = time.monotonic()
        with pytest.raises(ArenaFullError):
            graph.execute(value(1))
        assert time.monotonic() - begun < 10
        kept.clear()
        assert get(graph.execute(value(1)))[0] == 2
    over.set()
    other.join()


def test_an_execution_that_only_results_keep_from_beginning_is_refused_before_they_are_lost():
    (actor,) = actors()
    with compiled(lambda inp: actor.more.bind(inp), depth=COUNT) as graph:
        refs, found = [], []
        for i in range(12):
            try:
                refs.append(graph.execute(value(i)))
            except ArenaFullError:
                found += in_turn(refs)
                refs.append(graph.execute(value(i)))
        assert found
        assert found + in_turn(refs) == list(map(float, range(1, 13)))


def test_a_result_that_waits_can_be_cancelled(tmp_path, wait_until):
    (actor,) = actors()
    kept = [actor.make.remote(i) for i in range(FULL)]
    conveyor.wait(kept, num_returns=FULL, timeout=WAIT)
    late = actor.make.remote(FULL)
    wait_until(inside.results_wait_for_memory)
    conveyor.cancel(late)
    with pytest.raises(CancelledError):
        get(late)
    assert get(actor.pid.remote()) > 0
    in_turn(kept)


def test_the_death_of_an_actor_whose_result_waits_harms_nobody(wait_until):
    actor, other = actors(2)
    kept = [actor.make.remote(i) for i in range(FULL)]
    conveyor.wait(kept, num_returns=FULL, timeout=WAIT)
    pid = get(actor.pid.remote())
    late = actor.make.remote(FULL)
    wait_until(inside.results_wait_for_memory)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        get(late)
    kept.clear()
    assert get(other.make.remote(1))[0] == 1


def test_the_session_s_end_waits_for_no_result(wait_until):
    (actor,) = actors()
    kept = [actor.make.remote(i) for i in range(FULL + 1)]
    wait_until(inside.results_wait_for_memory)
    begun = time.monotonic()
    conveyor.shutdown()
    assert time.monotonic() - begun < 5
    del kept
    conveyor.init(arena_bytes=CAP)


def test_while_one_coroutine_s_result_waits_the_others_go_on(wait_until):
    actor = Async.remote()
    kept = [actor.make.remote(i) for i in range(FULL)]
    conveyor.wait(kept, num_returns=FULL, timeout=WAIT)
    late = actor.make.remote(FULL)
    wait_until(inside.results_wait_for_memory)
    assert get(actor.first.remote(np.full(1, 5.0))) == 5
    assert in_turn([*kept]) == list(map(float, range(FULL)))
    kept.clear()
    assert get(late)[0] == FULL


def test_a_holder_with_threads_is_waited_for(tmp_path):
    (holder,) = actors(max_concurrency=3)
    source = Relay.remote(holder)
    held = get(source.give.remote(tmp_path / "go"))
    assert held == 7
    (other,) = actors()
    late = other.first.remote(value(7))
    assert not conveyor.wait([late], timeout=0.7)[0]
    (tmp_path / "go").touch()
    assert get(late) == 7


def test_an_event_loop_goes_on_while_another_thread_s_execution_waits_for_memory(
    tmp_path, wait_until
):
    holder, other = actors(2)
    held = [holder.held.remote(value(i), tmp_path / "go") for i in range(7)]
    with compiled(lambda inp: other.first.bind(inp)) as graph:
        thread = threading.Thread(target=lambda: get(graph.execute(value(7))))
        thread.start()
        wait_until(inside.waits_for_memory)
        with pytest.raises(CapacityError, match="another thread's execution goes first"):
            graph.try_execute(np.zeros(1))

        async def both():
            begun = time.process_time()
            task = asyncio.ensure_future(graph.execute_async(np.full(1, 3.0)))
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert time.process_time() - begun < 0.15
            assert not task.done()
            (tmp_path / "go").touch()
            return await (await task)

        assert asyncio.run(both()) == 3
        thread.join()
    get(held)


def test_a_call_that_lacks_an_argument_or_room_holds_up_no_other_actor_s(tmp_path):
    busy, other = actors(2)
    holder, slow = actors(2)
    held = holder.held.remote(np.ones(SIZE // 32), tmp_path / "held")
    first = [busy.first.remote(value(i)) for i in range(8)]  # the last waits for memory
    lacks = busy.first.remote(slow.held.remote(np.ones(1), tmp_path / "slow"))
    assert get(first) == list(map(float, range(8)))
    assert get(other.first.remote(value(9))) == 9
    (tmp_path / "slow").touch()
    assert get(other.first.remote(value(9))) == 9
    (tmp_path / "held").touch()
    with pytest.raises(TaskError):
        get(lacks)  # a number has no items
    assert get(held) == 1


def test_a_program_that_computes_between_its_calls_keeps_its_results(wait_until):
    """It is not asleep, though it is seen asleep."""
    actor, other = actors(2)
    kept = [actor.make.remote(i) for i in range(FULL)]
    conveyor.wait(kept, num_returns=FULL, timeout=WAIT)
    late = actor.make.remote(FULL)
    wait_until(inside.results_wait_for_memory)
    for _ in range(20):
        time.sleep(0.06)
        get(other.held.remote(np.ones(1), os.devnull))
    kept.clear()
    assert get(late)[0] == FULL


def full_of_results():
    """Results that fill the memory, and their maker, whose next one waits."""
    (maker,) = actors()
    kept = [maker.make.remote(i) for i in range(FULL)]
    conveyor.wait(kept, num_returns=FULL, timeout=WAIT)
    return maker, kept


@conveyor.remote
class Given:
    def __init__(self, x):
        self.x = x

    def first(self):
        return float(self.x[0])


def has_one(actor, kept):
    """Have ``actor`` make one result, which it may above the cap."""
    kept.append(actor.make.remote(0))
    conveyor.wait(kept[-1:], timeout=WAIT)


def test_a_constructor_for_which_there_is_no_memory_is_an_error_of_the_actor_s_calls():
    """Though there is none for the error's text either."""
    (actor,) = actors()
    maker, kept = full_of_results()
    has_one(actor, kept)
    late = Given.remote(value(1))
    for _ in range(2):
        with pytest.raises(ConstructorError):
            get(late.first.remote())
    kept.clear()
    del maker
    assert get(Given.remote(value(2)).first.remote()) == 2


def test_a_row_of_actors_passes_values_on_by_reference():
    first, second, third = actors(3)
    refs = [
        third.first.remote(second.more.remote(first.more.remote(value(i)))) for i in range(COUNT)
    ]
    assert get(refs) == [i + 2 for i in range(COUNT)]


@pytest.mark.parametrize("row", [("twice", "more"), ("more", "twice"), ("twice", "half")])
def test_and_values_that_grow_on_their_way(row):
    *makers, last = actors(len(row) + 1)
    refs = []
    for i in range(COUNT):
        ref = value(i)
        for maker, name in zip(makers, row, strict=True):
            ref = getattr(maker, name).remote(ref)
        refs.append(last.first.remote(ref))
        del ref
    assert get(refs) == [i + row.count("more") for i in range(COUNT)]


def test_and_by_calls_of_their_own():
    one, other = actors(2)
    assert get([one.chain.remote(other, value(i)) for i in range(COUNT)]) == list(range(COUNT))


def test_tasks_execute_more_than_fits_and_get_what_comes():
    (actor,) = actors()

    async def one(graph, i):
        return float((await (await graph.execute_async(value(i))))[0])

    async def all_of_them(graph):
        return await asyncio.gather(*[one(graph, i) for i in range(COUNT)])

    with compiled(lambda inp: actor.more.bind(inp), depth=COUNT) as graph:
        assert asyncio.run(all_of_them(graph)) == [i + 1 for i in range(COUNT)]


def test_the_event_loop_of_an_actor_goes_on_while_its_output_waits():
    _, kept = full_of_results()
    actor = Async.remote()
    with compiled(lambda inp: actor.make.bind(inp)) as graph:
        late = graph.execute(3)
        assert get(actor.first.remote(np.full(1, 5.0))) == 5
        assert not late.done()
        kept.clear()
        assert get(late)[0] == 3
        assert get(graph.execute(4))[0] == 4


@pytest.mark.parametrize("make", [Actor, Async])
@pytest.mark.parametrize("of", ["calls", "executions"])
def test_results_that_are_hoarded_are_an_error_of_any_kind_of_method(make, of):
    _, kept = full_of_results()
    actor = make.remote()
    has_one(actor, kept)
    with compiled(lambda inp: actor.make.bind(inp)) as graph:
        late = actor.make.remote(1) if of == "calls" else graph.execute(1)
        with pytest.raises(ArenaFullError):
            get(late)
        kept.clear()
        assert get(actor.make.remote(2))[0] == 2
        assert get(graph.execute(3))[0] == 3


@pytest.mark.parametrize("of", ["calls", "executions"])
def test_a_result_that_waits_is_as_it_was_when_it_was_returned(of, wait_until):
    _, kept = full_of_results()
    actor = Async.remote()
    has_one(actor, kept)
    with compiled(lambda inp: actor.step.bind(inp)) as graph:
        late = actor.step.remote(1) if of == "calls" else graph.execute(1)
        wait_until(inside.results_wait_for_memory)
        behind = actor.step.remote(100)
        kept.clear()
        assert get(late)[0] == 1
        assert get(behind)[0] == 101


def test_a_small_call_behind_a_large_one_that_is_cancelled_goes_on(tmp_path):
    holder, other = actors(2)
    held = [holder.held.remote(value(i), tmp_path / "go") for i in range(7)]
    large, small = other.first.remote(value(1)), other.first.remote(np.full(1, 5.0))
    assert inside.waits_for_memory()
    conveyor.cancel(large)
    assert get(small) == 5
    (tmp_path / "go").touch()
    get(held)


def test_an_output_whose_reader_is_dead_does_not_wait(wait_until):
    _, kept = full_of_results()
    one, other = actors(2)
    with compiled(lambda inp: other.first.bind(one.make.bind(inp))) as graph:
        late = graph.execute(3)
        wait_until(inside.results_wait_for_memory)
        conveyor.kill(other)
        with pytest.raises((ActorDiedError, ArenaFullError)):  # whichever is heard of first
            get(late)
        begun = time.monotonic()
        assert get(one.pid.remote()) > 0
        assert time.monotonic() - begun < 2
    kept.clear()


def test_what_the_program_may_let_go_of_is_part_of_no_deadlock(wait_until):
    maker, kept = full_of_results()
    (actor,) = actors()
    answer = actor.ask.remote(np.full(SIZE // 16, 1.0), maker)
    wait_until(inside.results_wait_for_memory)
    kept.clear()
    assert get(answer) == 6


def test_a_call_that_does_not_fit_holds_up_none_that_does(tmp_path):
    holder, small, other, one = actors(4)
    held = holder.held.remote(np.zeros(22 * MB // 8), tmp_path / "go")
    less = small.held.remote(np.zeros(6 * MB // 8), tmp_path / "less")
    head = other.first.remote(np.zeros(20 * MB // 8))
    behind = one.touch.remote(np.zeros(5 * MB // 8), tmp_path / "go")
    assert inside.waits_for_memory()
    (tmp_path / "less").touch()
    assert get([behind, held, less, head]) == [None, 0, 0, 0]


def test_results_of_methods_side_by_side_end_with_or_without_memory():
    """Those of later calls may have taken it."""
    (actor,) = actors(max_concurrency=8)
    begun = time.process_time()
    refs = [actor.twice.remote(value(i)) for i in range(COUNT)]
    refs.reverse()
    found = 0
    while refs:
        with suppress(ArenaFullError, TaskError):
            found += get(refs.pop())[0] >= 0
    assert found
    assert time.process_time() - begun < 10


def test_an_error_of_the_method_s_own_is_told():
    (actor,) = actors()
    with pytest.raises(ArenaFullError, match="larger than the session's memory cap"):
        get(actor.too_large.options(num_returns=2).remote())


def test_a_task_that_waits_for_the_lock_goes_on_after_an_execution_that_fails():
    (actor,) = actors()
    begun = threading.Event()

    class Bad:
        def __reduce__(self):
            begun.set()
            time.sleep(0.2)
            raise ValueError("not sent")

    def execute(graph):
        with pytest.raises(SerializationError, match="not sent"):
            graph.execute(Bad())

    with compiled(lambda inp: actor.first.bind(inp)) as graph:
        thread = threading.Thread(target=execute, args=(graph,))
        thread.start()
        begun.wait(WAIT)

        async def other():
            return await (await graph.execute_async(np.full(1, 3.0)))

        assert asyncio.run(asyncio.wait_for(other(), WAIT)) == 3
        thread.join()
