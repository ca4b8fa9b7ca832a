"""Refs that are arguments and do not stand for their values."""

from __future__ import annotations

from typing import Any

from conveyor.runtime.refs.holding import same
from conveyor.runtime.refs.ref import Ref


class Itself:
    """A ref that, as an argument, does not stand for its value."""

    __slots__ = ("_ref",)

    def __init__(self, ref: Ref) -> None:
        self._ref = ref

    @classmethod
    def of(cls, value: Any) -> Any:
        """``value``, to be an argument as it is."""
        return cls(value) if isinstance(value, Ref) else value

    def __reduce__(self) -> Any:
        return same, (self._ref,)
