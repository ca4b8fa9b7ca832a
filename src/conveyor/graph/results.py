"""Results of ``execute``: references in the shape that the graph's results were given."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import conveyor.exceptions
from conveyor import _core
from conveyor.checks import deadline_of, left_until
from conveyor.codec import append_to_message
from conveyor.dag.containers import is_named_tuple, rebuild_tuple, with_fields
from conveyor.dag.inputs import given
from conveyor.exceptions import ArenaFullError, ArgumentsError, TaskError
from conveyor.graph.telemetry import result_edges
from conveyor.plan import fill
from conveyor.plan.model import Passed, Plan
from conveyor.refs.ref import EMPTY, Ref, Source, Unseen, failure_of
from conveyor.refs.streams import StreamRef
from conveyor.refs.together import get_together
from conveyor.refs.values import wait_for

#: For each output that is a generator's: the function that makes the reference to its items, given the
#: references to its end and to the effects.
Streams: TypeAlias = Mapping[int, Callable[[Ref, tuple[Ref, ...]], StreamRef]]


class GraphRef(Ref):
    """The result of one execution: of the graph, or of one of its outputs."""

    __slots__ = ()

    def _awaited_as(self) -> Hashable:
        return id(self._window), self._number


class EffectRef(GraphRef):
    """A result that is only there when the effects of its execution are done, too."""

    __slots__ = ("_effects", "_result")

    def __init__(self, result: Ref, effects: tuple[Ref, ...]) -> None:
        super().__init__(effects[0]._source, -1)
        self._result = result
        self._effects = effects

    def to_send(self) -> Any:
        for effect in self._effects:
            effect.get()
        return self._result.to_send()

    def get(self, timeout: float | None = None) -> Any:
        if self._is_received():
            return self._received(timeout)
        return self._after_effects(self._result.get, timeout)

    def _resolved(self, timeout: float | None) -> Any:
        return self._after_effects(self._result._resolved, timeout)

    def _unfetched(self) -> Any:
        return self._result._unfetched()

    def _after_effects(self, ask: Callable[[float | None], Any], timeout: float | None) -> Any:
        end = deadline_of(timeout)
        value = ask(left_until(end))
        for effect in self._effects:
            effect.get(left_until(end))
        return value

    def has_failed(self) -> bool:
        return any(part.has_failed() for part in self.parts())

    def done(self) -> bool:
        return self._result.done() and all(effect.done() for effect in self._effects)

    def cancel(self) -> bool:
        # All are of one execution: the first one that is not done cancels it.
        return any(ref.cancel() for ref in (self._result, *self._effects))

    def cancelled(self) -> bool:
        return any(ref.cancelled() for ref in (self._result, *self._effects))

    def parts(self) -> tuple[Ref, ...]:
        return (self._result, *self._effects)

    def _awaited_as(self) -> Hashable:
        return self._result._awaited_as()

    def __repr__(self) -> str:
        return f"<EffectRef {self._result!r}, {len(self._effects)} effect(s)>"


class Results:
    """The results of a plan's executions.

    edges: the edges that the executor reads, each once: of the outputs, then of the effects.
    single: whether an execution has just one result, which is a task's, and no effect.
    as_read: whether the results are the list of refs to ``edges``, in that order.
    """

    def __init__(self, plan: Plan, put: Callable[[Any], Ref]) -> None:
        distinct = {edge: position for position, edge in enumerate(dict.fromkeys(plan.outputs))}
        self.edges = result_edges(plan)
        self.single = (
            not plan.multi_output and plan.shape is None and not plan.effects and not plan.streams
        )
        self._put = put
        self._outputs = tuple(distinct[edge] for edge in plan.outputs)
        self._distinct = len(distinct)
        self._effects = bool(plan.effects)
        self._multi_output = plan.multi_output
        self.as_read = (
            plan.multi_output
            and plan.shape is None
            and not plan.effects
            and not plan.streams
            and tuple(plan.outputs) == tuple(self.edges)
        )
        self._shape = plan.shape
        # Results that are no task's: constants, put once, and parts of the input.
        leaves = () if plan.shape is None else plan.shape.leaves
        self._constants = {
            leaf: put(_constant(value.value))
            for leaf, value in enumerate(leaves)
            if not isinstance(value, (int, Passed))
        }

    def passed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Ref]:
        """Return the results that are parts of the arguments of ``execute``, by their position. Called before
        the execution is submitted: values that cannot be sent must leave no trace."""
        if self._shape is None:
            return {}
        return {
            position: self._put(given(leaf.key, args, kwargs))
            for position, leaf in enumerate(self._shape.leaves)
            if isinstance(leaf, Passed)
        }

    def failed(self, error: BaseException, source: Source, streams: Streams) -> Any:
        """Return the results of an ``execute`` with an argument whose ref has ``error``: nothing was sent."""

        unseen = Unseen(error)

        def fail(reader: int) -> GraphRef:
            ref = GraphRef(source, -1, reader)
            ref._fail(error)
            ref._outcome.unseen = unseen
            return ref

        leaves = () if self._shape is None else self._shape.leaves
        passed = {i: fail(0) for i, leaf in enumerate(leaves) if isinstance(leaf, Passed)}
        return self.arrange([fail(i) for i in range(len(self.edges))], passed, streams)

    def arrange(self, made: Sequence[Ref], passed: Mapping[int, Ref], streams: Streams) -> Any:
        """Return the results of ``execute``. ``made``: a ref for each of ``edges``."""
        if self.as_read:
            return made
        effects = tuple(made[self._distinct :])
        if streams:
            made = [
                streams[edge](ref, effects) if edge in streams else ref
                for edge, ref in zip(self.edges, made, strict=True)
            ]
        if self._shape is None:
            refs = [made[i] for i in self._outputs]
        else:
            refs = [
                made[self._outputs[leaf]]
                if isinstance(leaf, int)
                else passed[position]
                if isinstance(leaf, Passed)
                else self._constants[position]
                for position, leaf in enumerate(self._shape.leaves)
            ]
        if self._effects:
            refs = [ref if isinstance(ref, StreamRef) else EffectRef(ref, effects) for ref in refs]
        if self._shape is not None:
            return fill(self._shape.template, refs)
        return refs if self._multi_output else refs[0]

    def position(self, reader: int) -> int | None:
        """Return the first position in the list of outputs of the edge read as ``reader``; ``None``: it is an
        effect, or the only result."""
        if not self._multi_output or reader >= self._distinct:
            return None
        return self._outputs.index(reader)


def _constant(value: Any) -> Any:
    """Return the value to put for a constant result. A ref stands for its value."""
    if not isinstance(value, Ref):
        return value
    wait_for(value)
    return value.to_send()


def get_all(refs: Any, timeout: float | None) -> Any:
    """Return the values of ``refs``, in the same shape: one ref, or lists, tuples, dicts and dataclasses of
    them. A tuple on the outside gives a list. The first error that comes is raised, whichever ref has it; if
    several have come, the first in order.

    Raises:
        TypeError: something else than a ref is where one should be.
        WaitTimeoutError: ``timeout`` (seconds, for all together) is over.
    """
    if timeout is None and type(refs) is list:
        soon = _core.refs_get_soon(refs)  # the fast path
        if soon is not None:
            return soon if len(soon) == len(refs) else soon + _each(refs[len(soon) :])
    if isinstance(refs, Ref):
        return refs.get(timeout)
    end = deadline_of(timeout)
    if not isinstance(refs, (list, tuple, dict)) and not _is_instance(refs):
        raise ArgumentsError(f"get takes a ref or a container of refs, not {type(refs).__name__}")
    every: list[Ref] = []
    _check(refs, "", every)

    def value(item: Any) -> Any:
        if isinstance(item, Ref):
            return item.get(left_until(end))
        if isinstance(item, list):
            return [value(i) for i in item]
        if isinstance(item, tuple):
            return rebuild_tuple(type(item), [value(i) for i in item])
        if isinstance(item, dict):
            return {key: value(i) for key, i in item.items()}
        return with_fields(item, {name: value(i) for name, i in _fields(item)})

    def values() -> Any:
        return [value(item) for item in refs] if isinstance(refs, tuple) else value(refs)

    return get_together(every, values)


def _each(refs: list[Any]) -> list[Any]:
    """Return the values of a list of refs, without a timeout."""
    return get_together(refs, lambda: [ref.get() for ref in refs])


def _check(item: Any, where: str, every: list[Ref]) -> None:
    """Raise unless there are only refs in ``item``. They are added to ``every``."""
    if isinstance(item, Ref):
        every.append(item)
        return
    if isinstance(item, (list, tuple)) and (
        type(item) in (list, tuple) or is_named_tuple(type(item))
    ):
        for i, inner in enumerate(item):
            _check(inner, f"{where}[{i}]", every)
    elif isinstance(item, dict):
        for key, inner in item.items():
            _check(inner, f"{where}[{key!r}]", every)
    elif _is_instance(item) and any(True for _ in _fields(item)):
        for name, inner in _fields(item):
            _check(inner, f"{where}.{name}", every)
    else:
        raise ArgumentsError(f"get takes refs; element {where} is of type {type(item).__name__}")


def _is_instance(item: Any) -> bool:
    return dataclasses.is_dataclass(item) and not isinstance(item, type)


def _fields(instance: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass that hold refs; the others are constants of the graph."""
    held = [
        (field.name, getattr(instance, field.name, None)) for field in dataclasses.fields(instance)
    ]
    return [(name, item) for name, item in held if _holds(item)]


