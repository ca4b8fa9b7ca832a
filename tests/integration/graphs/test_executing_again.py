"""User code that runs in the middle of a graph's execute or restart, and uses the same graph."""

import asyncio
import os
import signal
import threading

import pytest
from integration_helpers import WAIT, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import DeadlockError, GraphTornDownError

WAYS = {
    "execute": lambda graph: graph.execute(5),
    "try_execute": lambda graph: graph.try_execute(5),
    # Without a loop, since one may run already.
    "execute_async": lambda graph: graph.execute_async(5).send(None),
    "with_a_deadline": lambda graph: graph.execute(5, deadline=WAIT),
    "teardown": lambda graph: graph.teardown(),
}


class Echo:
    def f(self, x):
        return x


class Encoded:
    """Calls ``act`` whenever it is encoded, and notes what that raises."""

    def __init__(self, act):
        self.act = act
        self.raised = []

    def __reduce__(self):
        try:
            self.act()
        except Exception as error:
            self.raised.append(error)
        return (int, (7,))


@pytest.fixture
def graph(local):
    actor = conveyor.remote(Echo).remote()
    with InputNode() as x:
        dag = actor.f.bind(x)
    graph = dag.compile(name="the echo", depth=1)
    yield graph
    graph.teardown()


@pytest.mark.parametrize("outer", ["execute", "deadline", "try_execute", "execute_async"])
@pytest.mark.parametrize("way", WAYS)
def test_an_argument_that_uses_its_own_graph_is_refused(graph, outer, way):
    value = Encoded(lambda: WAYS[way](graph))
    if outer == "execute":
        ref = graph.execute(value)
    elif outer == "deadline":
        ref = graph.execute(value, deadline=WAIT)
    elif outer == "try_execute":
        ref = graph.try_execute(value)
    else:
        ref = asyncio.run(graph.execute_async(value))
    assert conveyor.get(ref, timeout=WAIT) == 7
    (error,) = value.raised
    assert type(error) is DeadlockError
    assert "the echo" in str(error)
    # And the graph goes on.
    assert conveyor.get(graph.execute(1), timeout=WAIT) == 1


def test_another_thread_meanwhile_waits_for_its_turn(graph):
    made = []

    def act():
        thread = threading.Thread(target=lambda: made.append(graph.execute(2, timeout=WAIT)))
        thread.start()
        threads.append(thread)

    threads = []
    first = graph.execute(Encoded(act))
    assert conveyor.get(first, timeout=WAIT) == 7
    for thread in threads:
        thread.join(WAIT)
    assert conveyor.get(made[0], timeout=WAIT) == 2


def test_a_signal_handler_that_executes_what_it_has_interrupted_is_refused(graph, wait_until):
    raised = []

    def handler(_number, _frame):
        try:
            graph.execute(2)
        except DeadlockError as error:
            raised.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        value = Encoded(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        ref = graph.execute(value)
        wait_until(lambda: raised)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert conveyor.get(ref, timeout=WAIT) == 7
    assert "the echo" in raised[0]


_when_rebuilt = []


class Item:
    def __reduce__(self):
        return (_rebuilt, ())


def _rebuilt():
    if _when_rebuilt:
        _when_rebuilt.pop()()
    return Item()


class Items:
    def __init__(self, sent):
        self.sent = sent

    def items(self, x):
        for _ in range(3):
            yield Item()
        if x == 1:
            self.sent.touch()


class Dies:
    def __init__(self, go):
        self.go = go

    def f(self, x):
        if x == 1:
            hold(self.go)
            os._exit(3)
        return x


@pytest.mark.parametrize("use", ["teardown", "restart", "execute"])
def test_an_item_that_uses_its_graph_when_a_restart_decodes_it(local, wait_until, tmp_path, use):
    items = conveyor.remote(max_restarts=2)(Items).remote(tmp_path / "sent")
    dies = conveyor.remote(max_restarts=2)(Dies).remote(tmp_path / "sent")
    with InputNode() as x:
        dag = MultiOutputNode([items.items.bind(x), dies.f.bind(x)])
    graph = dag.compile()
    done = []

    def act():
        done.append(getattr(graph, use)(*([0] if use == "execute" else [])))

    conveyor.get(graph.execute(0)[1], timeout=WAIT)
    refs = graph.execute(1)
    with pytest.raises(conveyor.exceptions.ActorDiedError):
        conveyor.get(refs[1], timeout=WAIT)
    wait_until(lambda: refs[0].done())
    _when_rebuilt.append(act)
    thread = threading.Thread(target=graph.restart, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive()
    assert len(done) == 1
    if use == "teardown":
        with pytest.raises(GraphTornDownError):
            graph.execute(2)
    else:
        assert conveyor.get(graph.execute(2)[1], timeout=WAIT) == 2
        graph.teardown()
