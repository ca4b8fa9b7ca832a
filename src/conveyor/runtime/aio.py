"""asyncio on the doorbell: an event loop watches the process's eventfd while somebody awaits.

Actors run on loops of their own. A child that a coroutine forks shares the parent's epoll instance, and has
the parent's callbacks before it. It goes on with neither: what it awaits never comes, and it ends there.

Coroutines in a cycle of waits (``runtime.deadlock``) are found here. A coroutine that is a step of a graph,
or a call, is kept from going on where its task waits for nothing but results that are not there: for one, for
a task that waits so, or for several of them together (``asyncio.gather``), and no timer of its own may end
that. Whatever else it may wait for could come from anywhere, so then nothing is said of it.

This is looked at some milliseconds after the last of its waits has begun, and from then on less and less
often; and at once if somebody asks. What is noted on the process table may be out of date until the next
look, which harms nobody: whoever believes in a cycle has asked before, and only a look answers.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar
from functools import partial
from math import inf
from time import thread_time
from types import MappingProxyType
from typing import Any

from conveyor import _core, descriptors
from conveyor.exceptions import ConveyorError, DeadlockError, RuntimeStateError
from conveyor.runtime import context, ending
from conveyor.runtime.deadlock import FIRST_REFRESH, LONGEST_REFRESH, Wait, WaitRegistry
from conveyor.runtime.wait_graph import CONCURRENCY, FULL, Ask, Blockers, any_of, call_of
from conveyor.system_limits import explained
from conveyor.weak import WeakKeys, WeakSet

#: A timer counts for so long after its time: what it does has been done by then.
_GRACE = 1.0
#: So many timers are kept at least before those that are over are looked for.
_TIMERS = 16


class Activity:
    """Coroutine that others may wait for, with the tasks that it has started. There is one for every step
    and call, so it has little of its own until it has waited for some time."""

    #: See ``runtime.wait_graph``.
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
    # State at the last look (see ``aio.Awaits``): the wait that is noted of it, and its futures; when to
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
        wait_registry: WaitRegistry,
        full: Callable[[], tuple[list[Activity], list[Activity]] | None],
    ) -> None:
        """``full()``: if no more calls may run side by side, those that do, and those that are to."""
        global _own
        _own = self
        self.loop = loop
        self._inbox = inbox
        self._wait_registry = wait_registry
        self._full = full
        # Activities that await something, or did when they were last looked at.
        self._known: dict[Activity, None] = {}
        self._concurrency: Wait | None = None
        # When it looks next.
        self._timer: asyncio.TimerHandle | None = None
        self._next_look = inf
        self._not_before = 0.0
        self._requested = 0
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
        if when < self._next_look:
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
        waits = self._wait_registry.coroutines
        answered = self._wait_registry.reports.answers != self._answers
        requested = self._inbox.requested != self._requested
        if waits and (requested or answered or any(wait.pending for wait in waits)):
            self._look_at(self.loop.time())

    def _look_at(self, when: float) -> None:
        when = max(when, self._not_before)
        if when >= self._next_look:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._next_look = when
        # It is nobody's, in a context of its own.
        self._timer = self.loop.call_at(when, self._look, context=Context())

    def _look(self) -> None:
        self._timer, self._next_look = None, inf
        began, now = thread_time(), self.loop.time()
        before = self._requested, self._answers
        requested, self._answers = (
            self._inbox.requested,
            self._wait_registry.reports.answers,
        )  # before anything is looked for
        self._requested, wait_registry = requested, self._wait_registry
        noted = wait_registry.noted
        with wait_registry.at_once():
            found, due = self._examine(requested, now, (requested, self._answers) != before)
            wait_registry.coroutines = [of.wait for of in found if of.wait is not None]
            self._note_full(requested, now)
        for of in due:
            self._judge(of, now)
        if wait_registry.noted is not noted:
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
        self, requested: int, now: float, all_due: bool
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
                of.wait = Wait(
                    self._wait_registry, of.work, ask, True, of.label, refresh=of.first_look
                )
                of.futures = futures
            of.wait.resolve(requested, now)
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

    def _note_full(self, requested: int, now: float) -> None:
        """Note that a call that cannot begin waits for those that run."""
        running, queued = self._full() or ((), ())
        if not queued or any(of.wait is None for of in running):
            return
        slot, wait_registry = self._wait_registry.slot, self._wait_registry
        for_running = tuple((slot, of.work, of.label) for of in running)
        if self._concurrency is None or self._concurrency.blockers != for_running:
            self._concurrency = _passive(wait_registry, CONCURRENCY, for_running, "whoever is next")
        waits = [self._concurrency]
        for_place: Blockers = (
            (slot, CONCURRENCY, f"its turn (max_concurrency is {len(running)})"),
        )
        for of in queued:
            if of.wait is None:
                of.wait = _passive(wait_registry, of.work, for_place, of.label)
            waits.append(of.wait)
        for wait in waits:
            wait.resolve(requested, now)
        wait_registry.coroutines += waits


def _come_last(of: Activity) -> bool:
    return isinstance(of, Call)


def _passive(wait_registry: WaitRegistry, work: int, blockers: Blockers, text: str) -> Wait:
    """Make a wait that is only noted."""
    return Wait(wait_registry, work, lambda _: blockers, False, text, mode=FULL)


def _ask_all(asks: Sequence[Ask], question: int) -> Blockers | None:
    return any_of([ask(question) for ask in asks])


def _belongs(task: asyncio.Task[Any], of: Activity) -> bool:
    """Whether the timers that ``task`` has set are known as timers of that activity."""
    context = getattr(task, "get_context", None)  # since Python 3.12
    return context is not None and context().get(activity) is of


class LoopWatch:
    """Watch of one event loop over the doorbell: futures, each with the condition that completes it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        inbox: _core.Inbox,
        relay: int,
        awaits: Awaits | None,
    ) -> None:
        """``relay``: an eventfd, which is this one's from now on. ``awaits``: who looks for cycles among
        those that wait, if the loop is an actor's."""
        self._loop = weakref.ref(loop)  # the registry below is keyed by the loop
        self._awaits = awaits  # keeps an actor's, which is there to the end
        self._inbox = inbox
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}
        # Written when another thread has taken the process's event down (see Inbox::clear_event).
        self._relay = relay
        inbox.add_relay(self._relay)
        # Watched for the life of the loop: the event is only written while somebody is armed.
        loop.add_reader(inbox.eventfd, self._on_event)
        loop.add_reader(self._relay, self._on_relay)

    def add(
        self, loop: asyncio.AbstractEventLoop, ready: Callable[[], bool]
    ) -> asyncio.Future[None]:
        future: asyncio.Future[None] = loop.create_future()
        self._waiting[future] = ready
        try:
            self._look()
        except BaseException:
            self.discard(future)
            raise
        return future

    def discard(self, future: asyncio.Future[None]) -> None:
        self._waiting.pop(future, None)

    def _on_event(self) -> None:
        self._inbox.clear_event(self._relay)
        self._look()

    def _on_relay(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._relay)
        self._look()

    def _look(self) -> None:
        # Look after noting the count, sleep only if it has not moved since: no ring is missed.
        seen = self._inbox.count
        try:
            self._complete()
            if self._awaits is not None:
                self._awaits.rung()
            if not self._waiting:
                self._inbox.disarm(self._relay)
            elif not self._inbox.arm(seen, self._relay):
                self._look_soon()
        except BaseException:  # a signal handler's: the others are still to be told
            self._look_soon()
            raise

    def _look_soon(self) -> None:
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.call_soon(self._look)

    def _complete(self) -> None:
        if ending.begun_by_others():
            return  # a task that nobody waits for would print what it gets
        for future, ready in list(self._waiting.items()):
            if future.done():  # cancelled
                del self._waiting[future]
                continue
            try:
                if not ready():
                    continue
            except Exception as error:  # that one's, of whoever awaits it
                future.set_exception(error)
            else:
                future.set_result(None)
            del self._waiting[future]

    def __del__(self) -> None:
        self._inbox.remove_relay(self._relay)
        os.close(self._relay)


