"""The result of a call, as its caller has it."""

from __future__ import annotations

from conveyor.runtime.refs.ref import Ref, Source


class CallRef(Ref):
    """The result of an actor call."""

    __slots__ = ("method",)

    def __init__(self, source: Source, number: int, method: str) -> None:
        super().__init__(source, number)
        self.method = method
