"""What connects the ends of a conduit: rings beside an edge, from its writer to the readers and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from conveyor import _core
from conveyor.runtime import threads
from conveyor.runtime.graph.edges.beside import ConduitEnd
from conveyor.runtime.graph.edges.ends import WriteEnd
from conveyor.runtime.graph.edges.layout import Assignment
from conveyor.runtime.process import Process


class EdgeWire:
    """One end; see :class:`conveyor.transport.Wire`. It also tells the readers what has failed at the
    writer, of which a transport need not know how to tell."""

    def __init__(
        self,
        process: Process,
        segment: _core.Segment,
        assignment: Assignment,
        end: ConduitEnd,
        budget: _core.MemoryBudget | None,
        ring: Callable[[], None],
    ) -> None:
        """``ring`` has the program look again, from any thread."""
        source = assignment.sources[end.edge]
        name, carries = assignment.name, f"beside {source}"
        self.ring = ring
        self.rank = end.rank
        self.members = end.members
        self.overlap = end.overlap
        self.hosts = end.where.hosts
        self.known_dead_within = end.where.known_dead_within
        self.laid = end.where.laid
        #: The transfer that begins; what is told of who holds memory names it.
        self.transfer = 0
        self.edge = f"{name}, edge #{end.edge} ({source})"
        self._others = [0] if end.rank else list(range(1, len(end.members)))
        self._readers = [read.open(process, segment, name, carries) for read in end.receives]
        self._writer = end.sends.open(
            process, segment, assignment.graph, name, carries, budget=budget
        )
        #: What the writer says at its end.
        self._last: _core.Writer | None = None
        if isinstance(end.last, WriteEnd):
            self._last = end.last.open(process, segment, assignment.graph, name, carries)
        else:
            self._others.append(0)
            self._readers.append(end.last.open(process, segment, name, carries))
        self._ending = False
        #: What finds no room, in order: value, tag, kind.
        self._unsent: deque[tuple[Any, int, int]] = deque()
        self._come: list[tuple[int, Any]] = []
        #: By transfer, how it has failed at the writer: the meta bytes of an error.
        self.failures: dict[int, bytes] = {}
        #: How the writer's end has broken, if it has: nothing comes any more.
        self.broken: bytes | None = None

    def send(self, message: Any) -> None:
        """As for :class:`conveyor.transport.Wire`."""
        self._send(message, self.transfer, _core.KIND_VALUE)

    def start_thread(self, target: Callable[[], object], name: str) -> None:
        """As for :class:`conveyor.transport.Wire`."""
        threads.start(target, name)

    def tell_failure(self, transfer: int, meta: bytes) -> None:
        """Tell the readers that a transfer has failed, whose frame they have been given."""
        self._send((transfer, meta), 0, _core.KIND_CONTROL)

    def tell_broken(self, meta: bytes) -> None:
        """Tell the readers that nothing comes any more. What waits for room is given up."""
        self._unsent.clear()
        self._send((None, meta), 0, _core.KIND_CONTROL)

    def receive(self) -> list[tuple[int, Any]]:
        """As for :class:`conveyor.transport.Wire`."""
        self.pump()
        come, self._come = self._come, []
        return come

    def pump(self) -> None:
        """Take what has come, and send what there is room for by now. A message that cannot be taken or
        sent raises, once."""
        come: list[tuple[int, Any]] = []
        try:
            # The writer's last word is looked for first: what was said before it is there by then.
            for rank, reader in zip(reversed(self._others), reversed(self._readers), strict=True):
                come[:0] = self._taken(rank, reader)
        finally:
            self._come += come
        while self._unsent and self._has_room():
            message = self._unsent.popleft()
            if not self._writer.send(*message):  # what it has run meanwhile has sent something
                self._unsent.appendleft(message)

    def _taken(self, rank: int, reader: _core.Reader) -> list[tuple[int, Any]]:
        """Take what has come from ``rank`` over one ring, and return the values among it."""
        values: list[tuple[int, Any]] = []
        try:
            while (message := reader.receive()) is not _core.EMPTY:
                if reader.kind != _core.KIND_CONTROL:
                    values.append((rank, message))
                elif message[0] is None:
                    self.broken = message[1]
                else:
                    self.failures[message[0]] = message[1]
        except BaseException:  # one that cannot be taken; those before it were
            self._come += values
            raise
        return values

    def end(self) -> None:
        """The conduit is about to be closed. What waits for room is given up, but the writer's first word
        from now on finds some: readers that are busy would not know that its memory is let go of."""
        self._unsent.clear()
        self._ending = True

    def close(self) -> None:
        """Take and send nothing more."""
        self._unsent.clear()
        self._come.clear()
        for reader in self._readers:
            reader.close()

    def _send(self, message: Any, tag: int, kind: int) -> None:
        if self._unsent or not self._has_room() or not self._writer.send(message, tag, kind):
            last = self._last if self._ending else None
            if last is None or not last.send(message, tag, kind):
                self._unsent.append((message, tag, kind))

    def _has_room(self) -> bool:
        if not self._writer.has_room:
            self._writer.wants_room()  # whoever makes some from now on rings
        return self._writer.has_room
