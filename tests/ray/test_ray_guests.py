"""Actors and graphs of a Ray program in a session: they take part, and go on when it is over."""

import os
import re
import signal
import sys
import threading

import cloudpickle
import pytest
import ray
from ray.dag import InputNode as RaysInput
from ray.dag import MultiOutputNode as RaysOutputs

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError, ActorStartError, RuntimeStateError, WaitTimeoutError

for pickler in cloudpickle, ray.cloudpickle:
    pickler.register_pickle_by_value(sys.modules[__name__])

WAIT = 60


class Plain:
    def __init__(self):
        self.seen = []

    def add(self, x, y=1):
        self.seen.append("add")
        return x + y

    def list(self):
        return list(self.seen)

    def pid(self):
        return os.getpid()

    @ray.method(num_returns=2)
    def both(self, x):
        return x, x + 1

    def items(self, n):
        yield from range(n)

    def hold(self, started, go, wait_until):
        self.seen.append("hold")
        open(started, "w").close()
        wait_until(lambda: os.path.exists(go), WAIT)
        self.seen.append("held")

    def leave(self):
        sys.exit(3)

    def ask(self, actor):
        return conveyor.get(actor.add.remote(1))

    def left(self):
        """What a session has left in the process."""
        files = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if _is_there(fd)
        ]
        with open("/proc/self/maps") as maps:
            files += [line.split()[-1] for line in maps]
        threads = [thread.name for thread in threading.enumerate()]
        return [name for name in (*files, *threads) if "conveyor" in name and ".so" not in name]


def _is_there(fd):
    return os.path.islink(f"/proc/self/fd/{fd}")


Stage = ray.remote(num_cpus=0)(Plain)


@conveyor.remote
class Ours:
    def add(self, x, y=1):
        return x + y

    def ask(self, actor):
        return get(actor.add.remote(1))


def get(ref):
    return conveyor.get(ref, timeout=WAIT)


@pytest.fixture(scope="module")
def stages(two_nodes):
    """Two actors of Ray's, on two nodes. What they have of one test they have of the next one's session."""
    return Stage.remote(), Stage.options(resources={"second": 0.1}).remote()


@pytest.fixture
def stage(two_nodes):
    """One of a test's own."""
    made = Stage.remote()
    yield made
    ray.kill(made)


def until_it_raises(call):
    """What is told sooner or later, but comes as an error then."""
    while True:
        call()


def nothing_left(wait_until, *stages):
    for stage in stages:
        wait_until(lambda stage=stage: ray.get(stage.left.remote()) == [], WAIT)


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


def test_they_go_on_when_the_session_has_ended(rt, stages, wait_until):
    conveyor.shutdown()
    pids = ray.get([stage.pid.remote() for stage in stages])
    for _ in range(3):
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
    assert ray.get(stage.list.remote()) == ["hold", "held"]
    nothing_left(wait_until, stage)
    del ref


def test_one_that_is_killed_leaves(rt, stage, wait_until):
    attached = conveyor.attach(stage)
    conveyor.kill(attached)
    with pytest.raises(ActorDiedError, match=r"killed by conveyor\.kill"):
        attached.add.remote(1)
    assert ray.get(stage.add.remote(1)) == 2
    again = conveyor.attach(stage)
    assert again != attached
    assert get(again.add.remote(1)) == 2
    conveyor.kill(again, graceful=True)
    nothing_left(wait_until, stage)


# One at a time


def test_a_step_waits_for_a_call_of_rays(rt, stage, latches, wait_until):
    started, go = latches(), latches()
    attached = conveyor.attach(stage)
    with InputNode() as inp:
        graph = attached.add.bind(inp).compile()
    held = stage.hold.remote(started.path, go.path, wait_until)
    wait_until(lambda: started.is_open, WAIT)
    ref = graph.execute(1)
    wait_until(lambda: "hold for Ray, and then goes on" in str(graph.status()), WAIT)
    with pytest.raises(WaitTimeoutError, match="hold for Ray"):
        conveyor.get(ref, timeout=0.01)
    go.open()
    assert get(ref) == 2
    ray.get(held)
    assert ray.get(stage.list.remote()) == ["hold", "held", "add"]


