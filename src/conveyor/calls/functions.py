"""Calls of functions: the workers of one kind, and the calls that wait here until one of these is free."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.calls.call import Call, count_of
from conveyor.calls.links import Link
from conveyor.calls.pending import CallRef, WaitingCall, lacked, take
from conveyor.calls.unsendable import blame_call
from conveyor.exceptions import SerializationError
from conveyor.refs.ref import EMPTY, Ref, Source, blockers_of, cancelled_error, elements_of
from conveyor.refs.together import look_at_others
from conveyor.refs.values import refs_among
from conveyor.runtime.process import CALL_SLOTS
from conveyor.runtime.wait_graph import CALLS, Again, Blockers, any_of
from conveyor.runtime.waiting import TimeLimit, wait_within
from conveyor.system_limits import cores
from conveyor.user_frames import users_site

if TYPE_CHECKING:
    from conveyor.calls.pending import Pump
    from conveyor.runtime.process import Process

#: Seconds of work that a worker is given ahead, by how long its last calls have taken. That covers the way
#: there and back for short ones; a call that takes as long has no other one behind it.
_AHEAD = 0.004

#: Seconds that a call is waited for which has been sent just now, before others are sent by another thread.
_LAST_LOOK = 0.0002

#: Calls that are looked through for one that lacks no argument.
_LOOKED_THROUGH = CALL_SLOTS

#: Workers that are started one after the other in the place of dead ones though none was given a call.
_MOST_UNUSED = 3

_NO_NAMES: dict[str, Any] = {}


class Worker:
    """A worker, as its caller sees it."""

    __slots__ = ("_done", "_pace", "_since", "handle", "link")

    def __init__(self, handle: Any, link: Link) -> None:
        self.handle = handle
        self.link = link
        self.begin()

    def begin(self) -> None:
        """Forget how long its calls have taken: what comes next may be of another kind."""
        self._done = self.link.window.completed
        self._since = _core.monotonic()
        self._pace = _AHEAD

    def learn(self) -> int:
        """Look how long its last calls have taken. Returns how many it may be given."""
        done = self.link.window.completed
        if done <= 1:  # its constructor's alone, which says nothing of calls
            self.begin()
        elif done != self._done:
            now = _core.monotonic()
            # One look may come late, and the next one soon: the pace at most doubles from one to the next.
            self._pace = max((now - self._since) / (done - self._done), self._pace / 2)
            self._done, self._since = done, now
        elif not self.link.outstanding:
            self.begin()
        return self.capacity

    @property
    def capacity(self) -> int:
        """The number of calls that it may be given: one if idle, more if it has done its last ones fast.
        Several at once, since each time costs something."""
        load, most = self.link.outstanding, min(CALL_SLOTS, int(_AHEAD / self._pace))
        return most - load if most > 1 and load <= most // 2 else 1 - load


def _outstanding(worker: Worker) -> int:
    return worker.link.outstanding


def _capacity(worker: Worker) -> int:
    return worker.capacity


class Functions:
    """Calls of functions that can share workers, in the order in which they were made.

    A call is sent to a worker that has nothing else to do. Others wait here, and each goes to the first
    worker that has capacity, as soon as its arguments are there."""

    cancel_with_await = True
    get_timeout: float | None = None
    #: In messages.
    actor_name = "<functions>"

    def __init__(
        self,
        process: Process,
        pump: Pump,
        start: Callable[[], Any],
        link: Callable[[Any], Any],
    ) -> None:
        """``start()`` starts a worker and returns its handle; ``link`` gives the link to it."""
        self._process = process
        self._pump = pump
        self._start_worker = start
        self._link = link
        #: Held by who starts a worker. Reentrant, as the other one.
        self._starts = threading.RLock()
        #: Guards what follows. Nobody sends or starts anything while it is held. Reentrant, for signal
        #: handlers.
        self.lock = threading.RLock()
        self._workers: list[Worker] = []
        #: To the worker that was started last, which may be dead.
        self._last: Any = None
        self._starting = False
        #: Workers started in the place of dead ones since a call was last given to one.
        self._unused = 0
        self._start_error: Exception | None = None
        self._most = cores()
        self._deaths = process.process_table.deaths
        self._waiting: dict[Ref, WaitingCall] = {}  # in their order

    def call(self, call: Call) -> Any:
        """Start a call; one ref, or a list of them if it has several results."""
        method, args, kwargs, result_spec, _ = call
        has_refs = refs_among(args, kwargs or _NO_NAMES)
        lacks = has_refs and lacked(call) is not None
        with self.lock:
            self._forget_dead()
            worker, before = (None, 0) if lacks or self._waiting else self._free()
        if worker is None:
            started = self._start()
            worker, before = None if lacks else started, 1  # the constructor's
        if worker is not None:
            made = worker.link.call(call, most_before=before)
            if made is not None:
                return made
        ref = CallRef.waiting(self, method)
        try:
            waits, taken = take(call)
        except SerializationError as error:
            raise blame_call(error, self.actor_name, call) from error.__cause__
        with self.lock:
            self._waiting[ref] = WaitingCall(ref, waits, taken, users_site() if has_refs else None)
        if not self.flush() and not self._pump.knows(self):
            try:
                self._pump.add(self)
            except BaseException:
                with self.lock:  # nobody would send it
                    if self._waiting.pop(ref, None) is not None:
                        raise
            self.flush()  # what it waits for may have come before the pump knew of it
        return elements_of(ref, count_of(result_spec))

    def least_busy(self) -> Any:
        """The handle of the worker with the least to do, for what is bound to one."""
        while True:
            with self.lock:
                self._forget_dead()
                worker = min(self._workers, key=_outstanding, default=None)
            if worker is None or worker.link.gone or worker.link.outstanding:
                # Others may have started the last one meanwhile.
                worker = self._start() or worker
            if worker is not None:
                return worker.handle

    def _free(self) -> tuple[Worker | None, int]:
        """A worker that has nothing to do, or soon will not, and how many calls it has. With the lock."""
        for worker in self._workers:
            if not worker.link.outstanding:
                worker.begin()
                return worker, 0
            worker.learn()
        if len(self._workers) < self._most:
            return None, 0
        worker = max(self._workers, key=_capacity)
        capacity = worker.capacity
        return (worker, worker.link.outstanding) if capacity > 0 else (None, 0)

    def _forget_dead(self) -> None:
        """Keep the workers that live. With the lock."""
        deaths = self._process.process_table.deaths
        if deaths != self._deaths:
            self._deaths = deaths
            dead = [worker for worker in self._workers if worker.link.gone]
            if dead:
                self._workers = [worker for worker in self._workers if worker not in dead]
                if any(
                    worker.link.window.submitted > 1 for worker in dead
                ):  # beside the constructor's
                    self._unused = 0

    def _start(self) -> Worker | None:
        """Start a worker, unless there are as many as there are cores."""
        if len(self._workers) >= self._most:
            return None
        with self._starts:
            if len(self._workers) >= self._most:  # others have been started meanwhile
                return None
            self._starting = True
            try:
                handle = self._start_worker()
                worker = Worker(handle, self._link(handle))
                with self.lock:
                    self._last = worker.link
                    self._workers.append(worker)
                    self._start_error = None
            finally:
                self._starting = False
                self._process.notify()  # who waits may have waited for just this
        return worker

    # What waits

    @property
    def window(self) -> _core.InFlightWindow:
        """The window of any worker: what rings for a ref that waits here."""
        window: _core.InFlightWindow = self._last.window
        return window

    @property
    def has_pending(self) -> bool:
        return bool(self._waiting)

    def flush(self) -> bool:
        """Send what can be sent. True if nothing waits any more."""
        while self._waiting:
            worker, ready = self._next()
            if worker is not None:
                worker.link.send(partial(self._take, worker, ready))
            elif not self._replace_dead() and not self.fail_if_lost():
                return not self._waiting
        self._pump.sent(self)
        return True

    def _next(self) -> tuple[Worker | None, list[WaitingCall]]:
        """The worker that may be given the most calls, and those of the first that lack no argument."""
        with self.lock:
            self._forget_dead()
            capacities = [worker.learn() for worker in self._workers]
            capacity = max(capacities, default=0)
            if capacity <= 0:
                return None, []
            worker = self._workers[capacities.index(capacity)]
            if worker.link.gone:  # its process lives, and takes no calls from here
                self._workers.remove(worker)
                return self._next()
            first = list(islice(self._waiting.values(), _LOOKED_THROUGH))
        # Without the lock: a stream that is an argument asks for its items.
        ready = [one for one in first if one.site is None or lacked(one.call) is None]
        return (worker if ready else None), ready

    def _take(
        self, worker: Worker, ready: list[WaitingCall], pending: deque[WaitingCall]
    ) -> list[WaitingCall]:
        """Move as many of these calls to the link of a worker as the worker has capacity for, and return
        them. Called with the link's lock."""
        with self.lock:
            if worker not in self._workers:  # it has died just now
                return []
            # Others have a share, too.
            most = max(0, min(worker.capacity, -(-len(self._waiting) // len(self._workers))))
            taken = list(islice((one for one in ready if one.ref in self._waiting), most))
            for one in taken:
                one.ref._move(worker.link, worker.link.window, self._waiting, pending)
            if taken:
                self._unused = 0
        return taken

    def _replace_dead(self) -> bool:
        """Start a worker if one has died for which there is work. Whether there is a new one."""
        with self.lock:
            busy = sum(1 for worker in self._workers if worker.link.outstanding)
            enough = len(self._workers) >= min(self._most, len(self._waiting) + busy)
            if enough or self._starting or self._process.ended or self._unused >= _MOST_UNUSED:
                return False
            self._unused += 1
        try:
            return self._start() is not None
        except Exception as error:  # what waits fails with it if no other worker is left
            self._start_error = error.with_traceback(None)
            return False

    def fail_if_lost(self) -> bool:
        """Fail what waits if no worker is left and none can be started, or the session has ended. Whether
        that was so."""
        with self.lock:
            self._forget_dead()
            if not self._waiting or self._starting or (self._workers and not self._process.ended):
                return False
            last, waited = self._last, list(self._waiting)
            error, self._start_error = self._start_error, None
            self._unused = 0
        if error is None:
            error = last.why_gone()  # which may wait until that is known: not with the lock
        with self.lock:
            if self._workers and not self._process.ended:  # one has been started meanwhile
                return False
            lost = [ref for ref in waited if self._waiting.pop(ref, None) is not None]
        for ref in lost:
            ref._fail(error)
        self._process.notify()
        return True

    # Source protocol

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        time_limit = TimeLimit(timeout)

        def sent() -> bool:
            self.flush()
            if ref._source is not self or ref._outcome is not EMPTY:
                return True
            look_at_others(ref)
            return False

        with self._pump.attending(self, True):
            if not sent():
                inbox, wait_registry = self._process.inbox, self._process.wait_registry
                ask = partial(self.blockers, ref)
                with wait_registry.waiting(ask, True, time_limit.bounded) as wait:
                    describe = partial(self.describe, ref)
                    wait_within(inbox, sent, time_limit, describe, self.doing, wait)
            if ref._number >= 0:
                # Most results come soon, and whoever gets the next one sends what waits.
                left = time_limit.left()
                look = _LAST_LOOK if left is None else min(left, _LAST_LOOK)
                value = ref._window.get(ref, look)
                if value is not EMPTY:
                    return value
        source: Source = ref._source
        return EMPTY if source is self else source.wait_for(ref, time_limit.left())

    def is_ready(self, ref: Ref) -> bool:
        return ref._outcome is not EMPTY

    def has_failed(self, ref: Ref) -> bool:
        return False

    def cancel(self, ref: Ref) -> bool:
        with self.lock:
            waited = self._waiting.pop(ref, None) is not None
            if waited:
                ref._fail(cancelled_error(self.describe(ref)))
        if not waited:
            source: Source = ref._source
            return source is not self and source.cancel(ref)
        self._process.notify()
        self.flush()  # it may have been the last that waited
        return True

    def why_not_run(self, ref: Ref, overdue: bool) -> BaseException:
        return cancelled_error(self.describe(ref))

    def blockers(self, ref: Ref, question: int, again: Again | None = None) -> Blockers | None:
        with self.lock:
            entry = self._waiting.get(ref)
            workers, starting = list(self._workers), self._starting
        if entry is not None and entry.site is not None:
            first = lacked(entry.call)
            if first is not None:
                return blockers_of(first, question, again)
        if starting:
            return ()
        return any_of([((one.link.actor_slot, CALLS, self.describe(ref)),) for one in workers])

    def describe(self, ref: Ref) -> str:
        method = ref.method if isinstance(ref, CallRef) else "call"
        return f"{self.actor_name}.{method} (not sent yet)"

    def doing(self) -> str:
        waiting = len(self._waiting)
        calls = "1 call waits" if waiting == 1 else f"{waiting} calls wait"
        return f"{calls} for a worker; {self.does()}"

    def does(self) -> str:
        return "; ".join([worker.link.does() for worker in list(self._workers)])

    def lacks(self) -> Ref | None:
        """Return the first argument that the first waiting call lacks."""
        with self.lock:
            entry = next(iter(self._waiting.values()), None)
        return None if entry is None or entry.site is None else lacked(entry.call)
