"""What a method with ``num_returns`` has returned."""

from __future__ import annotations

import inspect
from typing import Any


def elements(value: Any, count: int, label: str) -> tuple[Any, ...]:
    """The ``count`` values that ``label`` has returned; a generator's items are those.

    Raises ``ValueError`` if there are more or fewer, and what a generator raises.
    """
    if inspect.isgenerator(value):
        value = tuple(value)
    if isinstance(value, (tuple, list)) and len(value) == count:
        return tuple(value)
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    raise ValueError(
        f"{label} has num_returns={count} and must return a sequence of that length, "
        f"but returned a {type(value).__name__}{size}"
    )
