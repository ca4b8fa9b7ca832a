"""Building one actor's program of one graph: the native interpreter, and the Python parts of its steps."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from conveyor import _core
from conveyor.calls.call import elements
from conveyor.calls.generators import iterator, needs_loop, without_loop
from conveyor.calls.pending import take_result
from conveyor.codec import SentDefinitions, encode_error
from conveyor.codec.direct import Direct
from conveyor.codec.frames import Sealed
from conveyor.exceptions import ArenaFullError, ConveyorError
from conveyor.graph.edges import Assignment, checker_of, make_budget
from conveyor.graph.failures import FailureTeller
from conveyor.later import LaterModule
from conveyor.plan import fill
from conveyor.plan.model import (
    MOST_LEFT_OUT,
    MOST_TIME,
    TIME_LIMIT,
    VAIN,
    Argument,
    Await,
    Call,
    Const,
    Recv,
    Reg,
    Send,
    Task,
    Try,
    assert_never,
)
from conveyor.plan.reading import Outline, edges_only_read, registers_read
from conveyor.plan.template import immutable, with_fresh
from conveyor.runtime.messages import SHARE_FROM
from conveyor.runtime.shortage import DRIVER, MemoryWait, Sending, begun
from conveyor.runtime.wait_graph import steps_of
from conveyor.worker.calls import PendingFrame
from conveyor.worker.endpoints import Endpoints, GraphCollectives
from conveyor.worker.instance import Abandoned, until

if TYPE_CHECKING:
    import asyncio

    from conveyor.codec.promises import PromiseChecker
    from conveyor.runtime.process import Process
    from conveyor.worker.instance import WorkerState

# It brings asyncio, which is slow to import.
aio: Any = LaterModule("conveyor.runtime.aio")


#: Items after which an actor looks whether others want a turn.
_BATCH = 16


class GeneratorStopped(ConveyorError):
    """Outcome of a generator that was ended with its execution; not raised where that is known."""


class GeneratorWriter:
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
        see ``instance.until``."""
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
        worker_state: WorkerState,
        program: _core.Program,
        graph: int,
        generator_writer: GeneratorWriter,
        label: str,
        invoke: Callable[[list[Any]], Any],
        start_coroutine: Callable[[Coroutine[Any, Any, Any], int], None],
        running: list[Any],
        limits: _core.Limits,
        task: int,
    ) -> None:
        """``running[0].cancel()`` is called when the execution has been cancelled."""
        self._worker_state = worker_state
        self._program = program
        self._graph = graph
        self._generator_writer = generator_writer
        self._writer = generator_writer.writer
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
            if self._worker_state.coroutines is None:
                raise without_loop(self._label, items)
            self._start_coroutine(self._send_all(items), self._task)
            return
        self._items = iterator(self._label, items)
        self._running[:] = (self,)
        # The program is suspended when this returns, and goes on in a turn of its own.
        self._notify()

    def go_on(self) -> None:
        """Send as many items as there is credit for."""
        items, execution = self._items, self._program.execution
        assert items is not None
        deadline = self._limits.deadline(execution)
        for _ in range(_BATCH):
            late = deadline and _core.monotonic_ns() >= deadline
            if late or not self._is_wanted(execution):
                self._end(None)
                return
            if not self._has_room():
                return
            self._worker_state.process.inbox.running(self._graph, self._task, execution)
            try:
                item = [next(items)]
                with self._generator_writer.sending(item, execution, self._until) as sending:
                    self._worker_state.process.shortage.finish(sending)
                del item, sending
            except StopIteration:
                self._end(None)
                return
            except SystemExit:
                raise
            except BaseException as error:
                self._end(error)
                return
        self._notify()

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

    def _notify(self) -> None:
        process = self._worker_state.process
        process.process_table.notify(process.slot, self._program.bit)

    async def _send_all(self, made: AsyncIterator[Any] | Coroutine[Any, Any, Any]) -> None:
        execution = self._program.execution
        items: Any = await made if inspect.iscoroutine(made) else made
        if not hasattr(items, "__anext__"):
            items = _each(iterator(self._label, items))
        try:
            async for item in items:
                await aio.wait_until(lambda: not self._is_wanted(execution) or self._has_room())
                if not self._is_wanted(execution):
                    return
                held = [item]
                with self._generator_writer.sending(held, execution, self._until) as sending:
                    if not sending.try_once():
                        held[:] = take_result(item)  # others may change it meanwhile
                        while not sending.try_once():
                            await aio.wait_until(sending.ready, lambda _: sending.causes())
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

        def run_once() -> None:
            for producer in self._producers:
                if producer.active:
                    program.advance()  # suspended: it only looks for a cancellation
                    if producer.active:
                        producer.go_on()
                    return
            program.advance()

        return run_once

    def close(self) -> None:
        """Close all producers; then raise what one of them has raised."""
        with ExitStack() as each:
            for producer in self._producers:
                each.callback(producer.close)


