"""Blame for values of a graph that cannot be sent, in the user's terms: for the error, after it has
failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from conveyor.calls.unsendable import arguments
from conveyor.codec import blamed
from conveyor.dag.inputs import InputData, Key, Path, key_label
from conveyor.exceptions import SerializationError
from conveyor.plan.model import Argument, Plan, Task
from conveyor.plan.template import constants
from conveyor.transport.base import Transport

if TYPE_CHECKING:
    from conveyor.codec.pickling.blame import Given


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
    from conveyor.codec.pickling.blame import Given  # needed for nothing but the error

    if not isinstance(key, Path):
        return Given.argument(key, f"{name}.execute", part)
    steps = key_label(key, "").removeprefix(f"[{key.root!r}]")
    return Given.argument(key.root, f"{name}.execute", part).part(steps)


def _of_transports(actor: str, transports: Iterable[Transport]) -> Iterator[Given]:
    from conveyor.codec.pickling.blame import Given

    for transport in transports:
        yield Given(f"the transport {transport.name!r}, for actor {actor},", "", transport)


def _of_tasks(name: str, tasks: Iterable[Task]) -> Iterator[Given]:
    from conveyor.codec.pickling.blame import Given

    for task in tasks:
        label = f"{task.label} in {name}"
        if task.function is not None:
            yield Given.definition("function", task.function)
        places: list[tuple[int | str, Argument]] = [*enumerate(task.args), *task.kwargs]
        for place, argument in places:
            for steps, value in constants(argument):
                yield Given.argument(place, label, value).part(steps)
