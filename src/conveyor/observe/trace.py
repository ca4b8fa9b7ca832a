"""What the processes of a graph do is recorded, for a trace viewer."""

from __future__ import annotations

import gzip
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from conveyor import _core
from conveyor.observe.traceevents import Far, FarEvents, Slices, write_events
from conveyor.plan.model import EXECUTOR
from conveyor.runtime.graph.parts import Account
from conveyor.runtime.graph.telemetry.afar import HASTE, PATIENCE, Afar, Question
from conveyor.runtime.graph.telemetry.clocks import Alignment

logger = logging.getLogger("conveyor")


class Trace:
    """The body of ``with graph.trace(path)``.

    path: the file.
    events: afterwards, how many slices it has.
    dropped: afterwards, for how many there was no room.
    """

    def __init__(self, graph: Account, path: str | os.PathLike[str], max_events: int) -> None:
        if max_events < 1:
            raise ValueError(f"max_events must be at least 1, not {max_events}")
        self.path = Path(path)
        self.events = 0
        self.dropped = 0
        self._graph = graph
        self._max_events = max_events
        self._stack = ExitStack()
        self._begun = Afar()
        self._partial = Path()
        self._pid = os.getpid()

    def __enter__(self) -> Trace:
        graph = self._graph
        graph.check_open()
        recording = graph.recording.traced(graph.name, str(self.path), self._max_events)
        # First the lock, so that a second trace does not touch the first one's file.
        self._stack.enter_context(recording)
        try:
            self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
            self._partial.touch()
            most = max(self._max_events // len(graph.recording.recorders), 1)
            self._begun = graph.afar(Question(trace="begin", events=most), PATIENCE)
        except BaseException:
            with suppress(FileNotFoundError):
                self._partial.unlink()
            self._stack.close()
            with suppress(Exception):  # other hosts may have begun, and nobody would have them end
                graph.afar(Question(trace="end"), HASTE)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: the trace is its parent's
        try:
            members = self._graph.tracks()
            ended = self._graph.afar(Question(trace="end"), PATIENCE)
            self._stack.close()
            until = _core.monotonic_ns()
            far = far_events(self._graph.hosts, self._begun, ended)
            recording = self._graph.recording
            slices = Slices(self._graph.plan, recording, members, until, far.events)
            self.events, self.dropped = slices.count, sum(slices.dropped.values())
            names = {t.native_id: t.name for t in threading.enumerate() if t.native_id}
            with _opened(self._partial, compressed=self.path.suffix == ".gz") as file:
                write_events(file, self._graph.name, slices, members, names, far)
            self._partial.replace(self.path)
        finally:
            self._stack.close()  # also where this was broken off: other hosts may take their time
            with suppress(FileNotFoundError):  # it has got its name
                self._partial.unlink()
        if self.dropped:
            logger.warning(
                "%s: %d events found no room in the trace %s: its metadata says whose",
                self._graph.name,
                self.dropped,
                self.path,
            )


def far_events(hosts: Mapping[int, str], begun: Afar, ended: Afar) -> Far:
    """What other hosts have said of their processes when the trace began, and when it ended."""
    events: dict[int, FarEvents] = {}
    unknown: dict[int, str] = {}
    for place, host in hosts.items():
        if host == hosts[EXECUTOR]:
            continue
        sight = ended.seen.get(place)
        before, after = begun.clocks.get(place), ended.clocks.get(place)
        if place not in begun.seen:
            unknown[place] = begun.why_unknown(host)
        elif sight is None:
            unknown[place] = ended.why_unknown(host)
        elif sight.events is None:
            unknown[place] = "the graph was laid anew while it was traced"
        elif before is None or after is None:
            unknown[place] = "its host's clock has not answered"
        else:
            events[place] = FarEvents(sight.events, Alignment(before, after))
    return Far(hosts, events, unknown)


def _opened(path: Path, *, compressed: bool) -> IO[str]:
    if compressed:
        return gzip.open(path, "wt", compresslevel=5, encoding="utf-8")
    return open(path, "w", encoding="utf-8")
