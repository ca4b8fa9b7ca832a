"""What a method with ``num_returns`` has returned."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from conveyor.codec.direct import Direct
from conveyor.runtime.calls.call import ASYNC_NEXT, NEXT
from conveyor.runtime.protocol import Returns

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
