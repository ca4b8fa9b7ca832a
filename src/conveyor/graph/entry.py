"""The entry of a graph over processes: submission to the window of its epoch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from conveyor import _core
from conveyor.calls.unsendable import blame_input
from conveyor.checks import check_deadline, deadline_in_words, in_seconds
from conveyor.codec import copy_to_raise
from conveyor.exceptions import (
    ArenaFullError,
    DeadlineExceededError,
    SerializationError,
    SessionEndedError,
    WaitTimeoutError,
)
from conveyor.graph.edges import InputPromises
from conveyor.graph.lifecycle import Lifecycle
from conveyor.graph.result_source import GraphSource
from conveyor.graph.results import GraphRef, Results
from conveyor.graph.submission import (
    FastPath,
    Need,
    Submission,
    Terms,
    check_inputs,
    match_inputs,
    reserved_inputs,
    takes_parts,
    whole_arguments,
)
from conveyor.plan.model import Plan, Task
from conveyor.refs.ref import EMPTY, Ref, cancelled_error
from conveyor.refs.values import refs_among
from conveyor.runtime import ending
from conveyor.runtime.shortage import MemoryWait, is_final
from conveyor.runtime.wait_graph import Again, Blockers, tell_another


def late_error(
    graph: str,
    tasks: Sequence[Task],
    number: int,
    seconds: float,
    ran: Collection[int],
    skipped: int,
    doing: str | None,
) -> DeadlineExceededError:
    """Return the error of an execution of ``graph`` that was given ``seconds``. Of its ``tasks``, by number,
    those in ``ran`` had run; ``skipped`` was the first that had not (-1: not known yet; ``doing`` says what
    goes on)."""
    had = ", ".join(tasks[i].label for i in sorted(ran)) or "none"
    left = ", ".join(task.label for task in tasks if task.id not in ran)
    message = (
        f"{graph}, execution {number}: its {deadline_in_words(seconds)} has passed; tasks "
        f"that had run: {had}; not in time: {left or 'only the last result'}"
    )
    if skipped >= 0:
        message += f"; the first of them was {tasks[skipped].label}"
    elif doing is not None:
        message += f"; {doing}"
    return DeadlineExceededError(message)


class Execution(Struct, eq=False, weakref=True):
    """The source of the refs of one execution with a deadline. Everything else it asks the graph's source."""

    _graph: GraphSource
    #: On the monotonic clock, in nanoseconds.
    deadline: int
    #: The duration that was asked for.
    seconds: float
    _report: tuple[int, list[int]] | None = None
    _alarmed: bool = False

    # Source of its refs

    @property
    def window(self) -> _core.InFlightWindow:
        return self._graph.window

    @property
    def cancel_with_await(self) -> bool:
        return self._graph.cancel_with_await

    @property
    def get_timeout(self) -> float | None:
        return self._graph.get_timeout

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        left = max(self.deadline - _core.monotonic_ns(), 0) / 1e9
        first = left if timeout is None else min(left, timeout)
        try:
            return self._graph.wait_for(ref, first)
        except WaitTimeoutError:
            if not self.overdue():
                raise
        self._expire(ref)
        return EMPTY  # expired, or just in time: the ref is looked at again

    def blockers(self, ref: Ref, question: int, again: Again | None = None) -> Blockers | None:
        return ()  # at the deadline it is done, whatever its actors do

    def is_ready(self, ref: Ref) -> bool:
        if self._graph.is_ready(ref):
            return True
        if not self._alarmed:
            # A thread is about to sleep on the doorbell, which nobody else would ring at the deadline.
            self._graph.alarm.add(self)
            self._alarmed = True
        return self.overdue()

    def has_failed(self, ref: Ref) -> bool:
        if not self.is_ready(ref):  # which has the doorbell rung at the deadline
            return False
        return self._graph.has_failed(ref) or not self._graph.is_ready(ref)

    def cancel(self, ref: Ref) -> bool:
        self._graph.end(ref._number, ref._siblings(), cancelled_error(self._graph.execution(ref)))
        return True

    def why_not_run(self, ref: Ref, overdue: bool) -> BaseException:
        return self.late(ref._number) if overdue else self._graph.why_not_run(ref, overdue)

    def describe(self, ref: Ref) -> str:
        return self._graph.describe(ref)

    def note_got(self, ref: Ref) -> None:
        self._graph.note_got(ref)

    def explain_held(self, error: ArenaFullError) -> str:
        return self._graph.explain_held(error)

    def doing(self) -> str:
        return self._graph.doing()

    # Deadline

    def overdue(self) -> bool:
        """Return whether the deadline has passed."""
        return _core.monotonic_ns() >= self.deadline

    def _expire(self, ref: Ref) -> None:
        """End the execution at its deadline: results that are not there yet get its error."""
        number, window = ref._number, ref._window
        late = [
            r
            for r in ref._siblings()
            if r._outcome is EMPTY and not window.ready(number, r._reader)
        ]
        if late:
            self._graph.end(number, late, self.late(number))

    def late(self, number: int) -> DeadlineExceededError:
        """Return the error of results that have not come in time; ``number``: of this execution."""
        skipped, ran = self._report or self._graph.report(number)
        doing = self._graph.doing() if skipped < 0 else None
        tasks = self._graph.plan.tasks
        return late_error(self._graph.name, tasks, number, self.seconds, ran, skipped, doing)

    def keep_report(self, number: int) -> None:
        """Keep the report of this execution, which has that number: another one is about to use its words."""
        self._report = self._graph.report(number)


