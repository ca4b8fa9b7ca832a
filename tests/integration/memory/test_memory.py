"""Where the memory of large values goes: it comes back whoever left, died or fell asleep with it."""

import gc
import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import cloudpickle
import inside
import numpy as np
import pytest
from integration_helpers import WAIT, freeze, hold, measured

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, ArenaFullError, GraphTornDownError, TaskError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MB = 1 << 20
CAP = 32 * MB
N = MB >> 3  # float64 of one MiB


@conveyor.remote
class Actor:
    def __init__(self):
        self.made = 0

    def make(self, i, size=4 * N):
        self.made += 1
        return np.full(size, float(i))

    def items(self, i):
        for _ in range(4):
            yield self.make(i)

    def count(self):
        return self.made

    def first(self, x, _y=None):
        return float(x[0])

    def in_place(self, i):
        made = conveyor.empty(4 * N)
        made[:] = i
        return made

    def echo(self, x):
        return x

    def fail_late(self, _i, begun, go):
        Path(begun).touch()
        hold(go)
        self.made += 1
        raise ValueError("x" * 4 * MB)

    def read_from(self, path):
        """Wait for somebody to open ``path`` and close it; then make a value."""
        with open(path) as file:
            file.read()
        return self.make(0)

    def pid(self):
        return os.getpid()


@pytest.fixture(scope="class")
def session(leaves_nothing):
    with leaves_nothing():
        conveyor.init(arena_bytes=CAP)
        yield
        conveyor.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_held():
    """Not by the frames that errors of tests before refer to."""
    gc.collect()


def nearly_all(actor):
    """Hold nearly as much as the cap allows, of what ``actor`` makes."""
    return [conveyor.get(actor.make.remote(i), timeout=WAIT) for i in range(7)]


def stop(actor):
    """Let it not run; its pid."""
    pid = conveyor.get(actor.pid.remote(), timeout=WAIT)
    freeze(pid)
    return pid


@contextmanager
def torn_down_meanwhile(graph, wait_until):
    """What runs inside runs when the driver has left the graph and the actors have not."""
    tearing_down = threading.Thread(target=graph.teardown)
    tearing_down.start()
    wait_until(lambda: graph.status().state == "torn down")
    yield
    tearing_down.join(WAIT)
    assert not tearing_down.is_alive()


