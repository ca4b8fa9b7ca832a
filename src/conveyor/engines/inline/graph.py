"""A compiled graph in the driver's process: an execution runs as a whole before ``execute`` returns."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from msgspec import Struct, field
from msgspec.structs import replace

from conveyor import _core
from conveyor._core import monotonic_ns
from conveyor.calls.generators import iterator, needs_loop, without_loop
from conveyor.calls.unsendable import blame_tasks
from conveyor.config import Config
from conveyor.engines.inline.actor import Actor
from conveyor.engines.inline.loopback import ArrivalError, Failure, Loopback, Raised, interrupts
from conveyor.engines.inline.threads import ActorThreads, CallLock, Job
from conveyor.exceptions import ExecutionCancelledError, GraphTornDownError, SerializationError
from conveyor.graph.edges import Assignment, assign, lay_out, tasks_by_actor
from conveyor.graph.executor import ChannelsSpec, DeployedChannels, Epoch
from conveyor.plan.model import (
    EXECUTOR,
    Await,
    Call,
    Plan,
    Program,
    Recv,
    Send,
    Step,
    Task,
    Try,
    assert_never,
)
from conveyor.plan.reading import Stage, in_order
from conveyor.refs.ref import Ref
from conveyor.refs.streams import ExecutionStream
from conveyor.refs.values import with_bound_values
from conveyor.runtime.process import RESULT_BIT, Process
from conveyor.runtime.protocol import ActorId
from conveyor.worker.program import make_part

if TYPE_CHECKING:
    from conveyor.graph.results import Origins
    from conveyor.refs.ref import Ref
    from conveyor.worker.instance import WorkerState


class Production:
    """Items of one generator in one execution."""

    def __init__(
        self,
        actor: Actor,
        loopback: Loopback,
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
        self._loopback = loopback
        self._credit = credit
        self._sent = sent
        self._items: Any = None

    def begin(self, items: Any) -> Coroutine[Any, Any, None] | None:
        """Take what the method has returned, and run ahead; in the actor's turn."""
        if needs_loop(items):
            if self.actor.queue.has_loop:
                return self._ahead_async(items)
            self.fail(without_loop(self.label, items))
        else:
            self._ahead(items)
        return None

    def _ahead(self, items: Any) -> None:
        self._items = iterator(self.label, items)
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
            self.actor.queue.actor_threads.came_back(self.label)
            self.over = True
        except BaseException as error:
            self.fail(error)
        else:
            self._publish(item)

    async def step_async(self) -> None:
        try:
            item = await self._items.__anext__()
        except StopAsyncIteration:
            self.actor.queue.actor_threads.came_back(self.label)
            self.over = True
        except BaseException as error:
            self.fail(error)
        else:
            self._publish(item)

    @property
    def is_async(self) -> bool:
        return hasattr(self._items, "__anext__")

    def _publish(self, item: Any) -> None:
        self.actor.queue.actor_threads.came_back(self.label)
        began, before = monotonic_ns(), self._loopback.sent_bytes
        try:
            self.ready.append(self._loopback.carry(item, shared=True))
            self._sent(began, monotonic_ns(), self._loopback.sent_bytes - before)
        except ArrivalError as error:
            self.ready.append(Failure(error.error, self.actor.name, self.label))
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the generator, which has raised ``error``. Raises it again if it interrupts the program."""
        self.over = True
        if isinstance(error, SystemExit):
            self.actor.on_system_exit(error, self.label)
            return
        self.actor.queue.actor_threads.came_back(self.label)
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
        super().__init__(production.actor.queue, f"{production.label} (next item)")
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

    def _look_for_item(self) -> Any:
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
            production.actor.queue.run(job)
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


class Work(NamedTuple):
    """A task that is to be run.

    task: its number.
    call: the method with its arguments.
    is_async: whether it gives a coroutine.
    """

    task: int
    call: Callable[[], Any]
    is_async: bool


class InlinePart:
    """Part of a graph that one actor has: its program, and what that is made on.

    Values travel over the same channels, and the same program sends and receives them, as in a graph over
    processes. The program stops where a task comes, as it does for a coroutine, and the graph runs the task.
    """

    def __init__(
        self,
        process: Process,
        actor: Actor,
        assignment: Assignment,
        segment: _core.Segment,
        loopback: Loopback,
    ) -> None:
        """The tasks of ``assignment`` go through ``loopback``."""
        self.actor = actor
        # The members that a program is made on; see `worker.worker_state`.
        self.process = process
        self.instance = self.coroutines = self
        #: The task that the program has come to, and the one that has been begun.
        self._next: Work | None = None
        self._begun: Work | None = None
        # The driving thread may be interrupted while a coroutine of the actor ends on its own.
        self._lock = threading.Lock()
        actor.wait_for_start()
        tasks = _carried(assignment, actor, loopback)
        self._methods = {number: _method(actor, task) for number, task in tasks.items()}
        # Each is found by its number, and none is run by the program.
        named = {i: replace(task, method=str(i), function=None) for i, task in tasks.items()}
        program = replace(assignment.program, steps=_steps(assignment.program))
        assignment = replace(assignment, program=program, tasks=named)
        self._part = make_part(cast("WorkerState", self), assignment, segment)
        self._program = self._part.program
        self._program.pause_after_tasks()

    @property
    def execution(self) -> int:
        """The number of the execution that the program is in."""
        return self._program.execution

    def come_to(self, task: int) -> Work | None:
        """Run the program up to ``task`` and return the task's work, or ``None`` if the task is skipped.
        Raises a ``SystemExit`` that a value raised as it was rebuilt."""
        with self._lock:
            if self._next is None:
                self._program.advance()
            work = self._next
            if work is None or work.task != task:
                return None
            self._begun, self._next = work, None
            return work

    def finish(self, work: Work, value: Any, error: BaseException | None) -> None:
        """Resume the program with the result of ``work``, a value or an error, and send what is sent of it.
        Raises ``SystemExit`` of a value that is sent."""
        with self._lock:
            if self._begun is work:  # else it was broken off meanwhile
                self._begun = None
                self._program.resume(value, error)

    def break_off(self) -> None:
        """Run the program to the end of an execution that has been cancelled; work that has begun is over."""
        with self._lock:
            self._program.advance()

    def close(self) -> None:
        """Close the part: its graph is undeployed, or deployed anew."""
        self._next = self._begun = None
        self._part.close()
        self._methods.clear()

    # For the program

    def method(self, name: str) -> tuple[Callable[..., Any], bool]:
        """Return a coroutine function that stands for a task, and ``True``."""
        task = int(name)
        method, is_async = self._methods[task]
        return (
            lambda *args, **kwargs: Work(task, functools.partial(method, *args, **kwargs), is_async)
        ), True

    def start_step(self, work: Any, *_: Any) -> InlinePart:
        """Note the task that the program has come to; the program is suspended."""
        self._next = work
        return self

    def cancel(self) -> None:
        """Skip the task that the program has come to."""
        self._next = self._begun = None
        self._program.resume(None, ExecutionCancelledError("the execution was broken off"))


def _steps(program: Program) -> tuple[Step, ...]:
    """Return the steps of ``program`` that the inline engine does: nothing travels beside frames, no tasks
    meet, and items are made when they are asked for."""
    steps: list[Step] = []
    for step in program.steps:
        match step:
            case Call():
                steps.append(replace(step, stream=None, meets=()))
            case Recv() | Send():
                steps.append(step)
            case Await() | Try():
                pass
            case _:
                assert_never(step)
    return tuple(steps)


def _carried(assignment: Assignment, actor: Actor, loopback: Loopback) -> dict[int, Task]:
    """Return the tasks with constants of the actor's own, which are sent to it once."""
    assert isinstance(assignment.tasks, dict)
    tasks = with_bound_values(assignment.tasks)
    try:
        arrived: dict[int, Task] = loopback.carry(tasks, shared=False)
    except SerializationError as error:
        raise blame_tasks(error, assignment.name, tasks.values()) from error.__cause__
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


