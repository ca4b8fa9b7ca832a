"""Results on the executor's side that are dropped, interrupted, or asked for in vain."""

import gc
import sys

import cloudpickle
import inside
import pytest
from integration_helpers import get, hold, large

import conveyor
from conveyor.codec import KnownDefinitions
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import WaitTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Maker:
    def boxed(self, value):
        """Of a class that nobody else knows: the frame brings its definition."""

        class Box:
            def __init__(self, value):
                self.value = value

        return Box(value)

    def late(self, value, go):
        hold(go)
        return value


@pytest.fixture(scope="module", autouse=True)
def session(leaves_nothing):
    with leaves_nothing():
        conveyor.init()
        yield
        conveyor.shutdown()


@pytest.fixture
def learning(monkeypatch):
    """``learning(f)``: have ``f()`` called when the next definitions have been learnt."""
    learn, waiting = KnownDefinitions.learn, []

    def learn_and_tell(*args):
        learnt = learn(*args)
        if waiting:
            waiting.pop()()
        return learnt

    monkeypatch.setattr(KnownDefinitions, "learn", learn_and_tell)
    return waiting.append


def finished(graph, executions, wait_until):
    wait_until(lambda: inside.window_of(graph).completed == executions, what="the results")


def test_a_result_that_is_dropped_while_its_definitions_are_learnt_is_not_kept(
    learning, wait_until
):
    maker = Maker.remote()
    with InputNode() as inp:
        graph = maker.boxed.bind(inp).compile()
    refs = [graph.execute(i) for i in range(3)]
    finished(graph, 3, wait_until)
    learning(lambda: refs.__setitem__(0, None))
    assert get(refs[2]).value == 2  # those before it move out of its way
    assert refs[0] is None
    assert inside.window_of(graph).stashed == 1
    assert get(refs[1]).value == 1
    assert inside.window_of(graph).stashed == 0
    graph.teardown()


def test_ctrl_c_while_a_graph_is_torn_down_loses_no_result(learning, wait_until):
    makers = [Maker.remote() for _ in range(3)]
    with InputNode() as inp:
        graph = MultiOutputNode([maker.boxed.bind(inp) for maker in makers]).compile()
    refs = [ref for i in range(2) for ref in graph.execute(i)]
    finished(graph, 2, wait_until)

    def interrupt():
        raise KeyboardInterrupt

    learning(interrupt)
    with pytest.raises(KeyboardInterrupt):
        graph.teardown()
    assert [box.value for box in get(refs)] == [0, 0, 0, 1, 1, 1]
    graph.teardown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_results_are_dropped_keeps_no_ref_in_them(learning, wait_until):
    exports = conveyor.runtime.context.current().exports
    maker = Maker.remote()
    with InputNode() as inp:
        graph = MultiOutputNode([maker.boxed.bind(inp), maker.boxed.bind(inp)]).compile()
    refs = [ref for i in range(2) for ref in graph.execute([conveyor.put(large(i))])]
    finished(graph, 2, wait_until)
    wait_until(lambda: exports.tidy() or exports.entry_count == 2)
    graph.teardown()
    assert inside.window_of(graph).stashed == 4

    def interrupt():
        raise KeyboardInterrupt

    learning(interrupt)
    del refs, graph
    gc.collect()
    wait_until(lambda: exports.tidy() or exports.entry_count == 0, what="the end of exported refs")


def test_a_result_that_was_requested_for_in_vain_leaves_nothing(latches):
    maker, go = Maker.remote(), latches()
    with InputNode() as inp:
        graph = maker.late.bind(inp, go.path).compile()
    refs = [graph.execute(i) for i in range(4)]
    for ref in refs:
        with pytest.raises(WaitTimeoutError):
            ref.get(timeout=0.02)
    assert inside.window_of(graph).requested == 4
    del ref, refs[3]  # it is dropped before it comes
    assert inside.window_of(graph).requested == 3
    assert refs[2].cancel()
    assert inside.window_of(graph).requested == 2
    go.open()
    assert get(refs[:2]) == [0, 1]
    assert inside.window_of(graph).requested == 0
    graph.teardown()
