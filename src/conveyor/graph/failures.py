"""Failure rings: the executor of a graph hears at once of a task that has failed, wherever it stands in the
graph.

Each actor has one more ring to the executor, which is opened and written only when a task raises. Over the
edges of the graph alone the error might have to wait for other inputs of its readers.
"""

from __future__ import annotations

import builtins
from collections.abc import Container
from typing import Any, NamedTuple

from conveyor import _core
from conveyor.exceptions import CollectiveBrokenError
from conveyor.runtime.blueprint import RingPlan
from conveyor.runtime.broker import DEAD_RANK, FAILED_IN
from conveyor.runtime.process import Process, RingEnd

_cause, _context, _noted = (
    BaseException.__dict__[name].__get__ for name in ("__cause__", "__context__", "__dict__")
)
_Group: Any = getattr(builtins, "BaseExceptionGroup", None)  # since Python 3.11


def follows(error: BaseException, of: tuple[int, int], workers: Container[tuple[int, int]]) -> bool:
    """Return whether ``error`` comes of an error that another rank has raised in ``of``, or of the death of
    one of ``workers``. ``of``: a graph and its execution. ``workers``: the slots and incarnations of that
    graph's actors.

    A step may turn such an error into one of its own, so errors that it was handling then count as well.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        # Read past the error's own class, which is the user's: it may raise, or go on for ever.
        if issubclass(type(one), CollectiveBrokenError):
            noted = _noted(one)
            if noted.get(FAILED_IN) == of or noted.get(DEAD_RANK) in workers:
                return True
        left += (_cause(one), _context(one))
        if _Group is not None and issubclass(type(one), _Group):
            left += _Group.exceptions.__get__(one)
    return False


#: Flag: the error follows from a failure in the same execution, or from a death. It stands above the error's
#: order (native/python/failures.cpp).
_FOLLOWS = 1 << 63


class FailureRings(NamedTuple):
    """Places of the failure rings: one behind the other from ``offset`` on, each of ``size`` bytes.
    ``programs``: the actors with the doorbell bits of their programs; ``executor``: the same of the executor.
    ``together``: see ``Config.fail_fast``."""

    offset: int
    size: int
    programs: tuple[RingEnd, ...]
    executor: RingEnd
    together: bool

    def rings(self, slots: int, stride: int) -> list[RingPlan]:
        """Return the layout of the rings."""
        return [
            RingPlan(self.offset + i * self.size, slots, stride, program, (self.executor,))
            for i, program in enumerate(self.programs)
        ]

    def open(self, process: Process, segment: _core.Segment, name: str) -> list[_core.Reader]:
        """Open the executor's ends; ``name`` is the graph's."""
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
    """An actor's end of its failure ring. ``actor``: its number in the plan."""

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
        self._workers = frozenset(program.process for program in rings.programs)
        self._actor = actor
        self._process = process
        self._segment = segment
        self._limits = limits
        self._name = name
        self._reported = -1
        self._writer: _core.Writer | None = None

    def tell(self, error: BaseException, meta: bytes, of: tuple[int, int], cancelled: bool) -> None:
        """Tell the executor that a task of the graph and execution ``of`` has failed with ``error``, encoded
        in ``meta``, or because it was ``cancelled``."""
        execution = of[1]
        if execution == self._reported:
            return
        if self._limits.failed(execution):
            if cancelled:
                return  # for that failure
        elif self._limits.ended(execution):
            return  # its waiters have another error already
        self._reported = execution
        writer = self._writer or self._open()
        # In this order: the executor looks at the count when it is rung, and an actor that skips a task for
        # the mark sends something that the executor must be able to explain.
        order = self._limits.count_failure()
        if follows(error, of, self._workers):
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
                    self._process.process_table.notify(*program.doorbell)

    def _open(self) -> _core.Writer:
        rings, offset = self._rings, self._rings.offset + self._actor * self._rings.size
        self._writer = self._process.writer(
            self._segment, offset, [rings.executor], _carries(self._name)
        )
        return self._writer


def _carries(name: str) -> str:
    return f"{name}, what its tasks have raised"
