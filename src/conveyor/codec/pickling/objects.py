"""Values of any one type that are taken out of those that they are in, and put in again at the reader."""

from __future__ import annotations

import copyreg
from typing import Any

from conveyor.codec.encoded import SENT, Reducer
from conveyor.codec.pickling import pickler
from conveyor.codec.tensors.collected import Collected, object_at

#: Types with a reducer that looks whether their values are taken out.
_kinds: list[type] = []

#: Types that the C pickler writes without asking anybody. Nor can classes and functions be taken out.
_NEVER = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set),
    *(frozenset, type, type(lambda: None), type(len)),
)


class CollectedObjects(Collected):
    """The values of exactly one type that were taken out, each once."""

    def __init__(self, kind: type) -> None:
        super().__init__(lambda _: None)
        self.kind = kind
        #: By its identity, each with its place. A value may be pickled twice before it is right.
        self._places: dict[int, tuple[Any, int]] = {}

    def wants(self, tensor: Any) -> bool:
        """Return false: no tensor is asked for its place in the usual way."""
        return False

    def take_object(self, value: Any) -> Any:
        """Reduce ``value`` to its place."""
        found = self._places.get(id(value))
        if found is None:
            found = self._places[id(value)] = value, len(self.tensors)
            self.tensors.append(value)
        return object_at, (found[1],)


def can_be_taken_out(kind: type) -> bool:
    """Whether the pickler asks anybody how values of exactly this type are written."""
    return kind not in _NEVER


def take_out(kind: type) -> None:
    """Have values of exactly this type taken out from now on, where somebody collects them."""
    if kind not in _kinds:
        _kinds.append(kind)
        pickler.drop_picklers()


def _reducers(made: dict[type, Reducer], notes: dict[Any, Any]) -> dict[type, Reducer]:
    return {kind: _reducer(kind, made.get(kind), notes) for kind in _kinds}


def _reducer(kind: type, other: Reducer | None, notes: dict[Any, Any]) -> Reducer:
    def reduce(value: Any) -> Any:
        sent = notes.get(SENT)
        collected = None if sent is None else sent.collected
        if isinstance(collected, CollectedObjects) and collected.kind is kind:
            return collected.take_object(value)
        usual = other or copyreg.dispatch_table.get(kind)
        return value.__reduce_ex__(5) if usual is None else usual(value)

    return reduce


pickler.add_reducers_over(_reducers)
