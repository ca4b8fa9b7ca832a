"""Functions that run in other processes: in graphs, and by ordinary calls."""

from __future__ import annotations

import asyncio
import collections
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from integration_helpers import WAIT, hold

import conveyor
from conveyor.api.actors import ActorClass
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    ConveyorError,
    DeadlockError,
    ExecutionCancelledError,
    GraphError,
    SerializationError,
    SystemLimitError,
    WaitTimeoutError,
)

OFFSET = 100


@conveyor.remote
def square(x: Any) -> Any:
    return x * x


@conveyor.remote
def shifted(x: int) -> int:
    return x + OFFSET


@conveyor.remote(num_returns=2)
def split(x: int) -> tuple[int, int]:
    return x // 10, x % 10


@conveyor.remote
def join(*parts: Any, last: Any = None) -> list[Any]:
    return [*parts, last]


@conveyor.remote
def fail(x: Any) -> Any:
    raise ValueError(f"no {x}")


@conveyor.remote
def count(n: int) -> Any:
    yield from range(n)


@conveyor.remote
async def later(x: int) -> int:
    await asyncio.sleep(0)
    return x + 1


@conveyor.remote
def pid(_: Any = None) -> int:
    return os.getpid()


@conveyor.remote
def fib(n: int) -> int:
    return n if n < 2 else sum(conveyor.get([fib.remote(n - 1), fib.remote(n - 2)]))


@conveyor.remote
def end(code: int) -> None:
    os._exit(code)


@conveyor.remote
class Actor:
    def __init__(self) -> None:
        self.state = 1

    def add(self, x: int) -> int:
        return x + self.state

    def pid(self) -> int:
        return os.getpid()

    def squared(self, x: int) -> int:
        return conveyor.get(square.remote(x))


@conveyor.remote
def through(actor: Any, x: int) -> int:
    return conveyor.get(actor.squared.remote(x))


@conveyor.remote
def squares(n: int) -> Any:
    for x in count.remote(n):
        yield conveyor.get(square.remote(x))


def test_called(engine):
    assert conveyor.get([square.remote(i) for i in range(20)]) == [i * i for i in range(20)]
    assert conveyor.get(square.remote(square.remote(3))) == 81
    assert conveyor.get(shifted.remote(1)) == 101
    assert conveyor.get(split.remote(42)) == [4, 2]
    assert list(count.remote(5)) == [0, 1, 2, 3, 4]
    assert conveyor.get([later.remote(i) for i in range(5)]) == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="no 3"):
        conveyor.get(fail.remote(3))
    with pytest.raises(TypeError, match="square"):
        square.remote()


def test_several_results_come_from_any_sequence_but_text_and_bytes(engine):
    @conveyor.remote(num_returns=3)
    def several(kind: str) -> Any:
        kinds = {
            "range": range(3),
            "deque": collections.deque([0, 1, 2]),
            "own": collections.UserList([0, 1, 2]),
            "list": [0, 1, 2],
            "str": "012",
            "bytes": bytes(3),
            "set": {0, 1, 2},
            "short": range(2),
        }
        return kinds[kind]

    with MultiOutputNode(list(several.bind(InputNode()))).compile() as graph:
        for run in (several.remote, graph.execute):
            for kind in ("range", "deque", "own", "list"):
                assert conveyor.get(run(kind)) == [0, 1, 2]
            for kind in ("str", "bytes", "set"):
                with pytest.raises(ValueError, match=f"but returned a {kind}$"):
                    conveyor.get(run(kind))
            with pytest.raises(ValueError, match="but returned a range of 2"):
                conveyor.get(run("short"))


