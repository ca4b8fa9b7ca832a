"""The source of results for the refs of a graph over processes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

from conveyor import _core
from conveyor.exceptions import ArenaFullError, SessionEndedError
from conveyor.graph.executor import Epoch, Executor
from conveyor.graph.lifecycle import GraphInfo
from conveyor.graph.results import Results
from conveyor.graph.status import RingProgress, replace_rings
from conveyor.graph.telemetry import BRIEF_TIME_LIMIT, RemoteStatus
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.refs.ref import EMPTY, Ref, cancelled_error, final
from conveyor.refs.together import get_or_wait
from conveyor.runtime import ending
from conveyor.runtime.deadlock import OLD, Wait, sooner
from conveyor.runtime.wait_graph import Again, Blockers, steps_of
from conveyor.runtime.waiting import TimeLimit

#: (actor, what it is about to make, of which execution)
Holder = tuple[int, str, int]


def holder_among(
    progress: RingProgress,
    remote_status: RemoteStatus,
    own: str,
    hosts: dict[int, str],
    number: int,
    edge: int,
) -> Holder | None:
    """Return the actor that has to do something before ``edge`` is published for that execution; ``None``: no
    actor, or it is not known. ``progress``: as the node called ``own`` knows it; ``hosts``: the nodes of all
    actors."""
    for _ in progress.plan.edges:  # a chain is no longer
        writer = progress.plan.edges[edge].writer
        if writer == EXECUTOR:
            return None
        if hosts.get(writer, own) != own and writer not in remote_status.rings:
            return None
        there = replace_rings(progress, remote_status.rings.get(writer))
        if there.rings[edge][0] > number - progress.first:
            return None  # it is on its way
        at, wait = there.at(writer)
        if wait is None:
            return writer, progress.plan.edges[edge].source, at
        edge, number = wait.edge, wait.execution
    return None


class RemoteBlockers:
    """Blockers of executions of one graph over several nodes, for the waits of its executor, and of processes
    that ask the executor."""

    def __init__(self, executor: Executor, number: int) -> None:
        self._executor = executor
        self._number = number
        # Any thread may ask; reentrant, since a signal handler may, too. It guards all that follows.
        self._lock = threading.RLock()
        # The last question of any wait, with the epoch, and the one for which nodes are asked just now.
        self._wanted: tuple[int, Epoch] | None = None
        self._under_way: tuple[int, Epoch] | None = None
        # The last question that they have answered, with the epoch and the answer.
        self._answered = -1
        self._epoch: Epoch | None = None
        self._other_nodes: RemoteStatus | None = None
        # By execution, when it was first asked about.
        self._since: dict[int, float] = {}
        # Callbacks for answers, with their questions.
        self._callbacks: list[tuple[int, Again]] = []

    def holder(
        self,
        epoch: Epoch,
        progress: RingProgress,
        number: int,
        edges: Sequence[int],
        question: int,
        again: Again | None = None,
    ) -> tuple[Holder | None, bool]:
        """Return the actor that blocks execution ``number``, and whether that is known already; if not,
        ``again`` is called later. A young execution counts as blocked by nobody: nodes are not asked about an
        execution that will be over soon."""
        edge = next((e for e in edges if progress.rings[e][0] <= number - progress.first), None)
        if edge is None or not self._is_old(number, epoch):
            return None, True
        with self._lock:
            known = self._answered >= question and self._epoch is epoch
            remote_status = self._other_nodes
            if not known:
                self._want(question, epoch)
                if again is not None:
                    self._callbacks.append((question, again))
        if not known:
            self._ask()
            return None, False
        if remote_status is None:
            return None, True
        own = epoch.hosts[EXECUTOR]
        return holder_among(progress, remote_status, own, dict(epoch.hosts), number, edge), True

    def _is_old(self, number: int, epoch: Epoch) -> bool:
        now = _core.monotonic()
        with self._lock:
            if number not in self._since:
                completed = epoch.window.completed
                self._since = {n: at for n, at in self._since.items() if n >= completed}
            return now - self._since.setdefault(number, now) >= OLD

    def _want(self, question: int, epoch: Epoch) -> None:
        """Have nodes asked after this. One look serves all questions until then. With the lock."""
        for begun in (self._under_way, self._wanted):
            if begun is not None and begun[0] >= question and begun[1] is epoch:
                return
        self._wanted = question, epoch

    def _ask(self) -> None:
        """Begin the look that is wanted, if none is under way: otherwise its end begins the next one."""
        with self._lock:
            if self._wanted is None or self._under_way is not None:
                return
            self._under_way, self._wanted = self._wanted, None
        try:
            self._executor.remote_later(self._number, self._looked)
        except Exception as error:  # the session ends, or the system refuses a thread
            self._looked(error)

    def _looked(self, remote_status: RemoteStatus | Exception) -> None:
        with self._lock:
            assert self._under_way is not None
            question, self._epoch = self._under_way
            self._under_way = None
            self._answered = max(question, self._answered)
            self._other_nodes = remote_status if isinstance(remote_status, RemoteStatus) else None
            due = [again for of, again in self._callbacks if of <= question]
            self._callbacks = [(of, again) for of, again in self._callbacks if of > question]
        for again in due:
            again()
        self._executor.process.notify()
        self._ask()


#: How long a wait may last before it is worth preparing to log and describe it.
_FIRST_LOOK = 0.005


def execution_of(graph: str, ref: Ref) -> str:
    """Return in words the execution of ``graph`` that ``ref`` belongs to."""
    number = f"execution {ref._number}" if ref._number >= 0 else "an execution that was not sent"
    return f"{graph}, {number}"


def describe_result(graph: str, plan: Plan, results: Results, ref: Ref) -> str:
    """Return in words which result of ``graph`` the ref stands for."""
    position = results.position(ref._reader)
    output = "" if position is None else f", output {position}"
    source = plan.edges[results.edges[ref._reader]].source
    return f"{execution_of(graph, ref)}{output} (from {source})"


class GraphSource:
    """The source of the refs of executions that have no deadline; see ``refs.ref.Source``."""

    #: On the monotonic clock; 0: none. An ``Execution`` has one.
    deadline = 0

    def __init__(self, graph_info: GraphInfo, results: Results, executor: Executor) -> None:
        self.graph_info = graph_info
        self.name = graph_info.name
        self.plan = graph_info.plan
        self.cancel_with_await = graph_info.config.cancel_with_await
        self.get_timeout = graph_info.config.get_timeout
        self.alarm = executor.process.alarm
        self._lifecycle = graph_info.lifecycle
        self._results = results
        self._executor = executor
        self._process = executor.process
        self._remote_blockers = RemoteBlockers(executor, graph_info.number)

    @property
    def window(self) -> _core.InFlightWindow:
        """The window of the present epoch, which gives the results of executions that begin now."""
        return self._lifecycle.epoch.window

    # Waiting

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        window = ref._window
        value = window.get(ref, 0.0 if timeout == 0 else _FIRST_LOOK)
        if value is not EMPTY:
            return value
        time_limit = TimeLimit(timeout)
        ask = functools.partial(self.blockers, ref)
        with self._process.wait_registry.waiting(ask, True, time_limit.bounded) as wait:
            return self._wait(ref, time_limit, wait)

    def _wait(self, ref: Ref, time_limit: TimeLimit, wait: Wait | None) -> Any:
        window, inbox, lifecycle = ref._window, self._process.inbox, self._lifecycle
        while ref._outcome is EMPTY:
            seen, requested = inbox.count, inbox.requested
            deaths = self._process.process_table.deaths
            if wait is not None and wait.serve is not None:
                wait.serve()
            # In this order: a restart notes the past of its former epoch, and is not failed afterwards.
            over = lifecycle.closed_or_failed()
            ended = lifecycle.past_error(ref._number)
            if over or ended is not None:
                value = window.take(ref._number, ref._reader)  # what had come before
                if value is not EMPTY:
                    return value
                # It may still come, from a living actor, and would be kept as long as the graph is held.
                window.drop(ref._number, ref._reader)
                raise final(ended or lifecycle.past_error(ref._number) or lifecycle.why())
            step = time_limit.step()
            if wait is not None:
                step = sooner(step, wait.look(requested))
            value = get_or_wait(ref, inbox, seen, step, deaths, wait is not None)
            if value is not EMPTY:
                return value
            time_limit.check(lambda: self.describe(ref), self.doing)
        return EMPTY

    def is_ready(self, ref: Ref) -> bool:
        return ref._window.ready(ref._number, ref._reader) or self._is_lost(ref)

    def has_failed(self, ref: Ref) -> bool:
        window, number = ref._window, ref._number
        if window.ready(number, ref._reader):
            return window.failed(number, ref._reader)
        return self._is_lost(ref)

    def _is_lost(self, ref: Ref) -> bool:
        """Return whether a result that has not come will not come."""
        lifecycle = self._lifecycle
        # In this order: see `_wait`.
        return lifecycle.closed_or_failed() or lifecycle.past_error(ref._number) is not None

    # Who is waited for

    def blockers(self, ref: Ref, question: int, again: Again | None = None) -> Blockers | None:
        if ref._number < self._lifecycle.epoch.first:
            return ()
        return self._held_up(ref._number, [self._results.edges[ref._reader]], question, again)

    def capacity_blockers(self, question: int, again: Again | None = None) -> Blockers | None:
        """Return the processes that have to do something before there is room for another execution."""
        window = self.window
        if window.submitted - window.completed < self.plan.depth:
            return ()
        # The oldest execution has to end.
        return self._held_up(window.completed, self._results.edges, question, again)

    def _held_up(
        self, number: int, edges: Sequence[int], question: int, again: Again | None
    ) -> Blockers | None:
        epoch = self._lifecycle.epoch
        progress = RingProgress.read(self.plan, epoch.segment, epoch.offsets, epoch.first)
        if epoch.hosts:
            holder, known = self._remote_blockers.holder(
                epoch, progress, number, edges, question, again
            )
            if not known:
                return None
        else:
            holder = progress.holder(number, edges)
        if holder is None:
            return ()
        actor, source, at = holder
        text = f"{source} of {self.name} (execution {at})"
        return ((epoch.workers[actor].slot, steps_of(self.graph_info.number), text),)

    # Ending early

    def cancel(self, ref: Ref) -> bool:
        self.end(ref._number, ref._siblings(), cancelled_error(self.execution(ref)))
        return True

    def end(self, number: int, refs: Sequence[Ref], error: BaseException) -> None:
        """End execution ``number``, for which nobody waits any more. ``error`` is the outcome of ``refs``,
        which are all that the execution has; tasks that have not begun are skipped."""
        epoch = self._lifecycle.epoch
        epoch.limits.cancel(number)
        for ref in refs:
            if ref._outcome is EMPTY:
                try:
                    ref._window.drop_cancelled(number, ref._reader)
                finally:
                    if ref._outcome is EMPTY:  # another thread may be getting it
                        ref._fail(error)
        self._process.notify()
        for worker, bit in zip(epoch.workers, epoch.bits, strict=True):
            if worker.alive:  # a coroutine may be running there
                self._process.process_table.notify(worker.slot, bit)

    def why_not_run(self, ref: Ref, overdue: bool) -> BaseException:
        if type(self._lifecycle.closed) is SessionEndedError:  # so it was cancelled
            return ending.error()
        return cancelled_error(self.execution(ref))

    def report(self, number: int) -> tuple[int, list[int]]:
        """Return the task that execution ``number``, which has a deadline, has skipped first, and the tasks
        that have run."""
        return self._lifecycle.epoch.limits.report(number)

    # In words

    def execution(self, ref: Ref) -> str:
        """Return in words the execution that ``ref`` belongs to."""
        return execution_of(self.name, ref)

    def describe(self, ref: Ref) -> str:
        return describe_result(self.name, self.plan, self._results, ref)

    def doing(self) -> str:
        """Return in words what each actor of the graph is doing now."""
        return self.graph_info.status(time_limit=BRIEF_TIME_LIMIT).summary()

    # In debug mode

    def note_got(self, ref: Ref) -> None:
        """Note that the program has got ``ref``."""
        edge = self._results.edges[ref._reader]
        self._executor.origins().note(self.graph_info.number, edge, ref._number)

    def explain_held(self, error: ArenaFullError) -> str:
        """Say where the program got the results that fill an arena."""
        return self._executor.origins().explain(
            error, self._process.process_table.name(self._process.slot)
        )
