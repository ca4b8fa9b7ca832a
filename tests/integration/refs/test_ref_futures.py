"""``ref.future()`` of every kind of ref, on both engines."""

import asyncio
import concurrent.futures
import gc
import os
import select
import sys
import threading
import weakref

import cloudpickle
import numpy as np
import pytest
from integration_helpers import INLINE_HOLDING, WAIT, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    DeadlockError,
    ExecutionCancelledError,
    TaskError,
)
from conveyor.testing import hold_transfers

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Actor:
    def hold(self, x, go):
        hold(go)
        return x

    @conveyor.method(tensor_transport="auto")
    def array(self, x, go):
        self.hold(x, go)
        return np.full(1000, x)

    def echo(self, x):
        return x

    def fail(self, x):
        raise ValueError(x)

    def items(self):
        yield 1

    def imported(self, refs):
        future = refs[0].future()
        told = threading.Event()
        future.add_done_callback(lambda _: told.set())
        return future.result(WAIT), told.wait(WAIT), future.cancelled()

    def waits_for_itself(self, handle):
        return handle.echo.remote(1).future().result()


pytestmark = pytest.mark.usefixtures("session")


def test_futures_of_all_kinds_are_done_and_call_back(latches, wait_until):
    a, b = Actor.remote(), Actor.remote()
    go = latches()
    with InputNode() as inp:
        graph = MultiOutputNode([b.echo.bind(a.hold.bind(inp, go.path)), inp]).compile()
    output, constant = graph.execute(1)
    call = a.hold.remote(2, go.path)
    direct = a.array.remote(3, go.path)
    refs = [output, constant, call, b.echo.remote(call), direct, direct[10:12], conveyor.put(4)]
    futures = [ref.future() for ref in refs]
    told = []
    for future in futures:
        future.add_done_callback(lambda one: told.append((one, threading.current_thread())))
    assert not any(future.done() for future in (futures[0], *futures[2:6]))
    go.open()
    assert not concurrent.futures.wait(futures, WAIT).not_done
    *plain, array, part, put = [future.result(0) for future in futures]
    assert [*plain, put] == [1, 1, 2, 2, 4]
    assert (array.sum(), part.tolist()) == (3000, [3, 3])
    assert futures[4].result() is array
    wait_until(lambda: len(told) == len(futures))  # they are told behind those who wait
    assert {id(one) for one, _ in told} == {id(future) for future in futures}
    assert threading.main_thread() not in {thread for one, thread in told if one is futures[2]}
    graph.teardown()


def test_a_future_and_a_descriptor_of_one_ref(latches):
    a = Actor.remote()
    go = latches()
    ref = a.hold.remote(1, go.path)
    fd = ref.fileno()
    first, second = ref.future(), ref.future()
    sent = conveyor.put([ref])  # it is exported, too
    assert first is not second
    go.open()
    assert (first.result(WAIT), second.result(WAIT)) == (1, 1)
    assert select.select([fd], [], [], WAIT)[0]  # the watcher tells of it soon
    assert os.eventfd_read(fd) == 1
    del sent


def test_failures_timeouts_and_deaths(latches):
    a = Actor.remote()
    go = latches()
    failed = a.fail.remote("x").future()
    with pytest.raises(ValueError, match="x") as raised:
        failed.result(WAIT)
    assert isinstance(raised.value, TaskError)
    assert isinstance(failed.exception(), ValueError)
    assert not failed.cancelled()
    held = a.hold.remote(1, go.path).future()
    with pytest.raises(concurrent.futures.TimeoutError, match="Actor"):
        held.result(0.02)
    with pytest.raises(concurrent.futures.TimeoutError):
        held.exception(0.02)
    assert not held.done()
    conveyor.kill(a)
    assert isinstance(held.exception(WAIT), ActorDiedError)


def test_a_value_that_takes_its_time_to_fetch_delays_no_descriptor(latches):
    a, b = Actor.remote(), Actor.remote()
    go = latches()
    go.open()
    direct = a.array.remote(1, go.path)
    conveyor.wait([direct], timeout=WAIT)
    with hold_transfers(a):
        future = direct.future()
        ref = b.echo.remote(2)
        assert os.eventfd_read(_readable(ref)) == 1
        assert ref.future() is not None
        assert not future.done()
    assert future.result(WAIT).sum() == 1000


def _readable(ref):
    import select

    [fd], _, _ = select.select([ref.fileno()], [], [], WAIT)
    return fd


