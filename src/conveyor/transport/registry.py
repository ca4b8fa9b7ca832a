"""Transports are found by name: ours are listed here, others are registered."""

from __future__ import annotations

from conveyor.dag.hints import known_transports
from conveyor.transport import device_ipc, gloo, nccl, nixl, shm
from conveyor.transport.base import Capabilities, Transport

__all__ = ["get", "names", "register", "unregister"]

_registered: dict[str, Transport] = {}
#: Imported at once, since a process that compiles a graph may have no descriptor left to open a file
#: with. Modules that are slow to import are imported when an endpoint is opened.
_ours: dict[str, Transport] = {
    module.TRANSPORT.name: module.TRANSPORT for module in (device_ipc, gloo, nccl, nixl, shm)
}
known_transports.update(_ours)


def register(transport: Transport) -> None:
    """Have graphs that are compiled from now on find ``transport`` by its name. It is enough to do so in the
    process that began the session: actors are sent what they need.

    Raises:
        TypeError: it is no :class:`Transport`, or its name or its capabilities are none.
        ValueError: the name is another transport's, means something else, or cannot be shown.
    """
    if not isinstance(transport, Transport):
        raise TypeError(f"a conveyor.transport.Transport is registered, not {transport!r}")
    name = getattr(transport, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"{transport!r} has no name: its attribute 'name' is {name!r}")
    if not name.isprintable() or name != name.strip():
        raise ValueError(f"a transport's name is shown to people, and {name!r} cannot be")
    if not isinstance(getattr(transport, "capabilities", None), Capabilities):
        raise TypeError(f"the capabilities of {name!r} are a conveyor.transport.Capabilities")
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
    return (*_ours, *_registered)


def get(name: str) -> Transport | None:
    """Find the transport of that name."""
    return _ours.get(name) or _registered.get(name)
