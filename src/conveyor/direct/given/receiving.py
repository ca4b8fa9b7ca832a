"""Methods that receive arguments into memory of their own (``@conveyor.method(receive_into=...)``)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from conveyor.codec.errors import note_not_begun
from conveyor.direct.awaiting import when_there
from conveyor.direct.given.into import Targets, receive
from conveyor.direct.structure.leaves import is_leaf
from conveyor.refs.derived import Arriving

#: By parameter: the path of an attribute of the instance, or a function of the instance.
Places = Mapping[str, "str | Callable[[Any], Any]"]


def receiving(function: Callable[..., Any], places: Places) -> Callable[..., Any]:
    """Wrap the method ``function`` so that it finds these arguments in memory of its instance."""
    signature = inspect.signature(function)

    def to_receive(bound: inspect.BoundArguments, instance: Any) -> Iterator[_Argument]:
        for name, place in places.items():
            if name in bound.arguments:
                value = bound.arguments[name]
                yield _Argument(function.__name__, name, value, instance, place)

    def received(args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        bound = signature.bind(*args, **kwargs)
        with _not_begun():
            for one in to_receive(bound, args[0]):
                bound.arguments[one.name] = one.receive()
        return bound

    async def received_later(
        args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> inspect.BoundArguments:
        bound = signature.bind(*args, **kwargs)
        with _not_begun():
            for one in to_receive(bound, args[0]):
                bound.arguments[one.name] = await when_there(one.receive)
        return bound

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = received(args, kwargs)
        return function(*bound.args, **bound.kwargs)

    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def items_later(*args: Any, **kwargs: Any) -> Any:
            bound = await received_later(args, kwargs)
            async for item in function(*bound.args, **bound.kwargs):
                yield item

        return items_later
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_later(*args: Any, **kwargs: Any) -> Any:
            bound = await received_later(args, kwargs)
            return await function(*bound.args, **bound.kwargs)

        return call_later
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def items(*args: Any, **kwargs: Any) -> Any:
            return (yield from call(*args, **kwargs))

        return items
    return call


@contextmanager
def _not_begun() -> Iterator[None]:
    """Mark each error raised inside as raised in the place of a method, which will not run."""
    try:
        yield
    except Exception as error:
        note_not_begun(error)
        raise


class _Argument:
    """Argument that is received into memory of the instance."""

    def __init__(self, method: str, name: str, value: Any, instance: Any, place: Any) -> None:
        self._method, self.name = method, name
        self._value = value
        self._place = place
        self._into = place(instance) if callable(place) else _found(method, name, instance, place)

    def receive(self) -> Any:
        """Return the argument, in its place. A call that was broken off can be repeated."""
        value = self._value
        try:
            targets = Targets(self._into, f"receive_into of {self.name!r}")
            if type(value) is not Arriving:
                return receive(value, targets)
            made = receive(value.value, targets)
            value.fetched()
            return made
        except (TypeError, ValueError) as error:
            if type(error) not in (TypeError, ValueError):
                raise  # it is of the value, and says so
            where = "" if callable(self._place) else f" into self.{self._place}"
            raise type(error)(
                f"{self._method}() cannot receive {self.name!r}{where}: {error}"
            ) from None


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
