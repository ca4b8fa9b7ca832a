"""Waiting that can say what it waits for, and ends at its deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Protocol

from conveyor import _core
from conveyor.checks import in_seconds
from conveyor.exceptions import WaitTimeoutError
from conveyor.flag import Flag
from conveyor.runtime import threads
from conveyor.runtime.deadlock import Wait, sooner
from conveyor.weak import WeakSet


class Timed(Protocol):
    """Something that is waited for until a time on the monotonic clock, in nanoseconds."""

    @property
    def deadline(self) -> int: ...


class Alarm:
    """Thread that notifies this process at deadlines. It exists only while something with a deadline is
    waited for in general: by ``conveyor.wait``, an event loop, or a descriptor. ``get`` watches the clock
    itself."""

    def __init__(self, notify: Callable[[], object]) -> None:
        self._notify = notify
        # By itself, since a signal handler that raises may leave a condition held that was entered: its
        # entering is Python's. Then no deadline would be seen any more, nor the session's end.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Weak: what nobody waits for any more has no deadline.
        self._timed: WeakSet[Timed] = WeakSet()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, timed: Timed) -> None:
        with self._lock:
            if self._closed:
                return
            self._timed.add(timed)
            if self._thread is not None:
                self._changed.notify_all()
                return
            try:
                self._thread = threads.serve(self._run, "alarm")
            except BaseException:
                self._timed.discard(timed)
                raise

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                now = _core.monotonic_ns()
                waiting = list(self._timed)
                due = [timed for timed in waiting if timed.deadline <= now]
                for timed in due:
                    self._timed.discard(timed)
                left = min((t.deadline - now for t in waiting if t.deadline > now), default=None)
                del waiting
                if not due:
                    if left is None or self._closed:
                        self._thread = None
                        return
                    self._changed.wait(left / 1e9)
                    continue
                due.clear()
            self._notify()


class _Passing(threading.local):
    depth = 0


_passing = _Passing()


def passing_on() -> bool:
    """Whether what this thread gets is for others."""
    return _passing.depth > 0


class PassingOn:
    """Context in which what is got is not for the user."""

    def __enter__(self) -> None:
        _passing.depth += 1

    def __exit__(self, *_: object) -> None:
        _passing.depth -= 1


#: A wait that lasts longer than this is logged, once.
LOG_AFTER = 10.0
#: How many of the results that are waited for a log line names.
_NAMED = 4


class TimeLimit:
    """The time one wait has left, and whether it has been logged."""

    __slots__ = ("_deadline", "_log_at", "_start", "timeout")

    def __init__(self, timeout: float | None, left: float | None = None) -> None:
        """``left``: of a wait that has begun in another process, what it has left."""
        self.timeout = timeout
        self._start = _core.monotonic()
        left = timeout if left is None else left
        self._deadline = inf if left is None else self._start + left
        self._log_at = self._start + LOG_AFTER

    @property
    def bounded(self) -> bool:
        """Whether the wait ends by itself."""
        return self._deadline < inf

    def step(self) -> float | None:
        """Seconds until something is to be done: the deadline, or the log line. ``None``: never."""
        end = min(self._deadline, self._log_at)
        return max(end - _core.monotonic(), 0.0) if end < inf else None

    def left(self) -> float | None:
        """Seconds until the deadline. ``None``: there is none."""
        return max(self._deadline - _core.monotonic(), 0.0) if self.bounded else None

    def over(self) -> bool:
        return _core.monotonic() >= self._deadline

    def check(self, what: Callable[[], str], who: Callable[[], str]) -> None:
        """Log a long wait once; raise ``WaitTimeoutError`` when the time is over."""
        now = _core.monotonic()
        if now >= self._deadline:
            raise WaitTimeoutError(
                f"timed out after {in_seconds(self.timeout)} waiting for {what()}; {who()}. "
                "The same wait can be tried again"
            )
        if now >= self._log_at:
            self._log_at = inf
            import logging  # slow to import, and most programs never wait that long

            logging.getLogger("conveyor").warning(
                "waiting for %s since %.0f s; %s", what(), now - self._start, who()
            )


def wait_for_flag(flag: Flag, what: str, doing: str, time_limit: TimeLimit | None = None) -> None:
    """Wait until ``flag`` is set. ``what`` is waited for, and ``doing`` says what happens meanwhile."""
    time_limit = time_limit or TimeLimit(None)
    while not flag.wait(time_limit.step(), interruptible=True):
        time_limit.check(lambda: what, lambda: doing)


def wait_until(
    inbox: _core.Inbox,
    ready: Callable[[], bool],
    timeout: float | None,
    what: Callable[[], str],
    who: Callable[[], str],
    wait: Wait | None = None,
) -> None:
    """Sleep on this process's doorbell until ``ready()``; it is asked after every notification. ``wait``: of
    one of an actor's lanes, which takes part in finding deadlocks."""
    wait_within(inbox, ready, TimeLimit(timeout), what, who, wait)


def wait_within(
    inbox: _core.Inbox,
    ready: Callable[[], bool],
    time_limit: TimeLimit,
    what: Callable[[], str],
    who: Callable[[], str],
    wait: Wait | None = None,
) -> None:
    """Like :func:`wait_until`, as one part of a wait whose time is ``time_limit``."""
    while True:
        seen = inbox.count
        requested = inbox.requested
        if wait is not None and wait.serve is not None:
            wait.serve()
        if ready():
            return
        step = time_limit.step()
        if wait is not None:
            step = sooner(step, wait.look(requested))
        if not inbox.wait(seen, step):
            if ready():
                return
            time_limit.check(what, who)


def outstanding(refs: Sequence[Any]) -> str:
    """Describe which of ``refs`` are not there yet, and what the processes that are to make them do."""
    # One that is made of others is not there because they are not.
    made = [part for ref in refs for part in ref.parts()]
    missing = list({id(ref): ref for ref in made if not ref.done()}.values())
    said = [ref._source.describe(ref) for ref in missing[:_NAMED]]
    if len(missing) > _NAMED:
        said.append(f"{len(missing) - _NAMED} more")
    sources = {id(ref._source): ref._source for ref in missing}
    doing = [source.doing() for source in sources.values() if hasattr(source, "doing")]
    failed = [
        f"failed: {_failure(ref)}" for ref in {id(r): r for r in made}.values() if _has_failed(ref)
    ]
    return "; ".join([f"to come: {', '.join(said)}", *dict.fromkeys(doing), *failed[:_NAMED]])


def _has_failed(ref: Any) -> bool:
    return bool(ref.done() and ref.has_failed())


def _failure(ref: Any) -> str:
    try:
        with PassingOn():
            ref.get(0)
    except Exception as error:
        first = str(error).partition("\n")[0]
        return f"{ref._source.describe(ref)}: {type(error).__name__}: {first}"
    return f"{ref!r}"
