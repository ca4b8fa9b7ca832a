"""A call of an actor: what is called, with what, and what is wanted of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from conveyor.codec.direct import Direct
from conveyor.runtime.protocol import Returns

if TYPE_CHECKING:
    from conveyor import _core


#: Sequences that are one value.
_WHOLE = (str, bytes, bytearray, memoryview)


def returned(value: Any, returns: Returns, what: int, label: str) -> Any:
    """What is sent for ``value``, which ``label``, called as ``what``, has returned.

    Raises ``ValueError`` if there are not as many results as are wanted, and what a generator raises.
    """
    if type(returns) is int:
        return value if returns == 1 else elements(value, returns, label)
    count, transport, snapshot = returns  # type: ignore[misc]
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


Call: TypeAlias = "tuple[str, tuple[Any, ...], dict[str, Any] | None, Returns, int]"
"""A call as it waits, as it travels and as the actor has it: the name that users know, the arguments by
position and by name (``None`` if there are none), which results are wanted, and what is called (one of the
numbers above). It is a plain tuple, because making a named one takes a tenth of the time of a call."""


def count_of(returns: Returns) -> int:
    """How many results are wanted."""
    return returns if type(returns) is int else returns[0]  # type: ignore[index]


def with_arguments(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Call:
    """The same call with others."""
    name, _, _, returns, what = call
    return name, args, dict(kwargs) if kwargs else None, returns, what


def start(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Call:
    """The call that makes the instance."""
    return "__init__", args, dict(kwargs) if kwargs else None, 1, START


def stop() -> Call:
    """The call that ends the actor."""
    return "stop", (), None, 1, STOP


def instead_of(call: Call, board: _core.Board, slot: int, why: str) -> Call | None:
    """Return what is sent in the place of ``call``, which comes to nothing before it is sent: other ranks may
    wait for it. ``None``: the actor, which is in ``slot``, is in no group."""
    return (call[0], (why,), None, 1, MISSED) if board.is_rank(slot) else None
