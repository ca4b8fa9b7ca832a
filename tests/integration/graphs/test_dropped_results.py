"""Results that nobody can get any more: their memory comes back by itself, and at the cap at once."""

import os
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import inside
import numpy as np
import pytest
from integration_helpers import get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ArenaFullError, WaitTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MB = 1 << 20
SIZE = 4 * MB
CAP = 32 * MB
#: Sizes of blocks are rounded up.
ROUNDED = SIZE * 5 // 4


@conveyor.remote
class Actor:
    def __init__(self):
        self.made = 0

    def make(self, size):
        self.made += 1
        return np.ones(size, np.uint8)

    def make_in_place(self, size):
        array = conveyor.empty(size, np.uint8)
        array[:] = 1
        return array

    def execute_and_drop(self, maker, count, cap):
        """How many results could not be sent."""
        with InputNode() as inp:
            graph = maker.make.bind(inp).compile(depth=32, memory_bytes=cap)
        for _ in range(count):
            graph.execute(SIZE)
        end = time.monotonic() + 20
        while inside.window_of(graph).completed < count and time.monotonic() < end:
            time.sleep(0.002)
        return sum(edge.errors for edge in graph.stats().edges)

    def make_later(self, path, size=SIZE):
        Path(path + ".begun").touch()
        hold(path)
        return self.make(size)

    def size_of(self, array):
        return array.nbytes

    def drop(self, other, count, told):
        for _ in range(count):
            other.make.remote(SIZE)
        other.tell.remote(told)

    def drop_and_stay(self, other, count, told, path):
        self.drop(other, count, told)
        hold(path)

    def tell(self, path):
        """How many it has made by now. By no result: asking for it would take the others out of the ring."""
        Path(path + ".part").write_text(str(self.made))
        os.rename(path + ".part", path)

    def ping(self):
        return "pong"


@pytest.fixture
def session(monkeypatch, leaves_nothing):
    """Memory that is free goes back after a second."""
    monkeypatch.setattr("conveyor.runtime.process.IDLE_SECONDS", 1.0)
    with leaves_nothing():
        conveyor.init(arena_bytes=16 * CAP)
        yield
        conveyor.shutdown()


@pytest.fixture
def small_session(monkeypatch, leaves_nothing):
    """Nothing goes back before somebody needs it."""
    monkeypatch.setattr("conveyor.runtime.process.IDLE_SECONDS", 600.0)
    with leaves_nothing():
        conveyor.init(arena_bytes=CAP)
        yield
        conveyor.shutdown()


@pytest.fixture
def told(tmp_path, wait_until):
    """Where an actor tells how many values it has made, and what waits for it to have made so many.

    How much memory is taken would not tell: who is slow has it back before all of them have been made."""
    path = tmp_path / "told"

    def check(count):
        wait_until(path.exists, what="values to be made")
        assert path.read_text() == str(count)
        path.unlink()

    return str(path), check


@pytest.fixture
def have_been_made(told):
    """Waits until an actor has done what it was called for, which was to make so many values."""
    path, check = told

    def wait(actor, count):
        actor.tell.remote(path)
        check(count)

    return wait


@pytest.fixture
def comes_back(wait_until):
    """Waits until nearly no memory is taken."""

    def check(left=0):
        wait_until(lambda: inside.session_memory() <= left, what="memory to come back")

    return check


@pytest.mark.usefixtures("session")
class TestComesBack:
    def test_of_calls(self, comes_back, have_been_made):
        actor = Actor.remote()
        for _ in range(10):
            actor.make.remote(SIZE)
        have_been_made(actor, 10)
        comes_back()
        # And again: what was noted for the first ones is not in the way of others.
        actor.make.remote(SIZE)
        have_been_made(actor, 11)
        comes_back()
        assert get(actor.make.remote(SIZE)).nbytes == SIZE

    def test_of_executions(self, comes_back, have_been_made, wait_until):
        actor = Actor.remote()
        with InputNode() as inp:
            dag = actor.make.bind(inp)
        with dag.compile() as graph:
            for _ in range(10):
                graph.execute(SIZE)
            wait_until(lambda: inside.window_of(graph).completed == 10, what="values to be made")
            have_been_made(actor, 10)
            comes_back()
            assert get(graph.execute(SIZE)).nbytes == SIZE

    def test_of_the_outputs_that_are_not_got(self, comes_back, have_been_made):
        got, dropped = Actor.remote(), Actor.remote()
        with InputNode() as inp:
            dag = MultiOutputNode([got.make.bind(inp), dropped.make.bind(inp)])
        with dag.compile() as graph:
            for _ in range(10):
                assert get(graph.execute(SIZE)[0]).nbytes == SIZE
            have_been_made(dropped, 10)
            comes_back()

    def test_behind_one_that_is_wanted(self, comes_back, have_been_made):
        actor = Actor.remote()
        wanted = actor.make.remote(SIZE)
        for _ in range(5):
            actor.make.remote(SIZE)
        have_been_made(actor, 6)
        comes_back(left=ROUNDED)
        assert get(wanted).nbytes == SIZE

    def test_dropped_when_it_has_come(self, comes_back, wait_until):
        busy, actor = Actor.remote(), Actor.remote()
        get([busy.ping.remote(), actor.ping.remote()])
        ref = actor.make.remote(SIZE)
        wait_until(lambda: inside.session_memory() >= SIZE, what="the value to be made")
        wait_until(ref.done)
        del ref
        comes_back()

    def test_dropped_when_it_has_come_while_another_is_to_come(
        self, tmp_path, comes_back, have_been_made, wait_until
    ):
        slow, actor = Actor.remote(), Actor.remote()
        path = tmp_path / "go"
        ref = actor.make.remote(SIZE)
        wait_until(ref.done)
        slow.make_later.remote(str(path))  # from now on something dropped is outstanding
        actor.make.remote(SIZE)
        have_been_made(actor, 2)
        comes_back(left=ROUNDED)
        assert inside.session_memory() >= SIZE
        del ref  # nothing rings any more
        comes_back()
        path.touch()
        have_been_made(slow, 1)
        comes_back()

    def test_timed_out(self, tmp_path, comes_back, have_been_made):
        actor, path = Actor.remote(), tmp_path / "go"
        with pytest.raises(WaitTimeoutError):
            conveyor.get(actor.make_later.remote(str(path)), timeout=0.01)
        path.touch()
        have_been_made(actor, 1)
        comes_back()

    def test_cancelled(self, tmp_path, comes_back, have_been_made, wait_until):
        actor, path = Actor.remote(), tmp_path / "go"
        ref = actor.make_later.remote(str(path))
        wait_until(lambda: (tmp_path / "go.begun").exists())
        assert ref.cancel()  # it runs to its end
        path.touch()
        have_been_made(actor, 1)
        comes_back()

    def test_between_actors(self, comes_back, told):
        one, other = Actor.remote(), Actor.remote()
        path, have_been_made = told
        one.drop.remote(other, 10, path)
        have_been_made(10)
        comes_back()

    def test_between_actors_while_the_method_runs(self, tmp_path, comes_back, told):
        one, other = Actor.remote(), Actor.remote()
        go = tmp_path / "go"
        path, have_been_made = told
        ref = one.drop_and_stay.remote(other, 10, path, str(go))
        have_been_made(10)
        comes_back()
        go.touch()
        get(ref)