class Run(Struct, frozen=True):
    """Execution that is running.

    number: its own. deadline: on the monotonic clock, in nanoseconds; 0: none.
    plan, epoch, crossing: the graph's.
    productions: the generators that it has begun, by the edge of their items.
    raised: the exceptions of its tasks.
    """

    number: int
    deadline: int
    plan: Plan
    epoch: Epoch
    loopback: Loopback
    productions: dict[int, Production] = field(default_factory=dict)
    raised: Raised = field(default_factory=Raised)


class TaskJob(Job):
    """Job of one task in one execution, with the steps of its actor's program before and after the task."""

    def __init__(self, run: Run, part: InlinePart, stage: Stage) -> None:
        task = run.plan.tasks[stage.call.task]
        super().__init__(part.actor.queue, f"{task.label} (execution {run.number})")
        self.node, self.execution, self.method = task.id, run.number, task.label
        self._run = run
        self._part = part
        self._stage = stage
        self.interrupt: BaseException | None = None
        self._work: Work | None = None
        #: Whether the task is over, and its actor was alive when it began.
        self.counts = False

    def start(self) -> Coroutine[Any, Any, None] | None:
        part = self._part
        if not part.actor.alive:
            return None
        try:
            work = self._work = part.come_to(self._stage.call.task)
        except SystemExit as error:
            self._on_system_exit(error)
            return None
        if work is None:
            self.counts = True
        elif work.is_async and self.queue.has_loop:
            return self._go_on(work)
        else:
            try:
                value = work.call()
            except BaseException as error:
                self._failed(error)
            else:
                return self._returned(value)
        return None

    async def _go_on(self, work: Work) -> None:
        try:
            coroutine = work.call()
            if self._run.deadline:
                import asyncio

                left = (self._run.deadline - _core.monotonic_ns()) / 1e9
                coroutine = asyncio.wait_for(coroutine, left)
            value = await coroutine
        except BaseException as error:
            self._failed(error)
        else:
            running = self._returned(value)
            if running is not None:
                await running

    def _returned(self, value: Any) -> Coroutine[Any, Any, None] | None:
        if self._stage.call.stream is None:
            self._finish(value)
            return None
        self.queue.actor_threads.came_back(self.method)
        production = self._production(self._stage.call.stream)
        running = production.begin(value)
        if running is not None:
            return self._go_on_producing(production, running)
        self._produced(production)
        return None

    def _production(self, edge: int) -> Production:
        run, actor = self._run, self._stage.actor
        recording, number = run.epoch.recording, run.number
        recorder, index = recording.recorders[actor], recording.layouts[actor].sends.index(edge)

        def sent(begin: int, end: int, size: int) -> None:
            recorder.note_send(index, number, begin, end, size, False)

        credit = run.plan.edges[edge].depth
        production = Production(self._part.actor, run.loopback, self.method, credit, sent)
        run.productions[edge] = production
        return production

    async def _go_on_producing(
        self, production: Production, running: Coroutine[Any, Any, None]
    ) -> None:
        await running
        self._produced(production)

    def _produced(self, production: Production) -> None:
        if production.raised is None:
            self._finish(None)
        else:
            self._failed(production.raised)

    def _failed(self, error: BaseException) -> None:
        actor = self._part.actor
        if isinstance(error, SystemExit):
            self._on_system_exit(error)
            return
        self._run.raised.note(error, actor.name, self.method)
        self._finish(None, error)
        if interrupts(error):
            raise error

    def _finish(self, value: Any, error: BaseException | None = None) -> None:
        actor, work, self._work = self._part.actor, self._work, None
        assert work is not None
        if not (actor.alive or actor.finishing):
            return
        try:
            self._part.finish(work, value, error)
        except SystemExit as left:
            self._on_system_exit(left)
        else:
            self.counts = True

    def _on_system_exit(self, error: SystemExit) -> None:
        self._part.actor.on_system_exit(error, self.method, f"execution {self.execution}")

    def interrupted(self, error: BaseException) -> None:
        self.interrupt = error


