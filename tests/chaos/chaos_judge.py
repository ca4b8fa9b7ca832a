"""Judging what a round is given: results against plain Python, errors against what has happened."""

from __future__ import annotations

import re
import threading
import time
from random import Random
from typing import Any

from chaos_actors import RAISED
from chaos_around import REPORT_WITHIN, Around, Failure, Running, Wrong
from chaos_faults import Fault, Faults, matches
from chaos_graphs import Expected, Failed, Graph, Stream
from chaos_pool import Member
from chaos_tally import Tally
from chaos_values import digest
from chaos_watch import busy_ns

from conveyor.exceptions import (
    ActorDiedError,
    DeadlineExceededError,
    ExecutionCancelledError,
    GraphTornDownError,
    TaskError,
    WaitTimeoutError,
)


class Judge:
    """The part of a round that says what is right. ``rng`` decides what is held."""

    seed: int
    around: Around
    tally: Tally
    rng: Random
    members: list[Member]
    specs: list[Graph]
    faults: Faults
    fail_fast = True
    waiting_since: int
    busy_at: threading.local

    def _check_timeout(
        self, error: WaitTimeoutError, running: Running, timeout: float | None, where: str
    ) -> None:
        if timeout is None:
            raise Wrong(f"{where}: a timeout that nobody asked for") from error
        if running.spec.name not in str(error) and "another thread" not in str(error):
            raise Wrong(f"{where}: a timeout that does not say of what") from error
        self.tally.timeouts += 1

    def _check_value(self, value: Any, expected: Expected, where: str, keep: bool = True) -> None:
        checksum = digest(value)
        if checksum != expected:
            raise Wrong(f"{where}: expected {expected}, got {checksum}: {value!r:.500}")
        self.tally.results += 1
        if keep and self.rng.random() < 0.1:
            self.around.holdings.keep(value, checksum, f"{where} of round {self.seed}")
            self.tally.held += 1

    def _check_error(
        self,
        error: BaseException,
        running: Running,
        number: int,
        expected: Expected,
        since: int,
        where: str,
    ) -> None:
        """``error`` came for ``expected``, which is a result of execution ``number``, or all of them."""
        if isinstance(error, ActorDiedError):
            self._died(error, running.spec, since)
            running.died = True
            return
        if isinstance(error, GraphTornDownError):
            if not running.torn:
                raise Wrong(f"{where}: nobody has torn it down") from error
            return
        if isinstance(error, DeadlineExceededError):
            if number not in running.limited:
                raise Wrong(f"{where}: it had no deadline") from error
            self.tally.late += 1
            return
        if isinstance(error, ExecutionCancelledError):
            if number not in running.cancelled:
                raise Wrong(f"{where}: nobody has cancelled it") from error
            return
        if not isinstance(error, TaskError):
            raise Wrong(f"{where}: expected {expected}") from error
        if isinstance(expected, Stream):
            expected = expected.failed or 0
        if not running.exact or running.uncounted:
            able = set(range(len(running.spec.tasks)))
        elif isinstance(expected, Failed):
            able = {task for task, _ in expected.blamed}
        else:
            raise Wrong(f"{where}: expected {expected}") from error
        for fault in self.faults.planned:
            here = fault.raises and fault.graph == running.index and fault.task in able
            if here and self._tells_of(error, running, fault):
                self._failed_with(fault, running, number, where)
                self._seen(fault, since)
                self.tally.errors += 1
                return
        raise Wrong(f"{where}: the error tells of something else than {expected}") from error

    def _tells_of(self, error: TaskError, running: Running, fault: Fault) -> bool:
        """Whether ``error`` is that of ``fault``. Others of its execution follow behind in its text."""
        blamed = running.spec.tasks[fault.task]
        own = str(error).partition("also failed in this execution")[0]
        return bool(
            isinstance(error, RAISED[fault.kind])
            and re.search(rf"\('{running.spec.name}', {fault.task}\) run {fault.run}\b", own)
            and error.actor == self.members[blamed.actor].name
            and blamed.method in (error.node or "")
            and self.around.clock.read(fault.slot)
        )

    def _failed_with(
        self, fault: Fault, running: Running, number: int, where: str, first: bool = True
    ) -> None:
        """A task raises once, so one execution fails with it."""
        failed = (running.index, number)
        if fault.execution not in (None, failed):
            raise Wrong(f"{where}: {fault.execution} has failed with the same error")
        fault.execution = failed
        if running.fail_fast and first:
            known = running.failures.setdefault(number, Failure(fault)).first
            if known is not fault:
                raise Wrong(f"{where} fails with {fault}, others of the execution with {known}")

    def _died(
        self, error: ActorDiedError, spec: Graph | None, since: int = 0, place: int | None = None
    ) -> None:
        """``error`` came out of a wait that began at ``since`` (0: now known) for ``spec``, or for the
        actor at ``place``: it must name an actor of those, and what really happened to it."""
        now = time.monotonic_ns()
        since = since or self.waiting_since
        able = [
            fault
            for fault in self._suspects()
            if fault.victim >= 0
            and self.members[fault.victim].name == error.actor
            and (spec is None or fault.victim in spec.actors)
            and (place is None or fault.victim == place)
        ]
        if not able:
            raise Wrong(f"nothing has happened to {error.actor!r}") from error
        struck = [fault for fault in able if self.around.clock.read(fault.slot)]
        told = [matches(error, fault) for fault in struck]
        if True in told:
            self._seen(struck[told.index(True)], since, now)
        elif None in told:
            self.tally.unknown_ends += 1
            self._seen(struck[told.index(None)], since, now)
        else:
            raise Wrong(
                f"{error.actor} has ended otherwise: signal {error.signal}, exit code "
                f"{error.exit_code}, not {[f.name for f in struck]}"
            ) from error

    def _suspects(self) -> list[Fault]:
        return self.faults.deadly

    def _seen(self, fault: Fault, since: int, now: int | None = None) -> None:
        """Somebody who has waited since ``since`` was told of ``fault``."""
        if fault.reported_ns is not None:
            return
        around, tally = self.around, self.tally
        now = now or time.monotonic_ns()
        happened = around.clock.read(fault.slot)
        fault.reported_ns = now
        ms = max(now - max(happened, since), 0) / 1e6
        tally.latencies[fault.name].append(ms)
        if ms <= REPORT_WITHIN:
            return
        # Was it this machine? A thread that runs late, this one's own work and its waiting for a core,
        # and what the kernel itself says late.
        allowed = around.hiccups.worst(max(happened, since), now) / 1e6
        allowed += (busy_ns() - self.busy_at.ns) / 1e6
        if fault.kills:
            ended = around.deaths.ended(fault.pid)
            allowed += ((ended or now) - happened) / 1e6
        allowed += 1e3 * sum(
            other.holds_up
            for other in self.faults.planned
            if other.kind != "dawdles" or not self.fail_fast
        )
        if fault.raises and not self.fail_fast:
            # The error comes behind what was on its way before.
            allowed += 1e3 * sum(task.step.pause for s in self.specs for task in s.tasks) * 40
        if ms > REPORT_WITHIN + allowed:
            raise Wrong(
                f"{fault.name} was reported after {ms:.0f} ms; this machine explains "
                f"{allowed:.0f} ms of them"
            )
        tally.excused += 1

    def _check_late(self, what: str, ms: float, since: int) -> None:
        """``what`` has taken ``ms`` to break off what was begun at ``since``."""
        allowed = self.around.hiccups.worst(since, time.monotonic_ns()) / 1e6
        allowed += (busy_ns() - self.busy_at.ns) / 1e6
        allowed += 1e3 * sum(fault.holds_up for fault in self.faults.planned)
        if ms > REPORT_WITHIN + allowed:
            raise Wrong(f"{what} took {ms:.0f} ms; this machine explains {allowed:.0f} ms of them")

    def _doing(self, what: str) -> int:
        self.around.watchdog.doing(what)
        self.busy_at.ns = busy_ns()
        return time.monotonic_ns()
