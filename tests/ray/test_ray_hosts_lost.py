"""Nodes that share no memory, when one of them, or the program, is lost."""

import gc
import os
import signal
import sys

import cloudpickle
import numpy as np
import pytest
from ray_refs_helpers import LARGE, holder, kept, total

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT = 60
#: Connections are not to be lost because the machine has other work.
TIMEOUT = 30
HERE, THERE = {"resources": {"first": 0.01}}, {"resources": {"second": 0.01}}


@conveyor.remote
class Stage:
    def __init__(self, add=0):
        self.add = add

    def run(self, x):
        return x + self.add

    def ask(self, other, x):
        return conveyor.get(other.run.remote(x))


def get(ref):
    return conveyor.get(ref, timeout=WAIT)


def executed_until_it_fails(graph):
    while True:
        get(graph.execute(1))


def test_a_node_that_is_lost(two_nodes, leaves_nothing):
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
            assert get(lost.ask.remote(other, 1)) == 101
            two_nodes.remove_node(node, allow_graceful=False)
            with pytest.raises(ActorDiedError, match="Stage"):
                executed_until_it_fails(graph)
        with pytest.raises(ActorDiedError):
            get(lost.run.remote(1))
        assert get([stays.run.remote(1), other.run.remote(1)]) == [2, 101]
        conveyor.shutdown()


def test_a_node_with_holders_and_makers_is_lost(two_nodes, leaves_nothing, wait_until):
    with leaves_nothing():
        node = two_nodes.add_node(num_cpus=1, resources={"lost": 1})
        conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT)
        here, there, slow = holder(HERE), holder(THERE), holder(HERE)
        lost = holder({"resources": {"lost": 0.1}})
        get(lost.keep.remote([conveyor.put(np.arange(LARGE))]))
        (made,) = get(lost.put.remote(LARGE))
        assert get(there.total.remote([made])) == [total(LARGE)]
        (pending,) = get(lost.asked_to_stay.remote(slow, ""))
        waiting = [a.total.remote([pending]) for a in (here, there)]
        two_nodes.remove_node(node, allow_graceful=False)
        for ref in [pending, *waiting]:
            with pytest.raises(ActorDiedError):
                get(ref)
        assert get(here.total.remote([made])) == [total(LARGE)]
        del made, pending, waiting, ref
        gc.collect()
        wait_until(lambda: kept() == 0, WAIT)
        conveyor.shutdown()


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
    from conveyor.runtime import context
    import ray
    (host,) = context.running()._hosts._agents._by_node.values()
    agent = ray.get(host.agent.__ray_call__.remote(lambda self: os.getpid()))
    print("said", conveyor.get(actor.pids.remote())[0], agent, flush=True)
    threading.Event().wait()
    """
    program = scripts.start(source, two_nodes.address, env={"RAY_ADDRESS": ""})
    said = next(line.split() for line in program.stdout if line.startswith("said"))
    pidfds = [os.pidfd_open(int(pid)) for pid in said[1:]]
    program.kill()
    for pidfd in pidfds:
        wait_until(lambda pidfd=pidfd: _over(pidfd), WAIT)
        os.close(pidfd)


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
