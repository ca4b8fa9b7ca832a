"""Hosts whose jobs run on the threads of those who want them, a few at a time, in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from conveyor.engines.inline.lines import Host, Job, Line, Lines, Run, run_alone
from conveyor.exceptions import DeadlockError
from conveyor.runtime import ending


class Turns(Host):
    """Queue with ``capacity`` turns. A thread that wants a job done stands in the queue, and does the job
    itself.

    A job whose caller is inside the host itself (or blocks somebody who is) cannot wait for its
    turn: it stays in the queue, and whoever has the turn does it before giving the turn back.
    """

    def __init__(self, lines: Lines, name: str, capacity: int = 1) -> None:
        super().__init__(lines, name)
        self._capacity = capacity
        self._holders: list[Line] = []
        self._at_the_end: Callable[[Run], None] | None = None
        self._over = False
        self._queue: deque[Job] = deque()

    def submit(self, job: Job, before: Callable[[], object] = lambda: None) -> None:
        with self.lines.lock:
            before()
            apart = self.lines.from_a_loop(job)
            if not apart:  # at once, so that nobody else takes it
                job.attendant = self.lines.current()
            self._queue.append(job)
        if apart:
            threading.Thread(
                target=self._wait_apart, args=(job,), name=f"inline {job.label}", daemon=True
            ).start()
            return
        try:
            self._wait_quietly(job)
        except BaseException:
            job.done = True
            raise

    def run_here(self, job: Job) -> None:
        """Do ``job`` on this thread, even if it is an event loop's. A job that cannot be done is never
        started."""
        with self.lines.lock:
            job.attendant = self.lines.current()
            self._queue.append(job)
        try:
            self.finish(job)
        except BaseException:
            job.done = True
            raise

    def _wait_quietly(self, job: Job) -> None:
        with suppress(DeadlockError):
            self.finish(job)

    def _wait_apart(self, job: Job) -> None:
        with suppress(BaseException):  # whoever wants the job's result is told
            self.finish(job)

    def finish(self, job: Job, timeout: float | None = None) -> None:
        line = self.lines.current()
        taken = False

        def take_turn() -> bool:
            nonlocal taken
            if job.done:
                return True
            if job.runner is not None:
                return False
            if job.attendant is None:
                job.attendant = line
            if job.attendant is not line or not self._is_next(job):
                return False
            self._holders.append(line)
            taken = True
            return True

        try:
            self.lines.block(job, take_turn, timeout)
        except BaseException:
            with self.lines.lock:
                if job.attendant is line:
                    job.attendant = None
                    self.lines.changed.notify_all()
            if taken:
                self._give_back(line)
            raise
        if taken:  # also if the job has been ended since then: the turn is to be given back
            self._serve(line)

    def _is_next(self, job: Job) -> bool:
        if len(self._holders) >= self._capacity:
            return False
        self._forget_unwanted()
        attended = (j for j in self._queue if j.attendant is not None and not j.done)
        return next(attended, None) is job  # none: this one was done meanwhile

    def _forget_unwanted(self) -> None:
        while self._queue and self._queue[0].done:
            self._queue.popleft()

    def _serve(self, line: Line) -> None:
        """Do the next jobs, as long as they are this line's or nobody's; then give the turn back."""
        line.inside.append(self)
        try:
            while (job := self._next(line)) is not None:
                try:
                    job.start()
                except BaseException as error:
                    job.interrupted(error)
                    raise
                finally:
                    self.lines.finished(job)
        finally:
            line.inside.pop()
            self._give_back(line)

    def _give_back(self, line: Line) -> None:
        with self.lines.lock:
            self._holders.remove(line)
            self.lines.changed.notify_all()
        self._end_if_due()

    def close(self, at_the_end: Callable[[Run], None]) -> None:
        with self.lines.lock:
            self._at_the_end = at_the_end
        # A signal that ends the program is handled inside of a method, which is not gone on with.
        self._end_if_due(ending.begun_here() and self.lines.current() in self._holders)

    def _end_if_due(self, inside: bool = False) -> None:
        with self.lines.lock:
            if self._holders and not inside:
                return
            at_the_end, self._at_the_end = self._at_the_end, None
        if at_the_end is None:
            return
        try:
            at_the_end(run_alone)
        finally:
            with self.lines.lock:
                self._over = True
                self.lines.changed.notify_all()

    def join(self, timeout: float) -> bool:
        with self.lines.lock:
            if self.lines.current() in self._holders:
                return True
            return self.lines.changed.wait_for(lambda: self._over, timeout)

    def _next(self, line: Line) -> Job | None:
        with self.lines.lock:
            self._forget_unwanted()
            if not self._queue or self._queue[0].attendant not in (None, line):
                return None
            job = self._queue.popleft()
            job.runner = line
            job.started = True
            self.begun(job)
            return job

    def movers(self, job: Job) -> list[Line]:
        return self._holders if job.runner is None else [job.runner]

    def rests(self, job: Job, seen: set[Job]) -> bool:
        lines = self.movers(job)
        return bool(lines) and all(
            line.waits_for is not None and self.lines.rests(line.waits_for, seen) for line in lines
        )