@pytest.mark.usefixtures("small_session")
class TestAtTheCap:
    def test_dropped_here(self, have_been_made):
        one, other = Actor.remote(), Actor.remote()
        for _ in range(20):
            one.make.remote(SIZE)
        # Until then it takes for itself what the driver lets go of, and on a busy machine for too long.
        have_been_made(one, 20)
        assert get(other.make.remote(CAP - ROUNDED)).nbytes == CAP - ROUNDED

    def test_dropped_here_and_needed_here(self, wait_until):
        actor = Actor.remote()
        for _ in range(5):
            actor.make.remote(SIZE)
        wait_until(lambda: inside.session_memory() >= 5 * SIZE, what="values to be made")
        assert get(Actor.remote().size_of.remote(np.ones(CAP - ROUNDED, np.uint8))) == CAP - ROUNDED

    def test_dropped_in_an_actor(self, wait_until, told):
        one, other = Actor.remote(), Actor.remote()
        get(one.drop.remote(other, 5, told[0]))
        wait_until(lambda: inside.session_memory() >= 5 * SIZE, what="values to be made")
        assert get(other.size_of.remote(np.ones(CAP - ROUNDED, np.uint8))) == CAP - ROUNDED


@pytest.mark.usefixtures("small_session")
class TestAtTheGraphsOwnCap:
    """Four values fit, and the ring has room for all of them: nobody looks at it but the sweeper, and that
    not before it is asked."""

    CAP = 4 * ROUNDED

    @staticmethod
    def all_were_sent(graph, executions, wait_until):
        # By what the actor has noted: to ask for a result would take the others out of the ring.
        wait_until(lambda: inside.window_of(graph).completed == executions, what="the results")
        assert [edge.errors for edge in graph.stats().edges] == [0] * len(graph.stats().edges)

    @pytest.mark.parametrize("method", ["make", "make_in_place"])
    def test_dropped_results_make_room(self, method, wait_until):
        with InputNode() as inp:
            dag = getattr(Actor.remote(), method).bind(inp)
        with dag.compile(depth=32, memory_bytes=self.CAP) as graph:
            for _ in range(12):
                graph.execute(SIZE)
            self.all_were_sent(graph, 12, wait_until)
            assert get(graph.execute(SIZE)).nbytes == SIZE

    def test_results_that_are_wanted_are_kept_and_told_of(self, wait_until):
        with InputNode() as inp:
            dag = Actor.remote().make.bind(inp)
        with dag.compile(depth=32, memory_bytes=self.CAP) as graph:
            wanted = []
            for i in range(9):
                ref = graph.execute(SIZE)
                if i % 3 == 1:
                    wanted.append(ref)
            del ref
            self.all_were_sent(graph, 9, wait_until)
            more = [graph.execute(SIZE) for _ in range(2)]
            with pytest.raises(ArenaFullError, match="memory_bytes") as caught:
                get(more)
            (held,) = caught.value.held
            assert (held.process, held.executions) == ("driver", (1, 4, 7, 9))
            assert all(get(ref).nbytes == SIZE for ref in wanted)
            # What the errors' frames refer to.
            del caught, held

    def test_dropped_in_an_actor_that_executes_the_graph(self):
        maker, user = Actor.remote(), Actor.remote()
        assert get(user.execute_and_drop.remote(maker, 12, self.CAP)) == 0


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

    def test_sleeps_again_once_all_is_let_go_of(self, comes_back, have_been_made):
        actor = Actor.remote()
        for _ in range(5):
            actor.make.remote(SIZE)
        have_been_made(actor, 5)
        comes_back()
        before = wakeups()
        for _ in range(200):
            assert get(actor.ping.remote()) == "pong"
        assert wakeups() - before < 10
