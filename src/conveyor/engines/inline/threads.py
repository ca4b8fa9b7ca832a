"""Threads of the driver's process as actors see them, and queues of jobs that run on them.

With processes, an actor is blocked when its process is. Here a call runs on its caller's thread, so
one thread is inside of several actors at once, each waiting for the next. Every wait of the engine
goes through :meth:`ActorThreads.block`, which refuses one that nobody but the waiting thread could end.

A queue runs the jobs of an actor: on the threads of those who want them, a few at a time, in order
(:class:`CallLock`); or, for an actor with async methods, on an event loop of its own (:class:`Loop`). As in a
process, everything of such an actor then runs on one thread, its constructor and its plain methods too, and
its coroutines run side by side. A caller waits until its call is done, or until it could only wait on: for a
timer, for I/O, for somebody else to set an event.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from conveyor import _core
from conveyor.exceptions import DeadlockError
from conveyor.flag import LOOK
from conveyor.runtime import aio, ending, threads
from conveyor.runtime.aio import ActorLoop, ActorSelector
from conveyor.runtime.deadlock import sooner
from conveyor.runtime.process import Process
from conveyor.runtime.uninterrupted import try_each
from conveyor.runtime.waiting import TimeLimit

#: Where on the process table an actor is dead: none of them lives there.
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


class ActorThread:
    """Thread, as actors see it: the queues that it is inside of, outermost first, and the job that it waits
    for."""

    __slots__ = ("bounded", "inside", "loop", "sent", "waits_for")

    def __init__(self, loop: JobQueue | None = None) -> None:
        #: The actor whose event loop this thread runs.
        self.loop = loop
        self.inside: list[JobQueue] = [] if loop is None else [loop]
        #: Jobs that the loop's coroutines have submitted elsewhere, and that are not done yet.
        self.sent: set[Job] = set()
        self.waits_for: Job | None = None
        #: Whether that wait has a deadline: then no cycle leads through it.
        self.bounded = False

    def names_from(self, queue: JobQueue) -> list[str]:
        """Return the names of ``queue`` and of the queues that this thread has entered from there. Each waits
        for the next."""
        if queue not in self.inside:
            return []
        return [h.name for h in self.inside[self.inside.index(queue) :]]


class Job:
    """Work to be done in one queue: a call, a constructor, a task of a graph."""

    def __init__(self, queue: JobQueue, label: str) -> None:
        self.queue = queue
        self.label = label
        #: For status(): a call by its number, a graph's task by node and execution.
        self.method = ""
        self.call: int | None = None
        self.node: int | None = None
        self.execution: int | None = None
        #: The thread that stands in the queue for it; none: whoever has the turn does it.
        self.attendant: ActorThread | None = None
        #: The thread that runs it (that will, on an event loop).
        self.runner: ActorThread | None = None
        #: The thread of the event loop whose coroutine has submitted it.
        self.sender: ActorThread | None = None
        self.started = False
        self.done = False
        self._permit = [True]

    def take(self) -> bool:
        """Whether the caller is to start the job: only the first one is, whatever interrupts it."""
        try:
            return self._permit.pop()
        except IndexError:
            return False

    def start(self) -> Coroutine[Any, Any, None] | None:
        """Do the work, or return a coroutine that goes on with it, if the queue has an event loop.

        What user code raises is the job's own affair. What comes out is meant for the program: it
        interrupts it.
        """
        raise NotImplementedError

    def interrupted(self, error: BaseException) -> None:
        """Handle ``error``, which ``start`` or its coroutine has raised."""

    def movers(self) -> list[ActorThread]:
        """Return the threads that must go on so that this job does."""
        return self.queue.movers(self)

    def rests(self, seen: set[Job]) -> bool:
        """Whether this can only go on when something outside happens; see :meth:`ActorThreads.rests`."""
        return self.queue.rests(self, seen)


class JobQueue:
    """Queue of the jobs of one actor, and what runs them. Made by and for one session."""

    #: Whether a job may return a coroutine.
    has_loop = False

    def __init__(self, actor_threads: ActorThreads, name: str) -> None:
        self.actor_threads = actor_threads
        self.name = name
        self._running: dict[Job, float] = {}

    def begun(self, job: Job) -> None:
        """Note that ``job`` runs from now on, until it is finished."""
        self._running[job] = time.time()

    def ended(self, job: Job) -> None:
        self._running.pop(job, None)

    def running(self) -> list[tuple[Job, float]]:
        """Return the jobs that run now, and since when (``time.time()``)."""
        with self.actor_threads.lock:
            return list(self._running.items())

    def submit(self, job: Job) -> None:
        """Do ``job`` in its turn. It may not be done yet when this returns, where waiting for it
        would be wrong or in vain."""
        try:
            with self.actor_threads.lock:
                go_on = self.enqueue(job)
            go_on()
        except BaseException:
            job.done = True  # nobody else may be there to do it
            raise

    def enqueue(self, job: Job) -> Callable[[], object]:
        """Put ``job`` into the queue, with the lock held; return what is to be called without it."""
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

    def movers(self, job: Job) -> list[ActorThread]:
        raise NotImplementedError

    def rests(self, job: Job, seen: set[Job]) -> bool:
        raise NotImplementedError

    def goes_on(self, job: Job) -> bool:
        """Whether ``job`` runs, and runs to its end though the queue is closed. Asked with the lock held."""
        return job in self._running

    def close(self, at_the_end: Callable[[Run], None]) -> None:
        """Accept no more jobs. ``at_the_end(run)`` is called when those that run have ended; ``run`` runs a
        coroutine."""
        raise NotImplementedError

    def join(self, timeout: float) -> bool:
        """Wait until a closed queue has ended; false if a method keeps it from ending. A caller that is
        inside of the queue does not wait."""
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


class ActorThreads:
    """All threads of a session, and the one lock that orders what they know of each other."""

    def __init__(self, process: Process) -> None:
        self._process = process
        # Reentrant: a finalizer may drop the last handle of something in the middle of anything.
        # By itself: a condition's entering is Python's, and a signal handler that raises then leaves it held.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._local = threading.local()

    def current(self) -> ActorThread:
        """Return the calling thread, as actors see it."""
        thread: ActorThread | None = getattr(self._local, "thread", None)
        if thread is None:
            thread = self._local.thread = ActorThread()
        return thread

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
        process_table = self._process.process_table
        with self.lock:
            process_table.prepare(DEAD_SLOT, "the actor that ended last")
            process_table.announce_death(DEAD_SLOT)
            return process_table.death_number(DEAD_SLOT)

    def adopt(self, thread: ActorThread) -> None:
        """Make ``thread`` what stands for the calling thread."""
        self._local.thread = thread

    def from_a_loop(self, job: Job) -> bool:
        """Whether a coroutine submits ``job``. Then its loop must not stand still meanwhile."""
        thread = self.current()
        if thread.loop is None:
            return False
        with self.lock:
            job.sender = thread
            thread.sent.add(job)
        return True

    def finished(self, job: Job) -> None:
        """Note that ``job`` is done, or never will be."""
        with self.lock:
            job.done = True
            job.runner = None
            job.queue.ended(job)
            sender, job.sender = job.sender, None
            self.changed.notify_all()
        # For those who wait for results in general: `conveyor.wait`, event loops.
        self._process.process_table.notify(self._process.slot, _core.ATTENTION_BIT)
        if sender is not None and sender.loop is not None:
            # By the loop itself, after the ring: until it has seen that, it is not at rest.
            sender.loop.soon(lambda: sender.sent.discard(job))

    def block(self, job: Job, ready: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait for ``job``, until ``ready()``, which is asked with the lock held.

        Raises ``DeadlockError`` if nobody else can bring that about, ``WaitTimeoutError``.
        """
        thread = self.current()
        before = thread.waits_for, thread.bounded
        time_limit = TimeLimit(timeout)
        try:
            while True:
                with self.lock:
                    if ready():
                        return
                    # Looked for and entered in one go: of a cycle's members, only the last one is
                    # refused.
                    names = None if time_limit.bounded else self._path_back(thread, job, {thread})
                    if names is not None:
                        raise _deadlock(thread, job, names)
                    if thread.waits_for is not job:
                        thread.waits_for, thread.bounded = job, time_limit.bounded
                        self.changed.notify_all()  # that this thread stands still may be news
                    woken = self.changed.wait(sooner(time_limit.step(), LOOK))
                    if ready():
                        return
                if not woken:
                    time_limit.check(lambda: job.label, lambda: self._doing(job))
        finally:
            thread.waits_for, thread.bounded = before

    def _path_back(self, me: ActorThread, job: Job, seen: set[ActorThread]) -> list[str] | None:
        """Return the names on the way from ``job`` to ``me``, if ``job`` only goes on when ``me`` does."""
        movers = job.movers()
        names: list[str] | None = None
        for thread in movers:
            found = thread.names_from(job.queue)
            if thread is not me:
                if thread in seen or thread.waits_for is None or thread.bounded:
                    return None
                rest = self._path_back(me, thread.waits_for, seen | {thread})
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
            return f"{job.queue.name} runs it in this process"
        names = [name for thread in job.movers() for name in thread.names_from(job.queue)]
        return f"it has not been started; {', '.join(dict.fromkeys(names)) or 'nobody'} comes first"