def test_a_call_of_rays_waits_for_a_method(rt, stage, latches, wait_until):
    started, go = latches(), latches()
    held = conveyor.attach(stage).hold.remote(started.path, go.path, wait_until)
    wait_until(lambda: started.is_open, WAIT)
    ref = stage.add.remote(1)
    go.open()
    get(held)
    assert ray.get(ref) == 2
    assert ray.get(stage.list.remote()) == ["hold", "held", "add"]


@pytest.mark.parametrize("options", [{}, {"max_concurrency": 2}])
def test_without_turns_a_step_goes_on_beside_it(rt, two_nodes, options, latches, wait_until):
    started, go = latches(), latches()
    stage = Stage.options(**options).remote()
    attached = conveyor.attach(stage, in_turn=bool(options))
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


def test_the_drivers_death(two_nodes, scripts, stage, wait_until):
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
    conveyor.init()
    assert get(conveyor.attach(stage).add.remote(1)) == 2
    conveyor.shutdown()


# What cannot be attached


class Async(Plain):
    async def later(self):
        pass


class Without(Plain):
    def __init__(self):
        sys.modules["conveyor.engine.ray.greeting"] = None


class Other(Plain):
    def __init__(self):
        conveyor.engine.ray.greeting.version = lambda: "Conveyor 0.0 on Python 2"


class Own(Plain):
    def __init__(self):
        conveyor.init(engine="inline")


@pytest.mark.parametrize(
    ("cls", "kind", "text"),
    [
        (Async, NotImplementedError, "async methods"),
        (Without, RuntimeStateError, "cannot import this version of conveyor"),
        (Other, RuntimeStateError, r"has Conveyor 0\.0 on Python 2, and the driver has Conveyor"),
        (Own, ActorStartError, "has started a session of its own"),
    ],
)
def test_one_whose_process_cannot_take_part(rt, two_nodes, cls, kind, text):
    stage = ray.remote(num_cpus=0)(cls).remote()
    with pytest.raises(kind, match=text):
        conveyor.attach(stage)
    ray.kill(stage)


def test_one_that_is_dead(rt, two_nodes):
    stage = Stage.remote()
    ray.get(stage.pid.remote())
    ray.kill(stage)
    with pytest.raises(ActorDiedError, match="Plain of Ray is dead"):
        until_it_raises(lambda: conveyor.attach(stage))


def test_one_of_another_cluster(rt, stage, monkeypatch):
    monkeypatch.setattr(stage, "_ray_cluster_and_job", (None, None))
    with pytest.raises(RuntimeStateError, match="another cluster"):
        conveyor.attach(stage)


def test_what_is_no_actor(rt):
    with pytest.raises(TypeError, match="not int"):
        conveyor.attach(3)
    with pytest.raises(RuntimeStateError, match=re.escape('init(engine="ray")')):
        get(Ours.remote().__ray_call__.remote(lambda self: conveyor.attach(3)))


def test_a_session_that_is_not_on_ray(stages):
    conveyor.init(engine="inline")
    with pytest.raises(RuntimeStateError, match=re.escape('init(engine="ray")')):
        conveyor.attach(stages[0])
    conveyor.shutdown()


def test_a_graph_of_rays_that_has_no_counterpart(rt, stages):
    function = ray.remote(lambda x: x)
    with RaysInput() as inp:
        dag = stages[0].add.bind(function.bind(inp))
    with pytest.raises(NotImplementedError, match="FunctionNode"):
        conveyor.attach(dag)
    with RaysInput() as inp:
        dag = Stage.bind().add.bind(inp)
    with pytest.raises(NotImplementedError, match="not started"):
        conveyor.attach(dag)