_watches: WeakKeys[asyncio.AbstractEventLoop, LoopWatch] = WeakKeys()


async def wait_until(ready: Callable[[], bool], ask: Ask | None = None) -> None:
    """Wait until ``ready()``, which is asked after every ring of this process's doorbell. ``ask`` tells who
    has to do something before that, if it is known: then the wait takes part in finding deadlocks."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeStateError(
            "awaiting a result, or for room, needs a running asyncio event loop; in trio and other loops "
            "wait until ref.fileno() can be read (trio.lowlevel.wait_readable), then get it"
        ) from None
    runtime = context.current()
    inbox, awaits = runtime.inbox, awaits_of(loop)
    watch = _watches.get(loop)
    if watch is None or watch._inbox is not inbox:
        with explained("await anything in this event loop"):
            relay = descriptors.event()
        watch = _watches[loop] = LoopWatch(loop, inbox, relay, awaits)
    future = watch.add(loop, ready)
    of = None if awaits is None or ask is None else awaits.begin(future, ready, ask)
    try:
        await future
    finally:
        if awaits is not None and of is not None:
            awaits.end(of, future)
        watch.discard(future)  # cancelled: it refers to the loop, which must not be kept


# How many tasks, of any loop, await what such a key stands for.
_awaiting: dict[Hashable, int] = {}
_awaiting_lock = threading.Lock()


async def wait_or_cancel(
    ready: Callable[[], bool], ask: Ask, key: Hashable, cancel: Callable[[], object]
) -> None:
    """Like :func:`wait_until`; where the task is cancelled meanwhile, and no other waits with the same
    ``key``, ``cancel()`` is called."""
    with _awaiting_lock:
        _awaiting[key] = _awaiting.get(key, 0) + 1
    cancelled = False
    try:
        await wait_until(ready, ask)
    except asyncio.CancelledError:
        cancelled = True
        raise
    finally:
        with _awaiting_lock:
            left = _awaiting.pop(key) - 1
            if left:
                _awaiting[key] = left
        if cancelled and not left:
            with suppress(ConveyorError):  # what would be cancelled has ended
                cancel()


async def cancel_all_tasks() -> None:
    """Cancel all tasks of the running loop, which ends. Returns when the tasks have ended."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_loops: WeakSet[ActorLoop] = WeakSet()


