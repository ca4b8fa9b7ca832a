"""Each edge gets a transport."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable
from importlib.util import find_spec
from typing import Any

from msgspec import Struct

from conveyor.dag import TransportHint
from conveyor.device import registry as registered
from conveyor.exceptions import GraphError
from conveyor.plan.model import Promise
from conveyor.transport import registry
from conveyor.transport.base import Transport
from conveyor.transport.communicator import ForCollectives


class Route(Struct, frozen=True):
    """How an edge's values travel.

    name: the transport of their tensors.
    reason: why it was chosen.
    in_frame: the tensors travel inside of the frames, with everything else.
    promise: what was asked for about the tensors, if anything was.
    communicator: the user's object that moves them, where one was named.
    streams: where on the device its work is enqueued, see :class:`conveyor.transport.Capabilities`.
    """

    name: str
    reason: str
    in_frame: bool = True
    promise: Promise | None = None
    communicator: Any = None
    streams: str | None = None


def choose(
    source: str,
    hints: Iterable[TransportHint],
    default: Any = "create",
    elsewhere: Container[str] = (),
) -> Route:
    """Choose the route for the value ``source`` (a label), given what its readers were told about it.
    ``default`` is the graph's ``default_communicator``. ``elsewhere``: the kinds of device that actors may
    have where this process has none.

    Raises:
        GraphError: a hint asks for a transport or a device that nothing here can serve, or two differ.
    """
    given = list(dict.fromkeys(hints))
    if len(given) > 1:
        raise GraphError(
            f"{source}: its readers were told different things, {' and '.join(map(str, given))}; a value "
            f"travels in one way, so mark them alike"
        )
    if not given:
        return in_frames("same host")
    (hint,) = given
    transport = hint.transport
    if transport in _ACCELERATORS:
        transport = _accelerated(source, hint, default)
    promise = Promise(_kind(hint.device), hint.static_shape, hint.direct_return)
    reason = _ASKED
    if not isinstance(transport, str):
        name = f"communicator {_name_of(source, transport)}"
        wanted = None if promise == Promise() else promise
        if isinstance(transport, ForCollectives):
            reason = "its ranks meet"
        return Route(name, reason, False, wanted, transport)
    automatic = transport == "auto"
    serving = _automatic(hint) if automatic else _forced(source, hint, transport, elsewhere)
    _check_device(source, hint, serving, elsewhere)
    in_frame = serving.capabilities.in_frame
    nothing = (Promise(), Promise("cpu"))
    # Frames bring tensors of devices back to such a device. Where there may be any, what is to be on the CPU
    # has to be looked for.
    on_device = promise.device == "cpu" and ("cuda" in elsewhere or _may_be_on_devices())
    wanted = None if promise in nothing and not (in_frame and on_device) else promise
    if automatic:
        reason = "same host"
        if not in_frame:
            kinds = _listed(_kinds(serving))
            reason += (
                f", tensors of {kinds}; by the host's memory where a reader sees another device"
            )
    return Route(serving.name, reason, in_frame, wanted, streams=serving.capabilities.streams)


def for_executor(source: str, route: Route, *, alone: bool) -> Route:
    """Choose the route between an actor and the executor of the graph, of a value that others get by
    ``route``. ``alone``: there are no others.

    Raises:
        GraphError: ``route`` was asked for, and it can serve nobody.
    """
    if route.in_frame:
        return route
    if alone and route.reason == _ASKED:
        raise GraphError(
            f"{source}: with_tensor_transport(transport={route.name!r}) asks for a transport in which only "
            f"actors take part, and here the executor of the graph writes or reads: leave the mark out"
        )
    return in_frames(f"the executor takes no part in {route.name}", route.promise)


def for_items(source: str, route: Route) -> Route:
    """Choose the route of a generator's items, of which ``route`` was asked for.

    Raises:
        GraphError: it is none that they can take, or promises something about one value.
    """
    if not route.in_frame and route.reason == _ASKED:
        raise GraphError(
            f"{source}: with_tensor_transport(transport={route.name!r}) is about a generator, whose items "
            f"the executor reads, and in that transport only actors take part: leave the mark out"
        )
    if route.promise not in (None, Promise(), Promise("cpu")):
        raise GraphError(
            f"{source}: with_tensor_transport is about a generator, and where its items are to be, or "
            f"what they all are, cannot be said of them: leave device, _static_shape and _direct_return out"
        )
    return route


def in_frames(reason: str, promise: Promise | None = None) -> Route:
    """Make the route that needs nothing but the frames."""
    return Route(_plain().name, reason, True, promise)


def _accelerated(source: str, hint: TransportHint, default: Any) -> Any:
    """Find what a hint means that names the accelerator's transport and no communicator."""
    if default is None:
        raise GraphError(
            f"{source}: {hint} names no communicator, and the graph is compiled with "
            f"default_communicator=None: name one, as in with_tensor_transport(transport=communicator)"
        )
    return "nccl" if default == "create" else default


