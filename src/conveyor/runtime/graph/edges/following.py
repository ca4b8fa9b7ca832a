"""Which errors of an execution only say that another one of it has failed, or that an actor has died."""

from __future__ import annotations

import builtins
from collections.abc import Container
from typing import Any

from conveyor.exceptions import CollectiveBrokenError
from conveyor.runtime.ranks import DEAD_RANK, FAILED_IN

_cause, _context, _noted = (
    BaseException.__dict__[name].__get__ for name in ("__cause__", "__context__", "__dict__")
)
_Group: Any = getattr(builtins, "BaseExceptionGroup", None)  # since Python 3.11


def follows(error: BaseException, of: tuple[int, int], members: Container[tuple[int, int]]) -> bool:
    """Whether ``error`` comes of what another rank has raised in ``of``, a graph and its execution, or of the
    death of one of ``members``, which are the slots and incarnations of that graph's actors.

    A step may turn such an error into one of its own, so those that it was handling then count as well.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        # What the class of the user's own says of these is not asked: it may raise, or go on for ever.
        if issubclass(type(one), CollectiveBrokenError):
            noted = _noted(one)
            if noted.get(FAILED_IN) == of or noted.get(DEAD_RANK) in members:
                return True
        left += (_cause(one), _context(one))
        if _Group is not None and issubclass(type(one), _Group):
            left += _Group.exceptions.__get__(one)
    return False
