"""Arguments of a call that have stayed here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Receiving:
    """Values that are kept in this process and are arguments of the call that is being received. The method
    gets the objects themselves, and holds what keeps them until it is over."""

    __slots__ = ("on", "taken")

    def __init__(self) -> None:
        self.on = False
        self.taken: list[Any] = []

    def held_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` so that it keeps what the call has taken."""
        taken, self.taken = self.taken, []
        return functools.partial(_holding, taken, function) if taken else function


def _holding(_taken: list[Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


#: An actor receives calls one after the other, on its main thread.
receiving = Receiving()
