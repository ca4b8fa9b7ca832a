"""Finding coroutines that take part in a cycle of waits; see ``waiting.deadlock``.

A coroutine that is a step of a graph, or a call, is kept from going on where its task waits for nothing
but results that are not there: for one, for a task that waits so, or for several of them together
(``asyncio.gather``), and no timer of its own may end that. Whatever else it may wait for could come from
anywhere, so then nothing is said of it.

This is looked at some milliseconds after the last of its waits has begun, and from then on less and less
often; and at once if somebody asks. What is noted on the board may be out of date until the next look,
which harms nobody: whoever believes in a cycle has asked before, and only a look answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, ContextVar
from functools import partial
from math import inf
from time import thread_time
from types import MappingProxyType
from typing import Any

from conveyor import _core
from conveyor.exceptions import DeadlockError
from conveyor.runtime.waiting.deadlock import FIRST_REFRESH, LONGEST_REFRESH, Wait
from conveyor.runtime.waiting.lanes import Lanes
from conveyor.runtime.waiting.works import FULL, PLACE, Ask, Blockers, any_of, call_of

#: A timer counts for so long after its time: what it does has been done by then.
_GRACE = 1.0
#: So many timers are kept at least before those that are over are looked for.
_TIMERS = 16


class Activity:
    """Coroutine that others may wait for, with the tasks that it has started. There is one for every step
    and call, so it has little of its own until it has waited for some time."""

    #: See ``waiting.works``.
    work: int
    #: In words.
    label: str
    #: Whether others have to end before it begins.
    queued = False
    #: Whether it counts for nothing any more.
    over = False
    task: asyncio.Task[Any] | None = None
    #: Futures that are awaited in it: by each, whether it has come, and who has to do something.
    awaits: Mapping[asyncio.Future[None], tuple[Callable[[], bool], Ask]] = MappingProxyType({})
    #: Time at which the last of its awaits has begun.
    since = 0.0
    # State at the last look (see ``waiting.awaits``): the wait that is noted of it, and its futures; when to
    # look again, and the pause after that.
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
        """Whether a timer that was set in the coroutine may still do something: end one of its waits, say."""
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


#: Activity that runs. The tasks and timers that are begun in it inherit it.
activity: ContextVar[Activity | None] = ContextVar("conveyor_activity", default=None)


#: The part of its time that a loop may spend here, unless it would not look for so long.
_SHARE, _LONGEST_PAUSE = 1 / 20, 0.05
#: Activities that are due within so many seconds are looked at now.
_EARLY = 0.0005


# Type of the futures that gather() returns; none, should Python have another name for it.
_Gathering: Any = getattr(asyncio.tasks, "_GatheringFuture", ())


#: The actor's that this process is.
_own: Awaits | None = None


def awaits_of(loop: asyncio.AbstractEventLoop) -> Awaits | None:
    """Return the ``Awaits`` of ``loop``, if that is an actor's."""
    return _own if _own is not None and _own.loop is loop else None


