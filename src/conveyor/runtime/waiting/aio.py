"""asyncio on the same bell: an event loop watches the process's eventfd while somebody awaits."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress

from conveyor import _core, descriptors
from conveyor.exceptions import ConveyorError, RuntimeStateError
from conveyor.runtime import context, ending
from conveyor.runtime.waiting.awaits import Awaits, awaits_of
from conveyor.runtime.waiting.works import Ask
from conveyor.system_limits import explained
from conveyor.weak import WeakKeys


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
        self._look()
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
        self._complete()
        if self._awaits is not None:
            self._awaits.rung()
        if not self._waiting:
            self._inbox.disarm(self._relay)
        elif not self._inbox.arm(seen, self._relay):
            loop = self._loop()
            if loop is not None:
                loop.call_soon(self._look)

    def _complete(self) -> None:
        if ending.begun_elsewhere():
            return  # a task that nobody waits for would print what it gets
        for future, ready in list(self._waiting.items()):
            if future.done():  # cancelled
                del self._waiting[future]
            elif ready():
                del self._waiting[future]
                future.set_result(None)

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
