"""Transports are found by name: ours have a folder each beside this file, others are registered."""

from __future__ import annotations

import importlib
import os

from conveyor.dag.hints import known_transports
from conveyor.transport.base import Transport

__all__ = ["get", "names", "register", "unregister"]

_registered: dict[str, Transport] = {}
_folders = frozenset(
    entry.name
    for entry in os.scandir(os.path.dirname(__file__))
    if entry.is_dir() and not entry.name.startswith("_")
)


def register(transport: Transport) -> None:
    """Have graphs that are compiled from now on find ``transport`` by its name. It is enough to do so in the
    process that began the session: actors are sent what they need.

    Raises:
        TypeError: it is no :class:`Transport`, or its name is no text.
        ValueError: the name is another transport's, or means something else.
    """
    if not isinstance(transport, Transport):
        raise TypeError(f"a conveyor.transport.Transport is registered, not {transport!r}")
    name = getattr(transport, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"{transport!r} has no name: its attribute 'name' is {name!r}")
    if name in names() or name == "auto":
        raise ValueError(f"there is a transport {name!r} already")
    _registered[name] = transport
    known_transports.add(name)


def unregister(name: str) -> None:
    """Take back what :func:`register` did. Graphs that use the transport keep it.

    Raises:
        ValueError: nobody has registered a transport of that name.
    """
    if _registered.pop(name, None) is None:
        raise ValueError(f"no transport was registered as {name!r}")
    known_transports.discard(name)


def names() -> tuple[str, ...]:
    """List all transports: ours, then those that were registered."""
    return (*sorted(_folders), *_registered)


def get(name: str) -> Transport | None:
    """Find the transport of that name."""
    if name in _folders:
        made: Transport = importlib.import_module(f"conveyor.transport.{name}").TRANSPORT
        return made
    return _registered.get(name)
