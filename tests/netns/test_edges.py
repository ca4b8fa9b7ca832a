"""Tensors that go beside the frames, and channels of users, between two hosts with addresses of their own."""

import pytest
import torch
from netns_actors import WAIT, get, on

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError

pytestmark = pytest.mark.cold_start
#: Connections are not to be lost because the machine has other work.
TIMEOUT = 30
#: That of a session by default.
DEFAULT = 1.0


def over(name, a, b):
    with InputNode() as given:
        return b.run.bind(a.run.bind(given).with_tensor_transport(name)).compile(depth=4)


def check(graph, count):
    for size in (1, count):
        assert torch.equal(get(graph.execute(torch.ones(size))), torch.full((size,), 12.0))


@pytest.mark.parametrize("turned", [False, True], ids=["there", "back"])
def test_tensors_between_two_addresses(cluster, session, turned):
    """Whichever end has the greater one. (Not by NIXL: UCX lists interfaces from /sys, which is the machine's
    own in these namespaces.)"""
    with session(TIMEOUT):
        near, far = on(0, 1), on(1, 10)
        with over("gloo", *((far, near) if turned else (near, far))) as graph:
            check(graph, 1 << 18)


@pytest.mark.parametrize("cut", [False, True], ids=["killed", "cut"])
def test_a_host_that_is_lost_is_a_death(cluster, session, cut):
    """Gloo's connection breaks at once where the host's processes are killed, and says less."""
    try:
        with session(DEFAULT):
            near, far = on(0, 1), on(1, 10)
            with over("gloo", far, near) as graph:
                check(graph, 1000)
                if cut:
                    cluster.wires[1].cut()
                else:
                    cluster.spaces[1].kill_all()
                for _ in range(2):
                    with pytest.raises(ActorDiedError, match=r"Stage.* on 10\.77\.0\.2"):
                        get(graph.execute(torch.ones(1000)))
    finally:
        cluster.wires[1].heal()
        cluster.spaces[1].kill_all()
        cluster.start(1)


def test_a_channel_over_connections_that_are_reset(cluster, session):
    with session(TIMEOUT):
        far = on(1, 10)
        sender, receiver = conveyor.channel.open(depth=16)
        received = far.all_of.remote(receiver)
        del receiver
        cluster.wires[1].set(jitter=0.01, loss=0.01)
        with sender:
            for i in range(400):
                if i in (100, 300):
                    cluster.reset_connections()
                sender.send(i, WAIT)
        assert get(received) == list(range(400))
