"""What a call's name stands for, in the process of the actor that is called."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from conveyor.codec.direct import receiving
from conveyor.exceptions import GraphError
from conveyor.runtime.calls.call import (
    ASYNC_FUNCTION,
    ASYNC_NEXT,
    CLOSE,
    FUNCTION,
    METHOD,
    NEXT,
    OPEN,
    OPEN_FUNCTION,
    Call,
)
from conveyor.runtime.calls.generators import OpenGenerators

#: Ray's name for calling a function with an actor's instance.
RAY_CALL = "__ray_call__"


def find_method(
    instance: Any, name: str, on_loop: bool | None = None
) -> tuple[Callable[..., Any], bool]:
    """The bound method, and whether it is a coroutine function. Raises ``GraphError`` if there is none.
    ``on_loop``: whether the actor has an event loop; ``None``: it has one if this is called on it.

    Besides methods there is ``__ray_call__``, which calls its first argument with the instance.
    """
    if name == RAY_CALL:
        return functools.partial(_call_with, instance), False
    method = getattr(instance, name, None)
    if not callable(method):
        raise GraphError(f"{type(instance).__name__} has no method {name!r}")
    if type(method) is types.MethodType:
        is_async = _is_async(method.__func__)
        return (method, is_async) if is_async is not None else _decorated(method, on_loop)
    return method, inspect.iscoroutinefunction(method)  # it may refer to the instance: none is kept


def find(instance: Any, generators: OpenGenerators, call: Call) -> tuple[Callable[..., Any], bool]:
    """What ``call`` calls with its arguments, and whether it is a coroutine function. Calls of generators are
    told apart here, in the order in which they have come, whatever runs them then."""
    name, args, kwargs, _, what = call
    if what == METHOD:
        return find_method(instance, name)
    if what == NEXT:
        return generators.writer(args[0]).next, False
    if what == ASYNC_NEXT:
        return generators.writer(args[0]).async_next, True
    if what in (OPEN, OPEN_FUNCTION):
        key, *given = args
        method = find_method(instance, name)[0] if what == OPEN else _call
        make = functools.partial(method, *given, **(kwargs or {}))
        generators.open(key, receiving.held_by(make))
        return _opened, False
    if what == CLOSE:
        return generators.closing(args[0]), False
    if what == ASYNC_FUNCTION:
        return _call_later, True
    if what == FUNCTION:
        return _call, False
    raise GraphError(f"{name} cannot be called so ({what})")


@functools.lru_cache(maxsize=1024)  # Python takes longer to say it than many a call does
def _is_async(function: Any) -> bool | None:
    """Whether it is a coroutine function; ``None``: a decorator of one, which may return its coroutine."""
    if inspect.iscoroutinefunction(function):
        return True
    return None if inspect.iscoroutinefunction(inspect.unwrap(function)) else False


def _decorated(method: Callable[..., Any], on_loop: bool | None) -> tuple[Callable[..., Any], bool]:
    """Return what awaits a coroutine that ``method`` returns: on the actor's event loop if it has one."""
    import asyncio

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return await result if inspect.iscoroutine(result) else result

    def alone(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    if on_loop is None:
        on_loop = asyncio._get_running_loop() is not None
    return (awaited, True) if on_loop else (alone, False)


def _opened(*_args: Any, **_kwargs: Any) -> None:
    """Answer a call that opens a generator. Its method is called for the first item."""


def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _call_with(instance: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(instance, *args, **kwargs)


async def _call_later(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await function(*args, **kwargs)
