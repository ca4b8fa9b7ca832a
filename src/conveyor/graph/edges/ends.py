"""The ends of an edge's ring in a segment, and how a process opens them."""

from __future__ import annotations

from msgspec import Struct

from conveyor import _core
from conveyor.runtime.process import Place, Process


class ReadEnd(Struct, frozen=True):
    edge: int
    offset: int
    index: int
    writer: Place
    shared: bool

    def open(
        self,
        process: Process,
        segment: _core.Segment,
        name: str,
        source: str,
        *,
        alone: bool = False,
    ) -> _core.Reader:
        """Open the reading end. ``name`` is the graph's, ``source`` says what the edge carries. ``alone``:
        frames are treated as if nobody else read them, since they are not written to here."""
        carries = carried(name, self.edge, source)
        arena = process.arena_of(*self.writer.process)
        return process.reader(
            segment,
            self.offset,
            self.index,
            self.writer,
            arena,
            carries,
            shared=self.shared and not alone,
        )


class WriteEnd(Struct, frozen=True):
    edge: int
    offset: int
    targets: tuple[Place, ...]

    def open(
        self,
        process: Process,
        segment: _core.Segment,
        graph: int,
        name: str,
        source: str,
        *,
        budget: _core.MemoryBudget | None = None,
    ) -> _core.Writer:
        """Open the writing end. ``graph``, ``name`` and ``budget`` are the graph's, ``source`` says what the
        edge carries."""
        carries = carried(name, self.edge, source)
        return process.writer(
            segment,
            self.offset,
            self.targets,
            carries,
            graph,
            self.edge,
            budget=budget,
        )


def carried(name: str, edge: int, source: str) -> str:
    """Describe the values on an edge of the graph ``name``, in words."""
    return f"{name}, edge #{edge} ({source})"
