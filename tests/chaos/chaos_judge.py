"""Judging what a round is given: results against plain Python, errors against what has happened."""

from __future__ import annotations

import threading
import time
from random import Random
from typing import Any

from chaos_actors import RAISED, RAISES
from chaos_around import REPORT_WITHIN, Around, Running, Wrong
from chaos_faults import Fault, Faults, matches
from chaos_graphs import Failed, Graph
from chaos_pool import Member
from chaos_tally import Tally
from chaos_values import digest
from chaos_watch import busy_ns

from conveyor.exceptions import ActorDiedError, GraphTornDownError, TaskError, WaitTimeoutError


class Judge:
    """The part of a round that says what is right. ``rng`` decides what is held."""

    seed: int
    around: Around
    tally: Tally
    rng: Random
    members: list[Member]
    specs: list[Graph]
    faults: Faults
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

    def _check_value(self, value: Any, expected: int | Failed, where: str) -> None:
        checksum = digest(value)
        if checksum != expected:
            raise Wrong(f"{where}: expected {expected}, got {checksum}: {value!r:.500}")
        self.tally.results += 1
        if self.rng.random() < 0.1:
            self.around.holdings.keep(value, checksum, f"{where} of round {self.seed}")
            self.tally.held += 1

    def _check_error(
        self,
        error: BaseException,
        running: Running,
        expected: int | Failed,
        since: int,
        where: str,
    ) -> None:
        if isinstance(error, ActorDiedError):
            self._died(error, running.spec, since)
            running.died = True
            return
        if isinstance(error, GraphTornDownError):
            if not running.torn:
                raise Wrong(f"{where}: nobody has torn it down") from error
            return
        if not isinstance(error, TaskError) or not isinstance(expected, Failed):
            raise Wrong(f"{where}: expected {expected}") from error
        for task, _ in expected.blamed:
            blamed = running.spec.tasks[task]
            for fault in self.faults.planned:
                if (fault.graph, fault.task) != (running.index, task) or fault.kind not in RAISES:
                    continue
                place = f"('{running.spec.name}', {task}) run {fault.run}"
                if (
                    isinstance(error, RAISED[fault.kind])
                    and place in str(error)
                    and error.actor == self.members[blamed.actor].name
                    and blamed.method in error.node
                ):
                    self._seen(fault, since)
                    self.tally.errors += 1
                    return
        raise Wrong(f"{where}: the error tells of something else than {expected}") from error

    def _died(
        self, error: ActorDiedError, spec: Graph | None, since: int = 0, place: int | None = None
    ) -> None:
        """``error`` came out of a wait that began at ``since`` (0: now known) for ``spec``, or for the
        actor at ``place``: it must name an actor of those, and what really happened to it."""
        now = time.monotonic_ns()
        since = since or self.waiting_since
        able = [
            fault
            for fault in self.faults.deadly
            if self.members[fault.victim].name == error.actor
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
            ended = around.deaths.ended(self.members[fault.victim].pid)
            allowed += ((ended or now) - happened) / 1e6
        if any(other.kind.startswith("stop") for other in self.faults.planned):
            allowed += 1e3 * max(other.pause for other in self.faults.planned)
        if fault.kind in RAISES:
            # The error comes behind what was on its way before.
            allowed += 1e3 * sum(task.step.pause for s in self.specs for task in s.tasks) * 40
        if ms > REPORT_WITHIN + allowed:
            raise Wrong(
                f"{fault.name} was reported after {ms:.0f} ms; this machine explains "
                f"{allowed:.0f} ms of them"
            )
        tally.excused += 1

    def _doing(self, what: str) -> int:
        self.around.watchdog.doing(what)
        self.busy_at.ns = busy_ns()
        return time.monotonic_ns()
