"""Ctrl-C in the midst of what is enqueued on the simulated accelerator holds up nobody."""

import sys
import threading
from contextlib import contextmanager

import pytest

pytest.importorskip("torch")

from conveyor.testing import accelerator

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]

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


def test_a_stream_of_the_simulated_accelerator_goes_on():
    stream, go = accelerator.install().current_stream(0), threading.Event()
    stream.enqueue("hold", lambda: go.wait(WAIT))  # its thread is there
    try:
        with interrupted_when_entered():
            stream.enqueue("nothing", lambda: None)
    except KeyboardInterrupt:
        pass
    go.set()
    assert goes_on(stream.synchronize)