class Steps(Struct, frozen=True):
    """Builder of a program's steps, over the channel ends that were opened.

    start: starts a task's coroutine.
    running: the task of the coroutine that the program waits for, if there is one.
    """

    worker_state: WorkerState
    assignment: Assignment
    tasks: Mapping[int, Task]
    recorder: _core.Recorder
    program: _core.Program
    limits: _core.Limits
    readers: Mapping[int, _core.Reader]
    writers: Mapping[int, _core.Writer]
    checkers: Mapping[int, PromiseChecker]
    endpoints: Endpoints
    graph_collectives: GraphCollectives
    producers: Producers
    budget: _core.MemoryBudget | None
    start: Callable[[Coroutine[Any, Any, Any], int], None]
    running: list[Any]

    def add_all(self) -> None:
        """Add all steps, in order."""
        # By edge, the index of the program's receive that takes its frames.
        receives = {edge: i for i, edge in enumerate(Outline(self.assignment.program).receives)}
        steps = self.assignment.program.steps
        last_read = {
            reg: i for i, step in enumerate(steps) for reg in registers_read(step, self.tasks)
        }
        for i, step in enumerate(steps):
            match step:
                case Recv():
                    self._add_receive(step)
                case Try():
                    self.program.add_try(
                        receives[step.edge], TIME_LIMIT, MOST_TIME, VAIN, MOST_LEFT_OUT
                    )
                case Await():
                    take = self.endpoints.inbound[step.edge].take
                    self.program.add_await(receives[step.edge], take)
                case Call():
                    self._add_task(step)
                case Send():
                    self._add_send(step, last=last_read[step.reg] == i)
                case _:
                    assert_never(step)

    def _add_receive(self, step: Recv) -> None:
        reg = -1 if step.reg is None else step.reg
        spread = [] if step.spread is None else _register_numbers(step.spread)
        source = self.assignment.sources[step.edge]
        inbound = self.endpoints.inbound.get(step.edge)
        arrived = None if inbound is None else inbound.arrived
        self.program.add_receive(self.readers[step.edge], reg, spread, source, arrived)

    def _add_task(self, step: Call) -> None:
        task = self.tasks[step.task]
        if step.stream is not None:
            self._add_generator(step, task, step.stream)
            return
        collective = self.graph_collectives.add(step, task)
        offer = self.graph_collectives.offer(step, task)
        _add_call(
            self.worker_state,
            self.program,
            step,
            task if offer is None else replace(task, function=offer),
            self.assignment.program.registers,
            self.start,
            None if collective is None else collective.start,
        )

    def _add_generator(self, step: Call, task: Task, stream: int) -> None:
        index = self.assignment.recorder.sends.index(stream)
        generator_writer = GeneratorWriter(
            self.writers[stream],
            self.recorder,
            index,
            self.worker_state.process,
            self.program,
            task.label,
            self.budget,
        )
        method, _ = _method(self.worker_state, task)
        producer = Producer(
            self.worker_state,
            self.program,
            self.assignment.graph,
            generator_writer,
            task.label,
            _invoke(method, task, self.assignment.program.registers),
            self.start,
            self.running,
            self.limits,
            task.id,
        )
        uses = sorted(set(registers_read(step, {task.id: task})))
        out = -1 if step.out is None else step.out
        self.program.add_call(
            method, step.task, task.label, [], [], uses, None, producer.start, out, [], -1
        )
        self.producers.add(producer)

    def _add_send(self, step: Send, last: bool) -> None:
        """``last``: no later step reads the register that is sent."""
        out_of_band = self.endpoints.outbound.get(step.edge)
        checker = self.checkers.get(step.edge)
        pack = None if checker is None else checker.pack
        if step.edge in self.assignment.by_reference:
            pack = functools.partial(_by_reference, *self.assignment.by_reference[step.edge])
        self.program.add_send(
            self.writers[step.edge],
            step.reg,
            last,
            step.only_done,
            self.assignment.sources[step.edge],
            step.edge in self.assignment.recorder.outputs,
            pack if out_of_band is None else out_of_band.pack,
            None if out_of_band is None else out_of_band.posted,
        )


