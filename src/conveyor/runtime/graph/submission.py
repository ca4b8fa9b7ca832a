"""Submitting executions of a graph over processes: at once, or after a wait for room or for arguments."""

from __future__ import annotations

import functools
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conveyor import _core
from conveyor.checks import check_timeout
from conveyor.exceptions import (
    ArenaFullError,
    CapacityError,
    ConveyorError,
    DeadlineExceededError,
    SerializationError,
    SessionEndedError,
    WaitTimeoutError,
)
from conveyor.runtime import ending
from conveyor.runtime.graph.arguments import check_inputs, match_inputs
from conveyor.runtime.graph.compiled import CompiledGraph
from conveyor.runtime.graph.epoch import Epoch
from conveyor.runtime.graph.execution import Execution
from conveyor.runtime.graph.results import GraphRef
from conveyor.runtime.graph.unsendable import blame_input
from conveyor.runtime.process import Process
from conveyor.runtime.refs.ref import Ref, blockers_of
from conveyor.runtime.refs.values import RefFailed, lacking, refs_among, with_values
from conveyor.runtime.waiting.alarm import Alarm
from conveyor.runtime.waiting.patience import Patience, wait_patiently


def _references_of_a_moved_value() -> int:
    # How many references an argument of execute() has when its maker keeps none: measured, because
    # it differs between versions of Python. Same shape as SubmittingGraph.execute.
    lock = threading.Lock()

    def execute(
        *args: Any, timeout: float | None = None, deadline: float | None = None, **kwargs: Any
    ) -> int:
        with lock:
            return _core.refcount(args[0])

    return execute(object())


MOVED_REFS = _references_of_a_moved_value()


def look_closer(
    _value: Any, source: SubmittingGraph | Execution, _type: type[GraphRef], _deadline: int = 0
) -> None:
    """In place of a gate: what :meth:`SubmittingGraph._execute` does will say why there is no room."""


