"""Futures that are waited for where a signal handler may raise."""

import threading
from concurrent import futures
from contextlib import suppress

import pytest
from interrupted import WAIT, goes_on, interrupted_when_entered

from conveyor.futures import Future, wait


def test_one_is_waited_for():
    future, other, told = Future(), Future(), []
    future.add_done_callback(told.append)
    assert not future.done()
    with pytest.raises(futures.TimeoutError):
        future.result(0)
    with pytest.raises(futures.TimeoutError):
        future.result(0.001)
    later = threading.Timer(0.01, future.set_result, (7,))
    later.start()
    assert future.result(WAIT) == future.result() == 7
    assert future.exception() is None
    later.join()
    assert told == [future]
    assert wait([future, other], 0.001) == [future]
    assert wait([future, future], WAIT) == [future, future]
    assert wait([], WAIT) == []
    with pytest.raises(futures.InvalidStateError):
        future.set_result(8)
    assert other.cancel()
    assert wait([future, other], WAIT) == [future, other]
    with pytest.raises(futures.CancelledError):
        other.result()


def test_all_who_wait_are_woken():
    future, come = Future(), threading.Barrier(4)
    found = []

    def wait(ask, timeout):
        come.wait(WAIT)
        found.append(repr(ask(timeout)))

    requested = [(future.exception, None), (future.exception, WAIT), (future.exception, 1e12)]
    threads = [threading.Thread(target=wait, args=one) for one in requested]
    for thread in threads:
        thread.start()
    come.wait(WAIT)
    future.set_exception(ValueError("no"))
    for thread in threads:
        thread.join(WAIT)
    assert found == [repr(ValueError("no"))] * 3


@pytest.mark.parametrize(
    "ask",
    [
        Future.done,
        Future.cancel,
        lambda future: future.result(0.001),
        lambda future: future.exception(0.001),
        lambda future: future.add_done_callback(print),
        lambda future: wait([future], 0.001),
    ],
)
def test_its_result_comes_also_where_one_who_requested_was_broken_off(ask):
    future = Future()
    with suppress(KeyboardInterrupt, futures.TimeoutError), interrupted_when_entered():
        ask(future)

    def settle():
        with suppress(futures.InvalidStateError):  # it was cancelled
            future.set_result(1)

    assert goes_on(settle)
    assert future.done()
