"""Supervisor of the processes of a session's actors: starts them, watches them, ends and restarts them."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from conveyor import _core
from conveyor.calls.call import stop
from conveyor.calls.constructor import EXIT_HOOK
from conveyor.calls.links import Link
from conveyor.codec import Reader, first_line
from conveyor.driver.actors import Actor, ActorRecord, DeathWatches, Table
from conveyor.driver.bootstrap import SharedState, Startup
from conveyor.driver.process_engine import (
    GpusTakenError,
    ProcessEngine,
    RemoteNode,
    Spawned,
    Spawning,
)
from conveyor.driver.remote_processes import RemoteNodes
from conveyor.exceptions import (
    ActorDiedError,
    ActorStartError,
    ConveyorError,
    RuntimeStateError,
    WaitTimeoutError,
)
from conveyor.refs.ref import Ref
from conveyor.runtime import ending, threads
from conveyor.runtime.cleanup import Cleanup
from conveyor.runtime.process import Process
from conveyor.runtime.protocol import PID_MASK, ActorId
from conveyor.runtime.status import ActorStatus
from conveyor.runtime.uninterrupted import uninterrupted
from conveyor.runtime.waiting import TimeLimit, wait_for_flag
from conveyor.system_limits import explained
from conveyor.worker.messages import End

#: Seconds before a restart of an actor whose constructor has killed the process: doubled with each time
#: in a row, up to the second number.
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 10.0

_SESSION_ENDED = "conveyor.kill() has ended it for good"


class Restarts:
    """The supervisor's restarts. Each runs on a thread of its own, since it waits for the engine."""

    def __init__(
        self, table: Table, start: Callable[[ActorRecord, Callable[[], object]], object]
    ) -> None:
        """``start(record, pause)`` starts a process that replaces the dead ``record``. It calls ``pause``
        when the new process can be called, and before it is there."""
        self._table = table
        self._start = start
        #: Reentrant: a signal handler may end the session in the middle of a restart.
        self.lock = threading.RLock()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def follow(self, work: Callable[[], object]) -> None:
        """Do ``work``, which waits for an actor's first process, on a thread of its own."""
        with self.lock:  # which it needs to leave the set again
            self._threads.add(threads.start(self._follow, "start", work))

    def _follow(self, work: Callable[[], object]) -> None:
        try:
            work()
        finally:
            with self.lock:
                self._threads.discard(threading.current_thread())

    def decide(self, record: ActorRecord) -> None:
        """Decide whether ``record``, whose process has ended, is restarted. Called before ``cleaned_up`` is
        set."""
        with self.lock:
            if not self._closed and record.may_restart():
                record.restarting = record.comes_back = True
                record.actor.restarts += 1

    def begin(self, record: ActorRecord) -> None:
        """Begin a restart, as ``decide`` or ``revive`` has decided."""
        try:
            with self.lock:  # which it needs to leave the set again
                self._threads.add(threads.start(self._run, "restart", record))
        except Exception as error:  # no thread was left
            self._conclude(record, error)

    def revive(self, actor: ActorId, time_limit: TimeLimit | None = None) -> ActorRecord:
        """Return the actor's living process. A dead actor is restarted, whatever its ``max_restarts``; the
        restart goes on where ``time_limit`` ends.

        Raises ``ActorDiedError`` if that is not possible, or if the new process has died as well,
        ``SessionEndedError`` and ``WaitTimeoutError``.
        """
        tried = False
        while True:
            record = self.current(actor, time_limit)
            if record.alive:
                return record
            _wait_for_end(record, time_limit)
            if tried:
                if self._table.closed:  # which has ended the try
                    raise ending.error()
                raise record.death()
            with self.lock:
                if self._table.record(actor) is not record or record.under_way:
                    continue  # somebody else was faster
                self._check_possible(record)
                self._table.reserve(record)
                record.replaced.clear()
                record.succeeded.clear()
                record.restart_error = ""
                record.restarting = True
            tried = True
            self.begin(record)

    def current(self, actor: ActorId, time_limit: TimeLimit | None = None) -> ActorRecord:
        """Return the process that the actor has now; wait for the end of a start or restart under way."""
        while True:
            record = self._table.record(actor)
            if record.spawning is not None:
                doing = "its process is being started"
                wait_for_flag(record.placed, f"the start of {actor.name}", doing, time_limit)
            # In this order: a restart that was decided on just now may have been the last one.
            coming = record.cleaned_up.is_set() or record.may_restart() or record.restarting
            if record.alive or not coming:
                return record
            _wait_for_end(record, time_limit)
            if record.restarting:
                doing = "another process is being started for it"
                wait_for_flag(record.replaced, f"the restart of {actor.name}", doing, time_limit)
            if self._table.record(actor) is record:
                return record

    def callable(self, actor: ActorId) -> ActorRecord:
        """Return the actor's process, like :meth:`current`, but a new one as soon as it can be called: it may
        take long until there is a place for it."""
        while True:
            record = self._table.record(actor)
            coming = record.cleaned_up.is_set() or record.may_restart() or record.restarting
            if record.alive or not coming:
                return record
            _wait_for_end(record)
            if record.restarting:
                what, doing = f"the restart of {actor.name}", "it is about to begin"
                wait_for_flag(record.succeeded, what, doing)
                successor = record.successor
                if successor is not None and successor.alive:
                    return successor
            current = self.current(actor)
            if current is record or current.alive:
                return current

    def close(self) -> None:
        """Begin no more restarts, and fail those under way. :meth:`join` waits until they have failed."""
        with self.lock:
            self._closed = True

    def join(self) -> None:
        while True:
            with self.lock:
                thread = next(iter(self._threads), None)
            if thread is None:
                return
            thread.join()

    def _check_possible(self, record: ActorRecord) -> None:
        actor = record.actor
        why = ""
        if self._closed:
            why = "the session has been shut down"
        elif actor.ended:
            why = _SESSION_ENDED
        elif actor.stopping:
            why = "its last handle is gone"
        elif actor.constructor is None:
            why = (
                "the arguments of its constructor were too large to be kept; start it with "
                "max_restarts, so that they are"
            )
        if why:
            error = record.death()
            raise ActorDiedError(
                f"{error}\nit cannot be started again: {why}",
                error.actor,
                error.node,
                error.exit_code,
                error.signal,
            )

    def _run(self, record: ActorRecord) -> None:
        actor, failures = record.actor, record.actor.failures
        failure: Exception | None = None

        def pause() -> None:
            if failures:
                # The end of the session is the end of the actor, too.
                over = actor.over.wait(min(_FIRST_DELAY * 2 ** (failures - 1), _LONGEST_DELAY))
                self._table.check_open()
                if over:
                    raise ActorStartError(_SESSION_ENDED)

        try:
            self._start(record, pause)
        except Exception as error:
            failure = error
        finally:
            self._conclude(record, failure)
            with self.lock:
                self._threads.discard(threading.current_thread())

    def _conclude(self, record: ActorRecord, error: Exception | None = None) -> None:
        """End a restart, which has succeeded or has failed with ``error``. The error is told to all users of
        the actor."""
        if error is not None:
            record.restart_error = str(error)
        else:
            record.successor = None
        if record.actor.ended:
            record.actor.constructor = None  # as where it is killed while it lives
        self._table.give_up(record)
        record.replaced.set()
        record.succeeded.set()
        if error is not None:
            self._table.forget_actor(record)  # its last handle may be gone by now


