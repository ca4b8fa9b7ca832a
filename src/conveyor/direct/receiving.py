"""Methods that receive arguments into memory of their own (``@conveyor.method(receive_into=...)``)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from conveyor.codec.errors.encoding import note_not_begun
from conveyor.direct.into import Targets, receive
from conveyor.direct.leaves import is_leaf
from conveyor.runtime.refs.unread import Arriving

#: By parameter: the path of an attribute of the instance, or a function of the instance.
Places = Mapping[str, "str | Callable[[Any], Any]"]


def receiving(function: Callable[..., Any], places: Places) -> Callable[..., Any]:
    """The method ``function``, which finds these arguments in memory that its instance has."""
    signature = inspect.signature(function)

    def with_received(args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        bound = signature.bind(*args, **kwargs)
        for name, place in places.items():
            if name in bound.arguments:
                value = bound.arguments[name]
                try:
                    received = _receive(function.__name__, name, value, args[0], place)
                except Exception as error:
                    note_not_begun(error)
                    raise
                bound.arguments[name] = received
        return bound

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = with_received(args, kwargs)
        return function(*bound.args, **bound.kwargs)

    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def items_later(*args: Any, **kwargs: Any) -> Any:
            bound = with_received(args, kwargs)
            async for item in function(*bound.args, **bound.kwargs):
                yield item

        return items_later
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_later(*args: Any, **kwargs: Any) -> Any:
            return await call(*args, **kwargs)

        return call_later
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def items(*args: Any, **kwargs: Any) -> Any:
            return (yield from call(*args, **kwargs))

        return items
    return call


def _receive(method: str, name: str, value: Any, instance: Any, place: Any) -> Any:
    into = place(instance) if callable(place) else _found(method, name, instance, place)
    try:
        targets = Targets(into, f"receive_into of {name!r}")
        if type(value) is not Arriving:
            return receive(value, targets)
        made = receive(value.value, targets)
        value.fetched()
        return made
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError):
            raise  # it is of the value, and says so
        where = "" if callable(place) else f" into self.{place}"
        raise type(error)(f"{method}() cannot receive {name!r}{where}: {error}") from None


def _found(method: str, name: str, instance: Any, path: str) -> Any:
    found = instance
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise AttributeError(
                f"{method}() cannot receive {name!r} into self.{path}: {error}"
            ) from None
    return found() if callable(found) and not is_leaf(found) else found
