"""A call of an actor: what is called, with what, and what is wanted of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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


class Call(NamedTuple):
    """As it waits in the caller's process and as the actor has it. It travels as a plain tuple."""

    #: The method's or the function's name, as users know it.
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None = None
    #: How many results are wanted.
    num_returns: int = 1
    #: What is called: one of the numbers above.
    what: int = METHOD

    def with_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The same call with others."""
        return self._replace(args=args, kwargs=kwargs or None)


def start(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Call:
    """The call that makes the instance."""
    return Call("__init__", args, dict(kwargs) if kwargs else None, 1, START)
