"""Each edge gets a transport."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conveyor.dag import TransportHint
from conveyor.exceptions import GraphError
from conveyor.transport import registry
from conveyor.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Route:
    """How an edge's values travel.

    name: the transport of their tensors.
    reason: why it was chosen.
    in_frame: the tensors travel inside of the frames, with everything else.
    """

    name: str
    reason: str
    in_frame: bool = True


def choose(source: str, hints: Iterable[TransportHint]) -> Route:
    """Choose the route for the value ``source`` (a label), given what its readers were told about it.

    Raises:
        GraphError: a hint asks for a transport or a device that nothing here can serve, or two ask for
            different ones.
    """
    forced: dict[str, Transport] = {}
    for hint in hints:
        if hint.transport == "auto":
            serving = _plain()
        else:
            serving = forced[hint.transport] = _forced(source, hint)
        device = _DEVICES[hint.device]
        if device not in (None, *serving.capabilities.devices):
            raise GraphError(
                f"{source}: {hint} asks for tensors on the device {hint.device!r}, and there is no "
                f"transport to it available yet; 'default' and 'cpu' are"
            )
    if len(forced) > 1:
        names = " and ".join(map(repr, forced))
        raise GraphError(
            f"{source}: its readers ask for the transports {names}; a value has one, so mark them alike"
        )
    for name, transport in forced.items():
        in_frame = transport.capabilities.in_frame
        return Route(name, "asked for by with_tensor_transport", in_frame)
    return in_frames("same host")


def for_executor(source: str, route: Route, *, alone: bool) -> Route:
    """Choose the route between an actor and the executor of the graph, of a value that others get by
    ``route``. ``alone``: there are no others.

    Raises:
        GraphError: ``route`` was asked for, and it can serve nobody.
    """
    if route.in_frame:
        return route
    if alone:
        raise GraphError(
            f"{source}: with_tensor_transport(transport={route.name!r}) asks for a transport in which only "
            f"actors take part, and here the executor of the graph writes or reads: leave the mark out"
        )
    return in_frames(f"the executor takes no part in {route.name}")


def for_items(source: str, route: Route) -> Route:
    """Choose the route of a generator's items, of which ``route`` was asked for.

    Raises:
        GraphError: it is none that they can take.
    """
    if route.in_frame:
        return route
    raise GraphError(
        f"{source}: with_tensor_transport(transport={route.name!r}) is about a generator, whose items the "
        f"executor reads, and in that transport only actors take part: leave the mark out"
    )


def in_frames(reason: str) -> Route:
    """Make the route that needs nothing but the frames."""
    return Route(_plain().name, reason)


def _forced(source: str, hint: TransportHint) -> Transport:
    transport = registry.get(hint.transport)
    if transport is None:
        others = ", ".join(map(repr, registry.names()))
        raise GraphError(
            f"{source}: {hint} asks for the transport {hint.transport!r}, and there is no "
            f"transport of that name available yet; 'auto' and {others} are"
        )
    try:
        why_not = transport.viable()
    except Exception as error:
        why_not = f"viable() has raised {type(error).__name__}: {error}"
    if why_not is not None:
        raise GraphError(
            f"{source}: {hint} asks for the transport {hint.transport!r}, which cannot be used: {why_not}"
        )
    return transport


def _plain() -> Transport:
    """Find the transport that needs nothing but the frames."""
    for name in registry.names():
        transport = registry.get(name)
        if transport is not None and transport.capabilities.in_frame:
            return transport
    raise AssertionError("no transport moves tensors inside of frames")


#: What each device of a hint is called by torch. The default one is where the tensors are, wherever that is.
_DEVICES = {"default": None, "cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}
