"""Runs one session in a process of its own, within time limits, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from benchmarks.cases import Session
from benchmarks.child import STACK_SIGNAL, Order
from benchmarks.machine import ROOT
from benchmarks.model import Case
from benchmarks.processes import kill_descendants, remaining_descendants, remove_ray_semaphores
from benchmarks.results import Outcome
from benchmarks.systems.native import PREBUILT
from benchmarks.systems.native import build as build_floors
from benchmarks.workloads import workloads

STARTUP_S = dict.fromkeys(("ray_cg", "ray_core", "ray_gloo", "ray_nixl"), 90.0)
STARTUP_OTHERS_S = 20.0
EXIT_S = {"conveyor": 15.0}  # who is expected to end by itself; the others are killed at once
STRAY_S = 2.0
STACK_MARK = "most recent call first"


class _SilentError(Exception):
    """No event within the limit."""


def _innermost(dump: str) -> str:
    """The innermost frame of the last thread, which is the main one, of faulthandler's output."""
    frames = dump.rpartition(STACK_MARK)[2].splitlines() if STACK_MARK in dump else []
    found = (line.strip() for line in frames if line.strip().startswith("File "))
    return next(found, "").removeprefix("File ")


@dataclass
class Child:
    """A started process of cases, and the pipe it reports on."""

    process: subprocess.Popen[str]
    events: int
    log: IO[str]
    log_start: int
    _rest: bytes = b""
    _lines: list[bytes] = field(default_factory=list)

    def next_event(self, limit_s: float) -> dict[str, Any] | None:
        """The next event, ``None`` if the process has ended; ``_SilentError`` after ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while not self._lines:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.events], [], [], left)[0]:
                raise _SilentError
            received = os.read(self.events, 1 << 16)
            if not received:
                return None
            *self._lines, self._rest = (self._rest + received).split(b"\n")
        event: dict[str, Any] = json.loads(self._lines.pop(0))
        return event

    def said(self) -> str:
        """What it has written so far."""
        return Path(self.log.name).read_bytes()[self.log_start :].decode(errors="replace").strip()

    def stack(self) -> str:
        """Where a hanging process is: the innermost line of its main thread."""
        with suppress(ProcessLookupError):
            self.process.send_signal(STACK_SIGNAL)
        time.sleep(0.5)
        return _innermost(self.said())

    def end(self) -> str:
        """Why it ended without a word: how, and where or with which last line."""
        status = self.process.wait()
        how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        said = self.said()
        if where := _innermost(said):
            return f"{how} in {where}"
        return f"{how}: {said.splitlines()[-1][:160]}" if said else how


class Runner:
    """Runs sessions, one at a time. Only inside ``running()``."""

    def __init__(self, log: Path, effort: float, limit_scale: float = 1.0) -> None:
        self._log = log
        self._effort = effort
        self._limit_scale = limit_scale
        self._folder = Path()
        self._environment: dict[str, str] = {}
        self._unavailable: dict[str, str] = {}
        self.warnings: list[str] = []

    @contextmanager
    def running(self) -> Iterator[Runner]:
        with TemporaryDirectory(prefix="cb-", ignore_cleanup_errors=True) as folder:
            self._folder = Path(folder)
            self._environment = self._make_environment()
            try:
                yield self
            finally:
                kill_descendants()

    def _make_environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        paths = [str(ROOT), str(ROOT / "tests" / "support"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environment["TMPDIR"] = str(self._folder)
        try:
            environment[PREBUILT] = str(build_floors(self._folder))
        except (OSError, RuntimeError) as error:
            self._unavailable["floor"] = str(error)
        return environment

    def run(self, session: Session) -> list[Outcome]:
        """One outcome for each case. After one that hangs or fails, the rest get a new process."""
        reason = self._unavailable.get(session.system)
        if reason is not None:
            return [Outcome(case, "unavailable", reason=reason) for case in session.cases]
        outcomes: list[Outcome] = []
        while len(outcomes) < len(session.cases):
            since = time.time()
            try:
                outcomes += self._attempt(session, session.cases[len(outcomes) :])
            finally:
                self._clean(since)
        return outcomes

    def _clean(self, since: float) -> None:
        try:
            kill_descendants()
        except TimeoutError as error:
            self.warnings.append(str(error))
        remove_ray_semaphores(since)

    def _attempt(self, session: Session, cases: tuple[Case, ...]) -> list[Outcome]:
        read_end, write_end = os.pipe()
        allowed = sorted(os.sched_getaffinity(0))
        order = Order(
            system=session.system,
            cores=allowed[-1:] if session.placement == "pinned" else allowed,
            cases=[case.workload for case in cases],
            split=session.placement == "split",
            effort=self._effort,
            tree=os.getpid(),
            events=write_end,
        )
        try:
            with self._log.open("a") as log:
                log.write(f"\n=== {session} ===\n")
                log.flush()
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.child"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                    cwd=ROOT,
                    env=self._environment,
                    pass_fds=[write_end],
                    start_new_session=True,
                )
                os.close(write_end)
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.write(order.to_json())
                    process.stdin.close()
                child = Child(process, read_end, log, self._log.stat().st_size)
                return self._follow(session, child, cases)
        finally:
            os.close(read_end)

    def _follow(self, session: Session, child: Child, cases: tuple[Case, ...]) -> list[Outcome]:
        """Read events until the cases are done or the first of them is lost."""
        outcomes: list[Outcome] = []
        limit = STARTUP_S.get(session.system, STARTUP_OTHERS_S)
        started = False
        while True:
            case = cases[min(len(outcomes), len(cases) - 1)]
            try:
                event = child.next_event(limit * self._limit_scale)
            except _SilentError:
                where = child.stack()
                if len(outcomes) == len(cases):
                    self.warnings.append(f"{session}: does not end; in {where}")
                    return outcomes
                when = f"after {limit * self._limit_scale:.0f} s"
                reason = f"{when}, in {where}" if where else when
                return [*outcomes, Outcome(case, "hung", reason=reason)]
            kind = event["event"] if event is not None else "gone"
            if event is None or kind == "failed":
                reason = event["reason"] if event is not None else child.end()
                if len(outcomes) < len(cases):
                    return [*outcomes, Outcome(case, "failed", reason=reason)]
                if kind == "failed" or child.process.wait():
                    self.warnings.append(f"{session}: failed at the end: {reason}")
                elif stray := remaining_descendants(STRAY_S):
                    self.warnings.append(f"{session}: {len(stray)} processes left behind")
                return outcomes
            if kind == "unavailable":
                self._unavailable[session.system] = event["reason"]
                return [Outcome(case, "unavailable", reason=event["reason"]) for case in cases]
            if kind == "begin":
                limit = workloads()[case.workload].limit_s
                if not started:
                    limit += STARTUP_S.get(session.system, STARTUP_OTHERS_S)
                started = True
            elif kind == "done":
                outcomes.append(Outcome(case, "ok", event["figures"]))
                limit = 10.0
            elif kind == "end":
                if session.system not in EXIT_S:
                    return outcomes
                limit = EXIT_S[session.system]