class SubmittingGraph(CompiledGraph):
    """The way in. Its lock makes submissions one after the other."""

    #: As the source of refs: of executions that have no deadline.
    deadline = 0

    alarm: Alarm
    limits: _core.Limits
    _process: Process
    _lock: threading.Lock
    _epoch: Epoch
    # The one thing the hot path looks at: replaced by a function that raises at the end.
    _start: Callable[..., GraphRef | None]
    _ref_type: type[GraphRef]
    # Executions with a deadline, by the set of words that they use.
    _timed: dict[int, tuple[weakref.ref[Execution], int]]
    # What the usual execution needs not look at.
    _plain: bool
    _unlimited: bool
    _single_output: bool
    _outputs: int
    _takes_parts: bool

    @abstractmethod
    def end(self, number: int, refs: Sequence[Ref], error: BaseException) -> None:
        """Nobody waits for execution ``number`` any more: ``error`` is the outcome of ``refs``, which
        are all that it has, and what has not begun is skipped."""

    @abstractmethod
    def note_got(self, ref: Ref) -> None:
        """In debug mode: the program has got ``ref``."""

    @abstractmethod
    def explain_held(self, error: ArenaFullError) -> str:
        """In debug mode: where the program got what fills an arena."""

    @abstractmethod
    def _closed_or_failed(self) -> bool: ...

    @abstractmethod
    def _why(self) -> ConveyorError: ...

    @abstractmethod
    def _restart_if_possible(self) -> None: ...

    def execute(
        self,
        *args: Any,
        timeout: float | None = None,
        deadline: float | None = None,
        **kwargs: Any,
    ) -> Any:
        if self._plain and deadline is None and len(args) == 1 and not kwargs:
            if timeout is not None:
                timeout = check_timeout(timeout)
            try:
                with self._lock:
                    ref = self._start(args[0], self, self._ref_type)
            except SerializationError as error:
                raise blame_input(error, self.plan, self.name, args) from error.__cause__
            if ref is not None:
                return ref if self._single_output else self._refs(ref, {})
        elif (
            self._unlimited
            and deadline is None
            and timeout is None
            and not refs_among(args, kwargs)
        ):
            inputs = match_inputs(self.plan, self.name, args, kwargs)
            passed = self._results.passed(args, kwargs)
            with self._lock:
                ref = None if self._closed_or_failed() else self._submit_now(inputs, self)
            if ref is not None:
                return self._refs(ref, passed)
        if "timeout" in self.plan.keywords:
            kwargs["timeout"] = timeout
            timeout = None
        timeout = check_timeout(timeout)
        seconds = self._seconds(deadline, kwargs)
        self._restart_if_possible()
        source = self._source(seconds)
        if timeout is None:
            timeout = self.config.submit_timeout
        patience = Patience(None if timeout is not None and timeout < 0 else timeout)
        if refs_among(args, kwargs):
            check_inputs(self.plan, self.name, args, kwargs)
            while (lacked := lacking(args, kwargs)) is not None:
                self._wait_for_argument(lacked, patience, source)
            try:
                args, kwargs = with_values(args, kwargs, self._takes_parts)
            except RefFailed as failed:
                return self._results.failed(failed.error, source)
        return self._execute(args, kwargs, patience, source)

    def try_execute(self, *args: Any, deadline: float | None = None, **kwargs: Any) -> Any:
        seconds = self._seconds(deadline, kwargs)
        self._restart_if_possible()
        source = self._source(seconds)
        if refs_among(args, kwargs):
            check_inputs(self.plan, self.name, args, kwargs)
            lacked = lacking(args, kwargs)
            if lacked is not None:
                raise CapacityError(
                    f"{self.name}: {lacked!r}, which is an argument, is not there yet"
                )
            try:
                args, kwargs = with_values(args, kwargs, self._takes_parts)
            except RefFailed as failed:
                return self._results.failed(failed.error, source)
        inputs = match_inputs(self.plan, self.name, args, kwargs)
        passed = self._results.passed(args, kwargs)
        ref = self._submit_once(inputs, source)
        if ref is None:
            raise CapacityError(f"{self.name}: {self.plan.depth} executions are on their way")
        return self._refs(ref, passed)

    async def execute_async(self, *args: Any, deadline: float | None = None, **kwargs: Any) -> Any:
        if (
            self._plain
            and deadline is None
            and len(args) == 1
            and not kwargs
            and self._lock.acquire(False)
        ):
            try:
                ref = self._start(args[0], self, self._ref_type)
            except SerializationError as error:
                raise blame_input(error, self.plan, self.name, args) from error.__cause__
            finally:
                self._lock.release()
            if ref is not None:
                return ref if self._single_output else self._refs(ref, {})
        from conveyor.runtime.waiting.aio import wait_until  # asyncio is slow to import

        seconds = self._seconds(deadline, kwargs)
        if self._closed_or_failed():
            import asyncio

            await asyncio.get_running_loop().run_in_executor(None, self._restart_if_possible)
        source = self._source(seconds)
        if refs_among(args, kwargs):
            check_inputs(self.plan, self.name, args, kwargs)
            while (lacked := lacking(args, kwargs)) is not None:
                self._check_time(source)
                self._wake_up_for(source)
                await wait_until(
                    functools.partial(_either, lacked.done, source),
                    functools.partial(blockers_of, lacked),
                )
            try:
                args, kwargs = with_values(args, kwargs, self._takes_parts)
            except RefFailed as failed:
                return self._results.failed(failed.error, source)
        inputs = match_inputs(self.plan, self.name, args, kwargs)
        passed = self._results.passed(args, kwargs)
        while True:
            ref = self._submit_once(inputs, source)
            if ref is not None:
                return self._refs(ref, passed)
            self._wake_up_for(source)
            began = _core.monotonic_ns()
            await wait_until(
                functools.partial(_either, self._may_submit, source), self.room_blockers
            )
            self.recording.own.note_room(self.gate.submitted, began, False)

    def _source(self, seconds: float | None) -> SubmittingGraph | Execution:
        if seconds is None:
            return self
        return Execution(self, _core.monotonic_ns() + int(seconds * 1e9), seconds)

    def _execute(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        patience: Patience,
        source: SubmittingGraph | Execution,
    ) -> Any:
        timeout = patience.timeout
        self._check_session()
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
                with self._process.lanes.waiting(self.room_blockers, True) as wait:
                    wait_patiently(
                        self._process.inbox,
                        lambda: self._may_submit() or _too_late(source),
                        patience,
                        lambda: (
                            f"room for another execution of {self.name} (depth {self.plan.depth})"
                        ),
                        self.doing,
                        wait,
                    )
                self.recording.own.note_room(self.gate.submitted, began, True)
        finally:
            self._lock.release()

    def _wait_for_argument(
        self, ref: Ref, patience: Patience, source: SubmittingGraph | Execution
    ) -> None:
        self._check_time(source)
        self._wake_up_for(source)
        with self._process.lanes.waiting(functools.partial(blockers_of, ref), True) as wait:
            wait_patiently(
                self._process.inbox,
                functools.partial(_either, ref.done, source),
                patience,
                lambda: f"{ref!r}, an argument of {self.name}",
                lambda: "it is not done",
                wait,
            )

    def _wake_up_for(self, source: SubmittingGraph | Execution) -> None:
        """This thread is about to sleep on the bell, which must ring at the deadline."""
        if isinstance(source, Execution):
            self.alarm.add(source)

    def _submit_once(
        self, inputs: tuple[Any, ...], source: SubmittingGraph | Execution
    ) -> GraphRef | None:
        if not self._lock.acquire(False):
            return None
        try:
            return self._submit_inputs(inputs, source)
        finally:
            self._lock.release()

    def _submit_inputs(
        self, inputs: tuple[Any, ...], source: SubmittingGraph | Execution
    ) -> GraphRef | None:
        while True:
            if self._closed_or_failed():
                raise self._why().with_traceback(None)
            ref = self._submit_now(inputs, source)
            # Otherwise a death, of this graph or of another, keeps the gate shut.
            if ref is not None or self._process.board.deaths == self.gate.deaths:
                return ref

    def _submit_now(
        self, inputs: tuple[Any, ...], source: SubmittingGraph | Execution
    ) -> GraphRef | None:
        deadline = source.deadline
        if deadline:
            assert isinstance(source, Execution)
            if not self.gate.has_room:
                self._check_time(source)
                return None
            self._take_words(self.gate.submitted, source)
        try:
            if len(inputs) == 1:
                return self._start(inputs[0], source, self._ref_type, deadline)
            number = self.gate.submit_many(inputs, deadline)
        except SerializationError as error:
            raise blame_input(error, self.plan, self.name, inputs) from error.__cause__
        return self._ref_type(source, number) if number >= 0 else None

    def _check_session(self) -> None:
        if type(self._closed) is SessionEndedError:
            raise ending.ended()

    def _check_time(self, source: SubmittingGraph | Execution) -> None:
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
            return first
        return self._results.arrange(first._with_siblings(self._outputs), passed)


def _too_late(source: SubmittingGraph | Execution) -> bool:
    return bool(source.deadline) and _core.monotonic_ns() >= source.deadline


def _either(ready: Callable[[], bool], source: SubmittingGraph | Execution) -> bool:
    return ready() or _too_late(source)


def _shorter(timeout: float | None, source: SubmittingGraph | Execution) -> float:
    """The time that a lock is waited for; -1: any."""
    if not source.deadline:
        return -1 if timeout is None else timeout
    left = max(source.deadline - _core.monotonic_ns(), 0) / 1e9
    return left if timeout is None else min(left, timeout)
