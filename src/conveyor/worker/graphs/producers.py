"""Generator tasks in their actor: items are sent as they come, as far as the reader's credit goes."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.calls.arguments import take_result
from conveyor.calls.generators import iterator, needs_loop, without_loop
from conveyor.exceptions import ConveyorError
from conveyor.runtime.shortage import Sending
from conveyor.worker.unwanted import until

if TYPE_CHECKING:
    from conveyor.runtime.process import Process
    from conveyor.worker.ground import Ground

#: Items after which an actor looks whether others want a turn.
_TURN = 16


class GeneratorStopped(ConveyorError):
    """Outcome of a generator that was ended with its execution; not raised where that is known."""


class Outlet:
    """Writer of a generator task's items, which are counted as ``recorder``'s sends number ``index``."""

    def __init__(
        self,
        writer: _core.Writer,
        recorder: _core.Recorder,
        index: int,
        process: Process,
        program: _core.Program,
        label: str,
        budget: _core.MemoryBudget | None,
    ) -> None:
        """``label`` is the task's."""
        self.writer = writer
        self._process = process
        self._program = program
        self._budget = budget
        self._label = label
        self._recorder = recorder
        self._index = index

    def sending(self, item: list[Any], execution: int, until: Callable[[], int]) -> Sending:
        """Return the operation that publishes the first of ``item``, for which there is room. ``until()``:
        see ``unwanted.until``."""
        return Sending(
            lambda: self._send(item[0], execution),
            lambda: self._process.shortage.result(lambda: self._budget, until),
        )

    def _send(self, item: Any, execution: int) -> None:
        if self._process.inbox.inherited:
            _core.end_forked_child(self._label)
        began, before = _core.monotonic_ns(), self.writer.bytes
        given = _core.Arena.note_given(self._program.given)
        try:
            self.writer.send(item, execution)
        finally:
            _core.Arena.note_given(given)
        now, size = _core.monotonic_ns(), self.writer.bytes - before
        self._recorder.note_send(self._index, execution, began, now, size, False)


class Producer:
    """A generator task of a program. While it has no credit the program is suspended, and the actor serves
    others; its next items come when the reader has taken some."""

    def __init__(
        self,
        ground: Ground,
        program: _core.Program,
        graph: int,
        outlet: Outlet,
        label: str,
        invoke: Callable[[list[Any]], Any],
        start_coroutine: Callable[[Coroutine[Any, Any, Any], int], None],
        running: list[Any],
        limits: _core.Limits,
        task: int,
    ) -> None:
        """``running[0].cancel()`` is called when the execution has been cancelled."""
        self._ground = ground
        self._program = program
        self._graph = graph
        self._outlet = outlet
        self._writer = outlet.writer
        self._label = label
        self._invoke = invoke
        self._start_coroutine = start_coroutine
        self._running = running
        self._limits = limits
        self._task = task
        self._items: Iterator[Any] | None = None

    @property
    def active(self) -> bool:
        return self._items is not None

    def start(self, regs: list[Any]) -> None:
        """Call the method: the step's turn has come. An exception of the call is the step's outcome."""
        items = self._invoke(regs)
        if needs_loop(items):
            if self._ground.coroutines is None:
                raise without_loop(self._label, items)
            self._start_coroutine(self._send_all(items), self._task)
            return
        self._items = iterator(self._label, items)
        self._running[:] = (self,)
        # The program is suspended when this returns, and goes on in a turn of its own.
        self._ring()

    def go_on(self) -> None:
        """Send as many items as there is credit for."""
        items, execution = self._items, self._program.execution
        assert items is not None
        deadline = self._limits.deadline(execution)
        for _ in range(_TURN):
            late = deadline and _core.monotonic_ns() >= deadline
            if late or not self._is_wanted(execution):
                self._end(None)
                return
            if not self._has_room():
                return
            self._ground.process.inbox.running(self._graph, self._task, execution)
            try:
                item = [next(items)]
                with self._outlet.sending(item, execution, self._until) as sending:
                    self._ground.process.shortage.finish(sending)
                del item, sending
            except StopIteration:
                self._end(None)
                return
            except SystemExit:
                raise
            except BaseException as error:
                self._end(error)
                return
        self._ring()

    def cancel(self) -> None:
        """End the generator with an error: the execution has been cancelled, or another of its tasks has
        failed, as the executor is told. An end without an error would say that these were all items."""
        self._end(GeneratorStopped(f"{self._label} was ended before it had yielded all items"))

    def close(self) -> None:
        """Close the generator where it stands: the graph is taken down."""
        items, self._items = self._items, None
        close = getattr(items, "close", None)
        if close is not None:
            close()

    def _end(self, error: BaseException | None) -> None:
        try:
            self.close()
        except Exception as raised:
            error = error or raised
        self._program.resume(None, error)

    def _is_wanted(self, execution: int) -> bool:
        return not (
            self._writer.wanted > execution or self._limits.stream_dropped(execution, self._task)
        )

    def _until(self) -> int:
        execution = self._program.execution
        gone = self._limits.failed(execution) or self._writer.deserted
        return until(self._limits, execution) if not gone and self._is_wanted(execution) else -1

    def _has_room(self) -> bool:
        if self._writer.has_room:
            return True
        self._writer.wants_room()
        return self._writer.has_room

    def _ring(self) -> None:
        process = self._ground.process
        process.board.ring(process.slot, self._program.bit)

    async def _send_all(self, made: AsyncIterator[Any] | Coroutine[Any, Any, Any]) -> None:
        from conveyor.runtime.waiting.aio import wait_until

        execution = self._program.execution
        items: Any = await made if inspect.iscoroutine(made) else made
        if not hasattr(items, "__anext__"):
            items = _each(iterator(self._label, items))
        try:
            async for item in items:
                await wait_until(lambda: not self._is_wanted(execution) or self._has_room())
                if not self._is_wanted(execution):
                    return
                held = [item]
                with self._outlet.sending(held, execution, self._until) as sending:
                    if not sending.try_once():
                        held[:] = take_result(item)  # others may change it meanwhile
                        while not sending.try_once():
                            await wait_until(sending.ready, lambda _: sending.causes())
        finally:
            if hasattr(items, "aclose"):
                await items.aclose()


async def _each(items: Iterator[Any]) -> AsyncGenerator[Any, None]:
    """Yield the items of ``items``, the result of a coroutine."""
    try:
        for item in items:
            yield item
    finally:
        if isinstance(items, Generator):
            items.close()


class Producers:
    """The generator tasks of one program."""

    def __init__(self) -> None:
        self._producers: list[Producer] = []

    def add(self, producer: Producer) -> None:
        self._producers.append(producer)

    def handler(self, program: _core.Program) -> Callable[[], None]:
        """Return the function to call when the program's bit is rung."""
        if not self._producers:
            return program.advance

        def turn() -> None:
            for producer in self._producers:
                if producer.active:
                    program.advance()  # suspended: it only looks for a cancellation
                    if producer.active:
                        producer.go_on()
                    return
            program.advance()

        return turn

    def close(self) -> None:
        """Close all producers; then raise what one of them has raised."""
        with ExitStack() as each:
            for producer in self._producers:
                each.callback(producer.close)
