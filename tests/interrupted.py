"""Ctrl-C between two lines of Python's own, and whether others go on behind it."""

import sys
import threading
from contextlib import contextmanager

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
    """Whether another thread comes to the end of ``what``."""
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    thread.join(WAIT)
    return not thread.is_alive()
