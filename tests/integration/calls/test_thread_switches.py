"""What threads of one process see of a reference while others are in the middle of sending or taking it."""

import asyncio
import contextlib
import sys
import threading
import time

import pytest
from integration_helpers import WAIT

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ExecutionCancelledError


@conveyor.remote
def nap(seconds):
    time.sleep(seconds)


@conveyor.remote
def square(x):
    return x * x


@conveyor.remote
class Actor:
    def nap(self, seconds):
        time.sleep(seconds)
        return 2

    def square(self, x):
        return x * x

    def fail(self, x):
        raise ValueError(x)

    def every_other_fails(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 2:
            raise ValueError(x)
        return x


@pytest.fixture
def switched(local):
    """Threads lose the interpreter to others that want it wherever they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def rounds(most):
    """Up to ``most`` numbers, as many as there is time for: on a busy machine each switch takes long."""
    end = time.monotonic() + 4
    for i in range(most):
        yield i
        if time.monotonic() > end:
            return


def behind_all_workers():
    for _ in range(2):
        nap.remote(0.0003)
    return [square.remote(2) for _ in range(3)]


def behind_an_argument(one=None, other=None):
    first = one.nap.remote(0.0003)
    return [other.square.remote(first), other.square.remote(2)]


@pytest.mark.parametrize("how", ["await", "wait", "future"])
@pytest.mark.parametrize("behind", ["workers", "argument"])
def test_who_waits_hears_of_a_call_that_another_thread_has_sent(switched, behind, how):
    """Its result may come before the thread that has sent it comes to say which one it is."""
    one, other = Actor.remote(), Actor.remote()

    async def awaited(refs):
        async def got(ref):
            return await ref

        return await asyncio.wait_for(asyncio.gather(*map(got, refs)), WAIT)

    async def run():
        for _ in rounds(400):
            refs = behind_all_workers() if behind == "workers" else behind_an_argument(one, other)
            if how == "await":
                assert await awaited(refs) == [4] * len(refs)
            elif how == "wait":
                assert conveyor.wait(refs, num_returns=len(refs), timeout=WAIT) == (refs, [])
            else:
                assert [ref.future().result(WAIT) for ref in refs] == [4] * len(refs)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["call", "failed call", "execution"])
def test_what_is_done_stays_so_while_another_thread_gets_it(switched, kind):
    actor = Actor.remote()
    with InputNode() as inp:
        graph = actor.square.bind(inp).compile()
    make = {
        "call": lambda: actor.square.remote(2),
        "failed call": lambda: actor.fail.remote(2),
        "execution": lambda: graph.execute(2),
    }[kind]
    undone = []
    refs = [make()]
    more = threading.Event()
    more.set()

    def look():
        while more.is_set():
            (ref,) = refs
            if ref.done() and not ref.done():
                undone.append(ref)
            if ref.done() and ref.has_failed() != (kind == "failed call"):
                undone.append(ref)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in rounds(1500):
            refs[0] = ref = make()
            if kind == "failed call":
                with pytest.raises(ValueError, match="2"):
                    ref.get(WAIT)
            else:
                assert ref.get(WAIT) == 4
    finally:
        more.clear()
        looking.join()
    assert undone == []


def test_calls_are_made_again_while_others_are_got(switched):
    actor = Actor.remote()
    call = actor.every_other_fails.options(max_task_retries=-1, retry_exceptions=True)
    for _ in rounds(1000):
        assert conveyor.get([call.remote(i) for i in range(3)], timeout=WAIT) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["call", "execution"])
def test_who_is_about_to_wait_hears_of_a_cancellation(switched, kind):
    """After 5 ms a wait becomes one that may be long."""
    actor = Actor.remote()
    with InputNode() as inp:
        graph = actor.nap.bind(inp).compile()

    def cancel(ref, begun, after):
        begun.wait()
        end = time.perf_counter() + after
        while (left := end - time.perf_counter()) > 0:
            time.sleep(0.0002 if left > 0.0006 else 0)
        ref.cancel()

    for i in rounds(250):
        ref = actor.nap.remote(0.02) if kind == "call" else graph.execute(0.02)
        begun = threading.Event()
        cancelling = threading.Thread(target=cancel, args=(ref, begun, 0.0048 + 0.000005 * i))
        cancelling.start()
        begun.set()
        with contextlib.suppress(ExecutionCancelledError):  # it may have come before
            ref.get(WAIT)
        cancelling.join()
        conveyor.get(actor.square.remote(1), timeout=WAIT)
