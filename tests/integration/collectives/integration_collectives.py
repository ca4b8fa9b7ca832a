"""What tests of collective groups share: to know that a rank waits."""

import time

from integration_helpers import WAIT

from conveyor import _core
from conveyor.runtime import context


def await_rank(actor, ref):
    """Wait until an actor sleeps in an operation for another rank, or its call ``ref`` has ended.

    That its process sleeps would say nothing: it does so, too, while it has not been told of the call. Of an
    actor of another node it is known only that its method runs: so what a test does to it then it may find
    when it comes to sleep.
    """
    end = time.monotonic() + WAIT
    while not (ref.done() or actor._id in sleeping() or _runs_elsewhere(actor)):
        assert time.monotonic() < end, f"{actor._id.name} does not come to an operation"
        time.sleep(0.002)


def _runs_elsewhere(actor):
    if context.current().table.record(actor._id).host is None:
        return False
    return _status_of(actor).method is not None


def rests(actor):
    """Whether an actor is shown as idle: a moment after what it was last called for has been answered."""
    return _status_of(actor).state == "idle"


def _status_of(actor):
    driver = context.current()
    record = driver.table.record(actor._id)
    (status,) = driver.process.statuses([record.reader], driver.table.label)
    return status


def sleeping():
    """Who sleeps in an operation for another rank: actors, and ``None`` for the driver."""
    return [
        None if rank == group.driver else group.actors[rank]
        for group in list(context.current().collectives._groups.values())
        if group.segment is not None  # else no rank is on the driver's node
        for rank, (_, absent) in enumerate(_core.CollectiveGroup.waits(group.segment))
        if absent
    ]
