"""An actor's part of collectives that communicators of the user's run. Meanwhile the actor's program is
suspended, and the actor serves others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conveyor import _core
from conveyor.dag.collective.calls import Offer, Together
from conveyor.exceptions import TransportError
from conveyor.plan.model import Call, Program, Recv, Reg, Send, Task
from conveyor.runtime.waiting.alarm import Alarm
from conveyor.transport.communicator import Gathering, Job
from conveyor.worker.graphs.conduits import Conduits, in_words
from conveyor.worker.unwanted import Unwanted, until


class Meetings:
    """All collectives of one actor's part of a graph. Used on the thread that runs the actor's program."""

    def __init__(
        self,
        steps: Program,
        tasks: Mapping[int, Task],
        conduits: Conduits,
        program: _core.Program,
        limits: _core.Limits,
        running: list[Any],
    ) -> None:
        """``running[0].cancel()`` is called when an execution in which a task runs has been cancelled."""
        self._conduits = conduits
        self._program = program
        self._limits = limits
        self._running = running
        self._edges = {
            step.reg: step.edge for step in steps.steps if isinstance(step, (Recv, Send))
        }
        self._tasks = tasks
        self._meetings: list[Meeting] = []

    def offer(self, step: Call, task: Task) -> Callable[..., Any] | None:
        """Return the callable that replaces a task's function if other ranks meet this one behind the
        task."""
        told = self._edges.get(step.out) in self._conduits.outbound
        return task.function.announce if isinstance(task.function, Offer) and told else None

    def add(self, step: Call, task: Task) -> Meeting | None:
        """Make the meeting that a task is this rank's part of, if it meets any other rank."""
        function = task.function
        if len(step.meets) < 2 or not isinstance(function, Together):
            return None
        places = [argument.index for argument in task.args if isinstance(argument, Reg)]
        edges = [self._edges[place] for place in places[function.tensors :]]
        ends: list[Any] = []
        for edge in edges:
            link = self._conduits.outbound.get(edge) or self._conduits.inbound[edge]
            ends.append(link.conduit)
        meeting = Meeting(
            function, places, ends, self._program, self._limits, self._conduits.alarm, self._running
        )
        self._meetings.append(meeting)
        return meeting

    def progress(self) -> None:
        """Do all that can be done without waiting."""
        self._conduits.progress()
        for meeting in self._meetings:
            meeting.progress()


class Meeting:
    """A collective of a graph. If one rank fails in it, all fail: a rank that does not come to the end tells
    the others, and all have their communicator made anew."""

    def __init__(
        self,
        function: Together,
        places: Sequence[int],
        ends: Sequence[Gathering],
        program: _core.Program,
        limits: _core.Limits,
        alarm: Alarm,
        running: list[Any],
    ) -> None:
        """``places``: the registers of the inputs; ``ends``: by rank, the endpoint over which the rank tells
        of itself."""
        self._function = function
        self._places = places
        self._own = ends[function.rank]
        self._others = [end for end in ends if end is not self._own]
        self._program = program
        self._limits = limits
        self._alarm = alarm
        self._running = running
        #: The execution that has come here, if one has.
        self._execution: int | None = None
        #: The outcome, which the program gets when it is rung.
        self._outcome: tuple[Any, BaseException | None] | None = None

    @property
    def deadline(self) -> int:
        """Deadline of the execution, for the alarm; 0: none."""
        return 0 if self._execution is None else self._limits.deadline(self._execution)

    def start(self, regs: list[Any]) -> None:
        """Begin this rank's part: the task's turn has come. An exception raised here is the task's
        outcome."""
        execution = self._program.execution
        try:
            run = self._function.begin([regs[place] for place in self._places])
        except BaseException as error:
            self._own.tell("gone", execution, in_words(error))  # others may have had the memory
            raise
        for other in self._others:
            other.gone = {n: why for n, why in other.gone.items() if n >= execution}
        self._execution, self._outcome = execution, None
        self._running[:] = (self,)

        def may_begin() -> bool:
            generation = self._own.line.generation
            return all(
                other.generation == generation
                and (other.rank > self._own.rank or other.begun == (execution, generation))
                for other in self._others
            )

        def ended(made: Any, error: BaseException | None) -> None:
            if self._execution == execution:
                self._settle(made, error if error is None else self._error(error))

        key = execution, 0
        began = functools.partial(self._own.tell, "begun", execution)
        self._own.line.add(Job(self._own, key, run, None, may_begin, began, ended))
        if self.deadline:
            self._alarm.add(self)
        self._own.ring()  # messages that the others have sent until now get a turn of their own

    def cancel(self) -> None:
        """Give the operation up: nobody waits for the execution any more."""
        self._give_up(Unwanted(f"{self._function.operation} was given up"))

    def progress(self) -> None:
        """Look at the messages of the other ranks, and give the program the outcome if there is one."""
        execution = self._execution
        if execution is None:
            return
        if self._outcome is None:
            for other in (self._own, *self._others):
                if other.broken is not None:
                    self._give_up(self._error(other.broken))
                elif execution in other.gone:
                    self._give_up(self._error(f"{other.member}: {other.gone[execution]}"))
            if until(self._limits, execution) < 0:
                self.cancel()
        if self._outcome is not None:
            outcome, self._outcome, self._execution = self._outcome, None, None
            self._program.resume(*outcome)

    def _give_up(self, error: BaseException) -> None:
        execution = self._execution
        if execution is not None and self._outcome is None:
            self._settle(None, error)
            self._own.line.forget(self._own, (execution, 0), in_words(error))

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self._outcome is not None:
            return
        self._outcome = value, error
        self._own.ring()
        if error is not None and self._own.broken is None:
            self._own.tell("gone", self._execution, in_words(error))

    def _error(self, cause: BaseException | str) -> TransportError:
        function = self._function
        told = TransportError(
            f"{function.operation} over {', '.join(function.names)} by the {function.communicator} has "
            f"failed: {cause if isinstance(cause, str) else in_words(cause)}"
        )
        if isinstance(cause, BaseException):
            told.__cause__ = cause
        return told
