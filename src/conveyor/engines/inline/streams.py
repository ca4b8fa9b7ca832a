"""Generators in the driver's process: they run ahead as far as processes would, then as they are asked."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from conveyor._core import monotonic_ns
from conveyor.calls.generators import iterator, needs_loop, without_loop
from conveyor.engines.inline.actor import Actor
from conveyor.engines.inline.crossing import ArrivalError, Crossing, Failure, interrupts
from conveyor.engines.inline.lines import Job
from conveyor.refs.ref import Ref
from conveyor.refs.streams import ExecutionStream


class Production:
    """Items of one generator in one execution."""

    def __init__(
        self,
        actor: Actor,
        crossing: Crossing,
        label: str,
        credit: int,
        sent: Callable[[int, int, int], None],
    ) -> None:
        """Prepare a generator. ``sent`` is told of each item: when it was begun, when it was there, and its
        size."""
        self.actor = actor
        self.label = label
        self.ready: deque[Any] = deque()
        #: The exception that the generator has raised.
        self.raised: BaseException | None = None
        #: Makes the error that comes after the items, unless they just end.
        self.failure: Callable[[], BaseException] | None = None
        self.over = False
        self._crossing = crossing
        self._credit = credit
        self._sent = sent
        self._items: Any = None

    def begin(self, items: Any) -> Coroutine[Any, Any, None] | None:
        """Take what the method has returned, and run ahead; in the actor's turn."""
        if needs_loop(items):
            if self.actor.host.has_loop:
                return self._ahead_async(items)
            self.fail(without_loop(self.label, items))
        else:
            self._ahead(items)
        return None

    def _ahead(self, items: Any) -> None:
        try:
            self._items = iterator(self.label, items)
        except TypeError as error:
            self.fail(error)
        while not self.over and len(self.ready) < self._credit:
            self.step()

    async def _ahead_async(self, items: Any) -> None:
        if inspect.iscoroutine(items):
            try:
                items = await items
            except BaseException as error:
                self.fail(error)
                return
        if not hasattr(items, "__anext__"):
            self._ahead(items)
            return
        self._items = items
        while not self.over and len(self.ready) < self._credit:
            await self.step_async()

    def step(self) -> None:
        """Make one more item."""
        try:
            item = next(self._items)
        except StopIteration:
            self.actor.host.lines.came_back(self.label)
            self.over = True
        except BaseException as error:
            self.fail(error)
        else:
            self._publish(item)

    async def step_async(self) -> None:
        try:
            item = await self._items.__anext__()
        except StopAsyncIteration:
            self.actor.host.lines.came_back(self.label)
            self.over = True
        except BaseException as error:
            self.fail(error)
        else:
            self._publish(item)

    @property
    def is_async(self) -> bool:
        return hasattr(self._items, "__anext__")

    def _publish(self, item: Any) -> None:
        self.actor.host.lines.came_back(self.label)
        began, before = monotonic_ns(), self._crossing.sent_bytes
        try:
            self.ready.append(self._crossing.carry(item, shared=True))
            self._sent(began, monotonic_ns(), self._crossing.sent_bytes - before)
        except ArrivalError as error:
            self.ready.append(Failure(error.error, self.actor.name, self.label))
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the generator, which has raised ``error``. Raises it again if it interrupts the program."""
        self.over = True
        if isinstance(error, SystemExit):
            self.actor.exited(error, self.label)
            return
        self.actor.host.lines.came_back(self.label)
        if interrupts(error):
            raise error
        else:
            self.raised = error
            self.failure = Failure(error, self.actor.name, self.label).error

    def cut(self, failure: Callable[[], BaseException]) -> None:
        """Stop, since the execution has failed. ``failure()`` is the error that comes after the items made so
        far."""
        self.close()
        self.failure = failure

    def close(self) -> None:
        """Stop: no more items are wanted."""
        self.over = True
        close = getattr(self._items, "close", None)
        if close is not None:
            close()


class _NextJob(Job):
    """Job that makes one more item while its actor does nothing else."""

    def __init__(self, production: Production) -> None:
        super().__init__(production.actor.host, f"{production.label} (next item)")
        self._production = production
        self.interrupt: BaseException | None = None

    def start(self) -> Coroutine[Any, Any, None] | None:
        if self._production.is_async:
            return self._production.step_async()
        self._production.step()
        return None

    def interrupted(self, error: BaseException) -> None:
        self.interrupt = error


class InlineStream(ExecutionStream):
    """Items of an actor in this process. An item that is not there yet is made when it is asked for."""

    __slots__ = ("_production",)

    # No production: the generator was never begun, and ``ended`` says why.
    def __init__(self, production: Production | None, ended: Ref, effects: tuple[Ref, ...]) -> None:
        super().__init__(ended, effects)
        self._production = production

    def _look(self) -> Any:
        production = self._production
        if production is None:
            self._end()
        while not production.ready:
            if self._over:
                raise StopIteration
            if production.over:
                if production.failure is not None:
                    raise production.failure()
                self._end()
            if not production.actor.alive:
                raise production.actor.why()
            job = _NextJob(production)
            production.actor.host.run(job)
            if job.interrupt is not None:
                raise job.interrupt
        item = production.ready.popleft()
        if isinstance(item, Failure):
            raise item.error()
        return item

    def _is_there(self) -> bool:
        return True

    def __del__(self) -> None:
        production = getattr(self, "_production", None)
        if production is not None and not production.over:
            production.close()
