"""What a call's name stands for, in the process of the actor that is called."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

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
)
from conveyor.runtime.calls.generators import OpenGenerators

#: Ray's name for calling a function with an actor's instance.
RAY_CALL = "__ray_call__"


def find_method(instance: Any, name: str) -> tuple[Callable[..., Any], bool]:
    """The bound method, and whether it is a coroutine function. Raises ``GraphError`` if there is none.

    Besides methods there is ``__ray_call__``, which calls its first argument with the instance.
    """
    if name == RAY_CALL:
        return functools.partial(_call_with, instance), False
    method = getattr(instance, name, None)
    if not callable(method):
        raise GraphError(f"{type(instance).__name__} has no method {name!r}")
    if type(method) is types.MethodType:
        return method, _is_async(method.__func__)
    return method, inspect.iscoroutinefunction(method)  # it may refer to the instance: none is kept


def find(
    instance: Any, generators: OpenGenerators, name: str, what: int
) -> tuple[Callable[..., Any], bool]:
    """What a call of that name calls with its arguments, and whether it is a coroutine function. ``what``:
    one of the numbers in ``calls.call``."""
    if what == METHOD:
        return find_method(instance, name)
    if what == NEXT:
        return generators.next, False
    if what == OPEN:
        return generators.opening(find_method(instance, name)[0]), False
    if what == ASYNC_NEXT:
        return generators.async_next, True
    if what == CLOSE:
        return generators.close, False
    if what == OPEN_FUNCTION:
        return generators.opening(_call), False
    if what == ASYNC_FUNCTION:
        return _call_later, True
    if what == FUNCTION:
        return _call, False
    raise GraphError(f"{name} cannot be called so ({what})")


#: Of the functions of classes. Python takes longer to say it than many a call does.
_is_async = functools.lru_cache(maxsize=1024)(inspect.iscoroutinefunction)


def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _call_with(instance: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(instance, *args, **kwargs)


async def _call_later(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await function(*args, **kwargs)
