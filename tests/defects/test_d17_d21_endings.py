"""What is dropped, and what is taken down, while an actor is at work."""

import gc

import pytest
from defect_actors import WAIT, Background, Recorder, room, seen, single

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, GraphTornDownError

pytestmark = pytest.mark.usefixtures("session")


# D17


@pytest.mark.parametrize("how", ["one by one", "in a cycle", "outputs apart", "with the graph"])
def test_d17_dropping_a_result_that_has_not_come_waits_for_nothing(a, b, latches, busy, how):
    """Elsewhere the destructor of a reference reads its result from the channel, without a limit:
    whoever drops one, or whose garbage collector does, may stand still for ever. Here dropping must
    return while the actor is still busy, and cost the other executions nothing."""
    with InputNode() as inp:
        dag = MultiOutputNode([a.take.bind(inp), b.take.bind(inp)])
    graph = dag.compile(depth=4)
    go, call = busy(b)
    refs = [graph.execute(i) for i in range(4)]
    box = [refs.pop(1), refs.pop(1)]  # executions 1 and 2
    graphs = [graph]

    def drop():
        if how == "in a cycle":
            box.append(box)
            box[:] = [list(box)]
            box[0].append(box[0])
        elif how == "outputs apart":
            for pair in box:
                del pair[0]
        elif how == "with the graph":
            refs.clear()
            graphs.clear()
        box.clear()
        gc.collect()

    if how == "with the graph":
        del graph
    Background(drop).result()
    assert not conveyor.wait([call], timeout=0)[0], "the actor was not busy any more"
    go.open()
    assert conveyor.get(call, timeout=WAIT) == "bleft"
    if how == "with the graph":
        assert conveyor.get([a.take.remote(9), b.take.remote(9)], timeout=WAIT) == ["a9", "b9"]
    else:
        assert conveyor.get(refs[0], timeout=WAIT) == ["a0", "b0"]
        assert conveyor.get(refs[1], timeout=WAIT) == ["a3", "b3"]
        assert room(graph, 4)[0] >= 4
        graph.teardown()
    seen(a), seen(b)


def test_d17_a_program_ends_though_a_result_has_not_come(scripts):
    """The same at the end of a program, where everything is dropped."""
    out = scripts.run(
        """
        import time
        import conveyor
        from conveyor.dag import InputNode

        @conveyor.remote
        class Stuck:
            def stay(self, x):
                print("inside", flush=True)
                while True:
                    time.sleep(60)

        stuck = Stuck.remote()
        with InputNode() as inp:
            dag = stuck.stay.bind(inp)
        graph = dag.compile(depth=2)
        refs = [graph.execute(i) for i in range(2)]
        print("end")
        """,
        timeout=3 * WAIT,
    )
    assert "end" in out


# D21


def test_d21_teardown_ends_with_the_method_that_runs(a, latches, busy, waits_for):
    """Elsewhere taking a graph down goes on waiting, in silence after one warning, for actors that
    may never answer. Here whoever waits must be told which actor it is; what that actor does must
    be finished, not lost; and the actor must be free at once afterwards."""
    graph = single(a.take).compile()
    go, call = busy(a)
    ref = graph.execute(1)
    ending = Background(graph.teardown)
    waits_for("Recorder")
    assert ending.running
    assert graph.is_teardown
    with pytest.raises(GraphTornDownError):
        graph.execute(2)
    with pytest.raises(GraphTornDownError):
        conveyor.get(ref, timeout=WAIT)
    go.open()
    ending.result()
    assert conveyor.get(call, timeout=WAIT) == "aleft"
    assert conveyor.get(a.take.remote(3), timeout=WAIT) == "a3"
    seen(a)


@pytest.mark.parametrize("where", ["in the graph", "in a call"])
def test_d21_teardown_ends_when_the_actor_it_waits_for_is_killed(
    latches, busy, waits_for, wait_until, where
):
    """Elsewhere nothing but an answer ends that wait. Here the death of the actor must end it, and
    the other actors of the graph must be free."""
    stuck, other = Recorder.remote("stuck"), Recorder.remote("other")
    inside, go = latches(), latches()
    with InputNode() as inp:
        dag = other.take.bind(stuck.enter.bind(inp, go.path))
    graph = dag.compile()
    if where == "in a call":
        go, call = busy(stuck)
    ref = graph.execute(inside.path)
    if where == "in the graph":
        wait_until(lambda: inside.is_open, what="the method to begin")
        call = stuck.take.remote(0)
    ending = Background(graph.teardown)
    waits_for("Recorder")
    assert ending.running
    conveyor.kill(stuck)
    ending.result()
    with pytest.raises(ActorDiedError):
        conveyor.get(call, timeout=WAIT)
    with pytest.raises((GraphTornDownError, ActorDiedError)):
        conveyor.get(ref, timeout=WAIT)
    assert conveyor.get(other.take.remote(1), timeout=WAIT) == "other1"


def test_d21_teardown_that_kills_waits_for_no_method(latches, wait_until):
    """Taking the graph down with its actors must not wait for what they do."""
    stuck, other = Recorder.remote("stuck"), Recorder.remote("other")
    inside, go = latches(), latches()
    with InputNode() as inp:
        dag = other.take.bind(stuck.enter.bind(inp, go.path))
    graph = dag.compile()
    ref = graph.execute(inside.path)
    wait_until(lambda: inside.is_open, what="the method to begin")
    Background(graph.teardown, kill_actors=True).result()
    for actor in (stuck, other):
        with pytest.raises(ActorDiedError):
            conveyor.get(actor.take.remote(1), timeout=WAIT)
    with pytest.raises((GraphTornDownError, ActorDiedError)):
        conveyor.get(ref, timeout=WAIT)
