"""An exception that another thread throws into a thread that waits arrives soon, as it does in Python code:
programs end what takes too long so (``PyThreadState_SetAsyncExc``)."""

import asyncio
import contextlib
import ctypes
import gc
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
from integration_helpers import WAIT, get, hold, measured

import conveyor
from conveyor import collective
from conveyor.dag import InputNode
from conveyor.exceptions import WaitTimeoutError
from conveyor.experimental import wait_tensor_freed

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: s. What is promised is 0.05 on a quiet machine.
SOON = 0.5
#: s: as the wait begins, and when it has lasted.
MOMENTS = [0.0, 0.1]


class Thrown(BaseException):
    pass


@pytest.fixture(autouse=True)
def uncollected():
    """A thread stands while it collects garbage, and what is thrown then is lost in the first finalizer of
    anybody's, as Python has it."""
    gc.disable()
    yield
    gc.enable()


def throw(thread):
    """As Python's own documents have it."""
    thrown = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(Thrown)
    )
    assert thrown == 1


def stands(thread):
    """Wait until that thread waits for something, other than the start of another thread."""
    before, looks = None, 0
    while looks < 3:
        frame = sys._current_frames()[thread]
        at = [(f.f_code, f.f_lasti) for f, _ in traceback.walk_stack(frame)]
        starts = any(code.co_name == "start" for code, _ in at)
        before, looks = at, looks + 1 if at == before and not starts else 0
        time.sleep(0.01)


def goes_on():
    """The interpreter has nothing left to raise: profiled code would come to no end (Python 3.11)."""
    sys.setprofile(lambda *_: None)
    try:
        (lambda: None)()
    finally:
        sys.setprofile(None)


def arrives(wait, after):
    """Seconds from when something is thrown into this thread until it leaves ``wait()``. It has waited for
    ``after`` seconds then."""
    me, at = threading.get_ident(), []

    def soon():
        stands(me)
        time.sleep(after)
        at.append(time.monotonic())
        throw(me)

    thrower = threading.Thread(target=soon)
    thrower.start()
    try:
        wait()
    except Thrown:
        left = time.monotonic() - at[0]
        goes_on()
        return left
    finally:
        thrower.join()
    raise AssertionError("nothing has ended the wait")


def in_thread(function, *args):
    """What ``function`` returns, on a thread of its own."""
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(function(*args)), daemon=True)
    thread.start()
    thread.join(WAIT)
    return outcome[0]


@conveyor.remote
class Actor:
    def __init__(self):
        self.opened = asyncio.Event()

    async def hold(self, x):
        await self.opened.wait()
        return x

    async def items(self):
        yield await self.hold("item")

    async def open(self):
        self.opened.set()


@conveyor.remote
class Waiting:
    """Waits in its methods."""

    def in_get(self, held, refs):
        return [arrives(lambda: conveyor.get(refs[0]), after) for after in MOMENTS]

    def in_wait(self, held, refs):
        return [arrives(lambda: conveyor.wait(refs), after) for after in MOMENTS]

    def in_receive(self, held, refs):
        with contextlib.suppress(WaitTimeoutError):
            held.empty[1].receive(timeout=0.01)  # both ends are known from then on
        return [arrives(held.empty[1].receive, after) for after in MOMENTS]

    def in_execute(self, held, refs):
        return [arrives(lambda: held.graph.execute("y"), after) for after in MOMENTS]

    def in_compile(self, held, refs):
        return [arrives(lambda: compiles(held.starting), after) for after in MOMENTS]

    def in_a_collective_call(self, held, refs):
        return [arrives(lambda: collective.barrier("pair"), 0.1)]


@conveyor.remote
class Late:
    def __init__(self, path=None):
        if path is not None:
            hold(path)

    def after(self, path):
        hold(path)


def compiles(actor):
    with InputNode() as inp:
        actor.after.bind(inp).compile()


@pytest.fixture(params=["local", "inline"])
def held(request):
    """Things to be waited for that come when ``actor.open`` is called."""
    conveyor.init(engine=request.param)
    actor = Actor.remote()
    held = SimpleNamespace(actor=actor, call=actor.hold.remote("x"), stream=actor.items.remote())
    held.empty, held.full = conveyor.channel.open(depth=1), conveyor.channel.open(depth=1)
    held.full[0].send(0)
    with contextlib.suppress(WaitTimeoutError):
        held.empty[1].receive(timeout=0.01)  # both ends are known from then on
    if request.param == "local":
        with InputNode() as inp:
            held.graph = actor.hold.bind(inp).compile(depth=1)
        held.execution = held.graph.execute("x")
        held.array = np.arange(1000)
        held.kept = conveyor.put(held.array, tensor_transport="auto")
    yield held
    get(actor.open.remote())
    conveyor.shutdown()


WAITS = {
    "get": lambda held: conveyor.get(held.call),
    "get of several": lambda held: conveyor.get([held.call, held.actor.hold.remote("y")]),
    "get with a timeout": lambda held: conveyor.get(held.call, timeout=WAIT),
    "wait": lambda held: conveyor.wait([held.call]),
    "a future": lambda held: held.call.future().result(),
    "a stream": lambda held: next(iter(held.stream)),
    "receive": lambda held: held.empty[1].receive(),
    "send": lambda held: held.full[0].send(1),
}
WAITS_OF_PROCESSES = {
    "get of an execution": lambda held: conveyor.get(held.execution),
    "execute": lambda held: held.graph.execute("y"),
    "tensors that are freed": lambda held: wait_tensor_freed(held.array),
}