def _deadlock(thread: ActorThread, job: Job, path: list[str]) -> DeadlockError:
    # The way ends where the waiting thread is; the cycle is told from there.
    names = (thread.inside[-1].name, *path[:-1]) if thread.inside else tuple(path)
    chain = " waits for ".join((*names, names[0]))
    return DeadlockError(
        f"waiting for {job.label} would never end: {chain}, and each runs one call at a time. Make "
        "one of them an async actor or give it max_concurrency > 1, or pass the ref on instead of "
        "getting it",
        names,
    )


class CallLock(JobQueue):
    """Queue with ``capacity`` turns. A thread that wants a job done stands in the queue, and does the job
    itself.

    A job whose caller is inside the queue itself (or blocks somebody who is) cannot wait for its
    turn: it stays in the queue, and whoever has the turn does it before giving the turn back.
    """

    def __init__(self, actor_threads: ActorThreads, name: str, capacity: int = 1) -> None:
        super().__init__(actor_threads, name)
        self._capacity = capacity
        self._holders: list[ActorThread] = []
        self._at_the_end: Callable[[Run], None] | None = None
        self._over = False
        self._jobs: deque[Job] = deque()

    def enqueue(self, job: Job) -> Callable[[], object]:
        from_loop = self.actor_threads.from_a_loop(job)
        if not from_loop:  # at once, so that nobody else takes it
            job.attendant = self.actor_threads.current()
        self._jobs.append(job)
        if not from_loop:
            return lambda: self._attend(job)
        name = f"inline {job.label}"
        return threading.Thread(
            target=self._wait_in_thread, args=(job,), name=name, daemon=True
        ).start

    def _attend(self, job: Job) -> None:
        try:
            with suppress(DeadlockError):
                self.finish(job)
        except BaseException:
            job.done = True
            raise

    def run_here(self, job: Job) -> None:
        """Do ``job`` on this thread, even if it is an event loop's. A job that cannot be done is never
        started."""
        with self.actor_threads.lock:
            job.attendant = self.actor_threads.current()
            self._jobs.append(job)
        try:
            self.finish(job)
        except BaseException:
            job.done = True
            raise

    def _wait_in_thread(self, job: Job) -> None:
        with suppress(BaseException):  # whoever wants the job's result is told
            self.finish(job)

    def finish(self, job: Job, timeout: float | None = None) -> None:
        thread = self.actor_threads.current()
        entered = self._holders.count(thread), len(thread.inside)
        running = len(self._run_by(thread))

        def try_take() -> bool:
            if job.done:
                return True
            if job.runner is not None:
                return False
            if job.attendant is None:
                job.attendant = thread
            if job.attendant is not thread or not self._is_next(job):
                return False
            # A signal handler or a finalizer may have come before the thread has used its turn.
            if self._holders.count(thread) <= len(self._run_by(thread)):
                if len(self._holders) >= self._capacity:
                    return False
                self._holders.append(thread)
            return True

        try:
            try:
                self.actor_threads.block(job, try_take, timeout)
                if job.runner is None and not job.done:
                    self._serve(thread)
            finally:
                self._step_back(job, thread, *entered)
        except BaseException as error:
            # Once more: an interrupt may have come in the middle of that, or when a job began or ended.
            for left in self._run_by(thread)[running:]:
                left.interrupted(error)
                self.actor_threads.finished(left)
            for left in tuple(self._running):
                if left.done:
                    self.ended(left)
            self._step_back(job, thread, *entered)
            raise

    def _is_next(self, job: Job) -> bool:
        """Whether no other thread attends to a job before this one. Those that this thread attends to are
        suspended under it, and are done first."""
        self._forget_abandoned()
        others = (
            j
            for j in tuple(self._jobs)
            if j is job or (j.attendant not in (None, job.attendant) and not j.done)
        )
        return next(others, None) is job  # none: this one was done meanwhile

    def _run_by(self, thread: ActorThread) -> list[Job]:
        """Return the jobs that the thread runs, the outermost first."""
        return [job for job in list(self._running) if job.runner is thread]

    def _step_back(self, job: Job, thread: ActorThread, turns: int, depth: int) -> None:
        """Leave the queue as the thread had entered it. Done twice, it does no more than once."""
        with self.actor_threads.lock:
            if job.attendant is thread and job.runner is None:
                job.attendant = None
            del thread.inside[depth:]
            if self._holders.count(thread) > turns:
                self._holders.remove(thread)
            self.actor_threads.changed.notify_all()
        if self._at_the_end is not None:
            self._end_if_due()

    def _forget_abandoned(self) -> None:
        for job in tuple(self._jobs):
            if not job.done and job.runner is None:
                return
            with suppress(ValueError):
                self._jobs.remove(job)

    def _serve(self, thread: ActorThread) -> None:
        """Do the next jobs, as long as they are this thread's or nobody's."""
        thread.inside.append(self)
        while (job := self._next(thread)) is not None:
            try:
                job.start()
            except BaseException as error:
                job.interrupted(error)
                raise
            finally:
                self.actor_threads.finished(job)

    def close(self, at_the_end: Callable[[Run], None]) -> None:
        with self.actor_threads.lock:
            self._at_the_end = at_the_end
        # A signal that ends the program is handled inside of a method, which is not gone on with.
        self._end_if_due(ending.begun_here() and self.actor_threads.current() in self._holders)

    def _end_if_due(self, inside: bool = False) -> None:
        with self.actor_threads.lock:
            if self._holders and not inside:
                return
            at_the_end, self._at_the_end = self._at_the_end, None
        if at_the_end is None:
            return
        try:
            at_the_end(run_alone)
        finally:
            with self.actor_threads.lock:
                self._over = True
                self.actor_threads.changed.notify_all()

    def join(self, timeout: float) -> bool:
        with self.actor_threads.lock:
            if self.actor_threads.current() in self._holders:
                return True
            return self.actor_threads.changed.wait_for(lambda: self._over, timeout)

    def _next(self, thread: ActorThread) -> Job | None:
        # The lock keeps other threads out, but not what interrupts this one: each step can be taken twice.
        with self.actor_threads.lock:
            while True:
                self._forget_abandoned()
                job = next(iter(tuple(self._jobs)), None)
                if job is None or job.attendant not in (None, thread):
                    return None
                job.runner = thread
                self.begun(job)
                if job.take():
                    job.started = True
                    return job
                self.ended(job)

    def movers(self, job: Job) -> list[ActorThread]:
        return self._holders if job.runner is None else [job.runner]

    def rests(self, job: Job, seen: set[Job]) -> bool:
        movers = self.movers(job)
        return bool(movers) and all(
            thread.waits_for is not None and self.actor_threads.rests(thread.waits_for, seen)
            for thread in movers
        )


