"""The result of a call, as its caller has it."""

from __future__ import annotations

import itertools

from conveyor.runtime.refs.ref import Ref, Source

_orders = itertools.count()


class CallRef(Ref):
    """The result of an actor call."""

    __slots__ = ("method", "order", "passes_on")

    #: The place of one that waits at its caller, among all that do.
    order: int
    #: Whether its arguments have come by refs: it takes their place (``_core.Arena.note_given``).
    passes_on: bool

    def __init__(self, source: Source, number: int, method: str) -> None:
        super().__init__(source, number)
        self.method = method

    @classmethod
    def waiting(cls, source: Source, method: str) -> CallRef:
        """Return that of a call that waits at its caller."""
        ref = cls(source, -1, method)
        ref.order = next(_orders)
        ref.passes_on = False
        return ref
