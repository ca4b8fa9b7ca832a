"""Transports of the user's own that were registered, as the session's processes ask the driver for them."""

from __future__ import annotations

#: By the name, each pickled by value. Only the driver's is asked for.
KNOWN: dict[str, bytes] = {}


def add(name: str, registration: bytes) -> None:
    """Note one.

    Raises:
        ValueError: another one has the name.
    """
    if KNOWN.setdefault(name, registration) != registration:
        raise ValueError(f"there is a transport {name!r} already")
