"""Events that other processes have been told of, kept beyond their use.

To wait for an event of another process, or to ask for it, is undefined in CUDA once that process has let go
of it: it may seem never to happen. Nobody knows when the last one has asked. So the last thousand stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from conveyor.device.base import Event

#: Far less than a process can have, which is about 22,000 in CUDA, and far more than there are at a time.
_MOST = 1024

_last: deque[Event] = deque(maxlen=_MOST)


def outlast(events: Iterable[Event]) -> None:
    """Keep events that are not needed here any more, and that other processes may still wait for."""
    _last.extend(events)
