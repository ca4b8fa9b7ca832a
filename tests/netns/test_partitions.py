"""Two hosts between which the cable is cut, for a while or for good, in one way or in both."""

import threading
import time

import inside
import pytest
from netns_actors import WAIT, get, on
from wire import IN, OUT

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError

pytestmark = pytest.mark.cold_start
#: That of a session by default.
DEFAULT = 1.0


def over(near, far):
    with InputNode() as given:
        return near.note.bind(far.note.bind(given)).compile(depth=64)


def assert_lost(near, far, graph, refs, since):
    """What was under way, and what comes later, fails as it does when an actor dies, and says of whom."""
    name = r"Stage.* on 10\.77\.0\.2"
    for ref in refs:
        with pytest.raises(ActorDiedError, match=name):
            get(ref)
    with pytest.raises(ActorDiedError, match=name):
        get(far.run.remote(1))
    print(f"known {time.monotonic() - since:.2f} s after")
    with pytest.raises(ActorDiedError, match=name):
        get(graph.execute(1))
    assert get(near.run.remote(1)) == 2


def test_shorter_than_a_connection_lives(cluster, session, wait_until):
    """TCP brings it all, and the connection stays."""
    with session(60):
        near, far = on(0), on(1)
        with over(near, far) as graph:
            before = cluster.wires[1].counts(IN).lost
            cluster.wires[1].cut()
            refs = [graph.execute(i) for i in range(64)]
            wait_until(lambda: cluster.wires[1].counts(IN).lost > before, WAIT)
            cluster.wires[1].heal()
            assert get(refs) == list(range(64))
            assert get(far.noted.remote()) == list(range(64))
        assert inside.pump().counts(1)[4] == 1


def test_shorter_than_the_window(cluster, session, wait_until):
    """The connection is given up and another is made, over which all goes on."""
    with session(8):
        near, far = on(0), on(1)
        with over(near, far) as graph:
            cluster.wires[1].cut()
            refs = [graph.execute(i) for i in range(64)]
            wait_until(lambda: not inside.pump().connected(1), WAIT)
            cluster.wires[1].heal()
            assert get(refs) == list(range(64))
            assert get(far.noted.remote()) == list(range(64))
        assert inside.pump().counts(1)[4] > 1


@pytest.mark.parametrize("ways", [(), (OUT,), (IN,)], ids=["both ways", "out", "in"])
def test_longer_than_the_window(cluster, session, wait_until, ways):
    """Also where one way is cut, and each sends to the other what only one of them gets. When the cable is
    whole there may be actors on that host again, of this session and of the next one."""
    with session(DEFAULT):
        near, far = on(0, 1), on(1, 10)
        with over(near, far) as graph:
            assert get(graph.execute(0)) == 0
            since = time.monotonic()
            cluster.wires[1].cut(*ways)
            refs = [graph.execute(i) for i in range(1, 17)] + [far.run.remote(1)]
            assert_lost(near, far, graph, refs, since)
        cluster.wires[1].heal()
        assert get(on(1, 20).run.remote(1)) == 21
    with session(DEFAULT):
        near, far = on(0), on(1)
        with over(near, far) as graph:
            assert get([graph.execute(i) for i in range(64)]) == list(range(64))


@pytest.mark.parametrize("cut", [False, True], ids=["connected", "cut"])
def test_a_host_that_is_lost(cluster, session, cut):
    """All its processes are killed at once, and none of them can say a word if the cable is cut."""
    try:
        with session(DEFAULT):
            near, far = on(0, 1), on(1, 10)
            with over(near, far) as graph:
                assert get(graph.execute(0)) == 0
                since = time.monotonic()
                if cut:
                    cluster.wires[1].cut()
                cluster.spaces[1].kill_all()
                assert_lost(near, far, graph, [], since)  # it may be known by now
    finally:
        cluster.wires[1].heal()
        cluster.spaces[1].kill_all()
        cluster.start(1)
    with session(DEFAULT):
        assert get(on(1, 10).run.remote(1)) == 11


@pytest.mark.parametrize("timeout", [DEFAULT, 30.0])
def test_the_session_ends_while_the_cable_is_cut(cluster, session, timeout):
    """Nobody there hears of it. Its processes there end by themselves."""
    with session(timeout):
        near, far = on(0), on(1)
        graph = over(near, far)
        assert get(graph.execute(0)) == 0
        cluster.wires[1].cut()
        refs = [graph.execute(i) for i in range(1, 17)]
        since = time.monotonic()
        ended = threading.Thread(target=conveyor.shutdown)
        ended.start()
        ended.join(WAIT)
        assert not ended.is_alive()
        print(f"ended {time.monotonic() - since:.2f} s after")
        for ref in refs:
            with pytest.raises(conveyor.exceptions.ConveyorError):
                get(ref)
