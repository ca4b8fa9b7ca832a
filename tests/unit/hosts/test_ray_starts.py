"""Starts of actors that Ctrl-C breaks off hold up nobody."""

import sys
import threading
from contextlib import contextmanager

import pytest

from conveyor.engine.events import EventLoop
from conveyor.engine.ray.starts import Starts

WAIT = 60


@contextmanager
def interrupted_when_entered():
    """Ctrl-C comes when a condition has just been entered, by a line of Python's."""

    def interrupt(frame, event, _):
        if event == "return" and frame.f_code is threading.Condition.__enter__.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        yield
    finally:
        sys.setprofile(None)


def goes_on(what):
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    thread.join(WAIT)
    return not thread.is_alive()


@pytest.mark.parametrize("of", ["under_way", "asking"])
def test_a_session_ends_behind_a_start_that_was_broken_off(of):
    starts, events = Starts(), EventLoop("starts-test")
    begun = starts.under_way(1, lambda: None) if of == "under_way" else starts.asking("start it")
    try:
        with interrupted_when_entered(), begun:
            pass
    except KeyboardInterrupt:
        pass
    assert goes_on(lambda: starts.close(events))
    events.close()