def _name_of(source: str, communicator: Any) -> str:
    try:
        name = communicator.get_transport_name()
    except Exception as error:
        raise GraphError(
            f"{source}: get_transport_name() of a {type(communicator).__name__} has raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(name, str) or not name.isprintable():
        raise GraphError(
            f"{source}: get_transport_name() of a {type(communicator).__name__} gives {name!r}, which "
            f"cannot be shown to people"
        )
    return name


def _check_device(
    source: str, hint: TransportHint, serving: Transport, elsewhere: Container[str]
) -> None:
    """Refuse a hint that asks for tensors where ``serving`` cannot bring them."""
    device = _kind(hint.device)
    if device is None:
        return
    capable = serving.capabilities
    if device not in capable.devices and not capable.in_frame:
        raise GraphError(
            f"{source}: {hint} asks for tensors on the device {hint.device!r}, and the transport "
            f"{serving.name!r} moves those of {_listed(sorted(capable.devices))}"
        )
    if device != "cpu" and capable.in_frame and device not in elsewhere:
        why_not = _not_viable(device)
        if why_not is not None:
            raise GraphError(
                f"{source}: {hint} asks for tensors on the device {hint.device!r}, and there is none on "
                f"this machine: {why_not}; device='default' and 'cpu' can be used here"
            )


def _not_viable(kind: str) -> str | None:
    """Say why no tensor can be put on a device of a kind here; ``None``: it can."""
    device = registered.get(kind)
    return "it is registered no more" if device is None else device.viable()


def _may_be_on_devices() -> bool:
    return os.path.exists(_GPUS) or registered.kinds() != ("cuda",)


def _kind(device: str) -> str | None:
    """Find what torch calls the device of a hint. The default one is where the tensors are."""
    return None if device == "default" else {"gpu": "cuda"}.get(device, device)


def _forced(source: str, hint: TransportHint, name: str, elsewhere: Container[str]) -> Transport:
    transport = registry.get(name)
    if transport is not None and any(kind in elsewhere for kind in transport.capabilities.devices):
        return transport  # this process takes no part in it
    why_not = _MISSING.get(name, lambda: None)() if transport is None else _viable(transport)
    if transport is not None and why_not is None:
        return transport
    usable = [name for name in registry.names() if _viable(registry.get(name)) is None]
    others = f"{_listed(['auto', *usable])} can be used here, and a Communicator of your own"
    if transport is None:
        told = "" if why_not is None else f" ({why_not})"
        raise GraphError(
            f"{source}: {hint} asks for the transport {hint.transport!r}, and there is no "
            f"transport of that name available yet{told}; {others}"
        )
    raise GraphError(
        f"{source}: {hint} asks for the transport {hint.transport!r}, which cannot be used: {why_not}; "
        f"{others}"
    )


def _viable(transport: Transport | None) -> str | None:
    assert transport is not None
    try:
        return transport.viable()
    except Exception as error:
        return f"viable() has raised {type(error).__name__}: {error}"


def _without_nixl() -> str | None:
    return "the package nixl is not installed" if find_spec("nixl") is None else None


#: For transports of Ray that do not exist here, why they could not be used anyway.
_MISSING: dict[str, Callable[[], str | None]] = {
    "nixl": _without_nixl,
}


def _automatic(hint: TransportHint) -> Transport:
    """Find what a mark that names no transport means. Where tensors may be on a device, they go from memory
    of the device to memory of the device; those of the CPU go in the frames by that transport as well."""
    wanted = _kind(hint.device)
    for name in registry.names():
        transport = registry.get(name)
        able = transport.capabilities if transport is not None else None
        if able is None or not able.others_in_frame or (wanted and wanted not in able.devices):
            continue
        if ("cuda" not in able.devices or os.path.exists(_GPUS)) and _viable(transport) is None:
            assert transport is not None
            return transport
    return _plain()


def _kinds(transport: Transport) -> list[str]:
    return sorted(transport.capabilities.devices)


def _plain() -> Transport:
    """Find the transport that needs nothing but the frames."""
    for name in registry.names():
        transport = registry.get(name)
        if transport is not None and transport.capabilities.in_frame:
            return transport
    raise AssertionError("no transport moves tensors inside of frames")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


#: The reason of what a user has named.
_ASKED = "asked for by with_tensor_transport"

#: There where the kernel has a driver for GPUs.
_GPUS = "/dev/nvidiactl"

#: Words that a hint may have in place of a communicator.
_ACCELERATORS = ("nccl", "accelerator")
