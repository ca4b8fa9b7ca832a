"""Why calls wait in their caller's process, in words: what the first of them lacks."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from conveyor.runtime.refs.ref import Ref, Source


@runtime_checkable
class Queue(Protocol):
    """Where calls of one actor wait until they can be sent."""

    actor_name: str

    def lacks(self) -> Ref | None:
        """What the first call lacks that waits there; nothing, if it lacks no argument."""

    def does(self) -> str:
        """What the actor is doing."""


@runtime_checkable
class Repeated(Protocol):
    """A call that is made again where it fails, as the source of its result."""

    #: Of the try that was made last.
    last: Ref


def held_up(queue: Queue) -> str:
    """What the calls wait for that cannot be sent yet, and what those do who are to make it; nothing, if they
    lack nothing. That may be a call that waits likewise, for another actor: so the last one is named, which
    has been sent, and which all of them wait for."""
    lacking, queues = queue.lacks(), [queue]
    while lacking is not None:
        last = next((part for part in lacking.parts() if not part.done()), None)
        if last is None:  # it has come just now
            return ""
        source: Source = last._source
        awaited = source.describe(last)
        # Asked itself, it would say what holds up the link of its last try, which is this one perhaps.
        if isinstance(source, Repeated) and not source.last.done():
            last = source.last
            source = last._source
        further = None
        if isinstance(source, Queue) and source not in queues and last._number < 0:
            queues.append(source)
            further = source.lacks()
        if further is None:
            doing = source.does() if isinstance(source, Queue) else source.doing()
            return f"; calls for {queue.actor_name} wait for {awaited}; {doing}"
        lacking = further
    return ""
