"""Running a Plan once, here and now."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from conveyor._core import monotonic_ns
from conveyor.engine.inline.actor import Actor, Expired, Failure, interrupts
from conveyor.engine.inline.crossing import ArrivalError, Crossing
from conveyor.engine.inline.lines import Job
from conveyor.engine.inline.notes import Notes
from conveyor.engine.inline.streams import Production
from conveyor.exceptions import DeadlineExceededError, SerializationError
from conveyor.plan import EXECUTOR, Argument, Const, Plan, Reg, Task, fill
from conveyor.plan.reading import Stage, in_order
from conveyor.runtime.calls.returns import elements
from conveyor.runtime.graph.unsendable import blame_input, blame_tasks
from conveyor.runtime.refs.values import with_bound_values


class Loaded:
    """A Plan with the actors it runs on: each has its constants, as sent to it once."""

    def __init__(
        self,
        plan: Plan,
        name: str,
        actors: Sequence[Actor],
        crossing: Crossing,
        notes: Notes,
        executions: Iterator[int],
    ) -> None:
        """``name`` is the graph's."""
        self.plan = plan
        self.name = name
        self.actors = actors
        self.crossing = crossing
        self.notes = notes
        self.executions = executions
        self.stages = in_order(plan)
        self.registers = [program.registers for program in plan.programs]
        self.readers = {edge.id: edge.readers for edge in plan.edges}
        self.sources = {edge.id: edge.source for edge in plan.edges}
        self.tasks: dict[int, Task] = {}
        self.methods: dict[int, tuple[Callable[..., Any], bool]] = {}
        for index, actor in enumerate(actors):
            actor.wait_for_start()
            own = {task.id: task for task in plan.tasks if task.actor == index}
            self.tasks.update(_carried(own, actor, name))
            for task in own.values():
                self.methods[task.id] = _method(actor, task)


def _carried(own: Mapping[int, Task], actor: Actor, name: str) -> dict[int, Task]:
    tasks = with_bound_values(own)
    try:
        arrived: dict[int, Task] = actor.crossing.carry(tasks, shared=False)
    except SerializationError as error:
        raise blame_tasks(error, name, tasks.values()) from error.__cause__
    except ArrivalError as error:
        raise Failure(error.error, actor.name, f"{actor.name}.call").error() from error.error
    return arrived


def _method(actor: Actor, task: Task) -> tuple[Callable[..., Any], bool]:
    if task.function is not None:
        return task.function, inspect.iscoroutinefunction(task.function)
    try:
        return actor.method(task.method)
    except Exception as error:
        raise Failure(error, actor.name, "load").error() from error


