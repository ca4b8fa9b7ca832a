"""What connects the ends of a conduit: rings beside an edge, from its writer to the readers and back."""

from __future__ import annotations

from collections import deque
from typing import Any

from conveyor import _core
from conveyor.runtime.graph.beside import ConduitEnd
from conveyor.runtime.graph.layout import Assignment
from conveyor.runtime.process import Process


class Wire:
    """One end; see :class:`conveyor.transport.Wire`. It also tells the readers of transfers that have failed
    at the writer, of which a transport need not know how to tell."""

    def __init__(
        self,
        process: Process,
        segment: _core.Segment,
        assignment: Assignment,
        end: ConduitEnd,
        budget: _core.MemoryBudget | None,
    ) -> None:
        source = assignment.sources[end.edge]
        name, carries = assignment.name, f"beside {source}"
        self.rank = end.rank
        self.members = end.members
        self.edge = f"{name}, edge #{end.edge} ({source})"
        self._others = [0] if end.rank else list(range(1, len(end.members)))
        self._readers = [read.open(process, segment, name, carries) for read in end.receives]
        self._writer = end.sends.open(
            process, segment, assignment.graph, name, carries, budget=budget
        )
        #: What finds no room, in order: value, tag, kind.
        self._unsent: deque[tuple[Any, int, int]] = deque()
        self._come: list[tuple[int, Any]] = []
        #: By transfer, how it has failed at the writer: the meta bytes of an error.
        self.failures: dict[int, bytes] = {}

    def send(self, message: Any) -> None:
        """As for :class:`conveyor.transport.Wire`."""
        self._send(message, 0, _core.KIND_VALUE)

    def tell_failure(self, transfer: int, meta: bytes) -> None:
        """Tell the readers that a transfer has failed, whose frame they have been given."""
        self._send(meta, transfer, _core.KIND_CONTROL)

    def receive(self) -> list[tuple[int, Any]]:
        """As for :class:`conveyor.transport.Wire`."""
        self.pump()
        come, self._come = self._come, []
        return come

    def pump(self) -> None:
        """Take what has come, and send what there is room for by now."""
        for rank, reader in zip(self._others, self._readers, strict=True):
            while (message := reader.receive()) is not _core.EMPTY:
                if reader.kind == _core.KIND_CONTROL:
                    self.failures[reader.tag] = message
                else:
                    self._come.append((rank, message))
        while self._unsent and self._fits(*self._unsent[0]):
            self._unsent.popleft()

    def close(self) -> None:
        """Take and send nothing more."""
        self._unsent.clear()
        self._come.clear()
        for reader in self._readers:
            reader.close()

    def _send(self, message: Any, tag: int, kind: int) -> None:
        if self._unsent or not self._fits(message, tag, kind):
            self._unsent.append((message, tag, kind))

    def _fits(self, message: Any, tag: int, kind: int) -> bool:
        if not self._writer.has_room:
            self._writer.wants_room()
            if not self._writer.has_room:  # whoever makes some from now on rings
                return False
        return self._writer.send(message, tag, kind)
