"""Places in the program where results were got: for the error that says who fills an arena, in debug mode."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Generator
from typing import Any

import conveyor.exceptions
from conveyor.codec import append_to_message
from conveyor.exceptions import ArenaFullError, TaskError
from conveyor.graph.results import GraphRef
from conveyor.refs.outcome import failure_of
from conveyor.refs.ref import EMPTY

#: Number of results whose place is remembered.
KEPT = 100_000
#: Number of places that the error names.
_NAMED = 10

_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(conveyor.exceptions.__file__)), "")
# Values of these are never views of shared memory.
_COPIED = (type(None), bool, int, float, str, bytes)


class Origins:
    """The places, by graph, edge and execution; of the latest results only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[tuple[int, int, int], str] = {}

    def note(self, graph: int, edge: int, execution: int) -> None:
        """Note that the program gets this result now, in the frame that called into the package."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        with self._lock:
            self._places.setdefault((graph, edge, execution), place)
            if len(self._places) > KEPT:
                del self._places[next(iter(self._places))]

    def explain(self, error: ArenaFullError, holder: str) -> str:
        """Say where this process, which is called ``holder``, got the results that it holds."""
        places: Counter[str] = Counter()
        for held in error.held:
            if held.process != holder or held.graph is None or held.edge is None:
                continue
            for execution in held.executions:
                place = self._places.get((held.graph, held.edge, execution))
                places[place or "not got yet, or long ago"] += 1
        if not places:
            return ""
        lines = [f"  {place}: {count}" for place, count in places.most_common(_NAMED)]
        if len(places) > _NAMED:
            lines.append(f"  and {len(places) - _NAMED} more places")
        return "\n".join([f"Of these, {holder} got", *lines])


class DebugRef(GraphRef):
    """A result that notes where it is got."""

    __slots__ = ()

    def get(self, timeout: float | None = None) -> Any:
        fresh = self._outcome is EMPTY
        value = super().get(timeout)
        self._note(fresh, value)
        return value

    def __await__(self) -> Generator[Any, None, Any]:
        fresh = self._outcome is EMPTY
        value = yield from super().__await__()
        self._note(fresh, value)
        return value

    def _note(self, fresh: bool, value: Any) -> None:
        if fresh and not isinstance(value, _COPIED):
            self._source.note_got(self)

    def _arrived(self, value: Any) -> None:
        super()._arrived(value)
        error = failure_of(self._outcome)
        if isinstance(error, TaskError):
            cause: Any = error.cause
            if isinstance(cause, ArenaFullError):
                append_to_message(error, self._source.explain_held(cause))
                self._fail(error)
