"""What the coroutines of an actor do for others, and which timers they have set (``waiting.loops``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from conveyor.runtime.waiting.deadlock import FIRST_REFRESH
from conveyor.runtime.waiting.works import call_of

if TYPE_CHECKING:
    from conveyor.runtime.waiting.deadlock import Wait
    from conveyor.runtime.waiting.works import Ask

#: A timer counts for so long after its time: what it does has been done by then.
_GRACE = 1.0
#: So many timers are kept at least before those that are over are looked for.
_TIMERS = 16


class Activity:
    """One coroutine that others may wait for, with the tasks that it has started. There is one for every
    step and call, so it has little of its own until it has waited for some time."""

    #: See ``waiting.works``.
    work: int
    #: In words.
    label: str
    #: Whether others have to end before it begins.
    queued = False
    #: Whether it counts for nothing any more.
    over = False
    task: asyncio.Task[Any] | None = None
    #: What is awaited in it: by each future, whether that has come, and who has to do something.
    awaits: Mapping[asyncio.Future[None], tuple[Callable[[], bool], Ask]] = MappingProxyType({})
    #: The last of what is awaited in it has begun then.
    since = 0.0
    # As it was when it was last looked at (see ``waiting.awaits``): what is noted of it, and what for; when
    # to look again, and the pause after that.
    wait: Wait | None = None
    futures: tuple[asyncio.Future[None], ...] = ()
    look_at = 0.0
    pause = 0.0

    #: After how long it is looked at for the first time.
    first_look = FIRST_REFRESH

    _timers: list[asyncio.TimerHandle] | None = None
    _most_timers = _TIMERS

    def end(self) -> None:
        self.over = True
        # They refer to each other.
        self.task = self._timers = None

    def has_timers(self, now: float) -> bool:
        """Whether a timer that was set in it may still do something: end one of its waits, say."""
        return any(_may_do_something(timer, now) for timer in self._timers or ())

    def add_timer(self, timer: asyncio.TimerHandle, now: float) -> None:
        if self.over:
            return
        if self._timers is None:
            self._timers = []
        if len(self._timers) >= self._most_timers:
            self._timers = [each for each in self._timers if _may_do_something(each, now)]
            self._most_timers = max(_TIMERS, 2 * len(self._timers))
        self._timers.append(timer)


def _may_do_something(timer: asyncio.TimerHandle, now: float) -> bool:
    return not timer.cancelled() and timer.when() + _GRACE > now


class Step(Activity):
    """A step of a graph."""

    def __init__(self, work: int, label: str) -> None:
        self.work = work
        self.label = label


class Call(Activity):
    """A call, which waits for its turn first."""

    queued = True
    # There are many more calls than steps, and few of them are in anybody's way.
    first_look = 0.02

    def __init__(self, caller: tuple[int, int], number: int, actor: str, method: str) -> None:
        self._call = caller, number, actor, method

    @property
    def work(self) -> int:  # type: ignore[override]
        (slot, incarnation), number, _, _ = self._call
        return call_of(slot, incarnation, number)

    @property
    def label(self) -> str:  # type: ignore[override]
        _, _, actor, method = self._call
        return f"{actor}.{method.partition('#')[0]}"


#: What is being done. The tasks and timers that are begun in it inherit it.
activity: ContextVar[Activity | None] = ContextVar("conveyor_activity", default=None)