def test_in_a_graph(engine):
    inp = InputNode()
    a, b = split.bind(inp)
    dag = MultiOutputNode([join.bind(square.bind(a), shifted.bind(b), last=[inp]), later.bind(a)])
    with dag.compile() as graph:
        for x in (42, 17, 5):
            assert conveyor.get(graph.execute(x)) == [
                [(x // 10) ** 2, x % 10 + 100, [x]],
                x // 10 + 1,
            ]
        text = graph.explain()
        assert "square(" in text
    assert conveyor.get(dag.execute(42)) == [[16, 102, [42]], 5]


def test_beside_actors_and_in_them(engine):
    actor = Actor.options(name="state").remote()

    @conveyor.remote
    def seen(x: int) -> tuple[int, int]:
        return x, os.getpid()

    dag = seen.options(on=actor).bind(square.bind(actor.add.bind(InputNode())))
    with dag.compile() as graph:
        value, where = conveyor.get(graph.execute(2))
        assert (value, where) == (9, conveyor.get(actor.pid.remote()))
        assert "state.seen" in graph.explain()
    assert conveyor.get(seen.options(on=actor).remote(7)) == (7, where)
    assert conveyor.get(dag.execute(2)) == (9, where)


def test_a_generator_in_a_graph(engine):
    with count.bind(square.bind(InputNode())).compile() as graph:
        assert list(graph.execute(3)) == list(range(9))


def test_an_error_in_a_graph(engine):
    with (
        square.bind(fail.bind(InputNode())).compile() as graph,
        pytest.raises(ValueError, match="no 3"),
    ):
        conveyor.get(graph.execute(3))


def test_a_chain_stays_in_one_process_and_branches_do_not(local):
    inp = InputNode()
    chain = pid.bind(square.bind(square.bind(inp)))
    with chain.compile() as graph:
        assert ": 1 actor" in graph.explain()
    branches = MultiOutputNode([pid.bind(inp) for _ in range(4)])
    with branches.compile(function_workers=3) as graph:
        assert len(set(conveyor.get(graph.execute(1)))) == 3
    with branches.compile(function_workers=1) as graph:
        assert len(set(conveyor.get(graph.execute(1)))) == 1


def test_workers_end_with_their_graph(local, wait_until):
    def alive(process: int) -> bool:
        return os.path.exists(f"/proc/{process}")

    graph = pid.bind(InputNode()).compile()
    process = conveyor.get(graph.execute(1))
    assert alive(process)
    graph.teardown()
    wait_until(lambda: not alive(process))


def test_functions_call_functions(engine):
    assert conveyor.get(fib.remote(4), timeout=WAIT) == 3
    assert conveyor.get(through.remote(Actor.remote(), 3), timeout=WAIT) == 9
    assert list(squares.remote(4)) == [0, 1, 4, 9]
    assert conveyor.get(square.remote(3), timeout=WAIT) == 9


def test_a_worker_that_died_is_replaced(local):
    with pytest.raises(ActorDiedError, match="exited with code 3"):
        conveyor.get(end.remote(3))
    for _ in range(5):
        assert conveyor.get(square.remote(3), timeout=WAIT) == 9


def test_wrong_options(local):
    with pytest.raises(TypeError, match="on must be an actor's handle"):
        square.options(on=3)
    with pytest.raises(GraphError, match="no event loop"):
        later.options(on=Actor.remote())
    with pytest.raises(GraphError, match="function_workers"):
        square.bind(InputNode()).compile(function_workers=0)


@conveyor.remote
def opened(path: str) -> str:
    """Wait until somebody writes to the named pipe."""
    with open(path) as pipe:
        return pipe.read()


@conveyor.remote
def total(numbers: list[int]) -> int:
    return sum(numbers)


@pytest.fixture
def held(local, tmp_path):
    """A call that lasts until its pipe is written to, which the second item does; other workers are free."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs a second worker")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # These are fast, and so might be the next ones, as far as anybody knows.
    conveyor.get([square.remote(i) for i in range(300)])
    return opened.remote(str(pipe)), lambda: pipe.write_text("now")


def test_no_call_waits_behind_a_long_one(held):
    long, go = held
    short = [square.remote(i) for i in range(300)]
    sums = [total.remote([i, 1]) for i in range(300)]
    passed_on = [square.remote(one) for one in short]
    assert conveyor.get(short, timeout=WAIT) == [i**2 for i in range(300)]
    assert conveyor.get(sums, timeout=WAIT) == [i + 1 for i in range(300)]
    assert conveyor.wait(passed_on, num_returns=300, timeout=WAIT)[1] == []
    assert not long.done()
    go()
    assert conveyor.get(long, timeout=WAIT) == "now"


def test_a_call_that_lacks_an_argument_keeps_no_worker(held):
    long, go = held
    lacking = [join.remote(long, i) for i in range(10)]
    assert conveyor.get([square.remote(i) for i in range(100)], timeout=WAIT)[-1] == 99**2
    assert not any(one.done() for one in lacking)
    go()
    assert conveyor.get(lacking, timeout=WAIT) == [["now", i, None] for i in range(10)]


@pytest.fixture
def all_held(local, tmp_path):
    """Calls for all workers, each of which lasts until the second item is called, and waits nowhere."""
    pipes = [tmp_path / f"pipe {i}" for i in range(len(os.sched_getaffinity(0)))]
    for pipe in pipes:
        os.mkfifo(pipe)
    calls = [opened.remote(str(pipe)) for pipe in pipes]
    return calls, lambda: [pipe.write_text("now") for pipe in pipes]


def test_arguments_are_taken_when_the_call_is_made(all_held):
    _, go = all_held
    numbers = [1, 2]
    later = total.remote(numbers)
    numbers.append(3)
    go()
    assert conveyor.get(later, timeout=WAIT) == 3


def test_a_call_that_waits_for_a_worker_can_be_cancelled_and_timed(all_held, tmp_path):
    calls, go = all_held
    made = tmp_path / "made"
    abandoned = touch.remote(str(made))
    wanted = square.remote(3)
    with pytest.raises(
        WaitTimeoutError, match=r"<functions>.square \(not sent yet\); 2 calls wait for a"
    ):
        conveyor.get(wanted, timeout=0.01)
    assert conveyor.wait([abandoned, wanted], timeout=0.01) == ([], [abandoned, wanted])
    assert abandoned.cancel()
    with pytest.raises(ExecutionCancelledError, match="touch"):
        conveyor.get(abandoned)
    go()
    assert conveyor.get([*calls, wanted], timeout=WAIT) == ["now"] * len(calls) + [9]
    assert not made.exists()


@conveyor.remote
def touch(path: str) -> None:
    open(path, "w").close()


def test_what_cannot_be_sent_raises_where_it_is_called(all_held):
    _, go = all_held
    with pytest.raises(SerializationError, match="total"):
        total.remote([threading.Lock()])
    go()
    assert conveyor.get(square.remote(2), timeout=WAIT) == 4


def test_several_results_and_errors_of_calls_that_have_waited(all_held):
    _, go = all_held
    parts, failed = split.remote(42), fail.remote(3)
    behind = square.remote(failed)
    go()
    assert conveyor.get(parts, timeout=WAIT) == [4, 2]
    for ref in (failed, behind):
        with pytest.raises(ValueError, match="no 3"):
            conveyor.get(ref, timeout=WAIT)


def test_awaited_while_it_waits_for_a_worker(all_held):
    _, go = all_held

    async def awaits() -> int:
        wanted = asyncio.ensure_future(square.remote(5))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(go)
        return await wanted

    assert asyncio.run(awaits()) == 25


def test_what_waits_is_run_by_the_workers_that_are_left(held):
    long, go = held
    ended = end.remote(3)
    kept = [square.remote(i) for i in range(20)]
    go()
    assert conveyor.get(kept, timeout=WAIT) == [i**2 for i in range(20)]
    with pytest.raises(ActorDiedError, match="exited with code 3"):
        conveyor.get(ended, timeout=WAIT)
    assert conveyor.get(long, timeout=WAIT) == "now"


@pytest.mark.parametrize("caller", ["driver", "actor", "coroutine"])
def test_what_waits_goes_to_new_workers_if_all_have_died(local, caller):
    if caller == "actor":
        ended, waited = conveyor.get(Caller.remote().ends_and_squares.remote(30), timeout=WAIT)
    elif caller == "driver":
        ended, waited = ends_and_squares(30)
    else:
        ended, waited = asyncio.run(awaits_ends_and_squares(30))
    assert all(isinstance(end, ActorDiedError) for end in ended)
    assert all("exited with code 3" in str(end) for end in ended)
    assert waited == [i * i for i in range(30)]
    assert conveyor.get(square.remote(3), timeout=WAIT) == 9


def start_ends_and_squares(n: int) -> tuple[list[Any], list[Any]]:
    """More calls that end their workers than there are workers, and what waits behind them."""
    workers = len(os.sched_getaffinity(0))
    ended = [end.remote(3) for _ in range(2 * workers + 1)]
    return ended, [square.remote(i) for i in range(n)]


def ends_and_squares(n: int) -> tuple[list[Any], list[Any]]:
    ended, waited = start_ends_and_squares(n)
    return [error_of(ref) for ref in ended], conveyor.get(waited, timeout=WAIT)


async def awaits_ends_and_squares(n: int) -> tuple[list[Any], list[Any]]:
    ended, waited = start_ends_and_squares(n)
    errors = await asyncio.gather(*ended, return_exceptions=True)
    return errors, await asyncio.gather(*waited)


def error_of(ref: Any) -> BaseException | None:
    try:
        conveyor.get(ref, timeout=WAIT)
    except ActorDiedError as error:
        return error
    return None


def test_what_waits_fails_if_no_worker_can_be_started(local, monkeypatch):
    workers = len(os.sched_getaffinity(0))
    ended = [end.remote(3) for _ in range(workers)]
    waited = [square.remote(3) for _ in range(5)]

    def refuse(*_: Any) -> Any:
        raise SystemLimitError("no more processes")

    with monkeypatch.context() as patched:
        patched.setattr(ActorClass, "remote", refuse)
        for ref in ended:
            with pytest.raises(ActorDiedError):
                conveyor.get(ref, timeout=WAIT)
        for ref in waited:
            with pytest.raises(SystemLimitError, match="no more processes"):
                conveyor.get(ref, timeout=WAIT)
    assert conveyor.get(square.remote(3), timeout=WAIT) == 9


def test_what_waits_fails_with_the_session(local, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refs = [opened.remote(str(pipe)) for _ in range(20)]
    conveyor.shutdown()
    for ref in refs:
        with pytest.raises(ConveyorError):
            ref.get()


def test_threads_that_call_at_once_start_no_more_workers_than_cores(local):
    with ThreadPoolExecutor(6) as threads:
        pids = set(threads.map(lambda i: conveyor.get(pid.remote(i), timeout=WAIT), range(60)))
    assert len(pids) <= len(os.sched_getaffinity(0))


@conveyor.remote
class Caller:
    def value(self) -> int:
        return 1

    def ends_and_squares(self, n: int) -> Any:
        return ends_and_squares(n)

    def calls_functions(self, me: Any) -> Any:
        return conveyor.get([asks.remote(me) for _ in range(20)][-1])


@conveyor.remote
def asks(actor: Any) -> int:
    return conveyor.get(actor.value.remote())


def test_a_cycle_through_calls_that_wait_is_found(local):
    caller = Caller.remote()
    with pytest.raises(DeadlockError):
        conveyor.get(caller.calls_functions.remote(caller), timeout=WAIT)


@conveyor.remote
class Late:
    def after(self, path: str, value: int) -> int:
        hold(path)
        return value


def test_a_call_that_lacks_an_argument_does_not_fail_with_workers_that_are_dead(local, latches):
    """Each core has had a worker."""
    go, actor = latches(), Late.remote()
    for _ in range(2 * len(os.sched_getaffinity(0))):
        with pytest.raises(ActorDiedError):
            conveyor.get(end.remote(3), timeout=WAIT)
    made = square.remote(actor.after.remote(go.path, 7))
    go.open()
    assert conveyor.get(made, timeout=WAIT) == 49


def test_threads_that_stream_at_once_share_the_workers_that_there_may_be(local):
    with ThreadPoolExecutor(16) as pool:
        streams = list(pool.map(lambda _: list(count.remote(3)), range(16)))
    assert streams == [[0, 1, 2]] * 16
