"""An actor's part of a graph: the program that it would run in a process of its own, a task at a time."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msgspec.structs import replace

from conveyor import _core
from conveyor.engine.inline.actor import Actor
from conveyor.engine.inline.crossing import ArrivalError, Crossing
from conveyor.engine.inline.failure import Failure
from conveyor.exceptions import ExecutionCancelledError, SerializationError
from conveyor.plan.model import Program, Task
from conveyor.plan.steps import Await, Call, Recv, Send, Step, Try, assert_never
from conveyor.runtime.actor.graphs.program import make_part
from conveyor.runtime.graph.edges.layout import Assignment
from conveyor.runtime.graph.submission.unsendable import blame_tasks
from conveyor.runtime.process import Process
from conveyor.runtime.refs.values import with_bound_values

if TYPE_CHECKING:
    from conveyor.runtime.actor.ground import Ground


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
    """Values come and go over the channels of a graph over processes, and the same program takes and sends
    them. Where the turn of a task comes it stops, as it does for a coroutine, and whoever drives the
    graph runs the task.
    """

    def __init__(
        self,
        process: Process,
        actor: Actor,
        assignment: Assignment,
        segment: _core.Segment,
        crossing: Crossing,
    ) -> None:
        """The tasks of ``assignment`` go through ``crossing``."""
        self.actor = actor
        # What a program is made on; see `runtime.actor.ground`.
        self.process = process
        self.instance = self.coroutines = self
        #: What the program has come to, and what has been begun of that.
        self._next: Work | None = None
        self._begun: Work | None = None
        # The driving thread may be interrupted while a coroutine of the actor ends on its own.
        self._lock = threading.Lock()
        actor.wait_for_start()
        tasks = _carried(assignment, actor, crossing)
        self._methods = {number: _method(actor, task) for number, task in tasks.items()}
        # Each is found by its number, and none is run by the program.
        named = {i: replace(task, method=str(i), function=None) for i, task in tasks.items()}
        program = replace(assignment.program, steps=_steps(assignment.program))
        assignment = replace(assignment, program=program, tasks=named)
        self._part = make_part(cast("Ground", self), assignment, segment)
        self._program = self._part.program
        self._program.pause_after_tasks()

    @property
    def execution(self) -> int:
        """The number of the execution that the program is in."""
        return self._program.execution

    def come_to(self, task: int) -> Work | None:
        """Take what comes before ``task``, which is to be run now. ``None``: it is skipped. Raises
        ``SystemExit`` of a value that is rebuilt."""
        with self._lock:
            if self._next is None:
                self._program.advance()
            work = self._next
            if work is None or work.task != task:
                return None
            self._begun, self._next = work, None
            return work

    def finish(self, work: Work, value: Any, error: BaseException | None) -> None:
        """``work`` has come to ``value``, or to ``error``: send what is sent of it. Raises ``SystemExit`` of
        a value that is sent."""
        with self._lock:
            if self._begun is work:  # else it was broken off meanwhile
                self._begun = None
                self._program.resume(value, error)

    def break_off(self) -> None:
        """Come to the end of an execution that has been cancelled; what has been begun is over."""
        with self._lock:
            self._program.advance()

    def close(self) -> None:
        """The graph is taken down, or laid anew."""
        self._next = self._begun = None
        self._part.close()
        self._methods.clear()

    # For the program

    def method(self, name: str) -> tuple[Callable[..., Any], bool]:
        """What stands for a task, as a coroutine function."""
        task = int(name)
        method, is_async = self._methods[task]
        return (
            lambda *args, **kwargs: Work(task, functools.partial(method, *args, **kwargs), is_async)
        ), True

    def start_step(self, work: Any, *_: Any) -> InlinePart:
        """The program has come to a task, and is suspended."""
        self._next = work
        return self

    def cancel(self) -> None:
        """The task that the program has come to is not run."""
        self._next = self._begun = None
        self._program.resume(None, ExecutionCancelledError("the execution was broken off"))


def _steps(program: Program) -> tuple[Step, ...]:
    """What of ``program`` is done here: nothing goes beside frames, nobody meets anybody, and items are made
    as they are asked for."""
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


def _carried(assignment: Assignment, actor: Actor, crossing: Crossing) -> dict[int, Task]:
    """The tasks with constants of the actor's own, as sent to it once."""
    assert isinstance(assignment.tasks, dict)
    tasks = with_bound_values(assignment.tasks)
    try:
        arrived: dict[int, Task] = crossing.carry(tasks, shared=False)
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
