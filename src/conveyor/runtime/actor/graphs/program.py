"""Making one actor's program of one graph: the native interpreter, with what Python does for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from conveyor import _core
from conveyor.codec import encode_error
from conveyor.codec.sealed import Sealed
from conveyor.exceptions import ArenaFullError
from conveyor.plan.model import Task
from conveyor.plan.reading import edges_only_read
from conveyor.runtime.actor.graphs.conduits import Conduits
from conveyor.runtime.actor.graphs.inputs import Inputs
from conveyor.runtime.actor.graphs.meetings import Meetings
from conveyor.runtime.actor.graphs.producers import GeneratorStopped, Producers
from conveyor.runtime.actor.graphs.steps import Steps
from conveyor.runtime.actor.unwanted import Unwanted, until
from conveyor.runtime.calls.arguments import take_result
from conveyor.runtime.calls.returns import elements
from conveyor.runtime.graph.edges.failures import FailureTeller
from conveyor.runtime.graph.edges.layout import Assignment, make_budget
from conveyor.runtime.graph.edges.promises import keeper_of
from conveyor.runtime.shortage import DRIVER, MemoryWait, begun
from conveyor.runtime.waiting.works import steps_of

if TYPE_CHECKING:
    import asyncio

    from conveyor.runtime.actor.ground import Ground
    from conveyor.runtime.process import Process


class Part(NamedTuple):
    """What an actor has of a graph, ready to run: its channel ends are open.

    program, producers, conduits, inputs: its steps; its generators; what goes beside its frames; what it
    has fetched.
    labels: what its tasks are called, by their numbers.
    limits: its executions' deadlines and cancellations.
    """

    program: _core.Program
    producers: Producers
    conduits: Conduits
    inputs: Inputs
    labels: dict[int, str]
    limits: _core.Limits

    def close(self) -> None:
        """Take it down. Each step is taken, whatever another one raises."""
        with ExitStack() as last:
            for close in (
                self.inputs.close,
                self.conduits.close,
                self.producers.close,
                self.program.close,
            ):
                last.callback(close)


def make_part(ground: Ground, assignment: Assignment, segment: _core.Segment) -> Part:
    """Make an actor's part of a graph.

    A failed step leaves an ``ErrorFrame`` in its registers; whoever needs one of those passes it on
    instead of running, so an error reaches the driver on the same path as a value.
    """
    process = ground.process
    actor = assignment.actor_name

    def error_meta(error: BaseException, label: str, execution: int) -> bytes:
        if _is_cancellation(error):  # who asked for it says why, as of tasks that have not begun
            if limits.cancelled(execution) and not limits.failed(execution):
                return _core.CANCELLED
            if isinstance(error, Unwanted) and not limits.cancelled(execution):
                return _core.OVERDUE
        if label not in collectives:  # these wait for nobody: it is their execution that fails
            process.on_failure(error)
        meta = encode_error(error, actor, label)
        # What cannot be told comes over the edges all the same, only later.
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
        assert ground.coroutines is not None
        running[:] = (
            ground.coroutines.start_step(
                coroutine, program.resume, deadline, note, work, labels[task]
            ),
        )

    def wait_for_memory(error: BaseException, before: Any) -> Any:
        assert isinstance(error, ArenaFullError)
        shortage, execution = process.shortage, program.execution

        def begin() -> MemoryWait:
            return shortage.result(lambda: budget, lambda: ends(execution))

        if ground.coroutines is None:
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
    keepers = {
        edge: keeper_of(assignment.sources[edge], promise)
        for edge, promise in assignment.promises.items()
    }
    conduits = Conduits(process, segment, assignment, program, limits, recorder, budget, keepers)
    meetings = Meetings(assignment.program, tasks, conduits, program, limits, running)
    if assignment.conduits:
        program.set_progress(meetings.progress)
    producers = Producers()
    inputs = Inputs(program, limits)
    if ground.coroutines is not None:  # else nothing but the program would run meanwhile
        program.set_fetching(inputs.begin, inputs.take)
    part = Part(program, producers, conduits, inputs, labels, limits)
    try:
        if process.slot != DRIVER:  # in one thread nobody would let go of any
            program.set_shortage(wait_for_memory)  # a circle, which closing breaks
        Steps(
            ground,
            assignment,
            tasks,
            recorder,
            program,
            limits,
            readers,
            writers,
            keepers,
            conduits,
            meetings,
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
    """Wait for memory of an output on an event loop, which goes on: the program is rung at its end."""

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
        """Return what is sent for the output, which others may change meanwhile."""
        taken, self._inner = take_result(value)
        return taken

    def tries(self) -> None:
        self._wait.tries()

    def note(self, error: ArenaFullError) -> None:
        """Note that the output has been tried in vain; see ``MemoryWait.note``."""
        self._wait.note(error)
        self._watch()

    def _watch(self) -> None:
        import asyncio  # slow to import, and here by now

        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._ring())

    def end(self) -> None:
        self._wait.end()
        if self._task is not None:
            self._task.cancel()

    async def _ring(self) -> None:
        from conveyor.runtime.waiting.aio import wait_until

        await wait_until(self._wait.ready)
        self._process.board.ring(self._process.slot, self._bit)


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
    if isinstance(error, (GeneratorStopped, Unwanted)):
        return True
    asyncio = sys.modules.get("asyncio")  # slow to import: an actor without coroutines has not
    return asyncio is not None and isinstance(error, asyncio.CancelledError)
