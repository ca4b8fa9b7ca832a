"""Status and restarts of graphs on the inline engine."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from integration_helpers import WAIT, chain

import conveyor
from conveyor.exceptions import ActorDiedError, ActorRestartedError


@conveyor.remote
class Actor:
    def echo(self, x):
        return x

    def leave(self, code):
        sys.exit(code)


@pytest.fixture
def inline(leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine="inline")
        yield
        conveyor.shutdown()


def test_inline_status(inline):
    seen = []

    @conveyor.remote
    class Looker:
        def look(self, x):
            seen.append(graphs[0].status())
            return x

    a, b = Looker.remote(), Actor.remote()
    graphs = [chain(a.look, b.echo).compile(name="here")]
    assert conveyor.get(graphs[0].execute(1)) == 1
    (status,) = seen
    first, second = status.actors
    assert (status.state, status.submitted, status.completed) == ("ready", 1, 0)
    assert (first.state, first.execution) == ("running", 0)
    assert "look" in first.method
    assert second.state == "idle"
    assert status.executions[0].number == 0
    status = graphs[0].status(stacks=False)
    assert (status.submitted, status.completed, status.executions) == (1, 1, ())
    assert "nothing in flight" in str(status)
    graphs.pop().teardown()
    del a, b


def test_inline_restart(inline):
    a, b = Actor.remote(), Actor.options(max_restarts=1).remote()
    with chain(a.echo, b.leave).compile() as graph:
        with pytest.raises(ActorRestartedError, match="tried again"):
            conveyor.get(graph.execute(3))
        with pytest.raises(ActorDiedError, match="code 3"):
            conveyor.get(graph.execute(3))
        with pytest.raises(ActorDiedError) as caught:
            conveyor.get(graph.execute(3))
        assert type(caught.value) is ActorDiedError
        assert graph.status().state == "failed"
        graph.restart()
        assert graph.status().state == "ready"
        assert conveyor.get(b.echo.remote(1)) == 1
        conveyor.kill(b)
        with pytest.raises(ActorDiedError):
            graph.restart()


@pytest.fixture
def switching_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_a_restart_that_several_threads_need_is_counted_once(inline, switching_often):
    for _ in range(10):
        actor = Actor.options(max_restarts=2).remote()
        for _ in range(2):
            with pytest.raises(ActorDiedError):
                conveyor.get(actor.leave.remote(3))
            with ThreadPoolExecutor(4) as pool:
                together = threading.Barrier(4)

                def call(i, together=together, actor=actor):
                    together.wait(WAIT)
                    return conveyor.get(actor.echo.remote(i), timeout=WAIT)

                assert list(pool.map(call, range(4))) == list(range(4))
        with pytest.raises(ActorDiedError):
            conveyor.get(actor.leave.remote(3))
        with pytest.raises(ActorDiedError):
            conveyor.get(actor.echo.remote(1))


def test_a_constructor_that_has_raised_at_a_restart_is_run_again(inline):
    busy = []

    @conveyor.remote
    class Device:
        def __init__(self):
            if busy:
                raise OSError("the device is busy")

        def echo(self, x):
            return x

        def leave(self, code):
            sys.exit(code)

    device = Device.remote()
    with chain(device.echo).compile() as graph:
        assert conveyor.get(graph.execute(1)) == 1
        busy.append("so")
        with pytest.raises(ActorDiedError):
            conveyor.get(device.leave.remote(3))
        for _ in range(2):
            graph.restart()
            with pytest.raises(ActorDiedError, match="the device is busy"):
                conveyor.get(graph.execute(2))
        busy.clear()
        graph.restart()
        assert conveyor.get(graph.execute(3)) == 3
        assert conveyor.get(device.echo.remote(4)) == 4