def _wait_for_end(record: ActorRecord, time_limit: TimeLimit | None = None) -> None:
    pid = record.pid & PID_MASK
    doing = f"the end of its process (pid {pid}) is not reported yet"
    wait_for_flag(record.cleaned_up, f"the end of {record.id.name}", doing, time_limit)


#: Seconds to wait for the end of a killed process; the kernel may take its time to free the memory.
_KILLED_TIME_LIMIT = 10.0
#: Seconds to wait for one on another node, which may not be reachable.
_REMOTE_TIME_LIMIT = 2.0


class GracefulExit:
    """Orderly end of actors: they are asked to end, and killed after the grace period. ``label`` names a
    (graph, node)."""

    def __init__(
        self,
        process: Process,
        grace: float,
        kill: Callable[[ActorRecord], None],
        label: Callable[[int, int], str | None],
    ) -> None:
        self._process = process
        self.grace = grace
        self._kill = kill
        self._label = label
        self.over = False

    def hurry(self) -> None:
        """Give no process any grace from now on. The caller kills those that have been asked to end."""
        self.over = True

    def say(
        self, records: Iterable[ActorRecord], half: Callable[[], object] = lambda: None
    ) -> list[ActorRecord]:
        """Ask all at once to end, and wait until they have. Those that have not within the grace period are
        killed, and returned. ``half()`` is called if half of the period is over.

        A process that is still being started is not waited for: its starter sees that it is not wanted, and
        may be this very thread, interrupted by a signal handler that calls this.
        """
        requested = [r for r in records if r.started and not r.cleaned_up.is_set()]
        if self.grace > 0 and not self.over:
            for record in requested:
                self.ask(record)
        return self.wait(requested, half)

    def ask(self, record: ActorRecord) -> None:
        with suppress(ConveyorError):  # dead already
            record.order(End())

    def wait(
        self, requested: list[ActorRecord], half: Callable[[], object] = lambda: None
    ) -> list[ActorRecord]:
        left: list[ActorRecord] = []
        grace = 0.0 if self.over else self.grace
        end = _core.monotonic() + grace
        over = False
        try:
            if not _wait_for(requested, end - grace / 2):
                half()
                _wait_for(requested, end)
            over = True
        finally:  # also if Ctrl-C ends the grace period, and whoever has pressed it needs no warning
            left = [record for record in requested if not record.cleaned_up.is_set()]
            if over and not self.over:
                self._warn([record for record in left if record.alive])
            for record in left:
                self._kill(record)
        killed = _core.monotonic()
        _wait_for([r for r in left if r.node is not None], killed + _REMOTE_TIME_LIMIT)
        local = [r for r in left if r.node is None and not _is_attached(r)]
        if not _wait_for(local, killed + _KILLED_TIME_LIMIT):
            names = ", ".join(r.id.name for r in local if not r.cleaned_up.is_set())
            logger.warning(
                "killed, and not known to have ended after %g s: %s", _KILLED_TIME_LIMIT, names
            )
        return left

    def _warn(self, left: list[ActorRecord]) -> None:
        if self.grace == 0:
            return
        for stay, how in (
            (False, "not ended within the grace period of %g s, and killed:\n%s"),
            (True, "still at work after the grace period of %g s, and left there:\n%s"),
        ):
            actors = [record for record in left if _is_attached(record) is stay]
            if actors:
                logger.warning(how, self.grace, "\n".join(self._describe(actors)))

    def _describe(self, records: list[ActorRecord]) -> Iterator[str]:
        statuses = self._process.statuses([r.reader for r in records], self._label)
        for record, status in zip(records, statuses, strict=True):
            location = None if record.process is None else record.process.location
            known = replace(status, pid=record.pid & PID_MASK, host=location or None)
            yield f"  {known}{self._what_is_left(record, status)}"

    def _what_is_left(self, record: ActorRecord, status: ActorStatus) -> str:
        if status.state == "idle":
            if record.node is not None:
                return ": it runs no method, and its process has not ended"
            # The hook is what the page says last, also where the class has none.
            if self._process.process_table.status(record.slot)[-1] == EXIT_HOOK:
                return (
                    f": its methods and {EXIT_HOOK} are done, but its process was not: threads, atexit "
                    "handlers, finalizers, or what the interpreter does at its end"
                )
            return ": it runs no method, and has not begun its end"
        return ""


