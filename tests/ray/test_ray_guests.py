"""Actors and graphs of a Ray program in a session: they take part, and go on when it is over."""

import os
import signal
import threading

import pytest
import ray
from ray.dag import InputNode as RaysInput
from ray.dag import MultiOutputNode as RaysOutputs
from ray_guests_helpers import Ours, Stage, is_killed_and_leaves, nothing_left, until_it_raises
from ray_nodes import WAIT, get

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError, ActorStartError
from conveyor.runtime import context


def test_their_methods_are_bound_and_called(rt, stages):
    first, second = map(conveyor.attach, stages)
    assert conveyor.attach(stages[0]) == first
    ours = Ours.remote()
    with InputNode() as inp:
        dag = ours.add.bind(second.add.bind(first.add.bind(inp), y=10), y=100)
    with dag.compile() as graph:
        for i in range(100):
            ref = graph.execute(i)
            assert ray.get(stages[0].add.remote(i)) == i + 1
            assert get(ref) == i + 111
    assert get(first.both.remote(1)) == [1, 2]
    assert list(second.items.remote(3)) == [0, 1, 2]
    assert get(ours.ask.remote(first)) == get(first.ask.remote(ours)) == 2
    with pytest.raises(TypeError, match="add"):
        first.add.remote()
    with pytest.raises(
        TypeError, match="_ray_trace_ctx"
    ):  # Ray's own, and no parameter of the program's
        first.add.remote(1, _ray_trace_ctx=None)


def test_a_graph_of_rays(rt, stages):
    first, second = stages
    with RaysInput() as inp:
        x, y = first.both.bind(inp[0])
        z = second.add.bind(x, y=100)
        dag = RaysOutputs([z, y, first.add.bind(inp.k), second.add.bind(z)])
    with conveyor.attach(dag).compile() as graph:
        assert get(graph.execute(1, k=7)) == [101, 2, 8, 102]


def test_an_error_is_the_programs_own(rt, stages):
    with pytest.raises(TypeError, match="can only concatenate str"):
        get(conveyor.attach(stages[0]).add.remote("text"))


def test_they_go_on_when_the_session_has_ended(leaves_nothing, stages, wait_until):
    pids = ray.get([stage.pid.remote() for stage in stages])
    for _ in range(3):
        with leaves_nothing():
            conveyor.init()
            first, second = map(conveyor.attach, stages)
            with InputNode() as inp:
                graph = second.add.bind(first.add.bind(inp)).compile()
            assert get(graph.execute(1)) == 3
            conveyor.shutdown()
        assert ray.get([stage.add.remote(1) for stage in stages]) == [2, 2]
        nothing_left(wait_until, *stages)
    assert ray.get([stage.pid.remote() for stage in stages]) == pids


def test_one_that_is_at_work_when_the_session_ends(leaves_nothing, stage, latches, wait_until):
    started, go = latches(), latches()
    with leaves_nothing():
        conveyor.init(grace_seconds=0.1)
        ref = conveyor.attach(stage).hold.remote(started.path, go.path, wait_until)
        wait_until(lambda: started.is_open, WAIT)
        conveyor.shutdown()
        conveyor.init()
        with pytest.raises(
            ActorStartError, match=rf"takes part in a session of process {os.getpid()}"
        ):
            conveyor.attach(stage)
        conveyor.shutdown()
    go.open()
    nothing_left(wait_until, stage)
    assert ray.get(stage.list.remote()) == ["hold", "held"]
    del ref


def test_one_that_is_killed_leaves(rt, stage, wait_until):
    is_killed_and_leaves(stage, wait_until)


def test_its_farewell_may_be_heard_late(rt, stage, monkeypatch, wait_until):
    """Where the driver is busy, the process may be there again before it is known to have gone."""
    from conveyor.driver import driver as attachments

    monkeypatch.setattr(attachments, "_LEAVES_WITHIN", 0.0)
    hosts = context.running()._engine
    attached = conveyor.attach(stage)
    busy, go = threading.Event(), threading.Event()

    def keep_it_busy():
        for connection in hosts._attached_processes.process_listener._known:
            hosts._events.remove(connection)  # its turn is last
        busy.set()
        assert go.wait(WAIT)

    hosts._events.call(keep_it_busy)
    assert busy.wait(WAIT)
    conveyor.kill(attached)
    hosts._attached_processes.process_listener.tell_to_leave(
        ray.get(stage.pid.remote())
    )  # as that thread will, too
    nothing_left(wait_until, stage)
    thread = threading.Thread(target=lambda: again.append(conveyor.attach(stage)))
    again = []
    thread.start()
    wait_until(lambda: ray.get(stage.host.remote()) is not None, WAIT)
    go.set()
    thread.join(WAIT)
    assert get(again[0].add.remote(1)) == 2
    assert len(hosts._attached_processes) == 1


def test_a_step_goes_on_beside_a_call_of_rays(rt, stage, latches, wait_until):
    started, go = latches(), latches()
    attached = conveyor.attach(stage)
    held = stage.hold.remote(started.path, go.path, wait_until)
    wait_until(lambda: started.is_open, WAIT)
    assert get(attached.add.remote(1)) == 2
    go.open()
    ray.get(held)


# Ends


def test_its_death(rt, stage, stages):
    attached, other = conveyor.attach(stage), conveyor.attach(stages[0])
    with InputNode() as inp:
        graph = other.add.bind(attached.add.bind(inp)).compile()
    os.kill(get(attached.pid.remote()), signal.SIGKILL)
    with pytest.raises(ActorDiedError, match=r"Plain.*(SIGKILL|how cannot be known)"):
        until_it_raises(lambda: get(graph.execute(1)))
    assert get(other.add.remote(1)) == 2


def test_left_by_sys_exit(rt, two_nodes):
    stage = Stage.remote()
    attached = conveyor.attach(stage)
    with pytest.raises(ActorDiedError, match=r"left by sys\.exit: it exited with code 3"):
        get(attached.leave.remote())
    with pytest.raises(ray.exceptions.RayActorError):
        until_it_raises(lambda: ray.get(stage.add.remote(1)))


def test_the_drivers_death(two_nodes, leaves_nothing, scripts, stage, wait_until):
    """Nobody tells it of its session's end: it sees that itself, and can be in another one."""
    source = """
    import sys
    import cloudpickle, conveyor, ray

    conveyor.init(engine="ray", address=sys.argv[1])
    stage = ray.cloudpickle.loads(bytes.fromhex(sys.argv[2]))
    print("said", conveyor.get(conveyor.attach(stage).add.remote(1)), flush=True)
    sys.stdin.close()
    while True:
        conveyor.get(conveyor.attach(stage).add.remote(1))
    """
    handle = ray.cloudpickle.dumps(stage).hex()
    program = scripts.start(source, two_nodes.address, handle)
    assert any(line.startswith("said 2") for line in program.stdout)
    program.kill()
    program.wait()
    nothing_left(wait_until, stage)
    with leaves_nothing():
        conveyor.init()
        assert get(conveyor.attach(stage).add.remote(1)) == 2
        conveyor.shutdown()