def _references_of_a_moved_value() -> int:
    # How many references an argument of execute() has when its maker keeps none: measured, because
    # it differs between versions of Python. Same shape as CompiledGraph.execute and FastPath.enter.
    def at_once(args: tuple[Any, ...], kwargs: dict[str, Any], deadline: float | None) -> int:
        return _core.refcount(args[0])

    def execute(
        *args: Any, timeout: float | None = None, deadline: float | None = None, **kwargs: Any
    ) -> int:
        return at_once(args, kwargs, deadline)

    return execute(object())


MOVED_REFS = _references_of_a_moved_value()

#: The source of an execution's refs. The graph's own serves all executions that have no deadline.
Source: TypeAlias = GraphSource | Execution


class OwnerEntry:
    """Submits executions to the window, one after the other."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        results: Results,
        source: GraphSource,
        ref_type: type[GraphRef],
    ) -> None:
        """``ref_type``: the class of the results of executions."""
        plan, config = lifecycle.plan, lifecycle.config
        self.takes_parts = takes_parts(plan)
        self._lifecycle = lifecycle
        self._results = results
        self._source = source
        self._ref_type = ref_type
        self._plan = plan
        self._name = lifecycle.name
        self._process = lifecycle.process
        self._lock: threading.Lock = lifecycle.lock
        self._holder = lifecycle.holder
        # Whether the thread that has the lock waits for room or for memory.
        self._waits = False
        # Deadline of executions that are given none.
        self._seconds = config.deadline
        # Whether no input of the graph has the name of an option.
        self._plain = not reserved_inputs(plan)
        self._single = results.single
        self._outputs = len(results.edges)
        self._fast_path: _core.FastPath | None = None
        self._arranged = results.single or results.as_read
        self._promises = InputPromises(plan)
        alone = plan.whole_input and len(plan.inputs) == 1
        inputs = None if alone else whole_arguments(plan)
        usual = (alone or inputs is not None) and plan.shape is None
        if usual and self._plain and not self._promises:
            # No reference cycle: the fast path refers to nothing that refers to this entry, so the graph ends
            # with the last reference to it.
            self._fast_path = _core.FastPath(
                lifecycle.admission,
                lifecycle.lock,
                lifecycle.holder,
                source,
                ref_type,
                SerializationError,
                functools.partial(_blame, plan, lifecycle.name),
                len(results.edges) if results.as_read else 0,
                Execution,
                config.deadline,
                inputs,
                plan.positional if inputs is not None else 1,
                len(plan.keywords) if inputs is not None else 0,
            )

    @property
    def remote_status(self) -> bool:
        process_table = self._process.process_table
        return any(process_table.is_remote(worker.slot) for worker in self._lifecycle.epoch.workers)

    @property
    def fast_path(self) -> FastPath:
        """The fast path: ``at_once``, or a part of it that begins most executions."""
        return self._fast_path.enter if self._fast_path and self._arranged else self.at_once

    def at_once(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deadline: Any = None,
        blocking: bool = True,
    ) -> Any:
        if self._fast_path is not None:
            first = self._fast_path.enter(args, kwargs, deadline)
            return first if first is None or self._arranged else self._refs(first, {})
        # A thread that waits for room holds the lock meanwhile: others queue for it in their submissions.
        if self._lock.locked():
            return None
        if not self._plain or refs_among(args, kwargs):
            return None
        seconds = self._seconds if deadline is None else check_deadline(deadline)
        execution = self._execution(seconds, _core.monotonic_ns())
        inputs = match_inputs(self._plan, self._name, args, kwargs)
        passed = self._results.passed(args, kwargs)
        with self._holder if blocking else _core.TimedLock(self._lock, 0, self._holder) as taken:
            if not taken or self._lifecycle.closed_or_failed():
                return None
            try:
                ref = self._submit_now(inputs, execution)
            except ArenaFullError:  # the submission can wait
                return None
        return None if ref is None else self._refs(ref, passed)

    def is_down(self) -> bool:
        return self._lifecycle.closed_or_failed()

    def revive(self, terms: Terms) -> None:
        time_limit = terms.restart_limit()
        try:
            self._lifecycle.restart_if_possible(time_limit)
        except WaitTimeoutError as error:
            if time_limit is terms.time_limit:
                raise
            raise DeadlineExceededError(
                f"{self._name}: the {deadline_in_words(terms.seconds)} has passed before it could "
                f"begin: {error}"
            ) from error

    def begin(self, terms: Terms) -> Source:
        return self._execution(terms.seconds, terms.since)

    def _execution(self, seconds: float | None, since: int) -> Source:
        if seconds is None:
            return self._source
        return Execution(self._source, since + int(seconds * 1e9), seconds)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_inputs(self._plan, self._name, args, kwargs)

    def until_done(self, need: Need, execution: Source) -> Need:
        lifecycle, there = self._lifecycle, need.ready
        self._check_session()
        lifecycle.check_open()
        self._check_time(execution)
        self._wake_up_for(execution)
        return replace(
            need,
            ready=_either(lambda: lifecycle.is_teardown or there(), execution),
            bounded=bool(execution.deadline),
        )

    def refs_of(self, error: BaseException) -> Any:
        return self._results.failed(error, self._source, self._lifecycle.epoch.streams)

    def tell_capacity_blockers(self, then: Callable[[Blockers], object]) -> None:
        """Have ``then`` told, now or later, on any thread, which processes have to do something before there
        is room."""
        tell_another(
            self._source.capacity_blockers, self._process.wait_registry.next_question(), then
        )

    def submit(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        execution: Source,
        terms: Terms,
        error: BaseException | None = None,
    ) -> Submission:
        if error is not None:
            return self._results.failed(error, execution, self._lifecycle.epoch.streams)
        self._lifecycle.check_not_submitting()
        self._check_session()
        inputs = match_inputs(self._plan, self._name, args, kwargs)
        passed = self._results.passed(args, kwargs)
        if terms.mode != "block":
            first = yield from self._pass(inputs, execution, self._submit_once, blocking=False)
        else:
            # Held while waiting for room: first come, first served.
            timeout = terms.time_limit.timeout
            with _core.TimedLock(
                self._lock, _shorter(terms.time_limit.left(), execution), self._holder
            ) as taken:
                if not taken:
                    self._check_time(execution)
                    raise WaitTimeoutError(
                        f"timed out after {in_seconds(timeout)} waiting for another thread's submission to "
                        f"{self._name}"
                    )
                first = yield from self._pass(inputs, execution, self._submit, blocking=True)
        return self._refs(first, passed)

    def _pass(
        self,
        inputs: tuple[Any, ...],
        source: Source,
        submit: Callable[[tuple[Any, ...], Source], GraphRef | None],
        blocking: bool,
    ) -> Generator[Need, None, GraphRef]:
        """Submit as soon as there is room, and memory."""
        wait: MemoryWait | None = None
        try:
            while True:
                if wait is not None:
                    wait.tries()
                try:
                    ref = submit(inputs, source)
                except ArenaFullError as error:
                    self._check_time(source)
                    if wait is None and not is_final(error):
                        self._waits |= blocking
                        wait = self._process.shortage.begin(
                            lambda: self._lifecycle.epoch.budget, blocks=blocking
                        )
                        wait.goes_on(error)
                        continue
                    if wait is None or not wait.goes_on(error):
                        raise
                    need = self._memory(wait, source)
                else:
                    if ref is not None:
                        return ref
                    self._check_time(source)
                    need = (
                        self._other_submission(source)
                        if not blocking and self._waits
                        else self._capacity(source)
                    )
                self._wake_up_for(source)
                began = _core.monotonic_ns()
                self._waits |= blocking
                yield need
                epoch = self._lifecycle.epoch
                epoch.recording.own.note_room(epoch.window.submitted, began, blocking)
        finally:
            if wait is not None:
                wait.end()
            if blocking and self._waits:
                self._waits = False
                self._process.notify()

    def _other_submission(self, source: Source) -> Need:
        return Need(
            _either(lambda: not self._waits, source),
            lambda _: (),
            lambda: f"another thread's submission to {self._name}",
            self._source.doing,
            lambda: (
                f"{self._name}: another thread's execution goes first, which waits for room or for memory"
            ),
            bounded=bool(source.deadline),
        )

    def _capacity(self, source: Source) -> Need:
        return Need(
            _either(self._may_submit, source),
            self._source.capacity_blockers,
            lambda: f"room for another execution of {self._name} (depth {self._plan.depth})",
            self._source.doing,
            lambda: f"{self._name}: {self._plan.depth} executions are on their way",
            bounded=bool(source.deadline),
        )

    def _memory(self, wait: MemoryWait, source: Source) -> Need:
        return Need(
            _either(lambda: wait.ready() or self._lifecycle.closed_or_failed(), source),
            lambda _: wait.causes(),
            lambda: f"memory for another execution of {self._name}",
            lambda: wait.why,
            lambda: f"{self._name}: {wait.why}",
            bounded=bool(source.deadline),
        )

    def _submit_once(self, inputs: tuple[Any, ...], source: Source) -> GraphRef | None:
        with _core.TimedLock(self._lock, 0, self._holder) as taken:
            return self._submit(inputs, source) if taken else None

    def _submit(self, inputs: tuple[Any, ...], source: Source) -> GraphRef | None:
        lifecycle = self._lifecycle
        while True:
            if lifecycle.closed_or_failed():
                raise copy_to_raise(lifecycle.why())
            ref = self._submit_now(inputs, source)
            # Otherwise a death, of this graph or of another, keeps the window shut.
            if (
                ref is not None
                or self._process.process_table.deaths == lifecycle.epoch.window.deaths
            ):
                return ref

    def _submit_now(self, inputs: tuple[Any, ...], source: Source) -> GraphRef | None:
        try:
            return (self._submit_checked if self._promises else self._send)(inputs, source)
        except SerializationError as error:
            raise blame_input(error, self._plan, self._name, inputs) from error.__cause__

    def _send(self, inputs: tuple[Any, ...], source: Source) -> GraphRef | None:
        admission, deadline = self._lifecycle.admission, source.deadline
        if len(inputs) == 1:
            return admission.start(inputs[0], source, self._ref_type, deadline)
        return admission.start_many(inputs, source, self._ref_type, deadline)

    def _submit_checked(self, inputs: tuple[Any, ...], source: Source) -> GraphRef | None:
        """Submit inputs that are checked against their promises first. An execution that does not begin is no
        first one."""
        fresh = self._promises.fresh()
        ref = None
        try:
            ref = self._send(self._promises.packed(inputs), source)
            return ref
        finally:
            if ref is None:
                self._promises.forget(fresh)

    def _may_submit(self) -> bool:
        return self._lifecycle.closed_or_failed() or self._lifecycle.epoch.window.has_room

    def _refs(self, first: GraphRef, passed: Mapping[int, Ref]) -> Any:
        """Return the results of ``execute``, given the ref to the first edge that the executor reads."""
        if self._single:
            return first
        made = first._with_siblings(self._outputs)
        return self._results.arrange(made, passed, self._lifecycle.epoch.streams)

    def _check_session(self) -> None:
        if type(self._lifecycle.closed) is SessionEndedError:
            raise ending.ended()

    # Deadlines

    def _wake_up_for(self, source: Source) -> None:
        """Have the doorbell rung at the deadline: a thread is about to sleep on it."""
        if isinstance(source, Execution):
            self._process.alarm.add(source)

    def _check_time(self, source: Source) -> None:
        if isinstance(source, Execution) and source.overdue():
            raise DeadlineExceededError(
                f"{self._name}: the {deadline_in_words(source.seconds)} has passed before it could "
                f"begin: it waited for room (depth {self._plan.depth}), for memory or for an argument; "
                f"{self._source.doing()}"
            )


def _blame(plan: Plan, name: str, error: SerializationError, args: tuple[Any, ...]) -> NoReturn:
    """Raise ``error`` of an execution in the user's terms."""
    raise blame_input(error, plan, name, args) from error.__cause__


def _either(ready: Callable[[], bool], source: Source) -> Callable[[], bool]:
    """Return a function that says whether it is ``ready()``, or too late."""
    if not isinstance(source, Execution):
        return ready
    overdue = source.overdue
    return lambda: ready() or overdue()


def _shorter(timeout: float | None, source: Source) -> float:
    """Return the seconds to wait for a lock; -1: any."""
    if not source.deadline:
        return -1 if timeout is None else timeout
    left = max(source.deadline - _core.monotonic_ns(), 0) / 1e9
    return left if timeout is None else min(left, timeout)