@pytest.mark.usefixtures("session")
class TestWhatNobodyReads:
    """Frames that are in rings when a graph ends: seven of them fill the cap."""

    def test_inputs(self):
        reader, big = Actor.remote(), np.zeros(4 * N)
        for _ in range(4):
            dying = Actor.remote()
            with InputNode() as inp:
                graph = reader.first.bind(inp[0], dying.echo.bind(inp[1])).compile()
            stop(dying)
            refs = [graph.execute(big, i) for i in range(4)]
            conveyor.kill(dying)
            with pytest.raises(ActorDiedError):
                conveyor.get(refs[0], timeout=WAIT)
            graph.teardown()
        held = [reader.echo.remote(big) for _ in range(3)]
        assert [value.nbytes for value in conveyor.get(held, timeout=WAIT)] == [big.nbytes] * 3

    def test_inputs_of_a_task_that_waits_for_a_slow_one(self, tmp_path, wait_until):
        reader, busy, big = Actor.remote(), Actor.remote(), np.zeros(4 * N)
        for i in range(4):
            os.mkfifo(path := tmp_path / str(i))
            with InputNode() as inp:
                graph = reader.first.bind(inp[0], busy.read_from.bind(inp[1])).compile()
            refs = [graph.execute(big, source) for source in (str(path), *[os.devnull] * 3)]
            # Its method ends, and sends its value, when the reader has left.
            begun = os.open(path, os.O_WRONLY)  # waits for the method to open it
            with torn_down_meanwhile(graph, wait_until):
                os.close(begun)
            del refs
        assert len(nearly_all(busy)) == 7

    def test_values_between_actors(self, wait_until):
        maker, reader = Actor.remote(), Actor.remote()
        for i in range(4):
            dying = Actor.remote()
            with InputNode() as inp:
                graph = reader.first.bind(maker.make.bind(inp), dying.echo.bind(inp)).compile()
            stop(dying)
            refs = [graph.execute(n) for n in range(4)]
            wait_until(lambda i=i: conveyor.get(maker.count.remote(), timeout=WAIT) == 4 * (i + 1))
            conveyor.kill(dying)
            with pytest.raises(ActorDiedError):
                conveyor.get(refs[0], timeout=WAIT)
            graph.teardown()
        assert len(nearly_all(maker)) == 7

    def test_values_between_actors_when_their_graph_is_restarted(self, wait_until):
        maker, reader = Actor.remote(), Actor.remote()
        dying = Actor.options(max_restarts=-1).remote()
        with InputNode() as inp:
            graph = reader.first.bind(maker.make.bind(inp), dying.echo.bind(inp)).compile()
        for i in range(4):
            pid = stop(dying)
            refs = [graph.execute(n) for n in range(4)]
            wait_until(lambda i=i: conveyor.get(maker.count.remote(), timeout=WAIT) == 4 * (i + 1))
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ActorDiedError):
                conveyor.get(refs[0], timeout=WAIT)
            graph.restart()
        graph.teardown()
        assert len(nearly_all(maker)) == 7

    def test_results(self, wait_until):
        maker = Actor.remote()
        for i in range(4):
            with InputNode() as inp:
                graph = MultiOutputNode([maker.make.bind(inp), maker.make.bind(inp)]).compile()
            refs = [graph.execute(n) for n in range(2)]
            wait_until(lambda i=i: conveyor.get(maker.count.remote(), timeout=WAIT) == 4 * (i + 1))
            graph.teardown()
            del refs, graph
        assert len(nearly_all(maker)) == 7

    def test_results_that_come_when_the_driver_has_left(self, tmp_path, wait_until):
        maker = Actor.remote()
        late = []
        for i in range(8):
            os.mkfifo(path := tmp_path / str(i))
            with InputNode() as inp:
                graph = maker.read_from.bind(inp).compile()
            late.append(graph.execute(str(path)))
            begun = os.open(path, os.O_WRONLY)  # waits for the method to open it
            with torn_down_meanwhile(graph, wait_until):
                os.close(begun)
        assert len(nearly_all(maker)) == 7  # though there are refs
        for ref in late:
            with pytest.raises(GraphTornDownError):
                conveyor.get(ref)

    def test_items_of_generators(self, wait_until):
        maker = Actor.remote()
        for i in range(4):
            with InputNode() as inp:
                graph = maker.items.bind(inp).compile(stream_items=2)
            before = conveyor.get(maker.count.remote(), timeout=WAIT)
            stream = graph.execute(i)
            wait_until(lambda n=before + 2: conveyor.get(maker.count.remote(), timeout=WAIT) == n)
            graph.teardown()
            # What had come can still be had.
            assert float(next(stream)[0]) == i
            with pytest.raises(GraphTornDownError):
                list(stream)
            del stream, graph
        assert len(nearly_all(maker)) == 7


