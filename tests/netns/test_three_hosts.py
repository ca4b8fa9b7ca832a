"""Three hosts: what happens between two of them is nothing to the third."""

import numpy as np
import pytest
from netns_actors import get, on

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError

pytestmark = pytest.mark.cold_start
#: That of a session by default.
DEFAULT = 1.0
LOST = r"Stage.* on 10\.77\.0\.3"
LARGE = 1 << 22


def over(*stages):
    with InputNode() as node:
        for stage in stages:
            node = stage.note.bind(node)
        return node.compile(depth=64)


def test_one_of_three_is_cut_off(cluster, session):
    """The two others go on, with what is between them, and with who comes after it."""
    with session(DEFAULT):
        first, second, third = (on(host) for host in range(3))
        with over(first, second) as two, over(first, third, second) as three:
            assert get(three.execute(-1)) == -1
            cluster.wires[2].cut()
            lost = [three.execute(i) for i in range(16)]
            for i in range(200):
                assert get(two.execute(i)) == i
            for ref in lost:
                with pytest.raises(ActorDiedError, match=LOST):
                    get(ref)
            with pytest.raises(ActorDiedError, match=LOST):
                get(second.total.remote([third.run.remote(1)]))
            for i in range(200, 400):
                assert get(two.execute(i)) == i
            assert [i for i in get(second.noted.remote()) if i >= 0] == list(range(400))
        cluster.wires[2].heal()
        with over(first, on(2), second) as three:
            assert get([three.execute(i) for i in range(64)]) == list(range(64))


def test_a_fetch_from_a_host_that_is_cut_off_ends(cluster, session):
    """Whoever waits for what lies there is told; what lies elsewhere can be had."""
    with session(8):
        second, third = on(1), on(2)
        (kept,) = get(second.put.remote(LARGE))
        # All that it would take to connect for the value takes longer than to hear that it is there.
        cluster.wires[2].set(delay=0.5)
        (ref,) = get(third.put.remote(LARGE))
        cluster.wires[2].cut()
        for wanted in (ref, second.total.remote([ref])):
            with pytest.raises(ActorDiedError, match=LOST):
                get(wanted)
        total = float(np.arange(LARGE).sum())
        assert get(second.total.remote([kept])) == [total]
        assert get(kept).sum() == total
        assert get(on(0).total.remote([kept, conveyor.put(np.arange(LARGE))])) == [total] * 2


def test_a_graph_over_three_while_packets_are_lost_and_connections_reset(cluster, session):
    """Of all three pairs. What comes, comes in order and once."""
    with session(30):
        first, second, third = stages = [on(host) for host in range(3)]
        with over(first, second, third, second, first) as graph:
            assert get(graph.execute(-1)) == -1
            for cable in cluster.wires[1:]:
                cable.set(jitter=0.01, loss=0.01)
            reset = 0
            for begin in range(0, 256, 64):
                refs = [graph.execute(i) for i in range(begin, begin + 64)]
                reset += sum(cluster.reset_connections(host) for host in range(3))
                assert get(refs) == list(range(begin, begin + 64))
            assert reset >= 3
            once = [-1, *range(256)]
            for stage in stages:
                times = 1 if stage is third else 2
                assert sorted(get(stage.noted.remote())) == sorted(once * times)
            assert get(third.noted.remote()) == once


def test_the_last_result_of_an_actor_is_for_a_third_host(cluster, session):
    """Its maker is killed while it is on its way."""
    with session(30):
        makers, reader = [on(1), on(0)], on(2)
        cluster.wires[2].set(jitter=0.02, loss=0.01)
        for maker in makers:
            assert get(reader.last_of.remote(maker, LARGE // 8)) == np.arange(LARGE // 8).sum()
