"""What tests of collective groups share: to know that a rank waits."""

import time

from integration_helpers import WAIT

from conveyor import _core
from conveyor.runtime import context


def await_rank(actor, ref):
    """Wait until an actor sleeps in an operation for another rank, or its call ``ref`` has ended.

    That its process sleeps would say nothing: it does so, too, while it has not been told of the call.
    """
    end = time.monotonic() + WAIT
    while not (ref.done() or actor._id in sleeping()):
        assert time.monotonic() < end, f"{actor._id.name} does not come to an operation"
        time.sleep(0.002)


def sleeping():
    """Who sleeps in an operation for another rank: actors, and ``None`` for the driver."""
    return [
        None if rank == group.driver else group.actors[rank]
        for group in list(context.current().collectives._groups.values())
        for rank, (_, absent) in enumerate(_core.CollectiveGroup.waits(group.segment))
        if absent
    ]
