"""How the executor of a graph hears at once of a task that has failed, wherever it stands in the graph.

Each actor has one more ring to the executor, which is opened and written only when a task raises. Over
the edges of the graph alone the error may have to wait for what else its readers need.
"""

from __future__ import annotations

from typing import NamedTuple

from conveyor import _core
from conveyor.runtime.blueprint import RingPlan
from conveyor.runtime.graph.edges.following import follows
from conveyor.runtime.process import Place, Process

#: What is told follows from a failure in the same execution, or from a death; above its order
#: (native/python/failures.cpp).
_FOLLOWS = 1 << 63


class FailureRings(NamedTuple):
    """Where they lie: one behind the other from ``offset`` on, each of ``size`` bytes. ``programs`` are
    the actors with the bell bits of their programs, ``executor`` is the same of who executes.
    ``together``: see ``Config.fail_fast``."""

    offset: int
    size: int
    programs: tuple[Place, ...]
    executor: Place
    together: bool

    def rings(self, slots: int, stride: int) -> list[RingPlan]:
        """How they are laid out."""
        return [
            RingPlan(self.offset + i * self.size, slots, stride, program, (self.executor,))
            for i, program in enumerate(self.programs)
        ]

    def open(self, process: Process, segment: _core.Segment, name: str) -> list[_core.Reader]:
        """The executor's ends; ``name`` is the graph's."""
        return [
            process.reader(
                segment,
                self.offset + i * self.size,
                0,
                program,
                process.arena_of(*program.process),
                _carries(name),
                shared=True,
            )
            for i, program in enumerate(self.programs)
        ]


class FailureTeller:
    """An actor's end. ``actor``: its number in the plan."""

    def __init__(
        self,
        rings: FailureRings,
        actor: int,
        process: Process,
        segment: _core.Segment,
        limits: _core.Limits,
        name: str,
    ) -> None:
        self._rings = rings
        self._members = frozenset(program.process for program in rings.programs)
        self._actor = actor
        self._process = process
        self._segment = segment
        self._limits = limits
        self._name = name
        self._told = -1
        self._writer: _core.Writer | None = None

    def tell(self, error: BaseException, meta: bytes, of: tuple[int, int], cancelled: bool) -> None:
        """A task of the graph and execution ``of`` has failed with ``error``, encoded in ``meta``, or because
        it was ``cancelled``."""
        execution = of[1]
        if execution == self._told:
            return
        if self._limits.failed(execution):
            if cancelled:
                return  # for that failure
        elif self._limits.stopped(execution):
            return  # whoever wants its results has been told of something else
        self._told = execution
        writer = self._writer or self._open()
        # In this order: the count is what the executor looks at when it is rung, and whoever skips a
        # task for the mark sends something that the executor must be able to explain.
        order = self._limits.count_failure()
        if follows(error, of, self._members):
            order |= _FOLLOWS
        sent = False
        try:
            sent = writer.send_error(order.to_bytes(8, "little") + meta, execution)
        finally:
            if not sent:
                self._limits.uncount_failure()
        if sent and self._rings.together:
            self._limits.fail(execution)
            for program in self._rings.programs:  # a coroutine may be running there
                if program != self._rings.programs[self._actor]:
                    self._process.board.ring(*program.bell)

    def _open(self) -> _core.Writer:
        rings, offset = self._rings, self._rings.offset + self._actor * self._rings.size
        self._writer = self._process.writer(
            self._segment, offset, [rings.executor], _carries(self._name)
        )
        return self._writer


def _carries(name: str) -> str:
    return f"{name}, what its tasks have raised"
