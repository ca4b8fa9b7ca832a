"""Checks of ``tensor_transport=`` and its companions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conveyor.checks import check_flag
from conveyor.dag.hints import known_transports
from conveyor.later import import_later

#: Ray's name for a value that does not stay where it was made.
OBJECT_STORE = "object_store"

#: The transport that only graphs know: the communicator that they were compiled with.
_OF_GRAPHS = frozenset(("accelerator",))


def check_transport(value: Any, option: str = "tensor_transport") -> str | None:
    """The transport's name in lower case; ``None`` for a value that travels as any other.

    Raises:
        TypeError: it is no name.
        ValueError: there is no such transport.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{option} is the name of a transport, not {value!r}")
    name = value.lower()
    if name == OBJECT_STORE:
        return None
    if name not in known_transports or name in _OF_GRAPHS:
        import_later("conveyor.transport.registry")  # it knows more names
        known = known_transports.difference(_OF_GRAPHS)
        for one in known:
            if one.lower() == name:
                return one
        if import_later("conveyor.direct.managers.registry").is_known(name):
            return name
        listed = ", ".join(sorted({*known, OBJECT_STORE}))
        raise ValueError(f"invalid tensor transport: {value!r}; known are {listed}")
    return name


def check_has_transport(actor: Any, name: str) -> None:
    """Raise unless the actor can use a transport, which may be one of the user's own.

    Raises:
        ValueError: it cannot.
    """
    if name not in known_transports:
        import_later("conveyor.direct.managers.registry").check_has_transport(actor, name)


def check_snapshot(snapshot: Any, transport: str | None) -> None:
    """Raise unless ``snapshot`` is true or false, and true only with a transport.

    Raises:
        TypeError: it is neither.
        ValueError: it is true, and the result does not stay where it was made.
    """
    check_flag(snapshot, "snapshot")
    if snapshot and transport is None:
        raise ValueError(
            "snapshot=True is of what stays where it was made: say tensor_transport=, too"
        )


def check_get_options(options: Mapping[str, Any]) -> None:
    """Raise unless all ``options`` are such as Ray's ``get`` takes beside a timeout.

    Raises:
        TypeError: an option that does not exist.
        ValueError: no such transport.
    """
    for name, value in options.items():
        if name == "_tensor_transport":
            check_transport(value, name)
        elif name != "_use_object_store":
            raise TypeError(f"get() got an unexpected keyword argument {name!r}")
