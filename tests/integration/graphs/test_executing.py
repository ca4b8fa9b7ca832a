"""The way of almost every execution into its graph, and of its results out: what Python has no part in."""

import sys
import threading

import cloudpickle
import pytest
from integration_helpers import WAIT, compiled, get

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import SerializationError, WaitTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


@conveyor.remote
class Echo:
    def echo(self, x, *_more):
        return x


class Raising:
    """Cannot be pickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


class Slow:
    """Is pickled when it is told to, and says that it is about to be."""

    begun = threading.Event()
    go = threading.Event()

    def __reduce__(self):
        self.begun.set()
        assert self.go.wait(WAIT)
        return int, (7,)


@pytest.mark.parametrize("outputs", [1, 2])
def test_what_cannot_be_sent_leaves_the_way_free(outputs):
    actors = [Echo.remote() for _ in range(outputs)]
    with InputNode() as x:
        tasks = [actor.echo.bind(x) for actor in actors]
    with (MultiOutputNode(tasks) if outputs > 1 else tasks[0]).compile() as graph:
        expected = [5] * outputs if outputs > 1 else 5
        with pytest.raises(SerializationError, match="execute") as raised:
            graph.execute(Raising(RuntimeError("not this one")))
        assert "not this one" in str(raised.value)
        with pytest.raises(KeyboardInterrupt):
            graph.execute(Raising(KeyboardInterrupt()))
        assert get(graph.execute(5)) == expected


def test_one_submission_at_a_time():
    with compiled(Echo.remote().echo.bind) as graph:
        refs = []
        thread = threading.Thread(target=lambda: refs.append(graph.execute(Slow())))
        thread.start()
        assert Slow.begun.wait(WAIT)
        try:
            with pytest.raises(WaitTimeoutError, match="another thread's submission"):
                graph.execute(1, timeout=0.02)
        finally:
            Slow.go.set()
            thread.join(WAIT)
        assert get([*refs, graph.execute(2)]) == [7, 2]


@pytest.mark.parametrize("value", [None, True, 3, 2.5, "text", b"bytes", (1, "two"), [1, 2]])
def test_values_can_be_got_again(value):
    with compiled(Echo.remote().echo.bind) as graph:
        refs = [graph.execute(value) for _ in range(3)]
        for timeout in (None, None, 0, 1.0, -1):
            assert [ref.get(timeout) for ref in refs] == [value] * 3
            assert conveyor.get(refs, timeout=timeout) == [value] * 3
