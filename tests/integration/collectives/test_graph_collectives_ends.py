"""Collectives in graphs whose ranks die, dawdle, are cancelled or restarted, and graphs that share actors."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import cloudpickle
import pytest
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, DeadlineExceededError, ExecutionCancelledError
from conveyor.experimental import collective

np = pytest.importorskip("numpy")

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


@conveyor.remote
class Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def ramp(self, size: int) -> Any:
        return np.arange(size) + self.rank

    def held(self, x: Any, path: str) -> Any:
        if self.rank == 1:
            open(path + ".began", "w").close()
            hold(path)
        return np.ones(x)

    def pid(self, x: Any = None) -> int:
        return os.getpid()


def ranks(count: int, **options: Any) -> list[Any]:
    return [Rank.options(**options).remote(i) for i in range(count)]


def every(workers: list[Any], method: str, *args: Any) -> list[Any]:
    return [getattr(worker, method).bind(*args) for worker in workers]


def held_graph(workers: list[Any], latch: Any, **options: Any) -> Any:
    with InputNode() as x:
        dag = MultiOutputNode(
            collective.allreduce.bind([w.held.bind(x, latch.path) for w in workers])
        )
    return dag.compile(**options)


def test_a_rank_that_is_killed_frees_the_others_at_once(latches, wait_until):
    workers, latch = ranks(2), latches()
    pid = get(workers[1].pid.remote())
    graph = held_graph(workers, latch)
    refs = graph.execute(2)
    wait_until(lambda: os.path.exists(latch.path + ".began"))
    died: list[float] = []

    def kill() -> None:
        died.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Timer(0.05, kill).start()
    for ref in refs:
        with pytest.raises(ActorDiedError, match="Rank"):
            get(ref)
    # Milliseconds in truth; other programs may have the cores meanwhile.
    assert time.monotonic() - died[0] < 5
    assert get(workers[0].pid.remote())


def test_cancelling_and_deadlines_free_who_waits(latches, wait_until):
    workers, latch = ranks(2), latches()
    graph = held_graph(workers, latch)
    refs = graph.execute(2)
    wait_until(lambda: os.path.exists(latch.path + ".began"))
    late = graph.execute(2, deadline=0.05)
    with pytest.raises(DeadlineExceededError):
        get(late)
    assert refs[0].cancel()
    for ref in refs:
        with pytest.raises(ExecutionCancelledError):
            get(ref)
    latch.open()
    assert [one.tolist() for one in get(graph.execute(2))] == [[2, 2]] * 2


def test_graphs_executed_in_opposite_orders_do_not_deadlock():
    workers = ranks(2)
    graphs = []
    for _ in range(2):
        with InputNode() as x:
            graphs.append(
                MultiOutputNode(collective.allreduce.bind(every(workers, "ramp", x))).compile()
            )
    failed: list[BaseException] = []

    def run(order: list[Any]) -> None:
        try:
            for _ in range(50):
                refs = [graph.execute(100) for graph in order for _ in range(3)]
                for ref in reversed(refs):
                    assert get(ref)[1][0] == 1
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(order,)) for order in (graphs, graphs[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads)
    assert not failed


@conveyor.remote
class Controller:
    def run(self, workers: list[Any], size: int) -> Any:
        with InputNode() as x:
            dag = MultiOutputNode(collective.allreduce.bind(every(workers, "ramp", x)))
        with dag.compile() as graph:
            return [one.tolist() for one in get(graph.execute(size))]


def test_a_graph_that_an_actor_compiles():
    workers = ranks(2)
    assert get(Controller.remote().run.remote(workers, 2)) == [[1, 3]] * 2


def test_a_restarted_graph(latches, wait_until):
    workers, latch = ranks(2, max_restarts=1), latches()
    pid = get(workers[1].pid.remote())
    graph = held_graph(workers, latch)
    refs = graph.execute(2)
    wait_until(lambda: os.path.exists(latch.path + ".began"))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        get(refs[0])
    latch.open()
    graph.restart()
    assert [one.tolist() for one in get(graph.execute(2))] == [[2, 2]] * 2
