"""Threads of this process as actors see them: which actors each is inside of, and what it waits for.

With processes, an actor is blocked when its process is. Here a call runs on its caller's thread, so
one thread is inside of several actors at once, each waiting for the next. Every wait of the engine
goes through :meth:`Lines.block`, which refuses one that nobody but the waiting thread could end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from conveyor import _core
from conveyor.exceptions import DeadlockError
from conveyor.flag import LOOK
from conveyor.runtime import threads
from conveyor.runtime.deadlock import sooner
from conveyor.runtime.process import Process
from conveyor.runtime.waiting import Patience

#: Where on the board an actor is dead: none of them lives there.
DEAD_SLOT = 1

#: Runs a coroutine to its end.
Run = Callable[[Coroutine[Any, Any, Any]], object]


def run_alone(coroutine: Coroutine[Any, Any, Any]) -> None:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(coroutine)
        return
    # The program ends the actor in its own event loop, and a thread runs one loop at a time.
    raised: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(coroutine)
        except BaseException as error:
            raised.append(error)

    threads.start(run, "exit-hook").join()
    if raised:
        raise raised[0]


class Line:
    """Thread, as actors see it: the hosts that it is inside of, outermost first, and the job that it waits
    for."""

    __slots__ = ("bounded", "inside", "loop", "sent", "waits_for")

    def __init__(self, loop: Host | None = None) -> None:
        #: The actor whose event loop this thread runs.
        self.loop = loop
        self.inside: list[Host] = [] if loop is None else [loop]
        #: Jobs that the loop's coroutines have submitted elsewhere, and that are not done yet.
        self.sent: set[Job] = set()
        self.waits_for: Job | None = None
        #: Whether that wait has a deadline: then no cycle leads through it.
        self.bounded = False

    def names_from(self, host: Host) -> list[str]:
        """Return the names of ``host`` and of the hosts that this line has entered from there. Each waits for
        the next."""
        if host not in self.inside:
            return []
        return [h.name for h in self.inside[self.inside.index(host) :]]


class Job:
    """Work to be done on one host: a call, a constructor, a task of a graph."""

    def __init__(self, host: Host, label: str) -> None:
        self.host = host
        self.label = label
        #: For status(): a call by its number, a graph's task by node and execution.
        self.method = ""
        self.call: int | None = None
        self.node: int | None = None
        self.execution: int | None = None
        #: The line that stands in the queue for it; none: whoever has the turn does it.
        self.attendant: Line | None = None
        #: The line that runs it (that will, on an event loop).
        self.runner: Line | None = None
        #: The line of the event loop whose coroutine has submitted it.
        self.sender: Line | None = None
        self.started = False
        self.done = False

    def start(self) -> Coroutine[Any, Any, None] | None:
        """Do the work, or return a coroutine that goes on with it, on a host that has an event loop.

        What user code raises is the job's own affair. What comes out is meant for the program: it
        interrupts it.
        """
        raise NotImplementedError

    def interrupted(self, error: BaseException) -> None:
        """Handle ``error``, which ``start`` or its coroutine has raised."""

    def movers(self) -> list[Line]:
        """Return the lines that must go on so that this job does."""
        return self.host.movers(self)

    def rests(self, seen: set[Job]) -> bool:
        """Whether this can only go on when something outside happens; see :meth:`Lines.rests`."""
        return self.host.rests(self, seen)


class Host:
    """Executor of the jobs of one actor. Made by and for one session."""

    #: Whether a job may return a coroutine.
    has_loop = False

    def __init__(self, lines: Lines, name: str) -> None:
        self.lines = lines
        self.name = name
        self._running: dict[Job, float] = {}

    def begun(self, job: Job) -> None:
        """Note that ``job`` runs from now on, until it is finished."""
        self._running[job] = time.time()

    def ended(self, job: Job) -> None:
        self._running.pop(job, None)

    def running(self) -> list[tuple[Job, float]]:
        """Return the jobs that run now, and since when (``time.time()``)."""
        with self.lines.lock:
            return list(self._running.items())

    def submit(self, job: Job, before: Callable[[], object] = lambda: None) -> None:
        """Do ``job`` in its turn. It may not be done yet when this returns, where waiting for it
        would be wrong or in vain. ``before`` is called first, with the lock held: no other job comes
        between."""
        raise NotImplementedError

    def finish(self, job: Job, timeout: float | None = None) -> None:
        """Wait until a submitted job is done. ``DeadlockError`` where that would never end."""
        raise NotImplementedError

    def run(self, job: Job) -> None:
        """Submit and finish; a job that could not be finished is never started."""
        try:
            self.submit(job)
            self.finish(job)
        except BaseException:
            job.done = True
            raise

    def movers(self, job: Job) -> list[Line]:
        raise NotImplementedError

    def rests(self, job: Job, seen: set[Job]) -> bool:
        raise NotImplementedError

    def goes_on(self, job: Job) -> bool:
        """Whether ``job`` runs, and runs to its end though the host is closed. Asked with the lock held."""
        return job in self._running

    def close(self, at_the_end: Callable[[Run], None]) -> None:
        """Accept no more jobs. ``at_the_end(run)`` is called when those that run have ended; ``run`` runs a
        coroutine."""
        raise NotImplementedError

    def join(self, timeout: float) -> bool:
        """Wait until a closed host has ended; false if a method keeps it from ending. A caller that is inside
        of the host does not wait."""
        raise NotImplementedError

    def cancel(self, job: Job) -> None:
        """End ``job``, which nobody wants any more, if it is a coroutine."""

    # With an event loop

    def soon(self, work: Callable[[], None]) -> None:
        """Have ``work`` done on the loop."""
        raise NotImplementedError

    def limited(self, coroutine: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None]:
        """Wrap ``coroutine`` so that ``max_concurrency`` counts it."""
        raise NotImplementedError


class Lines:
    """All threads of a session, and the one lock that orders what they know of each other."""

    def __init__(self, process: Process) -> None:
        self._process = process
        # Reentrant: a finalizer may drop the last handle of something in the middle of anything.
        # By itself: a condition's entering is Python's, and a signal handler that raises then leaves it held.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._local = threading.local()

    def current(self) -> Line:
        """Return the line of the calling thread."""
        line: Line | None = getattr(self._local, "line", None)
        if line is None:
            line = self._local.line = Line()
        return line

    @property
    def inbox(self) -> _core.Inbox:
        return self._process.inbox

    @property
    def inherited(self) -> bool:
        """Whether this is a child that user code has forked."""
        return self._process.inbox.inherited

    def came_back(self, where: str) -> None:
        """User code has returned, or raised: what follows is not for a child that it has forked."""
        if self._process.inbox.inherited:
            _core.end_forked_child(where)

    @property
    def slot(self) -> int:
        """Slot of this process in the process table."""
        return self._process.slot

    def note_death(self) -> int:
        """Announce in the process table that an actor has ended, so that its graphs see it. Returns the
        death's number in the session."""
        board = self._process.board
        with self.lock:
            board.prepare(DEAD_SLOT, "the actor that ended last")
            board.announce_death(DEAD_SLOT)
            return board.death_number(DEAD_SLOT)

    def adopt(self, line: Line) -> None:
        """Make ``line`` the line of the calling thread."""
        self._local.line = line

    def from_a_loop(self, job: Job) -> bool:
        """Whether a coroutine submits ``job``. Then its loop must not stand still meanwhile."""
        line = self.current()
        if line.loop is None:
            return False
        with self.lock:
            job.sender = line
            line.sent.add(job)
        return True

    def finished(self, job: Job) -> None:
        """Note that ``job`` is done, or never will be."""
        with self.lock:
            job.done = True
            job.runner = None
            job.host.ended(job)
            sender, job.sender = job.sender, None
            self.changed.notify_all()
        # For those who wait for results in general: `conveyor.wait`, event loops.
        self._process.board.ring(self._process.slot, _core.ATTENTION_BIT)
        if sender is not None and sender.loop is not None:
            # By the loop itself, after the ring: until it has seen that, it is not at rest.
            sender.loop.soon(lambda: sender.sent.discard(job))

    def block(self, job: Job, ready: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait for ``job``, until ``ready()``, which is asked with the lock held.

        Raises ``DeadlockError`` if nobody else can bring that about, ``WaitTimeoutError``.
        """
        line = self.current()
        before = line.waits_for, line.bounded
        patience = Patience(timeout)
        try:
            while True:
                with self.lock:
                    if ready():
                        return
                    # Looked for and entered in one go: of a cycle's members, only the last one is
                    # refused.
                    names = None if patience.bounded else self._way_back(line, job, {line})
                    if names is not None:
                        raise _deadlock(line, job, names)
                    if line.waits_for is not job:
                        line.waits_for, line.bounded = job, patience.bounded
                        self.changed.notify_all()  # that this line stands still may be news
                    woken = self.changed.wait(sooner(patience.step(), LOOK))
                    if ready():
                        return
                if not woken:
                    patience.check(lambda: job.label, lambda: self._doing(job))
        finally:
            line.waits_for, line.bounded = before

    def _way_back(self, me: Line, job: Job, seen: set[Line]) -> list[str] | None:
        """Return the names on the way from ``job`` to ``me``, if ``job`` only goes on when ``me`` does."""
        movers = job.movers()
        names: list[str] | None = None
        for line in movers:
            found = line.names_from(job.host)
            if line is not me:
                if line in seen or line.waits_for is None or line.bounded:
                    return None
                rest = self._way_back(me, line.waits_for, seen | {line})
                if rest is None:
                    return None
                found += rest
            names = names or found
        return names

    def rests(self, job: Job, seen: set[Job] | None = None) -> bool:
        """Whether ``job`` waits for something outside the calls that it made: a timer, I/O, another call to
        come. That may take any time, so its caller goes on. Call with the lock held."""
        seen = seen or set()
        if job.done:
            return False
        if job in seen:
            return True
        return job.rests(seen | {job})

    def _doing(self, job: Job) -> str:
        if job.runner is not None:
            return f"{job.host.name} runs it in this process"
        names = [name for line in job.movers() for name in line.names_from(job.host)]
        return f"it has not been started; {', '.join(dict.fromkeys(names)) or 'nobody'} comes first"


def _deadlock(line: Line, job: Job, way: list[str]) -> DeadlockError:
    # The way ends where the waiting line is; the cycle is told from there.
    names = (line.inside[-1].name, *way[:-1]) if line.inside else tuple(way)
    chain = " waits for ".join((*names, names[0]))
    return DeadlockError(
        f"waiting for {job.label} would never end: {chain}, and each runs one call at a time. Make "
        "one of them an async actor or give it max_concurrency > 1, or pass the ref on instead of "
        "getting it",
        names,
    )