def _by_reference(transport: str, snapshot: bool, value: Any) -> Direct:
    return Direct(value, transport, snapshot)


def _method(worker_state: WorkerState, task: Task) -> tuple[Callable[..., Any], bool]:
    """Return the callable of ``task``, and whether it is a coroutine function."""
    if task.function is not None:
        return task.function, inspect.iscoroutinefunction(task.function)
    return worker_state.instance.method(task.method)


def _invoke(method: Callable[..., Any], task: Task, registers: int) -> Callable[[list[Any]], Any]:
    """Return a function that calls ``task``, given all registers. ``registers``: how many there are."""
    task, values = with_fresh(task, registers)
    # Encoded once; large memory is not copied for each execution, but has private pages.
    fresh = _core.Snapshot(values, SentDefinitions(), SHARE_FROM) if values else None

    def invoke(regs: list[Any]) -> Any:
        if fresh is not None:
            regs = regs + fresh.decode()
        kwargs = {name: _value(argument, regs) for name, argument in task.kwargs}
        return method(*[_value(argument, regs) for argument in task.args], **kwargs)

    return invoke


def _add_call(
    worker_state: WorkerState,
    program: _core.Program,
    step: Call,
    task: Task,
    registers: int,
    start_coroutine: Callable[[Coroutine[Any, Any, Any], int], None],
    meet: Callable[[list[Any]], None] | None,
) -> None:
    """Add the step of a task that gives one result. If ``meet`` is given, it starts the task, which goes on
    while the program is suspended."""
    method, is_async = _method(worker_state, task)
    plain = not task.kwargs and all(
        isinstance(a, Reg) or (isinstance(a, Const) and immutable(a.value)) for a in task.args
    )
    args: list[int] = []
    constants: list[Any] = []
    if plain:
        for argument in task.args:
            if isinstance(argument, Reg):
                args.append(argument.index)
            elif isinstance(argument, Const):
                constants.append(argument.value)
                args.append(-len(constants))

    invoke = _invoke(method, task, registers)

    def start(regs: list[Any]) -> None:
        start_coroutine(invoke(regs), task.id)

    program.add_call(
        method,
        step.task,
        task.label,
        args,
        constants,
        sorted(set(registers_read(step, {task.id: task}))),
        None if plain or is_async else invoke,
        start if is_async else meet,
        -1 if step.out is None else step.out,
        _register_numbers(step.outs),
        -1 if task.num_returns is None else task.num_returns,
    )


def _register_numbers(regs: Sequence[int | None]) -> list[int]:
    return [-1 if reg is None else reg for reg in regs]


def _value(argument: Argument, regs: list[Any]) -> Any:
    if isinstance(argument, Reg):
        return regs[argument.index]
    if isinstance(argument, Const):
        return argument.value
    return fill(argument.template, regs)


