"""A compiled graph over processes, as whoever executes it holds it: submit, wait, tear down."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

from conveyor import _core
from conveyor.config import Config
from conveyor.exceptions import (
    ActorDiedError,
    ActorRestartedError,
    ArenaFullError,
    ConveyorError,
    GraphTornDownError,
    SessionEndedError,
)
from conveyor.plan.model import DRIVER, Plan
from conveyor.runtime import ending
from conveyor.runtime.graph import recording
from conveyor.runtime.graph.arguments import takes_parts
from conveyor.runtime.graph.epoch import Epoch
from conveyor.runtime.graph.execution import Execution
from conveyor.runtime.graph.hosting import GraphHost, Member, first_death
from conveyor.runtime.graph.results import GraphRef, Results
from conveyor.runtime.graph.status import GraphState, GraphStatus, Progress, graph_status
from conveyor.runtime.graph.submission import MOVED_REFS, SubmittingGraph, look_closer
from conveyor.runtime.refs.ref import EMPTY, Ref, cancelled_error, final
from conveyor.runtime.refs.together import get_or_wait
from conveyor.runtime.waiting.deadlock import Wait, sooner
from conveyor.runtime.waiting.patience import Patience
from conveyor.runtime.waiting.works import Blockers, steps_of


def _debug_ref() -> type[GraphRef]:
    from conveyor.runtime.graph.gots import DebugRef  # few programs need it

    return DebugRef


def _refuse(
    _value: Any, source: ProcessGraph | Execution, _type: type[GraphRef], _deadline: int = 0
) -> NoReturn:
    # Not a method: the graph would refer to itself, and its channels would stay until a collection.
    graph = source.graph if isinstance(source, Execution) else source
    raise graph._why().with_traceback(None)


class ProcessGraph(SubmittingGraph):
    """On actors that are processes."""

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
            self._use(Epoch(plan, config, self.name, laid, process, 0, MOVED_REFS))
        except BaseException:
            host.unlay(laid.number)
            raise
        process.limit_spin(laid.number, config.spin_us)
        self._ref_type = _debug_ref() if config.debug else GraphRef
        self._plain = plan.whole_input and plan.shape is None and config.deadline is None
        self._unlimited = (
            config.deadline is None
            and config.submit_timeout is None
            and not {"timeout", "deadline"}.intersection(plan.keywords)
        )
        self._single_output = self._results.single
        self._takes_parts = takes_parts(plan)
        self._outputs = len(self._results.edges)
        self._finalizer = weakref.finalize(self, host.drop, laid.number)
        self._finalizer.atexit = False
        host.graphs.add(self)

    def _use(self, epoch: Epoch) -> None:
        """Execute over these channels from now on."""
        self._epoch = epoch
        self.limits = epoch.limits
        self._timed = {}
        self.recording = epoch.recording
        self._results.streams = epoch.streams
        self.gate = epoch.gate
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
            epoch = Epoch(self.plan, self.config, self.name, laid, self._process, first, MOVED_REFS)
            with self._lock, self._failing:
                if self._closed is not None:  # meanwhile: what was laid goes with the rest
                    raise self._closed.with_traceback(None)
                self._epoch.leave()
                self._past.append((first, _as_past(cause)))
                del self._past[:-_PAST_KEPT]
                self._use(epoch)
                self._failure = None

    def _restart_if_possible(self) -> None:
        """Before an execution: a graph whose dead actors come back by themselves does so as well, also if
        nobody has noticed so far that they are dead."""
        if (
            self._closed_or_failed()
            and self._closed is None
            and self._host.comes_back(self._number)
        ):
            self.restart()

    # Waiting

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        gate = ref._gate
        value = gate.get(ref._number, ref._reader, 0.0 if timeout == 0 else _FIRST_LOOK)
        if value is not EMPTY:
            return value
        patience = Patience(timeout)
        with self._process.lanes.waiting(functools.partial(self.blockers, ref), True) as wait:
            return self._wait(ref, patience, wait)

    def _wait(self, ref: Ref, patience: Patience, wait: Wait | None) -> Any:
        gate, inbox = ref._gate, self._process.inbox
        while ref._outcome is EMPTY:
            seen, asked = inbox.count, inbox.asked
            deaths = self._process.board.deaths
            if wait is not None and wait.serve is not None:
                wait.serve()
            ended = self._past_error(ref)
            if ended is not None or self._closed_or_failed():
                value = gate.take(ref._number, ref._reader)  # what had come before
                if value is not EMPTY:
                    return value
                raise final(ended or self._past_error(ref) or self._why())
            step = patience.step()
            if wait is not None:
                step = sooner(step, wait.look(asked))
            value = get_or_wait(ref, inbox, seen, step, deaths, wait is not None)
            if value is not EMPTY:
                return value
            patience.check(lambda: self.describe(ref), self.doing)
        return EMPTY

    def blockers(self, ref: Ref, _question: int = 0) -> Blockers:
        if ref._number < self._epoch.first:
            return ()
        return self._held_up(ref._number, [self._results.edges[ref._reader]])

    def room_blockers(self, _question: int = 0) -> Blockers:
        if self.gate.submitted - self.gate.completed < self.plan.depth:
            return ()
        # The oldest execution has to end.
        return self._held_up(self.gate.completed, self._results.edges)

    def _held_up(self, number: int, edges: Sequence[int]) -> Blockers:
        epoch = self._epoch
        progress = Progress.read(self.plan, epoch.segment, epoch.offsets, epoch.first)
        holder = progress.holder(number, edges)
        if holder is None:
            return ()
        actor, source, at = holder
        text = f"{source} of {self.name} (execution {at})"
        return ((epoch.members[actor].slot, steps_of(self._number), text),)

    def is_ready(self, ref: Ref) -> bool:
        return (
            ref._gate.ready(ref._number, ref._reader)
            or self._past_error(ref) is not None
            or self._closed_or_failed()
        )

    def has_failed(self, ref: Ref) -> bool:
        gate, number = ref._gate, ref._number
        if gate.ready(number, ref._reader):
            return gate.failed(number, ref._reader)
        return self._past_error(ref) is not None or self._closed_or_failed()

    def _past_error(self, ref: Ref) -> ConveyorError | None:
        """Why the ref's execution has failed, if it was under way when the graph was restarted."""
        if ref._number >= self._epoch.first or ref._number < 0:
            return None
        return next((error for end, error in self._past if ref._number < end), None)

    def cancel(self, ref: Ref) -> bool:
        self.end(ref._number, ref._siblings(), cancelled_error(self.execution(ref)))
        return True

    def stopped(self, ref: Ref, overdue: bool) -> BaseException:
        if type(self._closed) is SessionEndedError:  # so it was cancelled
            return ending.error()
        return super().stopped(ref, overdue)

    def end(self, number: int, refs: Sequence[Ref], error: BaseException) -> None:
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
        if deaths == epoch.gate.deaths:
            return False
        dead = first_death(epoch.members)
        if dead is None:
            epoch.gate.deaths = deaths
            return False
        failure = dead.death(self._name_node)
        with self._failing:
            # Not of a graph that has been restarted meanwhile.
            if epoch is self._epoch and self._failure is None:
                self._failure = failure
                self._start = look_closer
        return self._failure is not None

    def _why(self) -> ConveyorError:
        error = self._closed or self._failure
        assert error is not None
        return ending.error() if type(error) is SessionEndedError else error

    def label(self, graph: int, node: int) -> str | None:
        return self.plan.tasks[node].label if graph == self._number else None

    def note_got(self, ref: Ref) -> None:
        edge = self._results.edges[ref._reader]
        self._host.gots().note(self._number, edge, ref._number)

    def explain_held(self, error: ArenaFullError) -> str:
        return self._host.gots().explain(error, self._process.board.name(self._process.slot))

    def _name_node(self, graph: int, node: int) -> str | None:
        return self.label(graph, node) or self._host.label(graph, node)

    def doing(self) -> str:
        """What each actor of the graph is doing now, in words."""
        return self.status().summary()

    def status(self, stacks: bool = False) -> GraphStatus:
        failed = self._closed_or_failed()
        state: GraphState = "torn down" if self._closed else "failed" if failed else "ready"
        error = self._closed or self._failure
        return graph_status(
            self.name,
            state,
            error,
            self.plan,
            self._epoch,
            self._process.board,
            self._results.edges,
            self._name_node,
            stacks,
        )

    # What it has noted

    def progress(self) -> recording.Progress:
        gate = self.gate
        gate.count_completed()
        board = self._process.board
        arenas = {DRIVER: board.memory(self._process.slot)}
        for info, member in zip(self.plan.actors, self._epoch.members, strict=True):
            arenas[info.index] = board.memory(member.slot) if member.alive else 0
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
            try:
                self._epoch.leave()
            finally:  # Ctrl-C comes once, and the actors are to be told all the same
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
        self._process.arena.give_back_soon()  # what its inputs took
        self._host.graphs.discard(self)  # until now it names what its actors run

    def close(self, error: ConveyorError) -> bool:
        """No more executions, and whoever waits gets ``error``. False if it was closed before."""
        with self._failing:
            if self._closed is not None:
                return False
            self._closed = error
            self._start = _refuse
        # Other threads may wait for a result that will not come, or for room with the lock held.
        self.gate.closed = True
        self._process.board.ring(self._process.slot, _core.ATTENTION_BIT)
        if type(error) is SessionEndedError:
            # What the actors have not begun is not begun, so that they can end.
            for number in range(self.gate.completed, self.gate.submitted):
                self.limits.cancel(number)
            # Who comes again is told, or kept, before it takes the lock.
            self._start = look_closer
            self._plain = self._unlimited = False
        else:
            with self._lock:  # after whoever was submitting just now
                pass
        return True

    def orphan(self, error: ConveyorError) -> None:
        """In a forked child: the graph is the parent's. Takes no lock."""
        self._closed = error
        self._start = _refuse


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