class _Undecoded:
    """A value that has reached its reader and could not be rebuilt there."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Execution:
    """One run through the Plan. A failed task leaves a ``Failure`` where its result would be; who
    needs it passes it on instead of running."""

    def __init__(
        self, loaded: Loaded, inputs: tuple[Any, ...], deadline: int = 0, together: bool = True
    ) -> None:
        """Takes the inputs across; raises what keeps one of them from being sent.

        deadline: on the monotonic clock, in nanoseconds; 0: none. together: see ``Config.fail_fast``.
        """
        self.deadline = deadline
        #: What has failed first, of one that fails as one.
        self.failure: Failure | None = None
        self._together = together
        self.ran: set[int] = set()
        self.skipped = -1
        self.late: Callable[[], BaseException] = DeadlineExceededError
        self.loaded = loaded
        #: By the edge that their items are on.
        self.productions: dict[int, Production] = {}
        self._frames: dict[tuple[int, int], Any] = {}
        self._regs: list[list[Any]] = [[None] * count for count in loaded.registers]
        sent = []
        try:
            for bundle, value in zip(loaded.plan.inputs, inputs, strict=True):
                begin = monotonic_ns()
                size = self._publish(bundle.edge, value)
                sent.append((bundle.edge, begin, monotonic_ns(), size))
        except SerializationError as error:
            raise blame_input(error, loaded.plan, loaded.name, inputs) from error.__cause__
        self.number = next(loaded.executions)
        # Only now: one that cannot be sent leaves no trace.
        for edge, begin, end, size in sent:
            loaded.notes.sent(EXECUTOR, edge, self.number, begin, end, size)

    def run(self) -> None:
        """Run all tasks. Raises ``ActorDiedError`` where an actor has died, ``DeadlockError``, and
        what interrupts the program."""
        for stage in self.loaded.stages:
            actor = self.loaded.actors[stage.actor]
            task = self.loaded.tasks[stage.call.task]
            job = _StageJob(self, stage, task, actor)
            actor.host.run(job)
            if job.interrupt is not None:
                raise job.interrupt
            if not (actor.alive or job.counts):
                raise actor.death()

    def output(self, edge: int) -> Any:
        """What the driver has received on ``edge``: a value, or a ``Failure``. ``KeyError`` if
        nothing has come; raises ``SerializationError`` for what cannot be rebuilt."""
        begin = monotonic_ns()
        value = self._frames.pop((edge, EXECUTOR))
        self._received(EXECUTOR, edge, begin, value)
        if isinstance(value, _Undecoded):
            raise value.error
        return value

    def _received(self, place: int, edge: int, begin: int, value: Any) -> None:
        failed = isinstance(value, (Failure, _Undecoded))
        self.loaded.notes.received(place, edge, self.number, begin, monotonic_ns(), failed)

    def _publish(self, edge: int, value: Any) -> int:
        """The size of the frame, which every reader gets."""
        readers = self.loaded.readers[edge]
        before = self.loaded.crossing.sent_bytes
        for reader in readers:
            # A result that can be got again is shared even if nobody else reads it.
            shared = len(readers) > 1 or reader == EXECUTOR
            try:
                arrived = self.loaded.crossing.carry(value, shared=shared, kept=reader == EXECUTOR)
            except ArrivalError as error:
                arrived = _Undecoded(error.error)
            self._frames[edge, reader] = arrived
        return (self.loaded.crossing.sent_bytes - before) // len(readers)

    def _note(self, value: Any) -> None:
        """A task, or a value on its way, has come to ``value``."""
        if self._together and self.failure is None and isinstance(value, Failure):
            # An execution that is late is no task's failure.
            self.failure = None if isinstance(value, Expired) else value

    def _failed(self, error: BaseException, actor: Actor, edge: int) -> Failure:
        """What a value leaves that ``actor`` could not send or rebuild."""
        label = self.loaded.sources[edge]
        if isinstance(error, SystemExit):
            actor.exited(error, label, f"execution {self.number}")
            error = actor.death()
        failure = Failure(error, actor.name, label)
        self._note(failure)
        return failure

    # The parts of a stage, in the actor's turn

    def receive(self, stage: Stage, actor: Actor) -> None:
        regs = self._regs[stage.actor]
        for step in stage.receives:
            begin = monotonic_ns()
            value = self._frames.pop((step.edge, stage.actor))
            self._received(stage.actor, step.edge, begin, value)
            if isinstance(value, _Undecoded):
                value = self._failed(value.error, actor, step.edge)
            if step.spread is None:
                assert step.reg is not None
                regs[step.reg] = value
                continue
            for i, reg in enumerate(step.spread):
                if reg is not None:
                    regs[reg] = value if isinstance(value, Failure) else value[i]

    def arguments(self, stage: Stage, task: Task) -> tuple[list[Any], dict[str, Any]] | Failure:
        regs = _Registers(self._regs[stage.actor])
        args = [_value(a, regs) for a in task.args]
        kwargs = {name: _value(a, regs) for name, a in task.kwargs}
        return regs.failure or (args, kwargs)

    def left(self) -> float:
        """Seconds until the deadline."""
        return (self.deadline - monotonic_ns()) / 1e9 if self.deadline else float("inf")

    def expired(self, task: Task) -> Expired:
        """``task`` was not in time."""
        if self.skipped < 0:
            self.skipped = task.id
        return Expired(lambda: self.late())

    def store(self, stage: Stage, task: Task, actor: Actor, value: Any) -> bool:
        """False if ``value`` is an error, or not what the task must give."""
        regs, step = self._regs[stage.actor], stage.call
        count = task.num_returns
        if count is not None and not isinstance(value, Failure):
            try:
                value = elements(value, count, task.label)
            except Exception as error:
                value = Failure(error, actor.name, task.label)
        self._note(value)
        if step.out is not None:
            regs[step.out] = value
        for i, reg in enumerate(step.outs):
            if reg is not None:
                regs[reg] = value if isinstance(value, Failure) else value[i]
        return not isinstance(value, Failure)

    def send(self, stage: Stage, actor: Actor) -> None:
        regs = self._regs[stage.actor]
        for step in stage.sends:
            value = regs[step.reg]
            begin, size = monotonic_ns(), 0
            if not isinstance(value, Failure):
                try:
                    size = self._publish(step.edge, None if step.only_done else value)
                except BaseException as error:
                    if interrupts(error):
                        raise
                    value = self._failed(error, actor, step.edge)
            failed = isinstance(value, Failure)
            if failed:
                for reader in self.loaded.readers[step.edge]:
                    self._frames[step.edge, reader] = value
            self.loaded.notes.sent(
                stage.actor, step.edge, self.number, begin, monotonic_ns(), size, failed
            )


class _StageJob(Job):
    """A stage on its actor."""

    def __init__(self, execution: Execution, stage: Stage, task: Task, actor: Actor) -> None:
        super().__init__(actor.host, f"{task.label} (execution {execution.number})")
        self._execution = execution
        self.node, self.execution, self.method = task.id, execution.number, task.label
        self._stage = stage
        self._task = task
        self._actor = actor
        self.interrupt: BaseException | None = None
        #: It has run to its end, of an actor that was alive when it began.
        self.counts = False
        self._began = 0

    def start(self) -> Coroutine[Any, Any, None] | None:
        execution, stage, task = self._execution, self._stage, self._task
        if not self._actor.alive:
            return None
        execution.receive(stage, self._actor)
        arguments = execution.failure or execution.arguments(stage, task)
        if isinstance(arguments, Failure):
            execution.store(stage, task, self._actor, arguments)
            execution.loaded.notes.skipped(task.id)
            execution.send(stage, self._actor)
            return None
        if execution.left() <= 0:
            execution.store(stage, task, self._actor, execution.expired(task))
            execution.loaded.notes.skipped(task.id)
            execution.send(stage, self._actor)
            return None
        args, kwargs = arguments
        method, is_async = execution.loaded.methods[task.id]
        self._began = monotonic_ns()
        if is_async and self.host.has_loop:
            return self._go_on(method, args, kwargs)
        try:
            value = method(*args, **kwargs)
        except BaseException as error:
            value = self._failure(error)
        self.host.lines.came_back(task.label)
        if stage.call.stream is not None and not isinstance(value, Failure):
            return self._produce(stage.call.stream, value)
        self._ended(value)
        return None

    def _produce(self, edge: int, items: Any) -> Coroutine[Any, Any, None] | None:
        execution = self._execution
        credit = execution.loaded.plan.edges[edge].depth
        sent = functools.partial(
            execution.loaded.notes.sent, self._task.actor, edge, execution.number
        )
        production = Production(
            self._actor, execution.loaded.crossing, self._task.label, credit, sent
        )
        execution.productions[edge] = production
        running = production.begin(items)
        if running is not None:
            return self._go_on_producing(production, running)
        self._ended(production.failure)
        return None

    async def _go_on_producing(
        self, production: Production, running: Coroutine[Any, Any, None]
    ) -> None:
        await running
        self._ended(production.failure)

    async def _go_on(
        self, method: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        left = self._execution.left()
        try:
            coroutine = method(*args, **kwargs)
            if left < float("inf"):
                import asyncio

                coroutine = asyncio.wait_for(coroutine, left)
            value = await coroutine
        except BaseException as error:
            value = self._failure(error)
        self.host.lines.came_back(self._task.label)
        self._ended(value)

    def _failure(self, error: BaseException) -> Failure | None:
        if isinstance(error, SystemExit):
            self._actor.exited(error, self._task.label, f"execution {self._execution.number}")
            return None
        if interrupts(error):
            raise error
        return Failure(error, self._actor.name, self._task.label)

    def interrupted(self, error: BaseException) -> None:
        self.interrupt = error

    def _ended(self, value: Any) -> None:
        # What came too late is no result.
        if self._execution.left() <= 0:
            value = self._execution.expired(self._task)
        else:
            self._execution.ran.add(self._task.id)
        self._finish(value)

    def _finish(self, value: Any) -> None:
        end = monotonic_ns()
        if self._actor.alive or self._actor.finishing:
            self.counts = True
            execution, stage, task = self._execution, self._stage, self._task
            good = execution.store(stage, task, self._actor, value)
            execution.loaded.notes.ran(task.id, execution.number, self._began, end, not good)
            execution.send(stage, self._actor)


class _Registers:
    """A register file that notes the first failure read from it."""

    def __init__(self, regs: list[Any]) -> None:
        self._regs = regs
        self.failure: Failure | None = None

    def __getitem__(self, index: int) -> Any:
        value = self._regs[index]
        if self.failure is None and isinstance(value, Failure):
            self.failure = value
        return value


def _value(argument: Argument, regs: Any) -> Any:
    if isinstance(argument, Reg):
        return regs[argument.index]
    if isinstance(argument, Const):
        return argument.value
    return fill(argument.template, regs)