class Inputs:
    """The inputs of one program that have to be fetched. The program waits for one at a time."""

    def __init__(self, program: _core.Program, limits: _core.Limits) -> None:
        self._program, self._limits = program, limits
        self._pending: PendingFrame | None = None

    @property
    def awaited(self) -> bool:
        """Whether the program waits for an input."""
        return self._pending is not None

    def begin(self, snapshot: _core.Snapshot) -> object:
        """Begin to fetch the values of an input, which the program needs."""
        self._pending = PendingFrame(snapshot)
        return self._pending

    def take(self) -> Any:
        """Return the input, or ``NotImplemented`` if it has not come yet.

        Raises:
            Unwanted: nobody waits for the execution any more.
        """
        assert self._pending is not None
        try:
            if until(self._limits, self._program.execution) < 0:
                raise Abandoned("nobody waits any more for an input that has not come")
            value = self._pending.decode()
        except BaseException:
            self.close()
            raise
        if value is _core.EMPTY:
            return NotImplemented
        self.close()
        return value

    def close(self) -> None:
        """Give up the input that is being fetched, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.end()


class Part(NamedTuple):
    """An actor's part of a graph, ready to run: its channel ends are open.

    program, producers, endpoints, inputs: its steps; its generators; the out-of-band ends; the inputs that it
        fetches.
    labels: the names of its tasks, by number.
    limits: its executions' deadlines and cancellations.
    """

    program: _core.Program
    producers: Producers
    endpoints: Endpoints
    inputs: Inputs
    labels: dict[int, str]
    limits: _core.Limits

    def close(self) -> None:
        """Take the part down. Each step is taken, whatever another one raises."""
        with ExitStack() as last:
            for close in (
                self.inputs.close,
                self.endpoints.close,
                self.producers.close,
                self.program.close,
            ):
                last.callback(close)


def make_part(worker_state: WorkerState, assignment: Assignment, segment: _core.Segment) -> Part:
    """Make an actor's part of a graph.

    A failed step leaves an ``ErrorFrame`` in its registers. A step that needs such a register passes the
    frame on instead of running, so an error reaches the driver on the same path as a value.
    """
    process = worker_state.process
    actor = assignment.actor_name

    def error_meta(error: BaseException, label: str, execution: int) -> bytes:
        if _is_cancellation(error):  # the executor says why, as for tasks that have not begun
            if limits.cancelled(execution) and not limits.failed(execution):
                return _core.CANCELLED
            if isinstance(error, Abandoned) and not limits.cancelled(execution):
                return _core.OVERDUE
        if label not in collectives:  # no rank waits for these: it is their execution that fails
            process.on_failure(error)
        meta = encode_error(error, actor, label)
        # If the failure cannot be told, it comes over the edges all the same, only later.
        with suppress(MemoryError, OSError):
            failures.tell(error, meta, (assignment.graph, execution), _is_cancellation(error))
        return meta

    recorder = assignment.recorder.open(segment)
    program = _core.Program(
        process.inbox,
        assignment.graph,
        assignment.bit,
        assignment.program.registers,
        error_meta,
        elements,
        recorder,
    )
    limits = assignment.limits.open(segment)
    failures = FailureTeller(
        assignment.failures, assignment.program.actor, process, segment, limits, assignment.name
    )
    running: list[Any] = []  # the task of the coroutine that the program waits for

    def cancel() -> None:
        running[0].cancel()

    tasks = assignment.tasks
    if isinstance(tasks, Sealed):
        tasks = tasks.open()
    labels = {task.id: task.label for task in tasks.values()}
    collectives = {task.label for task in tasks.values() if task.collective is not None}
    work = steps_of(assignment.graph)

    def start(coroutine: Coroutine[Any, Any, Any], task: int) -> None:
        execution = program.execution
        note = functools.partial(process.inbox.running, assignment.graph, task, execution)
        deadline = limits.deadline(execution)
        assert worker_state.coroutines is not None
        running[:] = (
            worker_state.coroutines.start_step(
                coroutine, program.resume, deadline, note, work, labels[task]
            ),
        )

    def wait_for_memory(error: BaseException, before: Any) -> Any:
        assert isinstance(error, ArenaFullError)
        shortage, execution = process.shortage, program.execution

        def begin() -> MemoryWait:
            return shortage.result(lambda: budget, lambda: ends(execution))

        if worker_state.coroutines is None:
            return shortage.pause(error, before, begin)
        if before is None:
            return RungFor(begun(error, begin), process, assignment.bit)
        before.note(error)
        return None

    def ends(execution: int) -> int:
        if limits.failed(execution) or any(writer.deserted for writer in writers.values()):
            return -1
        return until(limits, execution)

    program.set_limits(limits, cancel)
    program.start_at(assignment.first)
    readers = _open_readers(process, assignment, segment, tasks)
    budget = make_budget(assignment.memory_bytes)
    writers = _open_writers(process, assignment, segment, budget)
    checkers = {
        edge: checker_of(assignment.sources[edge], promise)
        for edge, promise in assignment.promises.items()
    }
    endpoints = Endpoints(process, segment, assignment, program, limits, recorder, budget, checkers)
    graph_collectives = GraphCollectives(
        assignment.program, tasks, endpoints, program, limits, running
    )
    if assignment.endpoints:
        program.set_progress(graph_collectives.progress)
    producers = Producers()
    inputs = Inputs(program, limits)
    if worker_state.coroutines is not None:  # else nothing but the program would run meanwhile
        program.set_fetching(inputs.begin, inputs.take)
    part = Part(program, producers, endpoints, inputs, labels, limits)
    try:
        if process.slot != DRIVER:  # in one thread nobody would let go of any
            program.set_shortage(wait_for_memory)  # a circle, which closing breaks
        Steps(
            worker_state,
            assignment,
            tasks,
            recorder,
            program,
            limits,
            readers,
            writers,
            checkers,
            endpoints,
            graph_collectives,
            producers,
            budget,
            start,
            running,
        ).add_all()
    except BaseException:
        part.close()
        raise
    return part


class RungFor:
    """Wait for an output's memory on an event loop, which runs on. The program is rung when the wait is
    over."""

    def __init__(self, wait: MemoryWait, process: Process, bit: int) -> None:
        self._wait = wait
        self._process = process
        self._bit = bit
        self._task: asyncio.Task[None] | None = None
        self._inner: Any = ()

    def ready(self) -> bool:
        ready = self._wait.ready()
        if not ready:
            self._watch()
        return ready

    def take(self, value: Any) -> Any:
        """Return the copy of the output that is sent: others may change the output meanwhile."""
        taken, self._inner = take_result(value)
        return taken

    def tries(self) -> None:
        self._wait.tries()

    @property
    def crossing(self) -> bool:
        return self._wait.crossing

    def note(self, error: ArenaFullError) -> None:
        """Note that an attempt to send the output has failed; see ``MemoryWait.note``."""
        self._wait.note(error)
        self._watch()

    def _watch(self) -> None:
        import asyncio  # slow to import, and here by now

        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._notify())

    def end(self) -> None:
        self._wait.end()
        if self._task is not None:
            self._task.cancel()

    async def _notify(self) -> None:
        await aio.wait_until(self._wait.ready)
        self._process.process_table.notify(self._process.slot, self._bit)


def _open_readers(
    process: Process, assignment: Assignment, segment: _core.Segment, tasks: Mapping[int, Task]
) -> dict[int, _core.Reader]:
    only_read = edges_only_read(assignment.program, tasks)
    return {
        end.edge: end.open(
            process,
            segment,
            assignment.name,
            assignment.sources[end.edge],
            alone=end.edge in only_read,
        )
        for end in assignment.reads
    }


def _open_writers(
    process: Process,
    assignment: Assignment,
    segment: _core.Segment,
    budget: _core.MemoryBudget | None,
) -> dict[int, _core.Writer]:
    return {
        end.edge: end.open(
            process,
            segment,
            assignment.graph,
            assignment.name,
            assignment.sources[end.edge],
            budget=budget,
        )
        for end in assignment.writes
    }


def _is_cancellation(error: BaseException) -> bool:
    if isinstance(error, (GeneratorStopped, Abandoned)):
        return True
    asyncio = sys.modules.get("asyncio")  # slow to import: an actor without coroutines has not
    return asyncio is not None and isinstance(error, asyncio.CancelledError)
