"""The event loop of an actor that has async methods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from conveyor import _core
from conveyor.runtime.aio import Activity, Awaits, Call, Step, activity
from conveyor.runtime.deadlock import WaitRegistry

#: Coroutines of calls that run at the same time, if the actor does not say.
_MAX_CONCURRENCY = 1000
#: With a higher limit than this, cycles of calls that fill all places are not looked for.
_FEW = 16


class Coroutines:
    """The coroutines of an actor's calls and graph steps. Made on the event loop that runs them."""

    #: The class of a call, for callers that should not import this module: asyncio is slow to import.
    new_call = Call

    def __init__(
        self, inbox: _core.Inbox, wait_registry: WaitRegistry, max_concurrency: int | None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox = inbox
        self._tasks: dict[asyncio.Task[Any], Activity] = {}
        self._max_concurrency = max_concurrency or _MAX_CONCURRENCY
        self.slots = asyncio.Semaphore(self._max_concurrency)
        self._awaits = Awaits(self._loop, inbox, wait_registry, self._full)
        #: Whether the process ends. That cancels coroutines, and such a cancellation is no result.
        self.exiting = False

    def _start(
        self,
        coroutine: Coroutine[Any, Any, Any],
        ended: Callable[[asyncio.Task[Any]], None],
        does: Activity,
    ) -> asyncio.Task[Any]:
        """Run ``coroutine``; ``ended(task)`` is called on the loop. ``does`` is the coroutine's activity."""
        task = does.task = self._loop.create_task(coroutine)
        self._tasks[task] = does

        def done(task: asyncio.Task[Any]) -> None:
            self._tasks.pop(task).end()
            if not task.cancelled():
                task.exception()  # seen: only SystemExit gets here, and that ends the process
            ended(task)
            self.note_idle()

        task.add_done_callback(done)
        return task

    def start_call(
        self,
        coroutine: Coroutine[Any, Any, Any],
        ended: Callable[[asyncio.Task[Any]], None],
        does: Call,
    ) -> asyncio.Task[Any]:
        """Run a call's coroutine, which calls :meth:`begin_call` when it has got one of the ``slots``."""
        if len(self._tasks) >= self._max_concurrency and self.slots.locked():
            self._awaits.stir()
        return self._start(coroutine, ended, does)

    def begin_call(self, does: Activity) -> None:
        activity.set(does)
        does.queued = False
        if does.wait is not None:
            does.wait = None
            self._awaits.stir()

    def _full(self) -> tuple[list[Activity], list[Activity]] | None:
        if self._max_concurrency > _FEW or not self.slots.locked():
            return None
        calls: list[Activity] = [d for d in self._tasks.values() if isinstance(d, Call)]
        running = [does for does in calls if not does.queued]
        if len(running) < self._max_concurrency:  # the next one is about to begin
            return None
        return running, [does for does in calls if does.queued]

    def disown(self, work: int) -> None:
        """Count no activity of ``work`` as awaited any more."""
        for does in self._tasks.values():
            if does.work == work:
                does.end()

    def note_idle(self) -> None:
        """Set the status page to idle if nothing runs. At the end the page keeps what has ended the
        process."""
        if not self._tasks and not self.exiting:
            self._inbox.idle()

    def leave(self, note: Callable[[], object]) -> None:
        """Note that a coroutine ends the process by ``sys.exit``. ``note()`` has the status page say that
        this coroutine runs, since others may have begun since."""
        if not self.exiting and not self._inbox.inherited:
            note()
        self.exiting = True

    def start_step(
        self,
        coroutine: Coroutine[Any, Any, Any],
        finish: Callable[[Any, BaseException | None], None],
        deadline: int,
        note: Callable[[], object],
        work: int,
        label: str,
    ) -> asyncio.Task[Any]:
        """Run a graph step's coroutine; ``finish(value, error)`` is called on the loop. ``note()`` has the
        status page say that the step runs.

        deadline: when the coroutine is cancelled, in nanoseconds of the monotonic clock; 0: never.
        work, label: the step, as a number and in words; see ``runtime.wait_graph``.
        """
        does = Step(work, label)
        begun = False

        async def run() -> None:
            nonlocal begun
            begun = True
            activity.set(does)
            try:
                try:
                    value = await coroutine
                except SystemExit:
                    self.leave(note)
                    raise
                except BaseException as error:
                    if self.exiting:
                        raise
                    finish(None, error)
                else:
                    if not self.exiting:  # or the steps behind this one would begin
                        finish(value, None)
            except SystemExit:  # also of a method that came after the coroutine
                self.exiting = True
                raise

        def ended(task: asyncio.Task[Any]) -> None:
            if timer is not None:
                timer.cancel()
            if not begun:  # cancelled before its first step
                coroutine.close()
                if not self.exiting:
                    finish(None, asyncio.CancelledError())

        timer = None
        task = self._start(run(), ended, does)
        if deadline:
            left = (deadline - _core.monotonic_ns()) / 1e9
            timer = self._loop.call_later(left, task.cancel)
            does.add_timer(timer, self._loop.time())
        return task