class ActorSelector(selectors.EpollSelector):
    """The selector of a loop that runs an actor's coroutines."""

    _selector_cls = staticmethod(descriptors.epoll)

    def __init__(self, name: str) -> None:
        """``name`` is the actor's."""
        super().__init__()
        self._name = name

    def be_its_own(self) -> None:
        """Detach from the parent, in a forked child, which ends where it would wait for more. Until then it
        leaves the parent's epoll instance alone: any change here would change it there."""

        def end(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            return _core.end_forked_child(f"a coroutine of {self._name}")

        # Here, and not in a method of the class, which every turn of the loop would call.
        self.select = end  # type: ignore[method-assign]
        # Without a descriptor left it keeps the parent's; it ends before it selects.
        with suppress(OSError):
            own = descriptors.epoll()
            try:
                os.dup2(own.fileno(), self.fileno(), inheritable=False)
            finally:
                own.close()


class ActorLoop(asyncio.SelectorEventLoop):
    """Event loop for an actor's coroutines. It knows which timers belong to which activity."""

    def __init__(self, selector: ActorSelector) -> None:
        super().__init__(selector)
        self._actor_selector = selector
        self._forking: asyncio.Task[Any] | None = None
        _loops.add(self)

    #: The clock of deadlines, which a test that replaces ``time.monotonic`` does not stop.
    time = staticmethod(_core.monotonic)

    def _make_self_pipe(self) -> None:
        super()._make_self_pipe()  # type: ignore[misc]  # of asyncio's base class since it exists
        self._remove_reader(self._ssock.fileno())  # type: ignore[attr-defined, has-type]
        self._ssock = descriptors.own_socket(self._ssock)  # type: ignore[has-type]
        self._csock = descriptors.own_socket(self._csock)  # type: ignore[has-type]
        self._add_reader(self._ssock.fileno(), self._read_from_self)  # type: ignore[attr-defined]

    def call_at(  # type: ignore[override]  # it takes and passes on anything
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = super().call_at(when, callback, *args, context=context)
        of = activity.get() if context is None else context.get(activity)
        if of is not None:
            of.add_timer(handle, self.time())
        return handle

    def before_fork(self) -> None:
        """Note which task forks this process."""
        self._forking = asyncio.current_task(self)

    def in_child(self) -> None:
        """Drop the parent's callbacks in a forked child. One of the callbacks that are due may have forked
        the process; the others are the parent's."""
        self._actor_selector.be_its_own()
        if self._thread_id == threading.get_ident():  # type: ignore[attr-defined]  # likewise
            # The child goes on inside of the task that has forked it. Python 3.14 has taken that away, and
            # would refuse to leave it.
            asyncio._set_running_loop(self)
            if self._forking is not None and asyncio.current_task(self) is None:
                asyncio.tasks._enter_task(self, self._forking)
        for handle in self._ready:  # type: ignore[attr-defined]  # of asyncio's base class since it exists
            handle.cancel()


def _before_fork() -> None:
    loop = asyncio._get_running_loop()
    if isinstance(loop, ActorLoop):
        loop.before_fork()


def _in_child() -> None:
    for loop in list(_loops):
        if not loop.is_closed():
            loop.in_child()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
