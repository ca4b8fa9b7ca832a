"""What a program still holds when its session has ended: values stay, and nothing else keeps memory."""

import ctypes
import gc
import mmap
import os
import sys
import threading
import weakref
from contextlib import suppress

import cloudpickle
import inside
import numpy as np
import pytest
from integration_helpers import WAIT, compiled, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ConveyorError, SessionEndedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MB = 1 << 20
SIZE = 4 * MB


@conveyor.remote
class Actor:
    def make(self, i, size=SIZE):
        return np.full(size, i % 251, np.uint8)

    def size_of(self, array):
        return array.nbytes

    def items(self, n):
        for i in range(n):
            yield self.make(i)

    def endless(self, x):
        while True:
            yield x

    def make_later(self, path):
        open(path + "-begun", "w").close()
        hold(path)
        return self.make(1)

    def boxed(self, i):
        """Of a class that the driver gets to know with the value."""

        class Box:
            def __init__(self, array):
                self.array = array

        return Box(self.make(i))


_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


#: Files of shared memory that tests of other files have left open or mapped here, by their inodes: they are
#: none of these tests' business.
EARLIER = set()


def arenas():
    """Of each arena that these tests have mapped, by its file: the bytes with memory behind them."""
    found = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            place, _, _, _, inode, *name = line.split()
            if not name or "conveyor-arena" not in name[0] or inode in EARLIER:
                continue
            start, end = (int(address, 16) for address in place.split("-"))
            pages = ctypes.create_string_buffer((end - start) // mmap.PAGESIZE)
            assert _mincore(start, end - start, pages) == 0
            resident = sum(byte & 1 for byte in pages.raw) * mmap.PAGESIZE
            found[inode] = found.get(inode, 0) + resident
    return found


def descriptors():
    """Of shared memory of ours, by its file."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            what = os.readlink(f"/proc/self/fd/{entry}")
            if "memfd:conveyor" in what:
                found[str(os.stat(f"/proc/self/fd/{entry}").st_ino)] = what
    return {inode: what for inode, what in found.items() if inode not in EARLIER}


@pytest.fixture(scope="module", autouse=True)
def others():
    gc.collect()
    EARLIER.update(arenas(), descriptors())


@pytest.fixture
def session():
    gc.collect()
    assert not any(arenas().values()), "an earlier test still holds something"
    conveyor.init()
    yield
    conveyor.shutdown()


def end():
    """End the session. What is left then is held by the test."""
    gc.collect()
    conveyor.shutdown()


def nothing_is_left():
    gc.collect()
    assert descriptors() == {}
    # That of the driver may be mapped still, with nothing in it.
    assert not any(arenas().values())
    return True


def has_come(graph, wait_until):
    wait_until(
        lambda: inside.window_of(graph).completed == inside.window_of(graph).submitted,
        what="the results",
    )


@pytest.mark.usefixtures("session")
class TestNothingIsLeft:
    def test_of_what_was_got_and_dropped(self):
        actor = Actor.remote()
        graph = compiled(lambda x: actor.size_of.bind(actor.make.bind(x)))
        made = compiled(lambda x: actor.make.bind(x))
        assert get(graph.execute(1)) == SIZE
        assert get(made.execute(2))[-1] == 2
        end()
        assert nothing_is_left()
        assert "session has ended" in str(graph.status())

    def test_of_inputs(self):
        actor = Actor.remote()
        graph = compiled(lambda x: actor.size_of.bind(x))
        assert get(graph.execute(np.ones(SIZE, np.uint8))) == SIZE
        end()
        assert nothing_is_left()
        del graph

    def test_of_results_that_nobody_has_got(self, wait_until):
        actor = Actor.remote()
        graph = compiled(lambda x: actor.make.bind(x), depth=8)
        for i in range(5):
            graph.execute(i)
        has_come(graph, wait_until)
        end()
        assert nothing_is_left()
        del graph

    def test_of_some_outputs(self, wait_until):
        actor = Actor.remote()
        with InputNode() as inp:
            graph = MultiOutputNode([actor.make.bind(inp), actor.size_of.bind(inp)]).compile()
        refs = [graph.execute(np.uint8(i)) for i in range(3)]
        has_come(graph, wait_until)
        del refs
        end()
        assert nothing_is_left()
        del graph

    def test_of_a_stream(self):
        actor = Actor.remote()
        graph = compiled(lambda x: actor.items.bind(x))
        stream, call = graph.execute(3), actor.items.remote(3)
        assert stream.next(timeout=WAIT).nbytes == call.next(timeout=WAIT).nbytes == SIZE
        del stream, call
        end()
        assert nothing_is_left()
        del graph

    def test_of_calls(self):
        actor = Actor.remote()
        refs = [actor.make.remote(i) for i in range(3)]
        sizes = [actor.size_of.remote(ref) for ref in refs]
        assert get(sizes) == [SIZE] * 3
        assert all((array == i).all() for i, array in enumerate(get(refs)))
        del refs
        end()
        # Who has these has the link to the actor, and the link has brought large results.
        assert nothing_is_left()
        assert [size.get() for size in sizes] == [SIZE] * 3

    def test_of_a_graph_that_was_torn_down(self):
        actor = Actor.remote()
        graph = compiled(lambda x: actor.make.bind(x))
        get(graph.execute(1))
        graph.teardown()
        end()
        assert nothing_is_left()
        del graph

    def test_of_a_graph_that_has_failed_and_of_one_that_was_restarted(self):
        graphs = []
        for _ in range(2):
            actor = Actor.remote()
            graphs.append(compiled(lambda x, actor=actor: actor.make.bind(x)))
            get(graphs[-1].execute(1))
            conveyor.kill(actor, no_restart=False)
            with pytest.raises(ConveyorError):
                get(graphs[-1].execute(1))
        graphs[0].restart()
        assert get(graphs[0].execute(1)).nbytes == SIZE
        end()
        assert nothing_is_left()
        del graphs

    def test_of_arrays_made_in_place_and_dropped_afterwards(self):
        actor = Actor.remote()
        graph = compiled(lambda x: actor.size_of.bind(x))
        array = conveyor.empty(SIZE, np.uint8)
        array[:] = 7
        assert get(graph.execute(array)) == SIZE
        end()
        assert array.sum() == 7 * SIZE
        del array
        assert nothing_is_left()
        del graph


@pytest.mark.usefixtures("session")
class TestValuesStay:
    def test_arrays(self):
        actor, other = Actor.remote(), Actor.remote()
        graph = compiled(lambda x: actor.make.bind(x))
        out_of_band = compiled(lambda x: other.make.bind(x))
        kept = [get(graph.execute(i)) for i in range(3)]
        assert get(out_of_band.execute(1)).nbytes == SIZE
        end()
        assert sum(memory != 0 for memory in arenas().values()) == 1
        assert len(descriptors()) == 1  # a fork needs the file of what is held
        assert all((array == i).all() for i, array in enumerate(kept))
        del kept[1:]
        assert (kept[0] == 0).all()
        del kept
        assert nothing_is_left()
        del graph, out_of_band

    def test_results_that_had_come(self, wait_until):
        actor = Actor.remote()
        graph = compiled(lambda x: actor.make.bind(x), depth=8)
        boxes = compiled(lambda x: actor.boxed.bind(x), depth=8)
        refs = [graph.execute(i) for i in range(4)] + [boxes.execute(4)]
        calls = [actor.make.remote(i) for i in range(3)]
        has_come(graph, wait_until)
        has_come(boxes, wait_until)
        conveyor.wait(calls, num_returns=3, timeout=WAIT)
        end()
        assert all((ref.get() == i).all() for i, ref in enumerate(refs[:4]))
        assert (refs[4].get().array == 4).all()
        assert all((ref.get() == i).all() for i, ref in enumerate(calls))
        del refs, calls
        assert nothing_is_left()
        del graph, boxes

    def test_items_that_had_come(self, wait_until):
        actor = Actor.remote()
        graph = compiled(lambda x: actor.items.bind(x), stream_items=8)
        stream = graph.execute(3)
        wait_until(lambda: stream._ended.done(), what="the generator's end")
        end()
        assert [int(item[0]) for item in stream.get(timeout=WAIT)] == [0, 1, 2]
        with pytest.raises(StopIteration):
            stream.next()
        assert nothing_is_left()


def test_everything_else_says_that_the_session_has_ended(tmp_path):
    conveyor.init()
    actor = Actor.remote()
    graph = compiled(lambda x: actor.make.bind(x))
    streams = compiled(lambda x: actor.items.bind(x))
    get(graph.execute(1))
    never = graph.execute(np.ones(3))  # what it fails with, if anything, is not asked for
    stream = streams.execute(100)
    stream.next(timeout=WAIT)
    end()
    for use in (
        lambda: graph.execute(1),
        lambda: graph.execute(np.ones(SIZE)),
        lambda: graph.try_execute(1),
        lambda: graph.restart(),
        lambda: streams.execute(2),
    ):
        with pytest.raises(SessionEndedError, match="session has ended"):
            use()
    with suppress(ConveyorError):
        never.get(timeout=WAIT)
    with pytest.raises(SessionEndedError):  # after the items that had come
        stream.get(timeout=WAIT)
    assert "session has ended" in str(graph.status(stacks=True))
    assert "make" in str(graph.stats())
    assert "make" in graph.explain()
    assert graph.is_teardown
    graph.teardown()
    graph.teardown(kill_actors=True)
    conveyor.init()  # the next one has nothing to do with it
    with pytest.raises(SessionEndedError):
        graph.execute(1)
    conveyor.shutdown()


@pytest.mark.parametrize("kind", ["execution", "call"])
def test_of_a_result_that_comes_after_its_ref_has_failed(kind, latches, wait_until):
    """Its method was begun before the end, which waits for it."""
    go = latches()
    conveyor.init()
    actor = Actor.remote()
    graph = compiled(lambda x: actor.make_later.bind(x)) if kind == "execution" else None
    refs = []  # as long as one is held, so is the gate of its call

    def waits():
        begin = actor.make_later.remote if graph is None else graph.execute
        refs.append(begin(go.path))
        with pytest.raises(SessionEndedError):
            refs[0].get()
        go.open()

    thread = threading.Thread(target=waits)
    thread.start()
    wait_until(lambda: os.path.exists(go.path + "-begun"), what="the method")
    conveyor.shutdown()
    thread.join()
    assert graph is None or graph.status().completed == 1
    assert nothing_is_left()


def test_at_the_moment_of_the_end(wait_until):
    """Threads that get, execute, take items and call while the session ends."""
    for _ in range(5):
        conveyor.init()
        actor, other = Actor.remote(), Actor.remote()
        graph = compiled(lambda x, actor=actor: actor.boxed.bind(x), depth=4)
        chain = compiled(lambda x, a=actor, b=other: b.size_of.bind(a.make.bind(x)), depth=4)
        streams = compiled(lambda x, other=other: other.items.bind(x))
        rounds, wrong = [0] * 6, []

        def again(place, step, rounds=rounds, wrong=wrong):
            try:
                while True:
                    step()
                    rounds[place] += 1
            except SessionEndedError:
                pass
            except BaseException as error:
                wrong.append(error)

        def a_box(graph=graph):
            refs = [graph.execute(i) for i in range(3)]
            assert [(box.array == i).all() for i, box in enumerate(map(get, refs[::-1]))]

        def an_input(chain=chain):
            assert get(chain.execute(1)) == SIZE

        def items(streams=streams):
            assert len(list(streams.execute(3))) == 3

        def calls(actor=actor):
            assert all(
                array.nbytes == SIZE for array in get([actor.make.remote(i) for i in (1, 2)])
            )

        def dropped(graph=graph):
            graph.execute(1)
            graph.status()

        def waits(chain=chain):
            conveyor.wait([chain.execute(i) for i in range(2)], num_returns=2, timeout=WAIT)

        steps = [a_box, an_input, items, calls, dropped, waits]
        threads = [threading.Thread(target=again, args=at) for at in enumerate(steps)]
        for thread in threads:
            thread.start()
        wait_until(lambda rounds=rounds: all(n >= 2 for n in rounds), what="all to be under way")
        conveyor.shutdown()
        for thread in threads:
            thread.join(WAIT)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        del threads
        assert nothing_is_left()
        del graph, chain, streams


def test_a_graph_can_be_torn_down_with_its_actors(leaves_nothing):
    with leaves_nothing():
        conveyor.init()
        with InputNode() as inp:
            graph = Actor.remote().make.bind(inp).compile()
        conveyor.shutdown()
        graph.teardown(kill_actors=True)


def test_who_takes_items_when_the_session_ends_is_told_that(wait_until):
    for _ in range(8):
        conveyor.init()
        actor = Actor.remote()
        endless = compiled(lambda x, actor=actor: actor.endless.bind(x))
        taken, told = [0], []

        def take(endless=endless, taken=taken, told=told):
            try:
                for _ in endless.execute(1):
                    taken[0] += 1
            except BaseException as error:
                told.append(type(error))

        thread = threading.Thread(target=take)
        thread.start()
        wait_until(lambda taken=taken: taken[0] > 50)
        conveyor.shutdown()
        thread.join(WAIT)
        assert told == [SessionEndedError]


@pytest.mark.parametrize("engine", ["inline", "local"])
def test_values_that_stay_where_they_were_made_go_with_their_last_holder(engine, wait_until):
    """The arena that they lie in is closed then, and the thread that looks after it has ended."""
    conveyor.init(engine=engine)
    actor = Actor.remote()
    array = np.ones(SIZE, np.uint8)
    gone = weakref.ref(array)
    put = conveyor.put(array, tensor_transport="auto")
    made = actor.make.options(tensor_transport="auto").remote(1)
    # Passed on, they are in frames of the driver's, which keep them too.
    assert get([actor.size_of.remote(put), actor.size_of.remote(made)]) == [SIZE, SIZE]
    held = get([put, made])
    conveyor.shutdown()
    assert [int(each[0]) for each in held] == [1, 1]
    del array, put, made, held, actor
    gc.collect()
    wait_until(lambda: gone() is None, what="the value to go")
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name == "conveyor-releasing"],
        what="the end of the thread that lets go of values",
    )