def _is_attached(record: ActorRecord) -> bool:
    return record.process is not None and record.process.attached


def _wait_for(records: list[ActorRecord], end: float) -> bool:
    """Wait until these have ended, at most until ``end`` on the monotonic clock. Return whether they have."""
    return all(record.cleaned_up.wait(max(end - _core.monotonic(), 0.0)) for record in records)


class Step(NamedTuple):
    """A step of the cleanup after a death."""

    #: Its purpose, in words.
    name: str
    #: Takes the step for one process.
    do: Callable[[ActorRecord], object]
    #: Whether it is also taken for a process that could not be started, or is left at the session's end.
    unborn: bool = False


class DeathCleanup:
    """The steps of the cleanup after a death, in order. Each is taken, whatever the ones before it have
    raised: others wait for its effect."""

    def __init__(self, *steps: Step) -> None:
        self.steps = steps

    def of(self, record: ActorRecord, *, unborn: bool = False) -> None:
        """Take the steps for ``record``, then raise the first error of theirs. ``unborn``: only the steps for
        a process that nobody has known."""
        failed: Exception | None = None
        for step in self.steps:
            if unborn and not step.unborn:
                continue
            try:
                step.do(record)
            except Exception as error:
                if failed is not None:
                    logger.error("%s: %s has failed", record.id.name, step.name, exc_info=error)
                failed = failed or error
        if failed is not None:
            raise failed


