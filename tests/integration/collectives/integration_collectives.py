"""What tests of collective groups share: to know that a rank waits."""

import time

import inside
from integration_helpers import WAIT


def await_rank(actor, ref):
    """Wait until an actor sleeps in an operation for another rank, or its call ``ref`` has ended.

    That its process sleeps would say nothing: it does so, too, while it has not been told of the call. Of an
    actor of another node it is known only that its method runs: so what a test does to it then it may find
    when it comes to sleep.
    """
    end = time.monotonic() + WAIT
    while not (ref.done() or actor._id in inside.sleeping() or _runs_remote(actor)):
        assert time.monotonic() < end, f"{actor._id.name} does not come to an operation"
        time.sleep(0.002)


def _runs_remote(actor):
    if inside.record_of(actor).node is None:
        return False
    return _status_of(actor).method is not None


def rests(actor):
    """Whether an actor is shown as idle: a moment after what it was last called for has been answered."""
    return _status_of(actor).state == "idle"


def _status_of(actor):
    return inside.status_of(actor._id.name)