class InlineSession(Protocol):
    """Session, as far as its graphs need it."""

    process: Process
    actor_threads: ActorThreads

    def actor(self, actor: ActorId) -> Actor:
        """Return the actor that a handle stands for."""
        ...

    def known(self, actor: ActorId) -> Actor:
        """Return the actor that a handle stands for; a dead one is not made again."""
        ...

    def revive(self, actor: ActorId) -> Actor:
        """Return the living actor; a dead one is made again. ``ActorDiedError`` if that cannot be done."""
        ...

    def retain(self, actor: ActorId) -> object:
        """Keep the actor alive as long as the returned object exists."""
        ...

    def kill(self, actor: ActorId) -> None:
        """Kill ``actor`` at once."""
        ...

    def keep(self, value: Any) -> Ref:
        """Return a reference to ``value`` as it is now."""
        ...

    def origins(self) -> Origins:
        """Return where results were got, for graphs in debug mode."""
        ...


class _GraphJob(Job):
    """Something that is done in a graph's turn."""

    def __init__(self, call_lock: CallLock, work: Callable[[], Any]) -> None:
        super().__init__(call_lock, f"an execution of {call_lock.name}")
        self._work = work
        self.made: Any = None
        self.error: BaseException | None = None

    def start(self) -> None:
        try:
            self.made = self._work()
        except Exception as error:
            self.error = error

    def interrupted(self, error: BaseException) -> None:
        self.error = error

    def take_error(self) -> BaseException:
        """Return the error that the work has raised, and forget it: the error's frames refer to this
        object."""
        error, self.error = self.error, None
        assert error is not None
        return error