logger = logging.getLogger("conveyor")

#: A process's condition in the process table.
_ALIVE = 2
#: Seconds for a thread to note that the process it waits for has come.
_NEWS_WAIT = 1.0
#: Lines that a session logs of deaths.
_MOST_LINES = 20
_KILLED = "was killed by conveyor.kill()"
_ENDED = "was ended by conveyor.kill(graceful=True)"


class Supervisor:
    """Starts processes, restarts them, and cleans up after their deaths."""

    def __init__(
        self,
        table: Table,
        shared_state: SharedState,
        engine: ProcessEngine,
        cleanup: Cleanup,
        grace: float,
        fired: int,
        remote_nodes: RemoteNodes,
    ) -> None:
        """``fired``: an eventfd that is written to when an actor's liveness futex has fired; whoever watches
        it calls :meth:`on_liveness_futexes`."""
        self._table = table
        self._shared_state = shared_state
        self._engine = engine
        self._cleanup = cleanup
        self._remote_nodes = remote_nodes
        self._process_table = table.process_table
        self._watches = DeathWatches(self._process_table, fired)
        self._restarts = Restarts(
            table, lambda record, pause: self.start(record.actor, replaces=record, pause=pause)
        )
        self._lines = 0
        #: Requests for processes that somebody waits for.
        self._awaited: set[Spawning] = set()
        self._graceful_exit = GracefulExit(
            shared_state.process, grace, self._end_at_once, table.label
        )
        #: Called with the driver's end of a new process's request socket.
        self.on_request_socket: Callable[[ActorRecord, socket.socket], object] = _close_it
        #: Called if a process will be on another node, which passes on its requests.
        self.on_remote_start: Callable[[ActorRecord], object] = lambda record: None
        #: Called for each process that has been started, under the table's lock.
        self.on_start: Callable[[ActorRecord], object] = lambda record: None
        #: Called when half of the actors' time at the session's end is over.
        self.end_waits: Callable[[], object] = lambda: None
        #: The cleanup after the end of a process; the driver sets it.
        self.death_cleanup = DeathCleanup()

    # Starting

    def start(
        self,
        actor: Actor,
        construct: Callable[[Link], Ref] | None = None,
        replaces: ActorRecord | None = None,
        pause: Callable[[], object] = lambda: None,
        later: bool = False,
    ) -> ActorRecord:
        """Start an actor's process and set up the driver's links to it. ``construct`` sends the constructor's
        call; without it another actor does. ``replaces``: the actor's process that is dead. ``pause``: see
        :class:`Restarts`. ``later``: return when the engine has been asked for the process, though it may
        take long to come. The process can be called from then on; if it does not come, calls get the
        error."""
        self._table.check_open()
        self._cleanup.do()
        if replaces is not None:
            assert actor.constructor is not None
            construct = actor.constructor.start
        # Lists, so that an interrupted caller finds what was made before it had the result.
        entered: list[ActorRecord] = []
        startups: list[Startup] = []
        requested: list[Spawning] = []
        handed_over: list[tuple[ActorRecord, Spawning]] = []
        try:
            uninterrupted(lambda: entered.append(self._table.enter(actor, replaces)))
            (record,) = entered
            if record.unnamed is not None:
                # It ends, unless there are other handles.
                self._cleanup.soon(partial(self.release, record.unnamed))
            startups.append(
                Startup(
                    self._shared_state, record, self._graceful_exit.grace, self.on_request_socket
                )
            )
            with explained(f"start actor {record.id.name}"):
                spawned = self._spawn(record, startups[0], construct, replaces, pause)
                if not isinstance(spawned, Spawned):
                    requested.append(spawned)
                    self._awaited.add(spawned)
                    if self._table.closed:  # whoever gives them up may not have seen it
                        raise ending.error()
                    if not self._ask(spawned, actor) and later:
                        given = entered, startups, requested, handed_over
                        uninterrupted(partial(self._begin_wait, *given))
                        return record
                    spawned = spawned.wait()
                record.process = spawned
                self._shared_state.process.unplaced.discard(record.slot)
        except BaseException as error:
            for record, spawning in handed_over:
                record.actor.over.set()
                self._end_pending(record, spawning, "is not wanted any more")
            for spawning in requested:
                spawning.give_up("is not wanted any more")
            for failed in entered:
                if replaces is not None:  # it may have been called already
                    ended = actor.ended and not self._table.closed
                    failed.killed = _KILLED if ended else f"could not be started again: {error}"
                uninterrupted(partial(self._undo, failed))
                if replaces is None:
                    self._table.forget_start(failed)
            if self._table.closed and isinstance(error, ActorStartError):
                raise ending.error() from error  # which has ended the start
            raise
        finally:
            self._awaited.difference_update(requested)
            for startup in startups:
                uninterrupted(startup.close)
            for known in entered:
                known.usable.set()
        self._is_there(record)
        return record

    def _ask(self, spawning: Spawning, actor: Actor) -> bool:
        """Ask the engine for a process. Where its GPUs are taken by processes that are ending, wait for
        these."""
        time_limit = TimeLimit(_KILLED_TIME_LIMIT)
        while True:
            # Before it is asked: the GPUs of those that end meanwhile are free.
            ending = self._ending_with_gpus() if actor.options.num_gpus else []
            try:
                return spawning.ask()
            except GpusTakenError as error:
                if not ending or self._engine.on_thread():
                    raise ActorStartError(str(error)) from None
                name = ending[0].id.name
                what = f"GPUs that {name} gives back"
                try:
                    wait_for_flag(ending[0].cleaned_up, what, f"{name} is ending", time_limit)
                except WaitTimeoutError:
                    raise ActorStartError(
                        f"{error}; {name} is ending, and has not given its own back within "
                        f"{_KILLED_TIME_LIMIT:g} s"
                    ) from None

    def _ending_with_gpus(self) -> list[ActorRecord]:
        """Return the processes of this node with GPUs that are dead, or have been told to end."""
        found = [
            record
            for record in self._table
            if record.node is None
            and record.actor.options.num_gpus
            and record.process is not None
            and not record.cleaned_up.is_set()
            and (record.killed or record.actor.stopping or not record.alive)
        ]
        return sorted(found, key=lambda record: record.alive)

    def _is_there(self, record: ActorRecord) -> None:
        """Install a process that has come."""
        with self._table.lock:
            self._table.install(record)
            self.on_start(record)
            if record.actor.ended:  # while it was started
                record.killed = _KILLED
                self._engine.kill(record.pid)
            record.started = True
            early = record.exit_status
        if early is not None:
            self.on_exit(record.pid, early)

    def _begin_wait(
        self,
        entered: list[ActorRecord],
        startups: list[Startup],
        requested: list[Spawning],
        handed_over: list[tuple[ActorRecord, Spawning]],
    ) -> None:
        """Have another thread wait for the process. That thread owns the content of these lists from then on,
        as ``handed_over`` says."""
        (record,), (startup,), (spawning,) = entered, startups, requested
        record.spawning = spawning
        self._restarts.follow(partial(self._wait_for, record, spawning, startup))
        handed_over.append((record, spawning))
        for own in (entered, startups, requested):
            own.clear()
        with self._table.lock:
            if record.spawning is not None:
                self.on_start(record)

    def _wait_for(self, record: ActorRecord, spawning: Spawning, startup: Startup) -> None:
        """Wait for an actor's first process, which may have been called already."""
        try:
            with explained(f"start actor {record.id.name}"):
                record.process = spawning.wait()
            self._shared_state.process.unplaced.discard(record.slot)
        except Exception as error:
            spawning.give_up("is not wanted any more")
            with self._table.lock:
                if not record.killed:
                    record.start_error = str(error)
            self._undo(record)
            self._table.forget_actor(record)  # its last handle may be gone by now
        else:
            self._awaited.discard(spawning)  # from now on it has its time for an orderly end
            self._is_there(record)
        finally:
            self._awaited.discard(spawning)
            startup.close()
            record.spawning = None
            record.placed.set()
            record.usable.set()
        with self._table.lock:
            if record.actor.handles <= 0 and not record.actor.shared:
                self._log_start_error(record)

    def _log_start_error(self, record: ActorRecord) -> None:
        """Log why the actor could not be started, if nobody has had the error."""
        if record.start_error and not record.error_was_got:
            record.error_was_got = True
            logger.warning("%s", record.start_error)

    def _spawn(
        self,
        record: ActorRecord,
        startup: Startup,
        construct: Callable[[Link], Ref] | None,
        replaces: ActorRecord | None,
        pause: Callable[[], object],
    ) -> Spawned | Spawning:
        uninterrupted(startup.prepare)
        if self._engine.places:
            self._shared_state.process.unplaced.add(record.slot)
        uninterrupted(partial(self._watches.add, record.slot))
        if construct is not None:
            assert record.calls is not None
            # Before anybody else can call it, and before there is a process: a constructor's call that
            # cannot be sent has started nothing. Here, because encoding runs code of the user's.
            record.start = construct(record.calls)
            record.usable.set()
        if replaces is not None:
            replaces.successor = record
            replaces.succeeded.set()
        pause()
        return self._engine.spawn(
            record.id.name,
            startup.message(),
            startup.passed(),
            record.actor.options,
            partial(self._table.spawned, record),
            partial(self._prepare_remote, record, startup),
        )

    def _prepare_remote(
        self, record: ActorRecord, startup: Startup, node: RemoteNode
    ) -> tuple[Reader, bytes, list[int]]:
        message = self._remote_nodes.prepare(record, startup, node)
        self.on_remote_start(record)
        return record.reader, message, self._remote_nodes.links_of(record)

    def _undo(self, record: ActorRecord) -> None:
        """Clean up after a start that has failed, or was interrupted."""
        self._shared_state.process.unplaced.discard(record.slot)
        with self._table.lock:
            for pid, known in self._table.pids():
                if known is record:
                    self._table.forget_pid(pid)  # its end is nobody's concern
                    self._engine.kill(pid)
        self.death_cleanup.of(record, unborn=True)

    @property
    def locks(self) -> tuple[Any, ...]:
        """Locks that the supervisor's threads need for the end of a process."""
        return self._table.lock, self._restarts.lock

    # Which process an actor has

    def current(self, actor: ActorId) -> ActorRecord:
        """Return the process that the actor has now; wait while the actor is being restarted."""
        return self._restarts.current(actor)

    def callable(self, actor: ActorId) -> ActorRecord:
        """Return the process that the actor has now, or will have: that one need not be there yet, nor have a
        place."""
        return self._restarts.callable(actor)

    def nodes_of(self, actors: Sequence[ActorId]) -> tuple[int, ...]:
        """Return the numbers of the nodes of the actors' processes."""
        return tuple([self._remote_nodes.node_of(self.current(actor).slot) for actor in actors])

    def have_gpus(self, actors: Sequence[ActorId]) -> bool:
        """Return whether any of the actors was given a GPU, or, if it is attached, may have one of its own
        system's."""
        options = [self.callable(actor).actor.options for actor in actors]
        return any(one.num_gpus or one.attached is not None for one in options)

    def revive(self, actor: ActorId, time_limit: TimeLimit | None = None) -> ActorRecord:
        """Return the actor's living process; a dead actor is restarted. Raises ``ActorDiedError`` if that is
        not possible, ``WaitTimeoutError`` if it takes too long."""
        return self._restarts.revive(actor, time_limit)

    def link(self, actor: ActorId) -> Link:
        """Return the driver's link to the process that the actor has now, or will have: calls wait there
        meanwhile."""
        record = self._restarts.callable(actor)
        while True:
            link = record.calls
            if link is not None and record.alive:
                return link
            # It may have died just now, and be on its way back.
            dead, record = record, self._restarts.callable(actor)
            if record is dead:
                raise record.death()

    # Ending

    def release(self, actor: ActorId, graph: int | None = None) -> None:
        """Drop one handle of the actor, or the need of ``graph`` for it. With the last one it ends."""
        with self._table.lock:
            record = self._table.known(actor)
            if record is None:
                return
            known = record.actor
            if graph is None:
                known.handles -= 1
                if known.handles <= 0 and not known.shared:
                    self._log_start_error(record)
            elif graph in known.graphs:
                known.graphs.discard(graph)
            else:
                return
            self._table.forget_actor(record)
            if known.handles > 0 or known.graphs or known.name is not None or known.shared:
                return
            if known.stopping:
                return
            known.stopping = True
            # On its way back it may have been called already.
            last = record if record.calls is not None else record.successor
            if last is not record and last is not None and not last.alive:
                last = None  # it could not be started
            calls = None if last is None else last.calls
            if last is None or calls is None:
                known.over.set()  # should it be about to come back
                return
        self._stop(calls)

    def _stop(self, calls: Link) -> None:
        """Have the actor end when it has done its calls: nobody needs it any more. An actor that has ended
        otherwise is left alone, and a caller that releases several goes on with the others."""
        try:
            calls.call(stop())
        except (ActorDiedError, RuntimeStateError):
            pass
        except Exception as error:  # no memory to say it with
            self._cleanup.again(lambda: self._stop(calls), error)

    def kill(
        self, actor: ActorId, no_restart: bool = True, graceful: bool = False, wait: bool = True
    ) -> None:
        """End an actor. ``wait``: return from a graceful end only when it is over; otherwise a thread sees to
        it."""
        self._wait_for_news(self._table.record(actor))
        with self._table.lock:
            record = self._table.record(actor)
            if no_restart:
                record.actor.over.set()  # it is not waited for the next try, either
            if not record.alive:
                return
            spawning = record.spawning
            if record.process is None and (spawning is None or not no_restart):
                return
            record.wanted_back = not no_restart
            how = record.killed = _ENDED if graceful else _KILLED
        if record.process is None and spawning is not None:  # nothing runs that could be let end
            self._end_pending(record, spawning, how)
        elif not graceful:
            self._end_at_once(record)
        elif wait:
            self._graceful_exit.say([record])
        else:
            self._graceful_exit.ask(record)
            threads.start(self._graceful_exit.wait, "graceful_exit", [record])

    def end_unmade(self, record: ActorRecord) -> None:
        """End the process if the actor's constructor has raised in it, so that another one may try again."""
        with self._table.lock:
            if not record.is_unmade or record.process is None:
                return
            record.wanted_back = True
            record.killed = "was ended for a restart, since its constructor had raised an error"
        self._end_at_once(record)

    def _wait_for_news(self, record: ActorRecord) -> None:
        """Let the thread that waits for the process hear that it lives, if it does, so that the process can
        be ended in good order. Waits shortly only: the caller may be a signal handler that has interrupted
        that very thread."""
        is_local = record.spawning is not None and record.node is None
        if is_local and self._process_table.condition(record.slot) == _ALIVE:
            record.placed.wait(_NEWS_WAIT)

    def _end_pending(self, record: ActorRecord, spawning: Spawning, how: str) -> None:
        """End an actor whose process is waited for."""
        record.killed = how
        spawning.give_up(how)
        self.announce(record)

    def _end_at_once(self, record: ActorRecord) -> None:
        self._engine.kill(record.pid)
        # From now on it is dead for everybody, whatever the kernel still has to do.
        self.announce(record)

    def end_all(self) -> None:
        """End all actors: the session ends, and nobody looks at their deaths."""
        self._restarts.close()
        records = list(self._table)
        for record in records:
            self._wait_for_news(record)
            record.killed = "has ended with its session"
            record.actor.over.set()
        self._give_up_starts()
        self._graceful_exit.say(records, self.end_waits)

    def hurry(self) -> None:
        """Kill at once all processes that are still ending, and give up those that are still to come: nobody
        wants to wait for them."""
        self._graceful_exit.hurry()
        self._engine.hurry()
        self._give_up_starts()
        for record in self._table:
            if record.process is not None and not record.cleaned_up.is_set():
                self._end_at_once(record)

    def _give_up_starts(self) -> None:
        """Give up the processes that are waited for: they would be ended as soon as they come."""
        for spawning in list(self._awaited):
            spawning.give_up("is not wanted any more, since the session ends")

    def close(self) -> None:
        """Let go of what belonged to the processes, which are all gone."""
        self._restarts.join()
        self._watches.stop()
        for record in self._table:
            self._log_start_error(record)
            record.actor.constructor = None  # refs among it hold on to channels
            if record.arena_fd >= 0:
                self.death_cleanup.of(record, unborn=True)

    # Deaths

    def on_exit(self, pid: int, status: int) -> None:
        """Clean up after a process that has ended. Called by the engine."""
        with self._table.lock:
            record = self._table.by_pid(pid)
            if record is None:  # one that could not be started
                return
            record.exit_status = status
            if not record.started:  # whoever starts it sees to the rest
                return
            self._table.forget_pid(pid)
        self.death_cleanup.of(record)

    def on_liveness_futexes(self) -> None:
        """End the processes whose main threads have ended. Most end by themselves; the others are ended,
        since these actors count as dead everywhere. Called by the engine."""
        with self._table.lock:
            headless = [
                (pid, record)
                for pid, record in self._table.pids()
                if not record.alive and not record.headless
            ]
            for _, record in headless:
                record.headless = True
        for pid, _ in headless:
            self._engine.end_headless(pid)

    # The supervisor's steps of a burial

    def announce(self, record: ActorRecord) -> None:
        """Announce the death, so that all processes take this one for dead."""
        self._process_table.announce_death(record.slot)

    def decide(self, record: ActorRecord) -> None:
        """Decide whether the actor is restarted, and then keeps its slot."""
        self._restarts.decide(record)
        record.keeps_slot = record.restarting

    def log_death(self, record: ActorRecord) -> None:
        """Log a death that the program has not asked for: callers that have dropped their refs are told
        nowhere else."""
        wanted = record.was_wanted or self._table.closed or self._graceful_exit.over
        if wanted or self._lines >= _MOST_LINES:
            return
        self._lines += 1
        sweeper = self._shared_state.process.sweeper
        sweeper.log_soon(first_line(str(record.death())))
        if self._lines == _MOST_LINES:
            sweeper.log_soon("further deaths of actors are not logged")

    def forget_process(self, record: ActorRecord) -> None:
        """Close what belonged to the process. The record itself can still be asked."""
        with self._table.lock:
            self._watches.remove(record.slot)
            if record.control_socket is not None:
                record.control_socket.close()
            # They are the process's, which forgets the peer now.
            record.arena, record.arena_fd, record.eventfd = None, -1, -1
            self._remote_nodes.remove_dead(record)
            if record.node is None:
                self._process_table.forget_memory(record.slot)
            self._shared_state.process.forget(record.slot)
            # Refs keep what they need of these; the record only keeps what can be asked of the dead.
            record.calls = record.control_link = record.start = None
            record.introduced = []
            self._table.forget_process(record)

    def succeed(self, record: ActorRecord) -> None:
        """Restart the actor, or keep nothing of one that nobody can ask for."""
        # Not if it is being started again: that may have been begun since its end was told.
        if record.comes_back:
            self._restarts.begin(record)
        else:
            self._table.forget_actor(record)


def _close_it(_record: ActorRecord, sock: socket.socket) -> None:
    """Close a request socket: nobody is there to serve its requests."""
    sock.close()
