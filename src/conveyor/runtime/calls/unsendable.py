"""What of a call cannot be sent, in the user's terms: for the error, after it has failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from conveyor.channel import blamed
from conveyor.exceptions import SerializationError
from conveyor.runtime.status import method_of

if TYPE_CHECKING:
    from conveyor.channel.blame import Given


def blame_constructor(
    error: SerializationError, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> SerializationError:
    """``error`` of starting an actor."""
    return blamed(error, _of_constructor(cls, args, kwargs))


def blame_call(
    error: SerializationError,
    actor: str,
    method: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> SerializationError:
    """``error`` of a call of ``method``, as it is called on the wire."""
    return blamed(error, _of_call(actor, method, args, kwargs))


def blame_result(
    error: SerializationError, actor: str, method: str, result: Any, num_returns: int
) -> SerializationError:
    """``error`` of answering a call of ``method``, as it is called on the wire, with ``result``."""
    return blamed(error, _of_result(actor, method, result, num_returns))


def _of_constructor(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Given]:
    from conveyor.channel.blame import Given  # needed for nothing but the error

    yield Given.definition("actor class", cls)
    yield from arguments(cls.__name__, args, kwargs)


def _of_call(
    actor: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Given]:
    from conveyor.channel.blame import Given

    name, *operations = method.split("#")
    for operation in reversed(operations):  # each comes with something before what the caller gave
        if operation in ("call", "acall"):
            yield Given.definition("function", args[0])
        args = args[1:]
    yield from arguments(f"{actor}.{name}", args, kwargs)


def arguments(label: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Given]:
    """The arguments of ``label``."""
    from conveyor.channel.blame import Given

    for i, value in enumerate(args):
        yield Given.argument(i, label, value)
    for name, value in kwargs.items():
        yield Given.argument(name, label, value)


def _of_result(actor: str, method: str, result: Any, num_returns: int) -> Iterator[Given]:
    from conveyor.channel.blame import Given

    label = f"{actor}.{method_of(method)}"
    if method.endswith(("#next", "#anext")):
        yield Given.result(f"an item of {label}", result[0])
    elif num_returns > 1:
        for i, value in enumerate(result):
            yield Given.result(f"result {i} of {label}", value)
    else:
        yield Given.result(f"the result of {label}", result)
