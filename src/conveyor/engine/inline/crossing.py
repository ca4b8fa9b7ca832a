"""What a value goes through on its way from one actor to another: a channel within this process.

It is a real one, a ring and an arena, so that what arrives is what would arrive in another process:
a copy, on private pages where it would be, and an error where it could not be sent.
"""

from __future__ import annotations

import threading
from typing import Any

from conveyor import _core
from conveyor.codec.faults import is_of_value
from conveyor.runtime.graph.edges.layout import make_budget
from conveyor.runtime.process import RESULT_BIT, Process


class ArrivalError(Exception):
    """The value was sent, and could not be rebuilt where it arrived: ``error`` says why."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Crossing:
    """Carries values. Each thread has rings of its own, so that nobody waits for anybody."""

    def __init__(self, process: Process, slot_bytes: int, memory_bytes: int | None = None) -> None:
        """``slot_bytes``: what a slot holds in place; larger values lie in the arena, and may take
        ``memory_bytes`` there."""
        self._process = process
        self._budget = make_budget(memory_bytes)
        self._stride = -(-slot_bytes // 64) * 64
        self._rings = threading.local()

    def carry(self, value: Any, *, shared: bool, kept: bool = False) -> Any:
        """What arrives when ``value`` is sent. ``shared``: others read the same memory; ``kept``: it
        arrives as a ref keeps it.

        Raises ``SerializationError`` or ``ArenaFullError`` where it cannot be sent, ``ArrivalError``
        where it cannot be rebuilt.
        """
        try:
            writer, reader = self._rings.ends[shared]
        except AttributeError:
            self._rings.ends = [self._make(shared=s) for s in (False, True)]
            writer, reader = self._rings.ends[shared]
        writer.send(value, 0)
        try:
            return reader.receive_kept() if kept else reader.receive()
        except BaseException as error:
            if not is_of_value(error):
                raise
            raise ArrivalError(error) from None

    @property
    def sent_bytes(self) -> int:
        """The size of all frames that this thread has sent."""
        ends = getattr(self._rings, "ends", ())
        return sum(writer.bytes for writer, _ in ends)

    def close(self) -> None:
        """Nothing is carried any more; what was carried stays as long as it is held."""
        self._rings = threading.local()

    def _make(self, shared: bool) -> tuple[_core.Writer, _core.Reader]:
        # More than one slot: user code that runs while a value is rebuilt may send another.
        segment = _core.Segment.create(_core.Segment.ring_bytes(4, self._stride, 1))
        segment.make_ring(0, 4, self._stride, 1)
        me = self._process.place(RESULT_BIT)
        carries = "values between actors"
        writer = self._process.writer(segment, 0, [me], carries, budget=self._budget)
        reader = self._process.reader(
            segment, 0, 0, me, self._process.arena_of(*me.process), carries, shared=shared
        )
        segment.close_fd()
        return writer, reader
