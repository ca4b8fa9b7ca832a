"""Nodes that share no memory, when one of them, or the program, is lost."""

import gc
import os
import signal
import sys
from contextlib import contextmanager, suppress

import cloudpickle
import inside
import numpy as np
import pytest
import ray
from ray_nodes import HERE, THERE, TIMEOUT, WAIT, Adds, get
from ray_refs_helpers import LARGE, SMALL, holder, total

import conveyor
from conveyor import collective
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError, CollectiveBrokenError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Stage(Adds):
    def ask(self, other, method, *args):
        return conveyor.get(getattr(other, method).remote(*args))

    def meet(self, path):
        open(path, "w").close()
        collective.barrier()

    @conveyor.method(tensor_transport="auto")
    def keeps(self):
        return np.arange(LARGE)

    def total_into(self, refs):
        into = np.empty(LARGE, np.int64)
        conveyor.get(refs[0], into=into)
        return int(into.sum())


def executed_until_it_fails(graph):
    while True:
        get(graph.execute(1))


def test_a_node_that_is_lost(two_nodes, leaves_nothing, tmp_path, wait_until):
    with leaves_nothing():
        node = two_nodes.add_node(num_cpus=1, resources={"lost": 1})
        conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT)
        lost = Stage.options(resources={"lost": 1}).remote(10)
        stays, other = Stage.options(**HERE).remote(1), Stage.options(**THERE).remote(100)
        # Three hosts, each of which has something for each.
        with InputNode() as inp:
            dag = stays.run.bind(other.run.bind(lost.run.bind(other.run.bind(inp))))
        with dag.compile() as graph:
            assert get([graph.execute(i) for i in range(16)]) == [i + 211 for i in range(16)]
            assert get(lost.ask.remote(other, "run", 1)) == 101
            collective.create_collective_group([stays, other, lost])
            paths = [str(tmp_path / name) for name in ("stays", "other")]
            meets = [a.meet.remote(p) for a, p in zip((stays, other), paths, strict=True)]
            wait_until(lambda: all(map(os.path.exists, paths)), WAIT)
            two_nodes.remove_node(node, allow_graceful=False)
            for meet in meets:
                with pytest.raises(CollectiveBrokenError, match=r"rank 2 \(Stage.*has died"):
                    get(meet)
            with pytest.raises(ActorDiedError, match="Stage"):
                executed_until_it_fails(graph)
        with pytest.raises(ActorDiedError):
            get(lost.run.remote(1))
        assert get([stays.run.remote(1), other.run.remote(1)]) == [2, 101]
        conveyor.shutdown()


def test_a_node_with_holders_and_makers_is_lost(two_nodes, leaves_nothing, wait_until, tmp_path):
    with leaves_nothing():
        node = two_nodes.add_node(num_cpus=1, resources={"lost": 1})
        conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT)
        here, there, slow = holder(HERE), holder(THERE), holder(HERE)
        lost, also = (holder({"resources": {"lost": 0.1}}) for _ in range(2))
        get(lost.keep.remote([conveyor.put(np.arange(LARGE))]))
        (made,) = get(lost.put.remote(LARGE))
        assert get(there.total.remote([made])) == [total(LARGE)]
        (pending,) = get(lost.requested_to_stay.remote(slow, ""))
        waiting = [a.total.remote([pending]) for a in (here, there)]
        # What it was pickling comes to nobody.
        halves = [str(tmp_path / name) for name in ("here", "there")]
        for maker, reader, half in zip((lost, also), (here, there), halves, strict=True):
            maker.send_half.remote(reader, [conveyor.put(np.arange(SMALL))], half)
        wait_until(lambda: all(map(os.path.exists, halves)), WAIT)
        two_nodes.remove_node(node, allow_graceful=False)
        for ref in [pending, *waiting]:
            with pytest.raises(ActorDiedError):
                get(ref)
        assert get(here.total.remote([made])) == [total(LARGE)]
        del made, pending, waiting, ref
        gc.collect()
        wait_until(lambda: inside.kept() == 0, WAIT)
        conveyor.shutdown()


def test_one_that_has_died_here_comes_back_there_too(two_nodes, leaves_nothing):
    """Another node that knows an actor of the driver's has a proxy of it, whose slot is its successor's."""
    with leaves_nothing():
        conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT)
        one = Stage.options(max_restarts=-1, **HERE).remote(1)
        there = Stage.options(**THERE).remote(10)
        slots = set()
        for _ in range(3):
            pid = requested_again(there.ask, one, "pid")
            assert get(there.ask.remote(one, "run", 1)) == 2
            slots.add(inside.record_of(one).slot)
            os.kill(pid, signal.SIGKILL)
        assert len(slots) == 1
        assert requested_again(there.ask, one, "run", 1) == 2
        conveyor.shutdown()


def requested_again(method, *args):
    """What it returns when those whom it needs have come back."""
    while True:
        with suppress(ActorDiedError):
            return get(method.remote(*args))


@contextmanager
def stopped(pid):
    """The process is stopped, and goes on afterwards, if it is still there; its pidfd."""
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    try:
        yield pidfd
    finally:
        if not _over(pidfd):
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        os.close(pidfd)


