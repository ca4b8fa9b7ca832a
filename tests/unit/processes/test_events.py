"""The thread on which an engine hears of descriptors."""

import os
import threading

import pytest

from conveyor.runtime.events import EventLoop


@pytest.fixture
def events():
    loop = EventLoop("events-test")
    yield loop
    loop.close()


@pytest.fixture
def pipe(events):
    """There is something to be read all the time."""
    reader, writer = os.pipe()
    os.write(writer, b"x")
    yield reader
    events.remove(reader)
    os.close(reader)
    os.close(writer)


def settle(events):
    """Wait until the loop has been round twice."""
    for _ in range(2):
        done = threading.Event()
        events.call(done.set)
        assert done.wait(60)


def test_one_that_rests_is_called_back_later_and_others_meanwhile(events, pipe, wait_until):
    calls, others = [], threading.Event()
    rests = iter([600.0])

    def callback():
        calls.append(True)
        events.rest(pipe, next(rests))

    events.add(pipe, callback)
    wait_until(lambda: calls, 60)
    events.call(others.set)
    assert others.wait(60)
    settle(events)
    assert len(calls) == 1


def test_a_rest_ends(events, pipe, wait_until):
    calls = []

    def callback():
        calls.append(True)
        events.rest(pipe, 0.002)

    events.add(pipe, callback)
    wait_until(lambda: len(calls) >= 3, 60)


def test_one_that_is_removed_while_it_rests_stays_removed(events, pipe, wait_until):
    calls, again = [], []

    def callback():
        calls.append(True)
        events.rest(pipe, 0.02)
        events.remove(pipe)

    events.add(pipe, callback)
    wait_until(lambda: calls and not events._resting, 60)
    settle(events)
    assert len(calls) == 1
    # Its number is another's by then: that one does not rest.
    events.add(pipe, lambda: (again.append(True), events.remove(pipe)))
    wait_until(lambda: again, 60)


def test_a_number_that_is_added_again_does_not_rest_for_the_former(events, pipe, wait_until):
    calls, again = [], []

    def other():
        again.append(True)
        events.rest(pipe, 600.0)

    def callback():
        calls.append(True)
        events.rest(pipe, 0.02)
        events.remove(pipe)
        events.add(pipe, other)

    events.add(pipe, callback)
    wait_until(lambda: again, 60)
    # The end of the former's rest does not end that of this one.
    later = threading.Event()
    reader, writer = os.pipe()
    os.write(writer, b"x")
    try:
        events.add(reader, lambda: (events.rest(reader, 0.05), later.set()))
        assert later.wait(60)
        settle(events)
        assert (len(calls), len(again)) == (1, 1)
    finally:
        events.remove(reader)
        os.close(reader)
        os.close(writer)


def test_one_that_is_closed_while_it_rests_costs_the_loop_nothing(events, capfd, wait_until):
    """It should have been removed before: that is said, and the others are called back on."""
    reader, writer = os.pipe()
    os.write(writer, b"x")
    events.add(reader, lambda: (events.rest(reader, 0.02), os.close(reader)))
    wait_until(lambda: "Bad file descriptor" in capfd.readouterr().err, 60)
    settle(events)
    events.remove(reader)
    os.close(writer)
