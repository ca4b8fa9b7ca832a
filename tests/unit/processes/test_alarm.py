"""The thread that sees deadlines."""

import threading
from contextlib import suppress

from interrupted import WAIT, goes_on, interrupted_when_entered

from conveyor import _core
from conveyor.runtime.waiting import Alarm


class Timed:
    def __init__(self, ns):
        self.deadline = _core.monotonic_ns() + ns


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
