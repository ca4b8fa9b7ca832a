"""Results that nobody can get any more: their memory comes back by itself, and at the cap at once."""

import sys
import threading
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from integration_helpers import get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import WaitTimeoutError
from conveyor.runtime import context, process

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MB = 1 << 20
SIZE = 4 * MB
CAP = 32 * MB
#: Sizes of blocks are rounded up.
ROUNDED = SIZE * 5 // 4


@conveyor.remote
class Actor:
    def make(self, size):
        return np.ones(size, np.uint8)

    def make_later(self, path, size=SIZE):
        Path(path + ".begun").touch()
        hold(path)
        return self.make(size)

    def size_of(self, array):
        return array.nbytes

    def drop(self, other, count, size=SIZE):
        for _ in range(count):
            other.make.remote(size)

    def drop_and_stay(self, other, count, path):
        self.drop(other, count)
        hold(path)

    def ping(self):
        return "pong"


@pytest.fixture
def session(monkeypatch, leaves_nothing):
    """Memory that is free goes back after a second."""
    monkeypatch.setattr(process, "IDLE_SECONDS", 1.0)
    with leaves_nothing():
        conveyor.init(arena_bytes=16 * CAP)
        yield
        conveyor.shutdown()


@pytest.fixture
def small_session(monkeypatch, leaves_nothing):
    """Nothing goes back before somebody needs it."""
    monkeypatch.setattr(process, "IDLE_SECONDS", 600.0)
    with leaves_nothing():
        conveyor.init(arena_bytes=CAP)
        yield
        conveyor.shutdown()


def session_memory():
    return context.current().process.board.session_memory


@pytest.fixture
def comes_back(wait_until):
    """Waits until that much memory is taken, and then until nearly none is."""

    def check(taken=SIZE, left=0):
        wait_until(lambda: session_memory() >= taken, what="values to be made")
        wait_until(lambda: session_memory() <= left, timeout=10, what="memory to come back")

    return check


@pytest.mark.usefixtures("session")
class TestComesBack:
    def test_of_calls(self, comes_back):
        actor = Actor.remote()
        for _ in range(10):
            actor.make.remote(SIZE)
        comes_back(5 * SIZE)
        # And again: what was noted for the first ones is not in the way of others.
        actor.make.remote(SIZE)
        comes_back()
        assert get(actor.make.remote(SIZE)).nbytes == SIZE

    def test_of_executions(self, comes_back):
        with InputNode() as inp:
            dag = Actor.remote().make.bind(inp)
        with dag.compile() as graph:
            for _ in range(10):
                graph.execute(SIZE)
            comes_back(5 * SIZE)
            assert get(graph.execute(SIZE)).nbytes == SIZE

    def test_of_the_outputs_that_are_not_got(self, comes_back):
        with InputNode() as inp:
            dag = MultiOutputNode([Actor.remote().make.bind(inp) for _ in range(2)])
        with dag.compile() as graph:
            for _ in range(10):
                assert get(graph.execute(SIZE)[0]).nbytes == SIZE
            comes_back()

    def test_behind_one_that_is_wanted(self, comes_back):
        actor = Actor.remote()
        wanted = actor.make.remote(SIZE)
        for _ in range(5):
            actor.make.remote(SIZE)
        comes_back(6 * SIZE, left=ROUNDED)
        assert get(wanted).nbytes == SIZE

    def test_dropped_when_it_has_come(self, comes_back, wait_until):
        busy, actor = Actor.remote(), Actor.remote()
        get([busy.ping.remote(), actor.ping.remote()])
        ref = actor.make.remote(SIZE)
        wait_until(lambda: session_memory() >= SIZE, what="the value to be made")
        wait_until(ref.done)
        del ref
        comes_back()

    def test_dropped_when_it_has_come_while_another_is_to_come(
        self, tmp_path, comes_back, wait_until
    ):
        slow, actor = Actor.remote(), Actor.remote()
        path = tmp_path / "go"
        ref = actor.make.remote(SIZE)
        wait_until(ref.done)
        slow.make_later.remote(str(path))  # from now on something dropped is outstanding
        actor.make.remote(SIZE)
        comes_back(2 * SIZE, left=ROUNDED)
        del ref  # nothing rings any more
        comes_back(0)
        path.touch()
        comes_back()

    def test_timed_out(self, tmp_path, comes_back):
        actor, path = Actor.remote(), tmp_path / "go"
        with pytest.raises(WaitTimeoutError):
            conveyor.get(actor.make_later.remote(str(path)), timeout=0.01)
        path.touch()
        comes_back()

    def test_cancelled(self, tmp_path, comes_back, wait_until):
        actor, path = Actor.remote(), tmp_path / "go"
        ref = actor.make_later.remote(str(path))
        wait_until(lambda: (tmp_path / "go.begun").exists())
        assert ref.cancel()  # it runs to its end
        path.touch()
        comes_back()

    def test_between_actors(self, comes_back):
        one, other = Actor.remote(), Actor.remote()
        one.drop.remote(other, 10)
        comes_back(5 * SIZE)

    def test_between_actors_while_the_method_runs(self, tmp_path, comes_back):
        one, other = Actor.remote(), Actor.remote()
        path = tmp_path / "go"
        ref = one.drop_and_stay.remote(other, 10, str(path))
        comes_back(5 * SIZE)
        path.touch()
        get(ref)


@pytest.mark.usefixtures("small_session")
class TestAtTheCap:
    def test_dropped_here(self, wait_until):
        one, other = Actor.remote(), Actor.remote()
        for _ in range(20):
            one.make.remote(SIZE)
        wait_until(lambda: session_memory() >= CAP - ROUNDED, what="values to be made")
        assert get(other.make.remote(CAP - ROUNDED)).nbytes == CAP - ROUNDED

    def test_dropped_here_and_needed_here(self, wait_until):
        actor = Actor.remote()
        for _ in range(5):
            actor.make.remote(SIZE)
        wait_until(lambda: session_memory() >= 5 * SIZE, what="values to be made")
        assert get(Actor.remote().size_of.remote(np.ones(CAP - ROUNDED, np.uint8))) == CAP - ROUNDED

    def test_dropped_in_an_actor(self, wait_until):
        one, other = Actor.remote(), Actor.remote()
        get(one.drop.remote(other, 5))
        wait_until(lambda: session_memory() >= 5 * SIZE, what="values to be made")
        assert get(other.size_of.remote(np.ones(CAP - ROUNDED, np.uint8))) == CAP - ROUNDED


def wakeups():
    """How often the thread has slept."""
    (thread,) = [t for t in threading.enumerate() if t.name == "conveyor-sweeper"]
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.usefixtures("session")
class TestThread:
    def test_sleeps_while_nothing_is_dropped(self):
        actor = Actor.remote()
        get(actor.ping.remote())
        before = wakeups()
        for _ in range(200):
            assert get(actor.ping.remote()) == "pong"
        assert wakeups() - before < 10  # its start may be among them

    def test_does_not_wake_for_each_call(self):
        actor = Actor.remote()
        get(actor.ping.remote())
        before = wakeups()
        for _ in range(2000):
            actor.ping.remote()
        assert get(actor.ping.remote()) == "pong"
        assert wakeups() - before < 200

    def test_sleeps_again_once_all_is_let_go_of(self, comes_back):
        actor = Actor.remote()
        for _ in range(5):
            actor.make.remote(SIZE)
        comes_back(SIZE)
        before = wakeups()
        for _ in range(200):
            assert get(actor.ping.remote()) == "pong"
        assert wakeups() - before < 10
