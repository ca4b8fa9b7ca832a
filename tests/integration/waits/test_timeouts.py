"""Waits with a timeout end when it is over: also where nothing was left of it, and whatever a test has made
of the functions of ``time``."""

import asyncio
import contextlib
import math
import sys
import threading
import time
from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import cloudpickle
import numpy as np
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import DeadlineExceededError, WaitTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CLOCKS = ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns")


@contextlib.contextmanager
def frozen_clocks():
    """As libraries for tests freeze them: in ``time``, and in all modules that have imported them."""
    with contextlib.ExitStack() as stack:
        for name in CLOCKS:
            real, fake = getattr(time, name), mock.Mock(return_value=0)
            stack.enter_context(mock.patch.object(time, name, fake))
            for module in [m for n, m in sys.modules.items() if n.startswith("conveyor")]:
                for attribute in [a for a, value in vars(module).items() if value is real]:
                    stack.enter_context(mock.patch.object(module, attribute, fake))
        yield


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

    def get(self, refs, timeout, frozen):
        with frozen_clocks() if frozen else contextlib.nullcontext():
            try:
                return conveyor.get(refs[0], timeout=timeout)
            except WaitTimeoutError:
                return "timed out"


@pytest.fixture(params=["local", "inline"])
def held(request):
    """Things to be waited for that come when ``actor.open`` is called; in processes also a graph that is full
    until then. (Inline, an execution is over when ``execute`` returns.)"""
    conveyor.init(engine=request.param)
    actor = Actor.remote()
    held = SimpleNamespace(actor=actor, call=actor.hold.remote("x"), graph=None)
    held.stream, held.asker = actor.items.remote(), Actor.remote()
    if request.param == "local":
        with InputNode() as inp:
            held.graph = actor.hold.bind(inp).compile(depth=1)
        held.execution = held.graph.execute("x")
    held.empty, held.full = conveyor.channel.open(depth=1), conveyor.channel.open(depth=1)
    held.full[0].send(0)
    yield held
    get(actor.open.remote())
    conveyor.shutdown()


def waits(held):
    """All ways to wait, by name: each is called with a timeout."""
    ways = {
        "get": lambda t: conveyor.get(held.call, timeout=t),
        "get of a list": lambda t: conveyor.get([held.call], timeout=t),
        "method": lambda t: held.call.get(t),
        "derived": lambda t: held.call[0].get(t),
        "wait": lambda t: conveyor.wait([held.call], timeout=t),
        "future": lambda t: held.call.future().result(t),
        "next": lambda t: held.stream.next(t),
        "items": lambda t: held.stream.get(t),
        "into": lambda t: conveyor.get(held.call, timeout=t, into=np.empty(1)),
        "receive": lambda t: held.empty[1].receive(t),
        "send": lambda t: held.full[0].send(1, t),
    }
    if held.graph is not None:
        ways["execution"] = lambda t: held.execution.get(t)
        ways["room"] = lambda t: held.graph.execute("y", timeout=t)
    return ways


def all_end(held, timeout):
    """Each way ends by itself; on a thread, so that one which does not fails the test, and names itself."""

    def wait_in_all_ways():
        for now_at[0], wait in waits(held).items():
            if now_at[0] == "wait":
                assert wait(timeout) == ([], [held.call])
                continue
            with pytest.raises(WaitTimeoutError):
                wait(timeout)
        ended.set()

    now_at, ended = [""], threading.Event()
    thread = threading.Thread(target=wait_in_all_ways, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert ended.is_set(), now_at[0]


NOTHING_LEFT = [
    0,
    -0.001,
    -2,
    -(10**400),
    -math.inf,
    np.float64(-0.5),
    np.int64(-3),
    Fraction(-1, 2),
]
NO_LIMIT = [None, -1, np.float32(-1), math.inf, 10**400]


def test_what_is_left_of_a_budget_that_is_used_up(held):
    for nothing_left in NOTHING_LEFT:
        all_end(held, nothing_left)
        requested = held.asker.get.remote([held.call], nothing_left, False)
        assert conveyor.get(requested, timeout=WAIT) == "timed out"
    # What is there is given.
    get(held.actor.open.remote())
    assert get(held.call) == "x"
    for nothing_left in NOTHING_LEFT:
        assert conveyor.get([held.call], timeout=nothing_left) == ["x"]
        assert conveyor.wait([held.call], timeout=nothing_left) == ([held.call], [])


def test_no_limit(held):
    opener = threading.Timer(0.02, lambda: get(held.actor.open.remote()))
    opener.start()
    for no_limit in NO_LIMIT:
        assert conveyor.get([held.call], timeout=no_limit) == ["x"]
        assert held.call.future().result(no_limit) == "x"
        assert conveyor.wait([held.call], timeout=no_limit) == ([held.call], [])
        if held.graph is not None:
            assert conveyor.get(held.graph.execute("y", timeout=no_limit), timeout=no_limit) == "y"
    assert held.stream.next(-1) == "item"
    opener.join()


@pytest.mark.parametrize("held", ["local"], indirect=True)
def test_deadlines_of_executions(held):
    for nothing_left in (-1, -0.5, -math.inf, 0):
        with pytest.raises(DeadlineExceededError):
            get(held.graph.execute("y", deadline=nothing_left))
    get(held.actor.open.remote())
    assert get(held.execution) == "x"
    for no_limit in (math.inf, 1e300, 10**400):
        assert get(held.graph.execute("y", deadline=no_limit)) == "y"


def test_frozen_clocks(held):
    with frozen_clocks():
        all_end(held, 0.01)
        assert get(Actor.remote().get.remote([held.call], 0.01, False)) == "timed out"
    requested = held.asker.get.remote([held.call], 0.01, True)
    assert conveyor.get(requested, timeout=WAIT) == "timed out"


@pytest.mark.parametrize("held", ["local"], indirect=True)
def test_calls_that_no_actor_takes_yet_name_the_limit(held):
    refs = [held.actor.hold.remote(i) for i in range(70)]
    opened = held.actor.open.remote()
    limit = r"\d+ calls wait at the caller: at most 64 calls of one caller are with an actor at once, .*"
    for wait in (
        lambda: conveyor.get(opened, timeout=0.02),
        lambda: conveyor.get(refs[-1], timeout=0.02),
        lambda: conveyor.get(held.call, timeout=0.02),
    ):
        with pytest.raises(WaitTimeoutError, match=limit + "max_concurrency="):
            wait()
    # There is room again, so those that wait come to the actor: the last opens it.
    for ref in [held.call, *refs[:10]]:
        ref.cancel()
    assert conveyor.get(refs[10:], timeout=WAIT) == list(range(10, 70))
