"""Restarts of dead actors: by themselves (``max_restarts``), or because a graph is restarted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from conveyor.exceptions import ActorDiedError, ActorStartError
from conveyor.flag import Flag
from conveyor.runtime import threads
from conveyor.runtime.protocol import PID_MASK
from conveyor.runtime.waiting.patience import Patience, wait_for_flag

if TYPE_CHECKING:
    from conveyor.driver.processes.record import ActorRecord
    from conveyor.driver.processes.table import Table
    from conveyor.runtime.protocol import ActorId

#: Seconds before a restart of an actor whose constructor has killed the process: doubled with each time
#: in a row, up to the second number.
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 10.0

_ENDED = "conveyor.kill() has ended it for good"


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
        self._closed = Flag()

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
        """Decide whether ``record``, whose process has ended, is restarted. Called before ``exited`` is
        set."""
        with self.lock:
            if not self._closed.is_set() and record.may_restart():
                record.restarting = record.comes_back = True
                record.actor.restarts += 1

    def begin(self, record: ActorRecord) -> None:
        """Begin a restart, as ``decide`` or ``revive`` has settled."""
        try:
            with self.lock:  # which it needs to leave the set again
                self._threads.add(threads.start(self._run, "restart", record))
        except Exception as error:  # no thread was left
            self._conclude(record, error)

    def revive(self, actor: ActorId, patience: Patience | None = None) -> ActorRecord:
        """Return the actor's living process. A dead actor is restarted, whatever its ``max_restarts``; the
        restart goes on where ``patience`` ends.

        Raises ``ActorDiedError`` if that is not possible, or if the new process has died as well, and
        ``WaitTimeoutError``.
        """
        tried = False
        while True:
            record = self.current(actor, patience)
            if record.alive:
                return record
            _wait_for_end(record, patience)
            if tried:
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

    def current(self, actor: ActorId, patience: Patience | None = None) -> ActorRecord:
        """Return the process that the actor has now; wait for the end of a start or restart under way."""
        while True:
            record = self._table.record(actor)
            if record.spawning is not None:
                doing = "its process is being started"
                wait_for_flag(record.placed, f"the start of {actor.name}", doing, patience)
            # In this order: a restart that was decided on just now may have been the last one.
            coming = record.exited.is_set() or record.may_restart() or record.restarting
            if record.alive or not coming:
                return record
            _wait_for_end(record, patience)
            if record.restarting:
                doing = "another process is being started for it"
                wait_for_flag(record.replaced, f"the restart of {actor.name}", doing, patience)
            if self._table.record(actor) is record:
                return record

    def callable(self, actor: ActorId) -> ActorRecord:
        """Return the actor's process, like :meth:`current`, but a new one as soon as it can be called: it may
        take long until there is a place for it."""
        while True:
            record = self._table.record(actor)
            coming = record.exited.is_set() or record.may_restart() or record.restarting
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
            self._closed.set()

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
        if self._closed.is_set():
            why = "the session has been shut down"
        elif actor.ended:
            why = _ENDED
        elif actor.stopping:
            why = "its last handle is gone"
        elif actor.kept is None:
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
                    raise ActorStartError(_ENDED)

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
            record.actor.kept = None  # as where it is killed while it lives
        self._table.give_up(record)
        record.replaced.set()
        record.succeeded.set()
        if error is not None:
            self._table.forget_actor(record)  # its last handle may be gone by now


def _wait_for_end(record: ActorRecord, patience: Patience | None = None) -> None:
    pid = record.pid & PID_MASK
    doing = f"the end of its process (pid {pid}) is not reported yet"
    wait_for_flag(record.exited, f"the end of {record.id.name}", doing, patience)