def _holds(item: Any) -> bool:
    if isinstance(item, (list, tuple)):
        return any(_holds(inner) for inner in item)
    if isinstance(item, dict):
        return any(_holds(inner) for inner in item.values())
    return isinstance(item, Ref) or (_is_instance(item) and bool(_fields(item)))


#: Number of results whose location is remembered.
MAX_ORIGINS = 100_000
#: Number of locations that the error names.
_NAMED = 10

_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(conveyor.exceptions.__file__)), "")
# Values of these are never views of shared memory.
_COPIED = (type(None), bool, int, float, str, bytes)


class Origins:
    """The locations, by graph, edge and execution; of the latest results only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locations: dict[tuple[int, int, int], str] = {}

    def note(self, graph: int, edge: int, execution: int) -> None:
        """Note that the program gets this result now, in the frame that called into the package."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        location = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        with self._lock:
            self._locations.setdefault((graph, edge, execution), location)
            if len(self._locations) > MAX_ORIGINS:
                del self._locations[next(iter(self._locations))]

    def explain(self, error: ArenaFullError, holder: str) -> str:
        """Say where this process, which is called ``holder``, got the results that it holds."""
        locations: Counter[str] = Counter()
        for held in error.held:
            if held.process != holder or held.graph is None or held.edge is None:
                continue
            for execution in held.executions:
                location = self._locations.get((held.graph, held.edge, execution))
                locations[location or "not got yet, or long ago"] += 1
        if not locations:
            return ""
        lines = [f"  {location}: {count}" for location, count in locations.most_common(_NAMED)]
        if len(locations) > _NAMED:
            lines.append(f"  and {len(locations) - _NAMED} more places")
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
