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
    while not (ref.done() or _sleeps(actor._id)):
        assert time.monotonic() < end, f"{actor._id.name} does not come to an operation"
        time.sleep(0.002)


def _sleeps(actor):
    groups = context.current().collectives._groups
    return any(
        absent and one == actor
        for group in list(groups.values())
        for one, (_, absent) in zip(
            group.actors, _core.CollectiveGroup.waits(group.segment), strict=True
        )
    )
