"""A call of an actor: what is called, with what, and what is wanted of it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from conveyor.calls.generators import OpenGenerators
from conveyor.codec.direct import Direct, receiving
from conveyor.exceptions import GraphError
from conveyor.runtime.protocol import ResultSpec

if TYPE_CHECKING:
    from conveyor import _core


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
    """Return the function that ``call`` calls with its arguments, and whether it is a coroutine function.
    Calls of generators are told apart here, in the order in which they have come, whatever runs them then."""
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
    """Whether ``function`` is a coroutine function; ``None``: a decorator of one, which may return its
    coroutine."""
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


#: Sequences that are one value.
_WHOLE = (str, bytes, bytearray, memoryview)


def returned(value: Any, result_spec: ResultSpec, what: int, label: str) -> Any:
    """Return the value to send for ``value``, which ``label``, called as ``what``, has returned.

    Raises ``ValueError`` if there are not as many results as are wanted, and any error that a generator
    raises.
    """
    if type(result_spec) is int:
        return value if result_spec == 1 else elements(value, result_spec, label)
    count, transport, snapshot = result_spec  # type: ignore[misc]
    if count > 1:
        return tuple([Direct(one, transport, snapshot) for one in elements(value, count, label)])
    if what not in (NEXT, ASYNC_NEXT):
        return Direct(value, transport, snapshot)
    return None if value is None else (Direct(value[0], transport, snapshot), *value[1:])


def elements(value: Any, count: int, label: str) -> tuple[Any, ...]:
    """The ``count`` values that ``label`` has returned in a sequence; a generator's items are those.

    Raises ``ValueError`` if there are more or fewer, and what a generator raises.
    """
    if inspect.isgenerator(value):
        value = tuple(value)
    several = isinstance(value, Sequence) and not isinstance(value, _WHOLE)
    if several and len(value) == count:
        return tuple(value)
    size = f" of {len(value)}" if several else ""
    raise ValueError(
        f"{label} has num_returns={count} and must return a sequence of that length, "
        f"but returned a {type(value).__name__}{size}"
    )


#: What a call does with its method's name and its arguments. These are plain numbers, which the native codec
#: writes by itself.
METHOD = 0
#: It calls the first argument, which is a function (or a coroutine function) with the call's name.
FUNCTION, ASYNC_FUNCTION = 1, 2
#: It opens a generator for the caller's key, which is the first argument. Of a function that is the second.
OPEN, OPEN_FUNCTION = 3, 4
#: It takes the next item of the generator with that key, or closes it.
NEXT, ASYNC_NEXT, CLOSE = 5, 6, 7
#: It makes the actor's instance: of the class that is the first argument, or of a ``Constructor``.
START = 8
#: It is no call of the user's: its argument is an ``Order`` of the driver's.
ORDER = 9
#: It is in the place of one that its caller could not send, or has cancelled before. Its argument says in
#: words what has happened.
MISSED = 10
#: The last call: nobody needs the actor any more, and it ends when it has done what was asked before. It
#: travels with the calls, so it overtakes none of them, whatever their size and wherever the actor is.
STOP = 11


Call: TypeAlias = "tuple[str, tuple[Any, ...], dict[str, Any] | None, ResultSpec, int]"
"""A call as it waits, as it travels and as the actor has it: the name that users know, the arguments by
position and by name (``None`` if there are none), which results are wanted, and what is called (one of the
numbers above). It is a plain tuple, because making a named one takes a tenth of the time of a call."""


def count_of(result_spec: ResultSpec) -> int:
    """Return how many results are wanted."""
    return result_spec if type(result_spec) is int else result_spec[0]  # type: ignore[index]


def with_arguments(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Call:
    """Return the same call with other arguments."""
    name, _, _, result_spec, what = call
    return name, args, dict(kwargs) if kwargs else None, result_spec, what


def start(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Call:
    """Make the call that makes the instance."""
    return "__init__", args, dict(kwargs) if kwargs else None, 1, START


def stop() -> Call:
    """Make the call that ends the actor."""
    return "stop", (), None, 1, STOP


def instead_of(call: Call, process_table: _core.ProcessTable, slot: int, why: str) -> Call | None:
    """Return what is sent in the place of ``call``, which comes to nothing before it is sent: other ranks may
    wait for it. ``None``: the actor, which is in ``slot``, is in no group."""
    return (call[0], (why,), None, 1, MISSED) if process_table.is_rank(slot) else None
