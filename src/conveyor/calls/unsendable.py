"""Blame, in the user's terms, for the part of a call or of a graph that cannot be sent: for the error, after
sending has failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from conveyor.calls.call import (
    ASYNC_FUNCTION,
    ASYNC_NEXT,
    CLOSE,
    FUNCTION,
    NEXT,
    OPEN,
    OPEN_FUNCTION,
    START,
    Call,
    count_of,
)
from conveyor.codec import blamed
from conveyor.codec.direct import Direct
from conveyor.codec.pickling.blame import Given
from conveyor.dag.inputs import InputData, Key, Path, key_label
from conveyor.exceptions import SerializationError
from conveyor.plan.model import Argument, Plan, Task
from conveyor.plan.template import constants
from conveyor.transport.base import Transport

#: Calls whose first argument is a generator's key, which is none of the user's.
_KEYED = frozenset((OPEN, OPEN_FUNCTION, NEXT, ASYNC_NEXT, CLOSE))


#: Results that cannot be sent because the method does not say what it is.
_ADVICE = {
    GeneratorType: "a generator: have the method yield the items itself, or decorate it with "
    "@conveyor.method(num_returns='streaming'), and they stream",
    AsyncGeneratorType: "an asynchronous generator: have the method yield the items itself (async def with "
    "yield), and they stream",
    CoroutineType: "a coroutine: write the method, or what its decorator makes of it, with async def, or "
    "decorate it with functools.wraps",
}


def blame_constructor(
    error: SerializationError, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> SerializationError:
    """Rewrite ``error`` of starting an actor in the user's terms."""
    return blamed(error, _of_constructor(cls, args, kwargs))


def blame_call(error: SerializationError, actor: str, call: Call) -> SerializationError:
    """Rewrite ``error`` of a call of ``actor``, which may be the one that makes it, in the user's terms."""
    return blamed(error, _of_call(actor, call))


def blame_result(
    error: SerializationError, actor: str, call: Call, result: Any
) -> SerializationError:
    """Rewrite ``error`` of answering a call of ``actor`` with ``result`` in the user's terms."""
    if advice := _ADVICE.get(type(result)):
        return SerializationError(f"{actor}.{call[0]} has returned {advice}")
    return blamed(error, _of_result(actor, call, result))


def _of_constructor(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Given]:
    yield Given.definition("actor class", cls)
    yield from arguments(cls.__name__, args, kwargs)


def _of_call(actor: str, call: Call) -> Iterator[Given]:
    name, args, kwargs, _, what = call
    if what == START:
        if isinstance(args[0], type):
            yield from _of_constructor(args[0], args[1:], kwargs or {})
        return
    if what in _KEYED:
        args = args[1:]
    if what in (FUNCTION, ASYNC_FUNCTION, OPEN_FUNCTION):
        yield Given.definition("function", args[0])
        args = args[1:]
    yield from arguments(f"{actor}.{name}", args, kwargs or {})


def arguments(label: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Given]:
    """Describe the arguments of ``label``."""
    for i, value in enumerate(args):
        yield Given.argument(i, label, value)
    for name, value in kwargs.items():
        yield Given.argument(name, label, value)


def _of_result(actor: str, call: Call, result: Any) -> Iterator[Given]:
    name, _, _, result_spec, what = call
    label = f"{actor}.{name}"
    if what in (NEXT, ASYNC_NEXT):
        yield Given.result(f"an item of {label}", _users(result[0]))
    elif count_of(result_spec) > 1:
        for i, value in enumerate(result):
            yield Given.result(f"result {i} of {label}", _users(value))
    else:
        yield Given.result(f"the result of {label}", _users(result))


def _users(result: Any) -> Any:
    return result.value if type(result) is Direct else result


def blame_input(
    error: SerializationError, plan: Plan, name: str, inputs: tuple[Any, ...]
) -> SerializationError:
    """Return ``error`` with the argument to blame, after submitting ``inputs``, the frames of the plan's
    input edges, to the graph ``name``."""
    return blamed(error, _of_inputs(plan, name, inputs))


def blame_arguments(
    error: SerializationError, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> SerializationError:
    """Return ``error`` with the argument to blame, after submitting all arguments of ``execute`` to the graph
    ``name``."""
    return blamed(error, arguments(f"{name}.execute", args, kwargs))


def blame_tasks(error: SerializationError, name: str, tasks: Iterable[Task]) -> SerializationError:
    """Return ``error`` with the constant or function to blame, after sending an actor its tasks of the graph
    ``name``."""
    return blamed(error, _of_tasks(name, tasks))


def blame_transports(
    error: SerializationError, actor: str, transports: Iterable[Transport]
) -> SerializationError:
    """Return ``error`` with the transport to blame, after sending an actor its part of a graph, which is to
    open it."""
    return blamed(error, _of_transports(actor, transports))


def _of_inputs(plan: Plan, name: str, inputs: tuple[Any, ...]) -> Iterator[Given]:
    for bundle, frame in zip(plan.inputs, inputs, strict=True):
        if bundle.keys == (None,):
            if isinstance(frame, InputData):
                yield from arguments(f"{name}.execute", frame.args, frame.kwargs)
            else:
                yield from arguments(f"{name}.execute", (frame,), {})
        else:
            for key, part in zip(bundle.keys, frame or (), strict=True):
                assert key is not None
                yield _of_part(name, key, part)


def _of_part(name: str, key: Key, part: Any) -> Given:
    if not isinstance(key, Path):
        return Given.argument(key, f"{name}.execute", part)
    steps = key_label(key, "").removeprefix(f"[{key.root!r}]")
    return Given.argument(key.root, f"{name}.execute", part).part(steps)


def _of_transports(actor: str, transports: Iterable[Transport]) -> Iterator[Given]:
    for transport in transports:
        yield Given(f"the transport {transport.name!r}, for actor {actor},", "", transport)


def _of_tasks(name: str, tasks: Iterable[Task]) -> Iterator[Given]:
    for task in tasks:
        label = f"{task.label} in {name}"
        if task.function is not None:
            yield Given.definition("function", task.function)
        places: list[tuple[int | str, Argument]] = [*enumerate(task.args), *task.kwargs]
        for place, argument in places:
            for steps, value in constants(argument):
                yield Given.argument(place, label, value).part(steps)
