"""A compiled graph over processes, as whoever executes it holds it: submit, wait, tear down."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from conveyor import _core
from conveyor.config import Config
from conveyor.exceptions import (
    ActorDiedError,
    ActorRestartedError,
    ArenaFullError,
    CapacityError,
    ConveyorError,
    DeadlineExceededError,
    GraphTornDownError,
    WaitTimeoutError,
)
from conveyor.plan.model import DRIVER, Plan
from conveyor.runtime.graph import recording
from conveyor.runtime.graph.arguments import match_inputs
from conveyor.runtime.graph.compiled import CompiledGraph
from conveyor.runtime.graph.epoch import Epoch
from conveyor.runtime.graph.execution import Execution
from conveyor.runtime.graph.hosting import GraphHost, Member, first_death
from conveyor.runtime.graph.results import GraphRef, Results
from conveyor.runtime.graph.stacks import stack_of
from conveyor.runtime.graph.status import (
    ActorStatus,
    GraphState,
    GraphStatus,
    Progress,
    actor_status,
    executions_in_flight,
)
from conveyor.runtime.refs.ref import EMPTY, Ref, cancelled_error, final
from conveyor.runtime.refs.values import RefFailed, RefNotThere
from conveyor.runtime.waiting.patience import Patience, wait_patiently


def _references_of_a_moved_value() -> int:
    # How many references an argument of execute() has when its maker keeps none: measured, because
    # it differs between versions of Python. Same shape as ProcessGraph.execute.
    lock = threading.Lock()

    def execute(
        *args: Any, timeout: float | None = None, deadline: float | None = None, **kwargs: Any
    ) -> int:
        with lock:
            return _core.refcount(args[0])

    return execute(object())


_MOVED_REFS = _references_of_a_moved_value()


def _debug_ref() -> type[GraphRef]:
    from conveyor.runtime.graph.gots import DebugRef  # few programs need it

    return DebugRef


def _refuse(
    _value: Any, source: ProcessGraph | Execution, _type: type[GraphRef], _deadline: int = 0
) -> NoReturn:
    # Not a method: the graph would refer to itself, and its channels would stay until a collection.
    graph = source.graph if isinstance(source, Execution) else source
    raise graph._why().with_traceback(None)


def _look_closer(
    _value: Any, source: ProcessGraph | Execution, _type: type[GraphRef], _deadline: int = 0
) -> None:
    """In place of a gate: what :meth:`ProcessGraph._execute` does will say why there is no room."""


class ProcessGraph(CompiledGraph):
    """On actors that are processes."""

    #: As the source of a ref: of the only one of an execution that has no deadline.
    deadline = 0

    def __init__(self, host: GraphHost, plan: Plan, config: Config) -> None:
        laid = host.lay(plan, config)
        super().__init__(plan, config, laid.number)
        self._host = host
        self._process = process = host.process
        self._lock = threading.Lock()
        self._restarting = threading.Lock()
        self._failing = threading.Lock()  # to be taken last
        self._past: list[tuple[int, ConveyorError]] = []
        self._unloading: list[tuple[Member, Ref]] = []
        self.alarm = process.alarm
        self._results = Results(plan, host.keep)
        try:
            self._use(Epoch(plan, self.name, laid, process, 0, _MOVED_REFS))
        except BaseException:
            host.unlay(laid.number)
            raise
        self._ref_type = _debug_ref() if config.debug else GraphRef
        # What the usual execution needs not look at.
        self._plain = plan.whole_input and plan.shape is None and config.deadline is None
        self._unlimited = (
            config.deadline is None
            and config.submit_timeout is None
            and not {"timeout", "deadline"}.intersection(plan.keywords)
        )
        self._single_output = self._results.single
        self._finalizer = weakref.finalize(self, host.drop, laid.number)
        self._finalizer.atexit = False
        host.graphs.add(self)

    def _use(self, epoch: Epoch) -> None:
        """Execute over these channels from now on."""
        self._epoch = epoch
        self.limits = epoch.limits
        # Executions with a deadline, by the set of words that they use.
        self._timed: dict[int, tuple[weakref.ref[Execution], int]] = {}
        self.recording = epoch.recording
        self._results.streams = epoch.streams
        self.gate = epoch.gate
        # The one thing the hot path looks at: replaced by a function that raises at the end.
        self._start: Callable[..., GraphRef | None]
        self._start = self.gate.start

    def restart(self) -> None:
        with self._restarting:
            if not self._closed_or_failed():
                return
            cause = self._failure
            if self._closed is not None or cause is None:
                raise self._why().with_traceback(None)
            with self._lock:  # after whoever was submitting just now
                first = self.gate.submitted
            laid = self._host.lay_again(self._number, first)
            epoch = Epoch(self.plan, self.name, laid, self._process, first, _MOVED_REFS)
            with self._lock, self._failing:
                if self._closed is not None:  # meanwhile: what was laid goes with the rest
                    raise self._closed.with_traceback(None)
                self.gate.drain()
                self._past.append((first, _as_past(cause)))
                del self._past[:-_PAST_KEPT]
                self._use(epoch)
                self._failure = None

    def _restart_if_possible(self) -> None:
        """Before an execution: a graph whose dead actors come back by themselves does so as well."""
        if (
            self._failure is not None
            and self._closed is None
            and self._host.comes_back(self._number)
        ):
            self.restart()

    # Executing

    def execute(
        self,
        *args: Any,
        timeout: float | None = None,
        deadline: float | None = None,
        **kwargs: Any,
    ) -> Any:
        if self._plain and deadline is None and len(args) == 1 and not kwargs:
            source = self if self._single_output else Execution(self)
            try:
                with self._lock:
                    ref = self._start(args[0], source, self._ref_type)
                if ref is not None:
                    return ref if self._single_output else self._refs(ref, {})
            except (RefNotThere, RefFailed):
                pass  # it is waited for, or reported, below
        elif self._unlimited and deadline is None and timeout is None and self._failure is None:
            try:
                inputs = match_inputs(self.plan, self.name, args, kwargs)
                passed = self._results.passed(args, kwargs)
                source = self if self._single_output else Execution(self)
                with self._lock:
                    ref = self._submit_inputs(inputs, source)
                if ref is not None:
                    return self._refs(ref, passed)
            except (RefNotThere, RefFailed):
                pass
        self._restart_if_possible()
        source = self._source(deadline, kwargs)
        if "timeout" in self.plan.keywords:
            kwargs["timeout"] = timeout
            timeout = None
        if timeout is None:
            timeout = self.config.submit_timeout
        patience = Patience(None if timeout is not None and timeout < 0 else timeout)
        while True:
            try:
                return self._execute(args, kwargs, patience, source)
            except RefFailed as failed:
                return self._results.failed(failed.error, source)
            except RefNotThere as missing:
                lacked = missing.ref
            self._wait_for_argument(lacked, patience, source)

    def try_execute(self, *args: Any, deadline: float | None = None, **kwargs: Any) -> Any:
        self._restart_if_possible()
        source = self._source(deadline, kwargs)
        try:
            inputs = match_inputs(self.plan, self.name, args, kwargs)
            passed = self._results.passed(args, kwargs)
            ref = self._submit_once(inputs, source)
        except RefFailed as failed:
            return self._results.failed(failed.error, source)
        except RefNotThere as missing:
            raise CapacityError(
                f"{self.name}: {missing.ref!r}, which is an argument, is not there yet"
            ) from None
        if ref is None:
            raise CapacityError(f"{self.name}: {self.plan.depth} executions are on their way")
        return self._refs(ref, passed)

    async def execute_async(self, *args: Any, deadline: float | None = None, **kwargs: Any) -> Any:
        if self._plain and deadline is None and len(args) == 1 and not kwargs:
            source = self if self._single_output else Execution(self)
            try:
                if self._lock.acquire(False):
                    try:
                        ref = self._start(args[0], source, self._ref_type)
                    finally:
                        self._lock.release()
                    if ref is not None:
                        return ref if self._single_output else self._refs(ref, {})
            except (RefNotThere, RefFailed):
                pass  # it is awaited, or reported, below
        from conveyor.runtime.waiting.aio import wait_until  # asyncio is slow to import

        if self._failure is not None:
            import asyncio

            await asyncio.get_running_loop().run_in_executor(None, self._restart_if_possible)
        source = self._source(deadline, kwargs)
        while True:
            ready = self._may_submit
            try:
                inputs = match_inputs(self.plan, self.name, args, kwargs)
                passed = self._results.passed(args, kwargs)
                ref = self._submit_once(inputs, source)
                if ref is not None:
                    return self._refs(ref, passed)
            except RefFailed as failed:
                return self._results.failed(failed.error, source)
            except RefNotThere as missing:
                self._check_time(source)
                ready = missing.ref.done
            self._wake_up_for(source)
            began = _core.monotonic_ns()
            await wait_until(functools.partial(_either, ready, source))
            if ready == self._may_submit:
                self.recording.own.note_room(self.gate.submitted, began, False)

    def _source(self, deadline: Any, kwargs: dict[str, Any]) -> ProcessGraph | Execution:
        seconds = self._seconds(deadline, kwargs)
        if seconds is None:
            return self if self._single_output else Execution(self)
        return Execution(self, _core.monotonic_ns() + int(seconds * 1e9), seconds)

    def _execute(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        patience: Patience,
        source: ProcessGraph | Execution,
    ) -> Any:
        timeout = patience.timeout
        inputs = match_inputs(self.plan, self.name, args, kwargs)
        passed = self._results.passed(args, kwargs)
        if not self._lock.acquire(timeout=_shorter(timeout, source)):
            self._check_time(source)
            raise WaitTimeoutError(
                f"timed out after {timeout:g} s waiting for another thread's submission to {self.name}"
            )
        try:
            # Held while waiting for room: who comes first goes first.
            while True:
                ref = self._submit_inputs(inputs, source)
                if ref is not None:
                    return self._refs(ref, passed)
                self._wake_up_for(source)
                began = _core.monotonic_ns()
                wait_patiently(
                    self._process.inbox,
                    lambda: self._may_submit() or _too_late(source),
                    patience,
                    lambda: f"room for another execution of {self.name} (depth {self.plan.depth})",
                    self.doing,
                )
                self.recording.own.note_room(self.gate.submitted, began, True)
        finally:
            self._lock.release()

    def _wait_for_argument(
        self, ref: Ref, patience: Patience, source: ProcessGraph | Execution
    ) -> None:
        self._check_time(source)
        self._wake_up_for(source)
        wait_patiently(
            self._process.inbox,
            functools.partial(_either, ref.done, source),
            patience,
            lambda: f"{ref!r}, an argument of {self.name}",
            lambda: "it is not done",
        )

    def _wake_up_for(self, source: ProcessGraph | Execution) -> None:
        """This thread is about to sleep on the bell, which must ring at the deadline."""
        if isinstance(source, Execution) and source.deadline:
            self.alarm.add(source)

    def _submit_once(
        self, inputs: tuple[Any, ...], source: ProcessGraph | Execution
    ) -> GraphRef | None:
        if not self._lock.acquire(False):
            return None
        try:
            return self._submit_inputs(inputs, source)
        finally:
            self._lock.release()

    def _submit_inputs(
        self, inputs: tuple[Any, ...], source: ProcessGraph | Execution
    ) -> GraphRef | None:
        if self._closed_or_failed():
            raise self._why().with_traceback(None)
        deadline = source.deadline
        if deadline:
            assert isinstance(source, Execution)
            if not self.gate.has_room:
                self._check_time(source)
                return None
            self._take_words(self.gate.submitted, source)
        if len(inputs) == 1:
            return self._start(inputs[0], source, self._ref_type, deadline)
        number = self.gate.submit_many(inputs, deadline)
        return self._ref_type(source, number) if number >= 0 else None

    def _check_time(self, source: ProcessGraph | Execution) -> None:
        if isinstance(source, Execution) and _too_late(source):
            raise DeadlineExceededError(
                f"{self.name}: the deadline of {source.seconds:g} s has passed before it could "
                f"begin: it waited for room (depth {self.plan.depth}) or for an argument; {self.doing()}"
            )

    def _take_words(self, number: int, source: Execution) -> None:
        """Execution ``number`` notes what it has run where an earlier one did."""
        place = number & (self._epoch.sets - 1)
        before = self._timed.get(place)
        if before is not None:
            execution = before[0]()
            if execution is not None and before[1] != number:
                execution.keep_report(before[1])
        self._timed[place] = (weakref.ref(source), number)

    def _may_submit(self) -> bool:
        return self._closed_or_failed() or self.gate.has_room

    def _refs(self, first: GraphRef, passed: Mapping[int, Ref]) -> Any:
        """What ``execute`` returns, given the ref of the first thing that the driver reads."""
        if self._single_output:
            if first._source is not self:
                first._source.has((first,))
            return first
        number, source = first._number, first._source
        made = [first]
        made += (self._ref_type(source, number, i) for i in range(1, len(self._results.edges)))
        source.has(made)
        return self._results.arrange(made, passed)

    # Waiting

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        if timeout is None:
            timeout = self.config.get_timeout
        gate = ref._gate
        value = gate.get(ref._number, ref._reader, 0.0 if timeout == 0 else _FIRST_LOOK)
        if value is not EMPTY:
            return value
        patience = Patience(timeout)
        while ref._outcome is EMPTY:
            deaths = self._process.board.deaths
            ended = self._past_error(ref)
            if ended is not None or self._closed_or_failed():
                value = gate.take(ref._number, ref._reader)  # what had come before
                if value is not EMPTY:
                    return value
                raise final(ended or self._past_error(ref) or self._why())
            value = gate.get(ref._number, ref._reader, patience.step(), deaths)
            if value is not EMPTY:
                return value
            patience.check(lambda: self.describe(ref), self.doing)
        return EMPTY

    def is_ready(self, ref: Ref) -> bool:
        return (
            ref._gate.ready(ref._number, ref._reader)
            or self._past_error(ref) is not None
            or self._closed_or_failed()
        )

    def _past_error(self, ref: Ref) -> ConveyorError | None:
        """Why the ref's execution has failed, if it was under way when the graph was restarted."""
        if ref._number >= self._epoch.first or ref._number < 0:
            return None
        return next((error for end, error in self._past if ref._number < end), None)

    def cancel(self, ref: Ref) -> bool:
        self.end(ref._number, [ref], cancelled_error(self.execution(ref)))
        return True

    def end(self, number: int, refs: Sequence[Ref], error: BaseException) -> None:
        """Nobody waits for execution ``number`` any more: ``error`` is the outcome of ``refs``, which
        are all that it has, and what has not begun is skipped."""
        self.limits.cancel(number)
        for ref in refs:
            if ref._outcome is EMPTY:
                ref._fail(error)
                ref._gate.drop(number, ref._reader)
                ref._gate.interrupt()
        for member, bit in zip(self._epoch.members, self._epoch.bits, strict=True):
            if member.alive:  # a coroutine may be running there
                self._process.board.ring(member.slot, bit)

    def _closed_or_failed(self) -> bool:
        if self._closed is not None or self._failure is not None:
            return True
        epoch, deaths = self._epoch, self._process.board.deaths
        if deaths == epoch.deaths_seen:
            return False
        dead = first_death(epoch.members)
        if dead is None:
            epoch.deaths_seen = deaths
            return False
        failure = dead.death(self._name_node)
        with self._failing:
            # Not of a graph that has been restarted meanwhile.
            if epoch is self._epoch and self._failure is None:
                self._failure = failure
                self._start = _look_closer
        return self._failure is not None

    def _why(self) -> ConveyorError:
        error = self._closed or self._failure
        assert error is not None
        return error

    def label(self, graph: int, node: int) -> str | None:
        return self.plan.tasks[node].label if graph == self._number else None

    def note_got(self, ref: Ref) -> None:
        """In debug mode: the program has got ``ref``."""
        edge = self._results.edges[ref._reader]
        self._host.gots().note(self._number, edge, ref._number)

    def explain_held(self, error: ArenaFullError) -> str:
        """In debug mode: where the program got what fills an arena."""
        return self._host.gots().explain(error, self._process.board.name(self._process.slot))

    def _name_node(self, graph: int, node: int) -> str | None:
        return self.label(graph, node) or self._host.label(graph, node)

    def doing(self) -> str:
        """What each actor of the graph is doing now, in words."""
        return self.status().summary()

    def status(self, stacks: bool = False) -> GraphStatus:
        board = self._process.board
        with self._failing:  # all of one epoch
            epoch, gate = self._epoch, self.gate
        actors = []
        for member in epoch.members:
            actor = actor_status(board, member.slot, member.incarnation, self._name_node)
            if actor.state == "dead":
                death = str(member.death(self._name_node))
                actor = ActorStatus(member.id.name, member.pid, "dead", error=death)
            elif stacks:
                actor = replace(actor, stack=stack_of(member.pid))
            actors.append(actor)
        progress = Progress.read(self.plan, epoch.segment, epoch.offsets, epoch.first)
        completed, submitted = gate.completed, gate.submitted
        executions, now = executions_in_flight(
            progress, self._results.edges, completed, submitted, actors
        )
        failed = self._closed_or_failed()
        state: GraphState = "torn down" if self._closed else "failed" if failed else "ready"
        error = self._closed or self._failure
        return GraphStatus(
            self.name,
            state,
            self.plan.depth,
            submitted,
            completed,
            executions,
            now,
            None if error is None else str(error),
        )

    # What it has noted

    def progress(self) -> recording.Progress:
        gate = self.gate
        gate.count_completed()
        arenas = {place: r.memory for place, r in self.recording.recorders.items()}
        arenas[DRIVER] = self._process.arena.bytes_touched
        completed = gate.completed  # first: what is submitted meanwhile is not completed
        return recording.Progress(
            gate.submitted, completed, gate.stashed, gate.stashed_bytes, arenas
        )

    def tracks(self) -> list[recording.Track]:
        executor = self._process.board.name(self._process.slot)
        tracks = [recording.Track(DRIVER, executor, os.getpid(), None)]
        for info, member in zip(self.plan.actors, self._epoch.members, strict=True):
            tracks.append(recording.Track(info.index, info.name, member.pid, member.pid))
        return tracks

    # Ending

    def teardown(self, kill_actors: bool = False) -> None:
        if self.close(GraphTornDownError(f"{self.name} has been torn down")):
            self.gate.drain()
            self._finalizer.detach()
            if kill_actors:
                for member in self._epoch.members:
                    self._host.kill(member.id)
            self._unloading = self._host.unlay(self._number)
        # One that was interrupted while it waited is finished by the next.
        while self._unloading:
            member, ack = self._unloading[-1]
            try:
                ack.get()
            except ConveyorError:
                if member.alive:
                    raise
            self._unloading.pop()
        self._host.graphs.discard(self)  # until now it names what its actors run

    def close(self, error: ConveyorError) -> bool:
        """No more executions, and whoever waits gets ``error``. False if it was closed before."""
        with self._lock:
            if self._closed is not None:
                return False
            self._closed = error
            self._start = _refuse
        # Other threads may wait for a result that will not come.
        self.gate.closed = True
        self._process.board.ring(self._process.slot, _core.ATTENTION_BIT)
        return True

    def orphan(self, error: ConveyorError) -> None:
        """In a forked child: the graph is the parent's. Takes no lock."""
        self._closed = error
        self._start = _refuse


def _too_late(source: ProcessGraph | Execution) -> bool:
    return bool(source.deadline) and _core.monotonic_ns() >= source.deadline


def _either(ready: Callable[[], bool], source: ProcessGraph | Execution) -> bool:
    return ready() or _too_late(source)


def _shorter(timeout: float | None, source: ProcessGraph | Execution) -> float:
    """The time that a lock is waited for; -1: any."""
    if not source.deadline:
        return -1 if timeout is None else timeout
    left = max(source.deadline - _core.monotonic_ns(), 0) / 1e9
    return left if timeout is None else min(left, timeout)


def _as_past(cause: ConveyorError) -> ConveyorError:
    """``cause`` as the error of executions that a restart has left behind."""
    text = f"{cause}\nthe graph has been restarted since: the execution can be tried again"
    if isinstance(cause, ActorDiedError):
        return ActorRestartedError(text, cause.actor, cause.node, cause.exit_code, cause.signal)
    return ActorRestartedError(text)


#: How many restarts' reasons are kept for refs of executions before them.
_PAST_KEPT = 100
#: How long a wait may last before it is worth preparing to log and describe it.
_FIRST_LOOK = 0.005