class TestRoom:
    """With nothing held there is room for all that the cap allows, whatever was there before."""

    @pytest.fixture
    def actor(self, leaves_nothing):
        with leaves_nothing():
            conveyor.init(arena_bytes=4 * CAP)
            yield Actor.remote()
            conveyor.shutdown()

    def test_sizes_in_turn(self, actor):
        for size in (1, 3, 16, 20, 28, 40, 7):
            held = [
                conveyor.get(actor.make.remote(i, size * N - 512), timeout=WAIT)
                for i in range(110 // size)
            ]
            assert {float(value[-1]) for value in held} == set(map(float, range(110 // size)))
            del held
        for size in (64, 100, 120):
            value = conveyor.get(actor.make.remote(size, size * N), timeout=WAIT)
            assert float(value.sum()) == size * size * N
            del value

    def test_what_one_process_has_free_is_there_for_another(self, actor):
        other = Actor.remote()
        for i in range(3):
            for maker in (actor, other):
                value = conveyor.get(maker.make.remote(i, 75 * N), timeout=WAIT)
                assert value[-1] == i
                del value
        # Two of them at the same time do not fit, but each process may have one.
        value = conveyor.get(actor.make.remote(i, 75 * N), timeout=WAIT)
        own = conveyor.get(other.make.remote(i, 75 * N), timeout=WAIT)
        assert own[0] == i
        with pytest.raises(TaskError) as caught:
            conveyor.get(other.make.remote(i, 75 * N), timeout=WAIT)
        assert isinstance(caught.value.cause, ArenaFullError)
        text = str(caught.value)
        assert f"the session's memory cap of {4 * CAP} bytes" in text
        assert re.search(r"the session's arenas:.* Actor 786\d+", text)
        assert value[0] == i

    def test_what_a_dead_process_had(self, actor):
        value = conveyor.get(actor.make.remote(0, 75 * N), timeout=WAIT)
        conveyor.kill(actor)
        other = Actor.remote()
        assert conveyor.get(other.make.remote(1, 75 * N), timeout=WAIT)[-1] == 1
        assert value[-1] == 0

    def test_many_values_that_are_held_cost_a_send_little(self, actor):
        with InputNode() as inp:
            graph = actor.make.bind(inp[0], inp[1]).compile()
        held = []

        def cost():
            start = time.perf_counter()
            for _ in range(500):
                held.append(conveyor.get(graph.execute(1, 400), timeout=WAIT))
            return time.perf_counter() - start

        @measured
        def compare():
            held.clear()
            few = [cost() for _ in range(3)]
            while len(held) < 20_000:
                cost()
            many = [cost() for _ in range(5)]
            held.clear()
            few += [cost() for _ in range(3)]  # the machine may have become busier
            # A look at all of them would make it some fifty times as much.
            assert min(many) < 6 * max(min(few[:3]), min(few[3:]))

        compare()
        graph.teardown()


@pytest.fixture
def soon_idle(monkeypatch):
    monkeypatch.setattr("conveyor.runtime.process.IDLE_SECONDS", 0.3)


class TestIdle:
    """Memory that nobody uses goes back within ten seconds, though nobody sends any more."""

    @pytest.mark.usefixtures("local")
    def test_arenas_of_all_kinds(self, wait_until):
        actors = [Actor.remote() for _ in range(2)]
        held = [conveyor.get(a.make.remote(1, 40 * N), timeout=WAIT) for a in actors]
        held += [conveyor.empty(40 * N) for _ in range(2)]
        held[-1][:] = 1  # the other is not even written to
        held.append(conveyor.get(actors[0].echo.remote(np.zeros(40 * N)), timeout=WAIT))
        assert inside.session_memory() >= 200 * MB
        kept = conveyor.get(actors[0].make.remote(7), timeout=WAIT)
        held.clear()
        wait_until(
            lambda: inside.session_memory() < 10 * MB, timeout=20, what="memory to come back"
        )
        assert kept[0] == kept[-1] == 7
        # And is there again.
        assert conveyor.get(actors[0].make.remote(2, 40 * N), timeout=WAIT)[-1] == 2

    @pytest.mark.usefixtures("soon_idle", "local")
    def test_when_a_reader_dies(self, wait_until):
        maker, reader = Actor.remote(), Actor.remote()
        pid = stop(reader)
        with InputNode() as inp:
            graph = maker.make.bind(inp).compile()
        held = [graph.execute(i) for i in range(3)]
        refs = [reader.first.remote(ref) for ref in held]
        conveyor.get(held, timeout=WAIT)
        del held
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            conveyor.get(refs[0], timeout=WAIT)
        del refs
        gc.collect()  # the error's frames
        wait_until(lambda: inside.session_memory() == 0, timeout=30, what="memory to come back")

    @pytest.mark.usefixtures("soon_idle", "local")
    def test_when_a_call_that_waits_here_is_not_sent(self, wait_until):
        """Its error must not refer to its arguments: nobody collects garbage for their sake."""
        maker, reader = Actor.remote(), Actor.remote()
        large = maker.make.remote(0)
        conveyor.wait([large], timeout=WAIT)
        pid = stop(reader)
        refs = [reader.echo.remote(None) for _ in range(inside.CALL_SLOTS)]  # no more can be sent
        refs.append(reader.first.remote(large))
        gc.disable()
        try:
            del large
            assert inside.session_memory() >= 4 * MB
            os.kill(pid, signal.SIGKILL)
            assert len(conveyor.wait(refs, num_returns=len(refs), timeout=WAIT)[0]) == len(refs)
            del refs
            wait_until(lambda: inside.session_memory() == 0, timeout=20, what="memory to come back")
        finally:
            gc.enable()

    @pytest.mark.usefixtures("soon_idle", "local")
    def test_of_an_error_that_is_told_after_a_teardown(self, wait_until, latches):
        maker, begun, go = Actor.remote(), latches(), latches()
        with InputNode() as inp:
            graph = maker.fail_late.bind(inp, begun.path, go.path).compile()
        ref = graph.execute(0)
        wait_until(lambda: os.path.exists(begun.path), timeout=WAIT)
        with torn_down_meanwhile(graph, wait_until):
            go.open()
        with pytest.raises(GraphTornDownError):
            conveyor.get(ref, timeout=WAIT)
        assert conveyor.get(maker.count.remote(), timeout=WAIT) == 1
        wait_until(lambda: inside.session_memory() == 0, timeout=20, what="memory to come back")

    @pytest.mark.usefixtures("local")
    def test_at_once_when_a_graph_is_torn_down(self, wait_until):
        maker = Actor.remote()
        with InputNode() as inp:
            graph = maker.make.bind(inp).compile()
        assert conveyor.get(graph.execute(3), timeout=WAIT)[0] == 3
        assert inside.session_memory() >= 4 * MB
        graph.teardown()
        wait_until(lambda: inside.session_memory() == 0, timeout=20, what="memory to come back")


@pytest.mark.usefixtures("local")
def test_values_made_in_place_are_counted_whole():
    maker = Actor.remote()
    with InputNode() as inp:
        graph = maker.in_place.bind(inp).compile()
    for i in range(3):
        assert conveyor.get(graph.execute(i), timeout=WAIT)[-1] == i
    stats = graph.stats()
    assert max(edge.bytes for edge in stats.edges) >= 12 * MB
    assert sum(stats.arena_bytes.values()) == inside.session_memory() >= 4 * MB
    graph.teardown()


def test_where_others_have_the_memory_the_error_says_how_much_each_has(leaves_nothing):
    @conveyor.remote
    class Sender:
        def make(self, size):
            return np.ones(size, np.uint8)

        def send(self, other, size):
            with pytest.raises(ArenaFullError) as caught:
                conveyor.get(other.measure.remote(np.ones(size, np.uint8)))
            return str(caught.value), caught.value.held

        def measure(self, array):
            return array.nbytes

    with leaves_nothing():
        conveyor.init(arena_bytes=64 << 20)
        hoarder, sender, reader = (Sender.options(name=n).remote() for n in ("owner", "b", "c"))
        # One that still starts holds what its constructor came in, which is the driver's.
        assert conveyor.get(
            [reader.measure.remote(np.ones(1)), sender.measure.remote(np.ones(1))]
        ) == [8, 8]
        kept = conveyor.get([hoarder.make.remote(20 << 20) for _ in range(2)])
        text, held = conveyor.get(sender.send.remote(reader, 40 << 20))
        assert held == ()
        assert "no value of this process is held by its readers" in text
        amounts = re.findall(r"the session's arenas: owner (\d+)$", text, re.MULTILINE)
        assert len(amounts) == 1, text
        assert 40 << 20 <= int(amounts[0]) < 42 << 20
        # What is put is the own memory of who does it, which no cap of the session counts...
        put = conveyor.put(np.ones(100 << 20, np.uint8))
        assert conveyor.get(put).nbytes == 100 << 20
        # ... until it is sent.
        with pytest.raises(ArenaFullError):
            conveyor.get(reader.measure.remote(put))
        del kept, put, text
        conveyor.shutdown()
