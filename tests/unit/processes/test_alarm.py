"""The thread that sees deadlines."""

import sys
import threading
from contextlib import contextmanager, suppress

from conveyor import _core
from conveyor.runtime.waiting.alarm import Alarm

WAIT = 60


class Timed:
    def __init__(self, ns):
        self.deadline = _core.monotonic_ns() + ns


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


def test_it_goes_on_behind_a_wait_that_was_broken_off():
    rung = threading.Event()
    alarm = Alarm(rung.set)
    far, near = Timed(WAIT * 10**9), Timed(10**7)
    alarm.add(far)
    with suppress(KeyboardInterrupt), interrupted_when_entered():
        alarm.add(near)
    assert goes_on(lambda: alarm.add(near))
    assert rung.wait(WAIT)
    assert goes_on(alarm.close)
