"""Hosts with an event loop of their own: actors that have async methods.

As in a process, everything of such an actor runs on one thread, its constructor and its plain
methods too, and its coroutines run side by side. A caller waits until its call is done, or until it
could only wait on: for a timer, for I/O, for somebody else to set an event.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from conveyor.engines.inline.lines import Host, Job, Line, Lines, Run
from conveyor.exceptions import DeadlockError
from conveyor.runtime import aio, threads
from conveyor.runtime.aio import ActorLoop, ActorSelector
from conveyor.runtime.uninterrupted import try_each

#: Coroutines of one actor that run side by side, if it does not say.
DEFAULT_CONCURRENCY = 1000


class Loop(Host):
    """Host with a thread of its own that runs an event loop."""

    has_loop = True

    def __init__(self, lines: Lines, name: str, capacity: int) -> None:
        super().__init__(lines, name)
        self.line = Line(self)
        self._capacity = capacity
        self._asleep = False
        self._at_the_end: Callable[[Run], None] = lambda run: None
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._loop = ActorLoop(_Selector(name, self._sleeps))
        self._thread = threads.Background(target=self._main, name=f"inline {name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job, before: Callable[[], object] = lambda: None) -> None:
        lines = self.lines
        with lines.lock:
            before()
            job.runner = self.line
            waits = not lines.from_a_loop(job)
            self.soon(lambda: self._start(job))
        if waits:
            with suppress(DeadlockError):
                lines.block(job, lambda: job.done or lines.rests(job))

    def finish(self, job: Job, timeout: float | None = None) -> None:
        self.lines.block(job, lambda: job.done, timeout)

    def movers(self, job: Job) -> list[Line]:
        return [self.line]

    def rests(self, job: Job, seen: set[Job]) -> bool:
        return (
            self._asleep
            and job.started
            and all(self.lines.rests(other, seen) for other in self.line.sent)
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
        self.lines.adopt(self.line)
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
        with self.lines.lock:
            self.begun(job)
        try:
            coroutine = job.start()
        except BaseException as error:
            job.interrupted(error)
            self.lines.finished(job)
            return
        if coroutine is None:
            self.lines.finished(job)
            return
        task = self._loop.create_task(self._await(job, coroutine))
        self._tasks[job] = task
        task.add_done_callback(lambda _: self._tasks.pop(job, None))
        with self.lines.lock:
            job.started = True

    async def _await(self, job: Job, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except BaseException as error:
            job.interrupted(error)
        finally:
            self.lines.finished(job)

    def _sleeps(self, asleep: bool) -> None:
        """Note whether the loop has nothing to do but to wait for a timer or for I/O."""
        with self.lines.lock:
            self._asleep = asleep
            if asleep:
                self.lines.changed.notify_all()


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
