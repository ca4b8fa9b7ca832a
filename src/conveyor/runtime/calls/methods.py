"""What a call's name stands for, in the process of the actor that is called."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from conveyor.exceptions import GraphError
from conveyor.runtime.calls.generators import OpenGenerators

#: Ray's name for calling a function with an actor's instance.
RAY_CALL = "__ray_call__"


def find_method(
    instance: Any, generators: OpenGenerators, name: str
) -> tuple[Callable[..., Any], bool]:
    """The bound method, and whether it is a coroutine function. Raises ``GraphError`` if there is none.

    Besides methods there are what a generator method's calls do (``calls.generators``), ``name#call`` (for
    coroutine functions ``name#acall``), which calls its first argument, and ``__ray_call__``, which
    calls its first argument with the instance.
    """
    if "#" in name:
        name, _, operation = name.rpartition("#")
        if operation == "call":
            return _call, False
        if operation == "acall":
            return _call_later, True
        return generators.operation(find_method(instance, generators, name)[0], operation)
    if name == RAY_CALL:
        return functools.partial(_call_with, instance), False
    method = getattr(instance, name, None)
    if not callable(method):
        raise GraphError(f"{type(instance).__name__} has no method {name!r}")
    if type(method) is types.MethodType:
        return method, _is_async(method.__func__)
    return method, inspect.iscoroutinefunction(method)  # it may refer to the instance: none is kept


#: Of the functions of classes. Python takes longer to say it than many a call does.
_is_async = functools.lru_cache(maxsize=1024)(inspect.iscoroutinefunction)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _call_with(instance: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(instance, *args, **kwargs)


async def _call_later(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await function(*args, **kwargs)
