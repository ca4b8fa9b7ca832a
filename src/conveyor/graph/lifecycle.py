"""Lifecycle of a graph over processes: deaths, restarts, and its end."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from conveyor import _core
from conveyor.codec import completed, copy_to_raise
from conveyor.config import Config
from conveyor.exceptions import (
    ActorDiedError,
    ActorRestartedError,
    ConveyorError,
    DeadlockError,
    GraphTornDownError,
    SessionEndedError,
)
from conveyor.graph.executor import Epoch, Executor, GraphWorker, first_death
from conveyor.graph.status import NOTHING_REMOTE, GraphState, GraphStatus, graph_status
from conveyor.graph.telemetry import (
    STACKS,
    TIME_LIMIT,
    Progress,
    Question,
    Recording,
    RemoteStatus,
    Track,
    result_edges,
)
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.refs.ref import Ref
from conveyor.runtime import ending
from conveyor.runtime.waiting import TimeLimit


class GraphInfo:
    """View of a graph over processes. It reads shared memory, and asks the actors nothing; for remote actors
    it asks their nodes.

    The executor of a graph, and each of its refs, has it, and it lasts as long as any of them.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.number = lifecycle.number
        self.name = lifecycle.name
        self.plan = lifecycle.plan
        self.config = lifecycle.config
        self._process_table = lifecycle.process.process_table
        self._own_slot = lifecycle.process.slot

    @property
    def recording(self) -> Recording:
        """The records that the graph's processes keep about themselves."""
        return self.lifecycle.epoch.recording

    @property
    def state(self) -> GraphState:
        """The state of the graph, as far as it has been noticed."""
        return self.lifecycle.state

    @property
    def is_teardown(self) -> bool:
        return self.lifecycle.is_teardown

    def check_open(self) -> None:
        """Raise the error that has ended the graph, if it was closed."""
        self.lifecycle.check_open()

    def restart(self) -> None:
        self.lifecycle.restart()

    @property
    def hosts(self) -> dict[int, str]:
        """In words, the nodes of the actors and the executor, if there are several."""
        return self.lifecycle.epoch.hosts

    def progress(self) -> Progress:
        """Return how far the graph's executions are."""
        epoch, process_table = self.lifecycle.epoch, self._process_table
        window = epoch.window
        window.count_completed()
        arenas = {EXECUTOR: process_table.memory(self._own_slot)}
        for info, worker in zip(self.plan.actors, epoch.workers, strict=True):
            arenas[info.index] = process_table.memory(worker.slot) if worker.alive else 0
        completed = window.completed  # first: what is submitted meanwhile is not completed
        return Progress(window.submitted, completed, window.stashed, window.stashed_bytes, arenas)

    def tracks(self) -> list[Track]:
        """Return the graph's processes, the executing one first."""
        tracks = [Track(EXECUTOR, self._process_table.name(self._own_slot), os.getpid(), None)]
        for info, worker in zip(self.plan.actors, self.lifecycle.epoch.workers, strict=True):
            tracks.append(Track(info.index, info.name, worker.pid, worker.pid))
        return tracks

    def remote_status(self, question: Question, time_limit: float) -> RemoteStatus:
        """Return the status of the graph's actors on other nodes, as these report it within ``time_limit``
        seconds."""
        hosts = self.hosts
        # A forked child has neither Ray's connections nor the pump's.
        if not hosts or self.lifecycle.process.inbox.inherited:
            return NOTHING_REMOTE
        return self.lifecycle.remote_status(question, time_limit)

    def status(self, stacks: bool = False, time_limit: float = TIME_LIMIT) -> GraphStatus:
        """Return the graph's status. ``time_limit``: seconds that other nodes have to answer."""
        self.lifecycle.closed_or_failed()  # it may not have been noticed
        return graph_status(
            self.name,
            self.state,
            self.lifecycle.closed or self.lifecycle.failure,
            self.plan,
            self.lifecycle.epoch,
            self.lifecycle.process,
            result_edges(self.plan),
            self.lifecycle.name_node,
            stacks,
            self.remote_status(Question(stacks=stacks), STACKS if stacks else time_limit),
        )


#: Number of restarts whose reasons are kept for refs of earlier executions.
_MAX_PAST = 100


def _look_closer(*_: object) -> None:
    """Return None, in place of a window's ``start``: the slow path of submission says why it is full."""


def _for_users(error: ConveyorError) -> ConveyorError:
    """Return the error for users of a graph that ``error`` has closed, or made fail."""
    return ending.error() if type(error) is SessionEndedError else error