class Awaits:
    """Wait registry of one actor's coroutines. Everything here is called on its event loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        inbox: _core.Inbox,
        lanes: Lanes,
        full: Callable[[], tuple[list[Activity], list[Activity]] | None],
    ) -> None:
        """``full()``: if no more calls may run side by side, those that do, and those that are to."""
        global _own
        _own = self
        self.loop = loop
        self._inbox = inbox
        self._lanes = lanes
        self._full = full
        # Activities that await something, or did when they were last looked at.
        self._known: dict[Activity, None] = {}
        self._place: Wait | None = None
        # When it looks next.
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = inf
        self._not_before = 0.0
        self._asked = 0
        # How often the driver has answered reports.
        self._answers = 0

    def begin(
        self, future: asyncio.Future[None], ready: Callable[[], bool], ask: Ask
    ) -> Activity | None:
        """Note that ``future`` is about to be awaited. The future is done once ``ready()``; ``ask`` tells
        who has to do something before. Returns the activity in which it is awaited; ``None``: none that
        others wait for."""
        of = activity.get()
        if of is None or of.over:
            return None
        if isinstance(of.awaits, dict):
            of.awaits[future] = ready, ask
        else:
            of.awaits = {future: (ready, ask)}
        of.since = now = self.loop.time()
        of.look_at = when = now + of.first_look
        of.pause = 0.0
        self._known[of] = None
        if when < self._looks_at:
            self._look_at(when)
        return of

    def end(self, of: Activity, future: asyncio.Future[None]) -> None:
        """Note that the future is not awaited any more."""
        assert isinstance(of.awaits, dict)
        del of.awaits[future]
        if of.wait is not None:
            of.look_at = 0.0
            self.stir()

    def stir(self) -> None:
        """Look again soon: the notes may be out of date."""
        self._look_at(self.loop.time() + FIRST_REFRESH)

    def rung(self) -> None:
        """React to a ring of the doorbell, for whatever reason."""
        waits = self._lanes.coroutines
        answered = self._lanes.reports.answers != self._answers
        asked = self._inbox.asked != self._asked
        if waits and (asked or answered or any(wait.pending for wait in waits)):
            self._look_at(self.loop.time())

    def _look_at(self, when: float) -> None:
        when = max(when, self._not_before)
        if when >= self._looks_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at = when
        # It is nobody's, in a context of its own.
        self._timer = self.loop.call_at(when, self._look, context=Context())

    def _look(self) -> None:
        self._timer, self._looks_at = None, inf
        began, now = thread_time(), self.loop.time()
        before = self._asked, self._answers
        asked, self._answers = (
            self._inbox.asked,
            self._lanes.reports.answers,
        )  # before anything is looked for
        self._asked, lanes = asked, self._lanes
        noted = lanes.noted
        with lanes.at_once():
            found, due = self._examine(asked, now, (asked, self._answers) != before)
            lanes.coroutines = [of.wait for of in found if of.wait is not None]
            self._note_full(asked, now)
        for of in due:
            self._judge(of, now)
        if lanes.noted is not noted:
            # Whoever notes the last wait of a cycle finds it: that may have been for any of these.
            for of in found:
                if of not in due:
                    of.look_at = now
        self._not_before = self.loop.time() + min((thread_time() - began) / _SHARE, _LONGEST_PAUSE)
        if self._known:
            self._look_at(min(of.look_at for of in self._known))

    def _judge(self, of: Activity, now: float) -> None:
        wait = of.wait
        assert wait is not None
        try:
            pause = wait.judge(now)
        except DeadlockError as error:
            # Where the first of those is awaited that never come.
            of.wait = None
            of.futures[0].set_exception(error)
            return
        of.look_at = now + (LONGEST_REFRESH if wait.pending or pause is None else pause)

    def _examine(
        self, asked: int, now: float, all_due: bool
    ) -> tuple[list[Activity], list[Activity]]:
        """Return the activities that are kept from going on, as far as is known, and those among them that
        were due for a look just now."""
        found, due = [], []
        # The steps come first: should there be more than can be noted, it is those that others wait for.
        for of in sorted(self._known, key=_come_last):
            if of.over or not of.awaits:
                del self._known[of]
                of.wait, of.futures = None, ()
                continue
            if now < of.since + FIRST_REFRESH / 2:
                of.wait = None
                continue
            pending = of.wait is not None and of.wait.pending
            if not (all_due or pending or now > of.look_at - _EARLY):
                if of.wait is not None:
                    found.append(of)
                continue
            futures = self._waits_only_for(of, now) if len(found) < _core.WAIT_ROWS else None
            if futures is None or any(of.awaits[future][0]() for future in futures):
                of.wait = None
                of.pause = min(max(2 * of.pause, of.first_look), LONGEST_REFRESH)
                of.look_at = now + of.pause
                continue
            if of.wait is None or of.futures != futures:
                asks = [of.awaits[future][1] for future in futures]
                ask = partial(_ask_all, asks)
                of.wait = Wait(self._lanes, of.work, ask, True, of.label, refresh=of.first_look)
                of.futures = futures
            of.wait.resolve(asked, now)
            found.append(of)
            due.append(of)
        return found, due

    def _waits_only_for(self, of: Activity, now: float) -> tuple[asyncio.Future[None], ...] | None:
        """Return the results without any of which that activity does not go on; ``None``: it may go on."""
        if of.has_timers(now):
            return None
        found: dict[asyncio.Future[None], None] = {}
        ahead: list[Any] = [of.task]
        seen = set()
        while ahead:
            one = ahead.pop()
            if one in seen:
                continue
            seen.add(one)
            if one is None or one.done():
                return None
            if one in of.awaits:
                found[one] = None
            elif isinstance(one, asyncio.Task):
                # Where Python should not tell what a task awaits, nothing is known.
                waiter = getattr(one, "_fut_waiter", None)
                if one is not of.task and waiter not in of.awaits and not _belongs(one, of):
                    return None
                ahead.append(waiter)
            else:
                if not isinstance(one, _Gathering):
                    return None
                ahead += [part for part in one._children if not part.done()] or [None]
        return tuple(found) or None

    def _note_full(self, asked: int, now: float) -> None:
        """Note that a call that cannot begin waits for those that run."""
        running, queued = self._full() or ((), ())
        if not queued or any(of.wait is None for of in running):
            return
        slot, lanes = self._lanes.slot, self._lanes
        for_running = tuple((slot, of.work, of.label) for of in running)
        if self._place is None or self._place.blockers != for_running:
            self._place = _passive(lanes, PLACE, for_running, "whoever is next")
        waits = [self._place]
        turn: Blockers = ((slot, PLACE, f"its turn (max_concurrency is {len(running)})"),)
        for of in queued:
            if of.wait is None:
                of.wait = _passive(lanes, of.work, turn, of.label)
            waits.append(of.wait)
        for wait in waits:
            wait.resolve(asked, now)
        lanes.coroutines += waits


def _come_last(of: Activity) -> bool:
    return isinstance(of, Call)


def _passive(lanes: Lanes, work: int, blockers: Blockers, text: str) -> Wait:
    """Make a wait that is only noted."""
    return Wait(lanes, work, lambda _: blockers, False, text, mode=FULL)


def _ask_all(asks: Sequence[Ask], question: int) -> Blockers | None:
    return any_of([ask(question) for ask in asks])


def _belongs(task: asyncio.Task[Any], of: Activity) -> bool:
    """Whether the timers that ``task`` has set are known as timers of that activity."""
    context = getattr(task, "get_context", None)  # since Python 3.12
    return context is not None and context().get(activity) is of