def test_a_node_that_keeps_its_connections_and_says_nothing(two_nodes, leaves_nothing, wait_until):
    """With the usual patience: what is said of a loss is said of this one."""
    with leaves_nothing():
        conveyor.init(engine="ray", shared_memory="node")
        silent, stays = Stage.options(**THERE).remote(10), Stage.options(**HERE).remote(1)
        with InputNode() as inp:
            dag = stays.run.bind(silent.run.bind(inp))
        graph = dag.compile()
        assert get(graph.execute(1)) == 12
        (host,) = inside.agents()
        with stopped(ray.get(host.agent.__ray_call__.remote(lambda self: os.getpid()))) as agent:
            with pytest.raises(ActorDiedError, match=r"Stage.* was lost with its node"):
                executed_until_it_fails(graph)
            graph.teardown()
            with pytest.raises(ActorDiedError, match="was lost with its node"):
                get(silent.run.remote(1))
            assert get(stays.run.remote(1)) == 2
            signal.pidfd_send_signal(agent, signal.SIGCONT)
            wait_until(lambda: _over(agent), WAIT)  # it finds that it has been given up
        conveyor.shutdown()


def test_a_node_that_says_nothing_when_another_one_is_to_meet_it(two_nodes, leaves_nothing):
    """It is being connected to, which may take long, when the driver's node finds that it is lost."""
    with leaves_nothing():
        node = two_nodes.add_node(num_cpus=1, resources={"lost": 1})
        try:
            conveyor.init(engine="ray", shared_memory="node")
            silent = Stage.options(resources={"lost": 1}).remote(10)
            kept = silent.keeps.remote()
            assert get(silent.run.remote(1)) == 11
            other, stays = Stage.options(**THERE).remote(100), Stage.options(**HERE).remote(1)
            assert get(other.run.remote(1)) == 101
            host = inside.record_of(silent).node
            with stopped(ray.get(host.agent.__ray_call__.remote(lambda self: os.getpid()))):
                fetches = other.total_into.remote([kept])
                # Its own node does what else it has to, meanwhile.
                late = Stage.options(**THERE).remote(1000)
                assert get(late.ask.remote(stays, "run", 1)) == 2
                # That it is lost is all that may come of it. In truth its processes are of this machine,
                # where their memory can be read.
                with suppress(ActorDiedError):
                    assert get(fetches) == total(LARGE)
                with pytest.raises(ActorDiedError, match="was lost with its node"):
                    get(late.ask.remote(silent, "run", 1))
            del kept, fetches
            gc.collect()
            conveyor.shutdown()
        finally:
            two_nodes.remove_node(node, allow_graceful=False)


def test_it_ends_with_the_program(scripts, two_nodes, wait_until):
    """Killed, the program leaves neither actors nor an agent on the other node."""
    source = """
    import os, sys, threading
    import conveyor

    class A:
        def pids(self):
            return os.getpid(), os.getppid()

    conveyor.init(engine="ray", address=sys.argv[1], shared_memory="node")
    actor = conveyor.remote(A).options(resources={"second": 1}).remote()
    pid = conveyor.get(actor.pids.remote())[0]
    import inside, ray
    (host,) = inside.agents()
    agent = ray.get(host.agent.__ray_call__.remote(lambda self: os.getpid()))
    print("said", pid, agent, flush=True)
    threading.Event().wait()
    """
    program = scripts.start(source, two_nodes.address, env={"RAY_ADDRESS": ""})
    said = next(line.split() for line in program.stdout if line.startswith("said"))
    pidfds = [os.pidfd_open(int(pid)) for pid in said[1:]]
    program.kill()
    for pidfd in pidfds:
        wait_until(lambda pidfd=pidfd: _over(pidfd), WAIT)
        os.close(pidfd)


def test_it_ends_when_rays_connection_has_ended_before(scripts, two_nodes):
    """Ray would make another connection by itself: to whatever cluster it finds, or to a new one."""
    source = """
    import sys
    import ray
    import conveyor

    class A:
        def run(self):
            return 1

    ray.init(address=sys.argv[1], log_to_driver=False)
    conveyor.init(engine="ray", shared_memory="node", grace_seconds=0.1)
    where = {"resources": {"second": 0.1}}
    actor = conveyor.remote(A).options(**where).remote()
    assert conveyor.get(actor.run.remote()) == 1
    ray.shutdown()
    try:
        conveyor.remote(A).options(**where).remote()
    except conveyor.exceptions.ActorStartError as error:
        print(error)
    conveyor.shutdown()
    print("connected", ray.is_initialized())
    """
    out = scripts.run(source, two_nodes.address, env={"RAY_ADDRESS": ""})
    assert "the connection to Ray that the session was started on has ended" in out
    assert "connected False" in out


def _over(pidfd):
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    return False


def test_bad_options():
    with pytest.raises(ValueError, match="shared_memory"):
        conveyor.init(engine="ray", shared_memory="rack")
    with pytest.raises(ValueError, match="node_timeout"):
        conveyor.init(engine="ray", node_timeout=0)
    assert not conveyor.is_initialized()
