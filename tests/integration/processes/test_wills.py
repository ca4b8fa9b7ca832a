"""What becomes garbage loses no Ctrl-C, and is let go of though nobody calls anything any more."""

import gc
import os
import subprocess
import sys
import textwrap
import time

from integration_helpers import WAIT, get

import conveyor


@conveyor.remote
class Actor:
    def items(self, path):
        try:
            while True:
                yield 1
        finally:
            with open(path, "w"):
                pass

    def same(self, value):
        return value

    def pid(self):
        return os.getpid()

    def drop_a_stream_of(self, other, path):
        assert next(other.items.remote(path)) == 1


def there(path):
    end = time.monotonic() + WAIT
    while not os.path.exists(path):
        assert time.monotonic() < end, f"{path} has not come"
        time.sleep(0.01)


def gone(pid):
    end = time.monotonic() + WAIT
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < end, f"process {pid} has not ended"
        time.sleep(0.01)


def test_a_dropped_stream_is_closed_though_nobody_calls_anything(local, tmp_path):
    actor = Actor.remote()
    items = actor.items.remote(str(tmp_path / "closed"))
    assert next(items) == 1
    del items
    there(tmp_path / "closed")


def test_a_stream_in_a_circle_of_garbage_is_closed(local, tmp_path):
    actor = Actor.remote()
    circle = [actor.items.remote(str(tmp_path / "closed"))]
    assert next(circle[0]) == 1
    circle.append(circle)
    del circle
    gc.collect()
    there(tmp_path / "closed")


def test_a_stream_that_an_actor_drops_is_closed(local, tmp_path):
    actor, other = Actor.remote(), Actor.remote()
    get(actor.drop_a_stream_of.remote(other, str(tmp_path / "closed")))
    there(tmp_path / "closed")


def test_the_actor_ends_with_its_last_handle_though_nobody_calls_anything(local):
    actor = Actor.remote()
    pid = get(actor.pid.remote())
    del actor
    gone(pid)


def test_what_is_dropped_in_a_forked_child_is_still_there(local, tmp_path):
    actor = Actor.remote()
    items = actor.items.remote(str(tmp_path / "closed"))
    assert next(items) == 1
    child = os.fork()
    if child == 0:
        try:
            del items, actor
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert next(items) == 1
    assert get(actor.same.remote(2)) == 2
    assert not os.path.exists(tmp_path / "closed")


def test_what_is_dropped_after_the_session_asks_for_nothing(leaves_nothing, tmp_path):
    with leaves_nothing():
        conveyor.init()
        actor = Actor.remote()
        items = actor.items.remote(str(tmp_path / "closed"))
        assert next(items) == 1
        conveyor.shutdown()
        del items, actor
        gc.collect()


#: Ctrl-C as often as it can be, in a loop that drops streams and handles: each comes out of the loop.
STORM = """
    import random, signal, sys, time
    import conveyor

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    lost = []
    sys.unraisablehook = lambda what: lost.append(str(what.object))

    @conveyor.remote
    class Actor:
        def items(self, count):
            yield from range(count)

    actor = Actor.options(name="it").remote()
    assert list(actor.items.remote(2)) == [0, 1]
    came = 0
    end = time.monotonic() + {seconds}
    while time.monotonic() < end:
        got = False
        try:
            signal.setitimer(signal.ITIMER_REAL, random.random() * 0.002 + 1e-5)
            begun = time.monotonic()
            while time.monotonic() - begun < 0.1:
                {turn}
        except KeyboardInterrupt:
            got = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        came += 1
        if not got:
            lost.append("a Ctrl-C")
    print(came, sorted(set(lost)), flush=True)
    conveyor.shutdown()
    assert came > 20, came
    sys.exit(1 if lost else 0)
"""

STREAMS = "stream = actor.items.remote(3); next(stream); del stream"
HANDLES = "handle = conveyor.get_actor('it'); del handle"


def storm(turn):
    program = textwrap.dedent(STORM).replace("{seconds}", "4").replace("{turn}", turn)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_ctrl_c_is_lost_where_streams_are_dropped():
    storm(STREAMS)


def test_no_ctrl_c_is_lost_where_handles_are_dropped():
    storm(HANDLES)


def test_a_handle_of_a_session_that_is_over_releases_no_actor_of_the_next(leaves_nothing):
    with leaves_nothing():
        conveyor.init()
        old = Actor.remote()
        conveyor.shutdown()
        conveyor.init()
        new = Actor.remote()  # known by the same number
        pid = get(new.pid.remote())
        del old
        gc.collect()
        for _ in range(20):
            assert get(new.pid.remote()) == pid
        conveyor.shutdown()


#: What runs in Python where what a program has made is collected. (Graphs, ends of channels and classes that
#: travel by value have finalizers, which note what is to be done.)
COLLECTED = """
    import gc, sys
    import conveyor
    from conveyor.dag import InputNode

    gc.disable()
    ran = []

    def noted(frame, event, arg):
        if event == "call":
            ran.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    @conveyor.remote
    class Actor:
        def items(self, count):
            yield from range(count)

        def refs(self, given):
            return [conveyor.put(5), *given]

    @conveyor.remote
    def same(value):
        return value

    def used(actor):
        stream = actor.items.remote(3)
        assert next(stream) == 0
        refs = [same.remote(conveyor.put(value)) for value in range(3)]
        assert len(conveyor.wait(refs, num_returns=3)[0]) == 3
        assert conveyor.get(refs[:2]) == [0, 1]
        refs += conveyor.get(actor.refs.remote([refs[0]]))
        assert conveyor.get(refs[3:]) == [5, 0]
        with InputNode() as inp:
            same_in_a_graph = Actor.remote().items.bind(3)
        return [actor, stream, refs, same_in_a_graph, inp.x]

    for name in ["one", "two"]:
        circle = used(Actor.options(name=name).remote())
        circle.append(circle)
        circle.append(conveyor.get_actor(name))
        sys.setprofile(noted)
        circle = None
        gc.collect()
        sys.setprofile(None)
        assert list(Actor.remote().items.remote(1)) == [0]
    print(sorted(set(ran)), flush=True)
    sys.exit(1 if ran else 0)
"""


def test_nothing_of_python_runs_where_it_is_collected():
    program = textwrap.dedent(COLLECTED)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