class InlineGraph:
    """Deployed graph of the inline engine: the parts of its actors, on channels within this process.
    Executions run one after the other, whatever threads they come from, and each runs its tasks in the Plan's
    order."""

    def __init__(self, session: InlineSession, plan: Plan, config: Config, number: int) -> None:
        self.plan = plan
        self.config = config
        self.number = number
        self.name = config.name or f"graph {number}"
        self.actors = [session.actor(info.key) for info in plan.actors]
        for actor in self.actors:
            actor.check_alive()
        #: The execution that runs.
        self.at: int | None = None
        self._loopback = Loopback(session.process, config.slot_bytes, config.memory_bytes)
        self._session = session
        self._call_lock = CallLock(session.actor_threads, self.name)
        self._stages = in_order(plan)
        self._parts: list[InlinePart] = []
        self._in_use = False
        self._over = False
        # The actors are as much the graph's as any handle's.
        self._retained: list[object] = [session.retain(actor.id) for actor in self.actors]

    # Laying

    def deploy(self) -> DeployedChannels:
        """Make the channels and the programs."""
        return self._deploy(self.actors, 0)

    def redeploy(self, first: int) -> DeployedChannels:
        """Deploy the graph again, with dead actors made again. ``first``: the number of the next
        execution."""
        return self._deploy([self._session.revive(actor.id) for actor in self.actors], first)

    def _deploy(self, actors: list[Actor], first: int) -> DeployedChannels:
        process, config = self._session.process, self.config
        # Tensors travel in the frames: there is no other process that they could go to beside them.
        edges = tuple(replace(edge, out_of_band=False) for edge in self.plan.edges)
        plan = replace(self.plan, edges=edges)
        # Everything is in this process, and nobody is rung: who executes has the programs driven.
        here = process.ring_end(RESULT_BIT)
        ring_ends = dict.fromkeys((EXECUTOR, *range(len(actors))), here)
        tasks, slot_bytes = len(plan.tasks), config.slot_bytes
        layout = lay_out(plan, ring_ends, tasks, slot_bytes, config.fail_fast, transports={})
        assignments = assign(
            plan, config, self.number, self.name, ring_ends, layout, tasks_by_actor(plan), first
        )
        parts: list[InlinePart] = []
        try:
            for actor, assignment in zip(actors, assignments, strict=True):
                part = InlinePart(process, actor, assignment, layout.segment, self._loopback)
                parts.append(part)
            with self._session.actor_threads.lock:
                if self._over:
                    raise GraphTornDownError(f"{self.name} has been torn down")
                self.actors, parts, self._parts = actors, self._parts, parts
        finally:  # of these if they have failed, else of those before
            for part in parts:
                part.close()
        bits = (RESULT_BIT,) * len(actors)
        return DeployedChannels(
            ChannelsSpec.of(self.number, actors, layout, bits), actors, layout.segment
        )

    def comes_back(self) -> bool:
        """Whether every dead actor is made again when it is needed, or has been."""
        known = [self._session.known(actor.id) for actor in self.actors]
        return all(actor.alive or actor.comes_back for actor in known)

    def end_unmade(self) -> None:
        """End the actors whose constructor has raised."""
        for actor in [self._session.known(actor.id) for actor in self.actors]:
            if actor.is_unmade:
                how = "was ended for a restart, since its constructor had raised an error"
                actor.end(how, code=1, for_good=False, orderly=False)

    def unload(self) -> None:
        """Take the graph down: there will be no more executions. An execution that runs comes to its end
        first."""
        with self._session.actor_threads.lock:
            self._over = True
            if self._in_use:
                return
        self._let_go()

    def _let_go(self) -> None:
        parts, self._parts = self._parts, []
        for part in parts:
            part.close()
        self._loopback.close()
        self._retained.clear()

    # Executing

    def exclusively(self, work: Callable[[], Any]) -> Any:
        """Run ``work()`` while nothing else is executed, and return its result. It runs in this thread, even
        if that is the event loop of an actor, which stands still meanwhile."""
        if self._call_lock in self._call_lock.actor_threads.current().inside:
            return work()
        job = _GraphJob(self._call_lock, functools.partial(self._alone, work))
        self._call_lock.run_here(job)
        if job.error is not None:
            raise job.take_error()
        return job.made

    def _alone(self, work: Callable[[], Any]) -> Any:
        with self._session.actor_threads.lock:
            self._in_use = True
        try:
            return work()
        finally:
            with self._session.actor_threads.lock:
                self._in_use = False
                over = self._over
            if over:
                self._let_go()

    def is_at(self, number: int) -> bool:
        """Whether all programs have come to execution ``number``. One is not where an interrupt has come
        between two of its steps: then the graph is to be deployed anew."""
        return all(part.execution == number for part in self._parts)

    def run(self, number: int, epoch: Epoch, deadline: int) -> Run:
        """Run the tasks of execution ``number``, which has been submitted, in the order in which they were
        bound. Raises ``DeadlockError``, and what interrupts the program.

        deadline: on the monotonic clock, in nanoseconds; 0: none.
        """
        run = Run(number, deadline, self.plan, epoch, self._loopback)
        self.at = number
        try:
            for stage in self._stages:
                part = self._parts[stage.actor]
                job = TaskJob(run, part, stage)
                try:
                    part.actor.queue.run(job)
                except BaseException:
                    part.actor.queue.cancel(job)
                    raise
                if job.interrupt is not None:
                    raise job.interrupt
                if not job.counts:  # its actor is dead, as everybody sees
                    break
        except BaseException:
            self._break_off(run)
            raise
        finally:
            self.at = None
        if epoch.recording.own.tracing:
            epoch.recording.drain()
        return run

    def _break_off(self, run: Run) -> None:
        """Stop an execution of which nobody will have references: nothing more of it is run."""
        run.epoch.limits.cancel(run.number)
        for stage in self._stages:
            part = self._parts[stage.actor]
            if part.actor.alive and part.execution == run.number:
                part.break_off()
        for production in run.productions.values():
            if not production.over:
                production.close()
