"""What the processes of a graph do is recorded, for a trace viewer."""

from __future__ import annotations

import gzip
import logging
import os
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from conveyor import _core
from conveyor.observe.traceevents import Slices, write_events
from conveyor.runtime.graph.parts import Account

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
        except BaseException:
            self._stack.close()
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
            self._stack.close()
            until = _core.monotonic_ns()
            slices = Slices(self._graph.plan, self._graph.recording, members, until)
            self.events, self.dropped = slices.count, sum(slices.dropped.values())
            names = {t.native_id: t.name for t in threading.enumerate() if t.native_id}
            with _opened(self._partial, compressed=self.path.suffix == ".gz") as file:
                write_events(file, self._graph.name, slices, members, names)
            self._partial.replace(self.path)
        finally:
            with suppress(FileNotFoundError):  # it has got its name
                self._partial.unlink()
        if self.dropped:
            logger.warning(
                "%s: %d events found no room in the trace %s: its metadata says whose",
                self._graph.name,
                self.dropped,
                self.path,
            )


def _opened(path: Path, *, compressed: bool) -> IO[str]:
    if compressed:
        return gzip.open(path, "wt", compresslevel=5, encoding="utf-8")
    return open(path, "w", encoding="utf-8")