def test_cancelling(latches):
    a = Actor.remote()
    go = latches()
    running = a.hold.remote(0, go.path)
    queued = a.hold.remote(1, go.path)
    future, other = queued.future(), queued.future()
    told = threading.Event()
    other.add_done_callback(lambda _: told.set())
    assert future.cancel()
    assert future.cancelled()
    assert queued.cancelled()
    with pytest.raises(ExecutionCancelledError, match=r"Actor.*\.hold"):
        future.result(0)
    with pytest.raises(concurrent.futures.CancelledError):
        future.exception(0)
    assert told.wait(WAIT)
    assert other.cancelled()
    assert list(concurrent.futures.as_completed([future, other], WAIT))
    go.open()
    assert running.get(WAIT) == 0
    done = running.future()
    assert done.result(WAIT) == 0
    assert not done.cancel()
    assert done.result() == 0


def test_asyncio_takes_one(latches):
    a = Actor.remote()
    go = latches()

    async def main():
        ahead = asyncio.wrap_future(a.hold.remote("x", go.path).future())
        given_up = asyncio.wrap_future((queued := a.hold.remote("y", go.path)).future())
        given_up.cancel()
        go.open()
        return await asyncio.wait_for(ahead, WAIT), queued.cancelled()

    assert asyncio.run(main()) == ("x", True)


def test_in_another_process_and_where_it_waits_for_itself(latches):
    a, b = Actor.remote(), Actor.remote()
    go = latches()
    held = b.hold.remote("there", go.path)
    got = a.imported.remote([held])
    go.open()
    assert got.get(WAIT) == ("there", True, False)
    with pytest.raises(DeadlockError):
        a.waits_for_itself.remote(a).get(WAIT)


def test_a_callback_may_wait_for_another_one(latches):
    a, b = Actor.remote(), Actor.remote()
    go, first = latches(), latches()
    late = b.hold.remote(2, go.path).future()
    got = []
    told = threading.Event()

    def callback(future):
        got.extend([future.result(), late.result(WAIT)])
        told.set()

    # Whatever is done is told at once, here, where nobody would open the other one.
    a.hold.remote(1, first.path).future().add_done_callback(callback)
    first.open()
    go.open()
    assert told.wait(WAIT)
    assert got == [1, 2]


def test_a_callback_that_leaves_by_sys_exit_ends_no_other_future(latches):
    a = Actor.remote()
    go, told = latches(), threading.Event()
    a.hold.remote(1, go.path).future().add_done_callback(lambda _: sys.exit(3))
    go.open()
    late = latches()
    a.hold.remote(2, late.path).future().add_done_callback(lambda _: told.set())
    late.open()
    assert told.wait(WAIT)


def test_a_stream_has_none():
    a = Actor.remote()
    with pytest.raises(TypeError, match="has items"):
        a.items.remote().future()


def test_nothing_is_left(latches, wait_until):
    def ours():
        names = ("conveyor-watcher", "conveyor-futures")
        return [t for t in threading.enumerate() if t.name in names]

    a = Actor.remote()
    go = latches()
    ref = a.hold.remote(1, go.path)
    future = ref.future()
    gone = weakref.ref(ref), weakref.ref(future)
    told = threading.Event()
    future.add_done_callback(lambda _: told.set())
    del ref, future
    go.open()
    assert told.wait(WAIT)  # whoever holds it
    wait_until(lambda: not ours(), 20, "the threads' end")
    gc.disable()
    try:
        failed = a.fail.remote(2).future()
        assert failed.exception(WAIT)
        gone += (weakref.ref(failed),)
        del failed
        wait_until(lambda: not any(one() for one in gone), 20, "the futures' end")
    finally:
        gc.enable()


def test_the_end_of_the_session_ends_them(scripts):
    program = """
        import time
        import conveyor

        @conveyor.remote
        class Actor:
            def hold(self):
                time.sleep(60)

        future = Actor.remote().hold.remote().future()
        conveyor.shutdown()
        print(type(future.exception(20)).__name__)
    """
    assert scripts.run(program) == "SessionEndedError\n"


def test_inline_refs_have_them(scripts):
    requested = """
future = a.hold.remote("x").future()
assert not future.done()
a.open.remote()
assert future.result(20) == "x"
assert dag.compile().execute(1).future().result(20) == 1
print("fine")
"""
    assert scripts.run(INLINE_HOLDING + requested) == "fine\n"
