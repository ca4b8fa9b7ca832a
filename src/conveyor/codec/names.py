"""How types and values are named in messages."""

from __future__ import annotations

from typing import Any

from conveyor.codec.faults import is_fault


def type_name(kind: type) -> str:
    """The name that a user knows a class by."""
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def shown(value: Any, longest: int) -> str:
    """``repr`` of ``value``, in at most so many characters, whatever its class does."""
    try:
        text = repr(value)
    except BaseException as failure:
        if not is_fault(failure):
            raise
        text = f"<{type(value).__name__}>"
    return text if len(text) <= longest else text[: longest - 3] + "..."