#: Coroutines of one actor that run side by side, if it does not say.
DEFAULT_CONCURRENCY = 1000


class Loop(JobQueue):
    """Job queue with a thread of its own that runs an event loop."""

    has_loop = True

    def __init__(self, actor_threads: ActorThreads, name: str, capacity: int) -> None:
        super().__init__(actor_threads, name)
        self.actor_thread = ActorThread(self)
        self._capacity = capacity
        self._asleep = False
        self._at_the_end: Callable[[Run], None] = lambda run: None
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._loop = ActorLoop(_Selector(name, self._sleeps))
        self._thread = threads.Background(target=self._main, name=f"inline {name}", daemon=True)
        self._thread.start()

    def enqueue(self, job: Job) -> Callable[[], object]:
        job.runner = self.actor_thread
        waits = not self.actor_threads.from_a_loop(job)
        self.soon(lambda: self._start(job))
        return lambda: self._attend(job) if waits else None

    def _attend(self, job: Job) -> None:
        with suppress(DeadlockError):
            self.actor_threads.block(job, lambda: job.done or self.actor_threads.rests(job))

    def finish(self, job: Job, timeout: float | None = None) -> None:
        self.actor_threads.block(job, lambda: job.done, timeout)

    def movers(self, job: Job) -> list[ActorThread]:
        return [self.actor_thread]

    def rests(self, job: Job, seen: set[Job]) -> bool:
        return (
            self._asleep
            and job.started
            and all(self.actor_threads.rests(other, seen) for other in self.actor_thread.sent)
        )

    def soon(self, work: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # it is closed: the actor is gone, and its jobs with it
            self._loop.call_soon_threadsafe(work)

    def goes_on(self, job: Job) -> bool:
        return super().goes_on(job) and not job.started  # a coroutine is cancelled

    def cancel(self, job: Job) -> None:
        def cancel() -> None:
            task = self._tasks.get(job)
            if task is not None:
                task.cancel()

        self.soon(cancel)

    def close(self, at_the_end: Callable[[Run], None]) -> None:
        self._at_the_end = at_the_end
        self.soon(self._loop.stop)

    def join(self, timeout: float) -> bool:
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def limited(self, coroutine: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None]:
        async def run() -> None:
            try:
                async with self._slots:
                    await coroutine
            finally:
                coroutine.close()  # should it never have begun

        return run()

    # On its thread

    def _main(self) -> None:
        self.actor_threads.adopt(self.actor_thread)
        loop = self._loop
        self._slots = asyncio.Semaphore(self._capacity)
        try:
            loop.run_forever()
        finally:
            # A coroutine that raises KeyboardInterrupt stops the loop: the others need another turn.
            while try_each(lambda: loop.run_until_complete(aio.cancel_all_tasks())) is not None:
                pass
            try_each(lambda: loop.run_until_complete(loop.shutdown_asyncgens()))
            with suppress(KeyboardInterrupt):  # printed, and no concern of this thread
                self._at_the_end(loop.run_until_complete)
            try_each(lambda: loop.run_until_complete(loop.shutdown_default_executor()))
            loop.close()
            # The loop's watch of the doorbell ends with the loop, not when it is garbage.
            aio._watches.pop(loop)

    def _start(self, job: Job) -> None:
        if job.done:  # not wanted any more
            return
        with self.actor_threads.lock:
            self.begun(job)
        try:
            coroutine = job.start()
        except BaseException as error:
            job.interrupted(error)
            self.actor_threads.finished(job)
            return
        if coroutine is None:
            self.actor_threads.finished(job)
            return
        task = self._loop.create_task(self._await(job, coroutine))
        self._tasks[job] = task
        task.add_done_callback(lambda _: self._tasks.pop(job, None))
        with self.actor_threads.lock:
            job.started = True

    async def _await(self, job: Job, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except BaseException as error:
            job.interrupted(error)
        finally:
            self.actor_threads.finished(job)

    def _sleeps(self, asleep: bool) -> None:
        """Note whether the loop has nothing to do but to wait for a timer or for I/O."""
        with self.actor_threads.lock:
            self._asleep = asleep
            if asleep:
                self.actor_threads.changed.notify_all()


class _Selector(ActorSelector):
    """Selector that tells when its loop falls asleep, and when it wakes up."""

    def __init__(self, name: str, sleeps: Callable[[bool], None]) -> None:
        super().__init__(name)
        self._sleeps = sleeps

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        self._sleeps(True)
        try:
            return super().select(timeout)
        finally:
            self._sleeps(False)