def _refuse(error: ConveyorError, *_: object) -> NoReturn:
    # Not a method: the lifecycle would refer to itself, and its channels would stay until a collection.
    raise copy_to_raise(_for_users(error))


class Lifecycle:
    """Holder of the epoch over which a graph is executed: replaces it at a restart, and closes it at the end.

    Nothing is reported to it. Submitters and waiters ask it, and then it looks at the process table's count
    of deaths. Its lock makes submissions one after the other.
    """

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        config: Config,
        number: int,
        name: str,
        make_epoch: Callable[..., Epoch],
        first: Epoch,
    ) -> None:
        """``make_epoch(deployed, first)`` opens the channels of a graph that was deployed again."""
        self.plan = plan
        self.config = config
        self.number = number
        self.name = name
        self.process = executor.process
        #: Held by the thread that submits.
        self.lock = threading.Lock()
        #: The thread that holds the lock. The lock is only taken through this.
        self.holder = _core.Holder(self.lock)
        #: The one thing that the hot path looks at.
        self.admission = _core.Admission()
        #: Why there will be no more executions.
        self.closed: ConveyorError | None = None
        #: Why there are none until a restart.
        self._failure: ConveyorError | None = None
        self._executor = executor
        self._make_epoch = make_epoch
        self._ending = threading.RLock()
        self._restarting = threading.Lock()
        self._restarter = _core.Holder(self._restarting)
        self._failing = threading.Lock()  # to be taken last
        self._past: list[tuple[int, ConveyorError]] = []
        self._unloading: list[tuple[GraphWorker, Ref]] = []
        self._use(first)
        self._finalizer = weakref.finalize(self, executor.drop, number)
        self._finalizer.atexit = False

    def _use(self, epoch: Epoch) -> None:
        """Execute over these channels from now on."""
        self.epoch = epoch
        self.admission.open(epoch.window)

    # What has happened

    def closed_or_failed(self) -> bool:
        """Return whether the graph cannot be executed as it is. Notices deaths."""
        if self.closed is not None or self._failure is not None:
            return True
        epoch, deaths = self.epoch, self.process.process_table.deaths
        if deaths == epoch.window.deaths:
            return False
        dead = first_death(epoch.workers)
        if dead is None:
            epoch.window.deaths = deaths
            return False
        failure = dead.death(self.name_node)
        with self._failing:
            # Not of a graph that has been restarted meanwhile.
            if epoch is self.epoch and self._failure is None:
                self.failure = failure
                self.admission.shut(_look_closer)
        return self._failure is not None

    @property
    def failure(self) -> ConveyorError | None:
        """Why there are no executions until a restart, as far as it is known by now."""
        return self._failure and completed(self._failure)

    @failure.setter
    def failure(self, failure: ConveyorError | None) -> None:
        self._failure = failure

    def why(self) -> ConveyorError:
        """Return the error for users of a graph that is closed or has failed."""
        error = self.closed or self.failure
        assert error is not None
        return _for_users(error)

    def past_error(self, number: int) -> ConveyorError | None:
        """Return why execution ``number`` has failed, if it was under way when the graph was restarted."""
        if number >= self.epoch.first or number < 0:
            return None
        return next((error for end, error in self._past if number < end), None)

    @property
    def is_teardown(self) -> bool:
        return self.closed is not None

    @property
    def state(self) -> GraphState:
        """The state of the graph, as far as it has been noticed."""
        return "torn down" if self.closed else "failed" if self.failure else "ready"

    def check_open(self) -> None:
        """Raise the error that has ended the graph, if it was closed."""
        if self.closed is not None:
            raise copy_to_raise(self.closed)

    def check_block(self) -> None:
        """Accept a ``with`` block: any process tears down the graphs that it has compiled."""

    # Labels

    def label(self, graph: int, node: int) -> str | None:
        """Return the name of task ``node``; ``None`` if ``graph`` is another one."""
        return self.plan.tasks[node].label if graph == self.number else None

    def name_node(self, graph: int, node: int) -> str | None:
        """Return the name of a task of this graph, or of another one that this process knows."""
        return self.label(graph, node) or self._executor.label(graph, node)

    def remote_status(self, question: Question, time_limit: float) -> RemoteStatus:
        """Return the status of the graph's actors on other nodes, as these report it within ``time_limit``
        seconds."""
        return self._executor.remote_status(self.number, question, time_limit)

    def check_not_submitting(self) -> None:
        """Raise ``DeadlockError`` if this very thread is in the middle of a submission, which it would wait
        for."""
        if self.holder.mine():
            raise DeadlockError(
                f"{self.name} is being executed by this very thread, which would wait for itself: code that "
                "runs while an argument is encoded, or a signal handler, cannot execute, restart or tear "
                "down the same graph. Do it before or after that execute()"
            )

    # Restarts

    def restart(self, time_limit: TimeLimit | None = None) -> None:
        """Bring the graph back. Raises ``WaitTimeoutError`` if its actors are not back in time; their restart
        goes on."""
        time_limit = time_limit or TimeLimit(None)
        if not self.closed_or_failed():
            self._executor.end_unmade(self.number)
        if not self.closed_or_failed():
            return
        self.check_not_submitting()
        if self._restarter.mine():
            raise DeadlockError(
                f"{self.name} is being restarted by this very thread, which would wait for itself: a signal "
                "handler cannot execute or restart the graph that it has interrupted the restart of"
            )
        seconds = time_limit.left()
        seconds = -1.0 if seconds is None else seconds
        with _core.TimedLock(self._restarting, seconds, self._restarter) as taken:
            if not taken:
                time_limit.check(
                    lambda: f"the restart of {self.name}", lambda: "another thread does it"
                )
            if not self.closed_or_failed():
                return
            cause = self.failure
            if self.closed is not None or cause is None:
                raise copy_to_raise(self.why())
            with self.holder:  # after whoever was submitting just now
                left = self.epoch
                first = left.window.submitted
            deployed = self._executor.redeploy(self.number, first, time_limit)
            epoch = self._make_epoch(deployed, first)
            with self.holder, self._failing:
                if self.closed is not None:  # meanwhile: what was deployed goes with the rest
                    raise copy_to_raise(self.closed)
                self._past.append((first, _as_past(cause)))
                del self._past[:-_MAX_PAST]
                self._use(epoch)
                self.failure = None
        # Without a lock: this decodes results that have come, which runs code of the user's, which may use
        # the graph.
        left.leave()

    def restart_if_possible(self, time_limit: TimeLimit) -> None:
        """Restart the graph before an execution, if all of its dead actors come back by themselves. This also
        notices deaths."""
        if (
            self.closed_or_failed()
            and self.closed is None
            and self._executor.comes_back(self.number)
        ):
            self.restart(time_limit)

    # The end

    def teardown(self, kill_actors: bool = False) -> None:
        self.check_not_submitting()
        with self._ending:  # who comes second waits for what the first has begun
            if self.close(GraphTornDownError(f"{self.name} has been torn down")):
                try:
                    self.epoch.leave()
                finally:  # Ctrl-C comes once, and the actors are to be told all the same
                    if kill_actors:
                        self._kill_actors()
                    self._unloading = self._executor.undeploy(self.number)
                    self._finalizer.detach()  # last: it serves a caller that is interrupted before
            elif kill_actors and type(self.closed) is GraphTornDownError:
                self._kill_actors()
        # Several threads may wait here, and the next one takes over from one that was interrupted: each waits
        # for all acknowledgements.
        for worker, ack in self._unloading:
            try:
                ack.get()
            except ConveyorError:
                if worker.alive:
                    raise
        self._unloading = []
        self.process.arena.give_back_soon()  # what its inputs took

    def _kill_actors(self) -> None:
        for worker in self.epoch.workers:
            self._executor.kill(worker.id)

    def close(self, error: ConveyorError) -> bool:
        """Begin no more executions, and give all waiters ``error``. Return False if the graph was closed
        before."""
        with self._failing:
            if self.closed is not None:
                return False
            self.closed = error
            self.admission.shut(partial(_refuse, error))
        epoch = self.epoch
        # Other threads may wait for a result that will not come, or for room with the lock held.
        epoch.window.closed = True
        self.process.process_table.notify(self.process.slot, _core.ATTENTION_BIT)
        if type(error) is SessionEndedError:
            # Tasks that have not begun are skipped, so that the actors can end.
            for number in range(epoch.window.completed, epoch.window.submitted):
                epoch.limits.cancel(number)
            # Later callers get the error, or wait, when they hold no lock.
            self.admission.shut(_look_closer)
        else:
            with self.holder:  # after whoever was submitting just now
                pass
        return True

    def orphan(self, error: ConveyorError) -> None:
        """Close the graph in a forked child: it is the parent's. Takes no lock."""
        self.closed = error
        self.admission.shut(partial(_refuse, error))


def _as_past(cause: ConveyorError) -> ConveyorError:
    """Return ``cause`` as the error of executions that a restart has left behind."""
    text = f"{cause}\nthe graph has been restarted since: the execution can be tried again"
    if isinstance(cause, ActorDiedError):
        return ActorRestartedError(text, cause.actor, cause.node, cause.exit_code, cause.signal)
    return ActorRestartedError(text)