def check(wait):
    """It arrives in this thread, the main one, and in another."""
    for after in MOMENTS:
        assert arrives(wait, after) < SOON
        assert in_thread(arrives, wait, after) < SOON


@pytest.mark.parametrize("name", WAITS)
@measured
def test_it_arrives(held, name):
    check(lambda: WAITS[name](held))


@pytest.mark.parametrize("name", WAITS_OF_PROCESSES)
@pytest.mark.parametrize("held", ["local"], indirect=True)
@measured
def test_it_arrives_where_others_are_waited_for(held, name):
    check(lambda: WAITS_OF_PROCESSES[name](held))


@pytest.mark.parametrize("held", ["local"], indirect=True)
@measured
def test_it_arrives_behind_another_thread(held):
    """Two threads execute a graph that is full: one waits for room, the other for its turn."""
    outcomes = queue.SimpleQueue()

    def execute():
        try:
            held.graph.execute("y")
        except Thrown:
            outcomes.put(time.monotonic())

    threads = [threading.Thread(target=execute, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
        stands(thread.ident)
    for thread in reversed(threads):  # the one that waits for its turn is the first
        began = time.monotonic()
        throw(thread.ident)
        assert outcomes.get(timeout=WAIT) - began < SOON


@pytest.mark.parametrize("held", ["local"], indirect=True)
@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("method", ["in_get", "in_wait", "in_receive", "in_execute"])
@measured
def test_it_arrives_in_an_actor(held, method, concurrency):
    actor = Waiting.options(max_concurrency=concurrency).remote()
    theirs = SimpleNamespace(empty=conveyor.channel.open(depth=1), graph=held.graph)
    assert max(get(getattr(actor, method).remote(theirs, [held.call]))) < SOON


def system_call(thread):
    """Number and arguments of the system call that a thread is in; ``running``: in none."""
    with open(f"/proc/self/task/{thread.native_id}/syscall") as file:
        return file.read().split()


def sleeps(thread):
    """How often a thread has gone to sleep."""
    with open(f"/proc/self/task/{thread.native_id}/status") as file:
        (line,) = [line for line in file if line.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])


@contextlib.contextmanager
def stops_in_a_handler(number):
    """Let this thread, the main one, stop at a signal until ``go_on()``: it gets no processor, so to speak.

    The interpreter's own handler writes to a pipe that is full.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    handler = signal.signal(number, lambda *_: None)
    descriptor = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.set_blocking(writing, True)
    try:
        yield lambda: os.read(reading, 1 << 20)
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("held", ["local"], indirect=True)
def test_it_arrives_where_the_thread_that_looks_wakes_late(held, latches, wait_until):
    """The main thread looks for all, and wakes when another thread already waits for what comes next."""
    go, has_left, outcomes = latches(), threading.Event(), queue.SimpleQueue()
    first = Late.remote().after.remote(go.path)
    main = threading.main_thread()

    def wait():
        try:
            conveyor.get(held.call)
        except Thrown:
            outcomes.put("thrown")

    def direct():
        try:
            stands(main.ident)
            slept = sleeps(main)
            wait_until(lambda: sleeps(main) > slept + 3)  # between looks: it is on the list
            asleep = system_call(main)[0]
            signal.pthread_kill(main.ident, signal.SIGUSR1)
            wait_until(lambda: system_call(main)[0] not in (asleep, "running"))
            go.open()
            wait_until(first.done)
            waiting.start()
            stands(waiting.ident)
            wait_until(lambda: system_call(waiting)[4:5] == ["0x0"])  # without end: another looks
        finally:
            go.open()
            go_on()
        assert has_left.wait(WAIT)
        throw(waiting.ident)

    waiting = threading.Thread(target=wait, daemon=True)
    director = threading.Thread(target=direct)
    with stops_in_a_handler(signal.SIGUSR1) as go_on:
        director.start()
        get(first)
        has_left.set()
        director.join()
    assert outcomes.get(timeout=WAIT) == "thrown"


def test_it_arrives_in_a_collective_call(session):
    pair = [Waiting.remote() for _ in range(2)]
    collective.create_collective_group(pair, name="pair")
    assert max(get(pair[0].in_a_collective_call.remote(None, None))) < SOON


@measured
def test_it_arrives_where_an_actor_is_not_there_yet(session, latches):
    """The driver waits for it, and an actor for the driver."""
    go = latches()
    starting = Late.remote(go.path)
    check(lambda: compiles(starting))
    held = SimpleNamespace(starting=starting)
    assert max(get(Waiting.remote().in_compile.remote(held, None))) < SOON
    go.open()
    compiles(starting)


def test_threads_that_wait_are_quiet(session, latches):
    """They look into what may be thrown one for all, so it does not matter how many there are."""
    go = latches()
    ref = Late.remote().after.remote(go.path)
    threads = [threading.Thread(target=get, args=(ref,)) for _ in range(16)]
    for thread in threads:
        thread.start()
        stands(thread.ident)
    time.sleep(0.1)  # all are on the list
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.5)
    after = resource.getrusage(resource.RUSAGE_SELF)
    go.open()
    for thread in threads:
        thread.join(WAIT)
    assert after.ru_nvcsw - before.ru_nvcsw < 100  # of one that looks: 17
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1
