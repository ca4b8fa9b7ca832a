"""The event loop of an actor that has async methods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from conveyor import _core

#: Coroutines of calls that run at the same time, if the actor does not say.
_MAX_CONCURRENCY = 1000


class Coroutines:
    """What runs on it. Made on the loop."""

    def __init__(self, inbox: _core.Inbox, max_concurrency: int | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox = inbox
        self._tasks: set[asyncio.Task[Any]] = set()
        self.slots = asyncio.Semaphore(max_concurrency or _MAX_CONCURRENCY)
        #: The process ends; that cancels coroutines, which is no result.
        self.leaving = False

    def start(
        self, coroutine: Coroutine[Any, Any, Any], ended: Callable[[asyncio.Task[Any]], None]
    ) -> asyncio.Task[Any]:
        """Run it; ``ended(task)`` is called on the loop."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)

        def done(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # seen: only SystemExit gets here, and that ends the process
            self.note_idle()
            ended(task)

        task.add_done_callback(done)
        return task

    def note_idle(self) -> None:
        """On the status page, if nothing runs. At the end it says what has ended the process."""
        if not self._tasks and not self.leaving:
            self._inbox.idle()

    def leave(self, note: Callable[[], object]) -> None:
        """A coroutine leaves by ``sys.exit``. Others may have begun since: ``note()`` has the status page
        say that it runs."""
        if not self.leaving and not self._inbox.inherited:
            note()
        self.leaving = True

    def start_step(
        self,
        coroutine: Coroutine[Any, Any, Any],
        finish: Callable[[Any, BaseException | None], None],
        deadline: int,
        note: Callable[[], object],
    ) -> asyncio.Task[Any]:
        """Run a graph step's coroutine; ``finish(value, error)`` is called on the loop. ``note()`` has the
        status page say that it runs.

        deadline: when it is cancelled, in nanoseconds of the monotonic clock; 0: never.
        """
        begun = False

        async def run() -> None:
            nonlocal begun
            begun = True
            try:
                try:
                    value = await coroutine
                except SystemExit:
                    self.leave(note)
                    raise
                except BaseException as error:
                    if self.leaving:
                        raise
                    finish(None, error)
                else:
                    if not self.leaving:  # or the steps behind this one would begin
                        finish(value, None)
            except SystemExit:  # also of a method that came after the coroutine
                self.leaving = True
                raise

        def ended(task: asyncio.Task[Any]) -> None:
            if timer is not None:
                timer.cancel()
            if not begun:  # cancelled before its first step
                coroutine.close()
                if not self.leaving:
                    finish(None, asyncio.CancelledError())

        timer = None
        task = self.start(run(), ended)
        if deadline:
            left = (deadline - _core.monotonic_ns()) / 1e9
            timer = self._loop.call_later(left, task.cancel)
        return task
