"""A graph gets its channels: an edge for each value that leaves its process, or several for many readers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from conveyor import _core
from conveyor.codec.frames import seal
from conveyor.config import Config
from conveyor.dag import TransportHint
from conveyor.dag.inputs import Key
from conveyor.device import base as registered
from conveyor.exceptions import GraphError, SerializationError
from conveyor.plan.flow import Done, Flow, Items, Made, Part, Start, Value
from conveyor.plan.model import EXECUTOR, ActorInfo, Edge, InputBundle, Promise
from conveyor.transport import registry
from conveyor.transport.base import Transport
from conveyor.transport.communicator import (
    CollectiveTransport,
    Communicator,
    CommunicatorTransport,
    ForCollectives,
)


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
    is_remote: Container[str] = (),
) -> Route:
    """Choose the route for the value ``source`` (a label), given what its readers were told about it.
    ``default`` is the graph's ``default_communicator``. ``is_remote``: the kinds of device that actors may
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
    reason = _REQUESTED
    if not isinstance(transport, str):
        name = f"communicator {_name_of(source, transport)}"
        wanted = None if promise == Promise() else promise
        if isinstance(transport, ForCollectives):
            reason = "its ranks meet"
        return Route(name, reason, False, wanted, transport)
    automatic = transport == "auto"
    serving = _automatic(hint) if automatic else _forced(source, hint, transport, is_remote)
    _check_device(source, hint, serving, is_remote)
    in_frame = serving.capabilities.in_frame
    nothing = (Promise(), Promise("cpu"))
    # Frames bring tensors of devices back to such a device. Where there may be any, what is to be on the CPU
    # has to be looked for.
    on_device = promise.device == "cpu" and ("cuda" in is_remote or _may_be_on_devices())
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
    if alone and route.reason == _REQUESTED:
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
    if not route.in_frame and route.reason == _REQUESTED:
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
    source: str, hint: TransportHint, serving: Transport, is_remote: Container[str]
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
    if device != "cpu" and capable.in_frame and device not in is_remote:
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


def _forced(source: str, hint: TransportHint, name: str, is_remote: Container[str]) -> Transport:
    transport = registry.get(name)
    if transport is not None and any(kind in is_remote for kind in transport.capabilities.devices):
        return transport  # this process takes no part in it
    why_not = _viable(transport)
    if transport is not None and why_not is None:
        return transport
    usable = [name for name in registry.names() if _viable(registry.get(name)) is None]
    others = f"{_listed(['auto', *usable])} can be used here, and a Communicator of your own"
    if transport is None:
        raise GraphError(
            f"{source}: {hint} asks for the transport {hint.transport!r}, and there is no "
            f"transport of that name available yet; {others}"
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
_REQUESTED = "asked for by with_tensor_transport"

#: There where the kernel has a driver for GPUs.
_GPUS = "/dev/nvidiactl"

#: Words that a hint may have in place of a communicator.
_ACCELERATORS = ("nccl", "accelerator")


#: By identity, the communicators of graphs that were compiled here, and what all graphs know them by.
_domains: dict[int, tuple[weakref.ref[Communicator], str]] = {}


class _Known(Struct, frozen=True):
    """A communicator of the graph: what moves tensors by it, and the rank of each actor in it."""

    communicator: Communicator
    transport: CommunicatorTransport
    ranks: dict[Any, int]


class Communicators:
    """The communicators of one graph."""

    def __init__(self, graph: str) -> None:
        self._graph = graph
        #: By identity, and whether it is for collectives.
        self._known: dict[tuple[int, bool], _Known] = {}

    def transport(
        self, source: str, route: Route, members: Sequence[ActorInfo]
    ) -> CommunicatorTransport:
        """Make the transport of tensors among ``members`` by the communicator of ``route``. All edges that
        name the communicator share it.

        Raises:
            GraphError: it is not one of these actors, or has no order of its own.
        """
        meets = isinstance(route.communicator, ForCollectives)
        communicator = route.communicator.communicator if meets else route.communicator
        known = self._known.get((id(communicator), meets))
        if known is None:
            known = self._open(source, route, communicator, meets)
            self._known[id(communicator), meets] = known
        for member in members:
            rank = known.ranks.get(member.key)
            if rank is None:
                names = ", ".join(key.name for key in known.ranks) or "none"
                raise GraphError(
                    f"{source}: {member.name} takes part, and is no member of the {route.name}, which has "
                    f"{names}: list it in get_actor_handles()"
                )
            known.transport.ranks[member.name] = rank
        return known.transport

    def _open(self, source: str, route: Route, communicator: Communicator, meets: bool) -> _Known:
        ranks: dict[Any, int] = {}
        try:
            handles = list(communicator.get_actor_handles())
            size = communicator.get_world_size()
            order = [communicator.get_rank(handle) for handle in handles]
        except Exception as error:
            raise GraphError(
                f"{source}: the {route.name} cannot say which actors it has: "
                f"{type(error).__name__}: {error}"
            ) from error
        for handle, rank in zip(handles, order, strict=True):
            key = getattr(handle, "_id", None)
            if key is None:
                raise GraphError(
                    f"{source}: get_actor_handles() of the {route.name} lists {handle!r}, which is no actor"
                )
            if key in ranks:
                raise GraphError(
                    f"{source}: get_actor_handles() of the {route.name} lists the actor {key.name} twice"
                )
            ranks[key] = rank
        if sorted(order, key=repr) != sorted(range(len(handles)), key=repr) or size != len(handles):
            raise GraphError(
                f"{source}: the {route.name} lists {len(handles)} actors, with the ranks {order} by "
                f"get_rank() and the size {size} by get_world_size(); ranks count from 0 without a gap"
            )
        same = sum(known.transport.name.startswith(route.name) for known in self._known.values())
        name = route.name if not same else f"{route.name} #{same + 1}"
        try:
            sealed = seal(communicator)
        except SerializationError as error:
            raise GraphError(
                f"{source}: the {route.name} cannot be sent to its actors: {error}"
            ) from error
        kind = CollectiveTransport if meets else CommunicatorTransport
        transport = kind(name, sealed, domain=_domain_of(communicator))
        return _Known(communicator, transport, ranks)


def _domain_of(communicator: Communicator) -> str:
    """Return the name by which graphs know a communicator. Graphs that name the same object share its
    operations."""
    place = id(communicator)
    known = _domains.get(place)
    if known is None or known[0]() is not communicator:
        forget = weakref.ref(communicator, lambda _: _domains.pop(place, None))
        known = _domains[place] = forget, Communicator.generate_communicator_id()
    return known[1]


#: An edge has no more readers; a value that has more travels on several.
MOST_READERS = _core.MAX_READERS


class Channels:
    """The values that cross from process to process, and on which edge each does. ``keys`` are the parts of
    the input that are used. ``is_remote``: see ``route.choose``; it is asked for where something is said of a
    tensor.

    edges: all of them, by their numbers.
    inputs: those that the executor writes.
    edge_of: the edge on which a process reads a value. Inputs with the same readers share theirs.
    """

    def __init__(
        self,
        flow: Flow,
        keys: Sequence[Key],
        config: Config,
        is_remote: Callable[[], Container[str]],
    ) -> None:
        self.edges: list[Edge] = []
        self.edge_of: dict[tuple[Value | Done | Items, int], int] = {}
        self._flow = flow
        self._config = config
        self._is_remote = is_remote
        self._communicators = Communicators(config.name or "the graph")
        self.inputs = self._add_inputs(keys)
        self._add_results()
        self._add_effects()

    def _add_inputs(self, keys: Sequence[Key]) -> tuple[InputBundle, ...]:
        """Make the edges on which the executor gives the inputs of an execution. Inputs that travel in one
        way to the same readers share a frame, but for parts about whose tensors something is promised."""
        readers = self._flow.readers
        bundles: dict[Any, list[Part]] = {}
        for part in map(Part, keys):
            if part in readers:  # else only the executor uses it, as a result
                route = self._input_route(part)
                promise = route.promise
                guaranteed = promise is not None and (promise.static_shape or promise.direct_return)
                alone = part if guaranteed else None
                bundles.setdefault((readers[part], route, alone), []).append(part)
        deployed = [
            InputBundle(edge, tuple(part.key for part in parts))
            for (to, route, _), parts in bundles.items()
            for edge in self._deploy(parts, EXECUTOR, to, self._label(parts), route)
        ]
        whole = Part(None)
        if whole in readers:
            # Alone in its frame, which then is the value itself.
            to, route = readers[whole], self._input_route(whole)
            edges = self._deploy([whole], EXECUTOR, to, self._label([whole]), route)
            deployed += [InputBundle(edge, (None,)) for edge in edges]
        starts = [value for value in readers if isinstance(value, Start)]
        if starts:
            to = tuple(sorted(value.actor for value in starts))
            for edge in self._deploy([], EXECUTOR, to, self._label(starts), in_frames("same host")):
                deployed.append(InputBundle(edge, ()))
                for actor in self.edges[edge].readers:
                    self.edge_of[Start(actor), actor] = edge
        return tuple(deployed)

    def _label(self, values: Sequence[Value]) -> str:
        return ", ".join(dict.fromkeys(map(self._flow.label, values)))

    def _input_route(self, part: Part) -> Route:
        return for_executor(self._flow.label(part), self._choose(part), alone=True)

    def _choose(self, value: Part | Made) -> Route:
        hints = self._flow.hints.get(value, ())
        is_remote = self._is_remote() if hints else ()
        return choose(self._flow.label(value), hints, self._config.default_communicator, is_remote)

    def _add_results(self) -> None:
        """Make the edges of the tasks' results."""
        flow, depth = self._flow, self._config.depth
        made = [value for value in flow.readers if isinstance(value, Made)]
        for value in sorted(made, key=_in_order):
            writer, label = flow.actor_of[value.task], flow.label(value)
            if flow.nodes[value.task].streams:
                for_items(label, self._choose(value))
                self._lay_plain(value, writer, label, depth, "only that its items have ended")
                credit = self._config.stream_items
                self._lay_plain(
                    Items(value), writer, f"items of {label}", credit, "a generator's items"
                )
            elif flow.readers[value]:
                self._add_made(value, writer, flow.readers[value], label)
            else:
                # The value stays on its actor, in a register; but the transport that its hint names must
                # still exist.
                self._choose(value)

    def _add_effects(self) -> None:
        """Make the edges on which the executor hears that a task has run for its effect."""
        for value in self._flow.effects:
            writer, label = self._flow.actor_of[value.task], f"done {self._flow.label(value)}"
            reason = "an effect: only that it has run"
            self._lay_plain(Done(value), writer, label, self._config.depth, reason)

    def _add_made(self, value: Made, writer: int, readers: tuple[int, ...], label: str) -> None:
        """Make the edges of one result. The executor has an edge of its own where it cannot share one with
        the others."""
        route = self._choose(value)
        actors = tuple([reader for reader in readers if reader != EXECUTOR])
        by_reference = self._flow.nodes[value.task].by_reference
        if actors == readers or (by_reference is None and route.in_frame):
            self._deploy([value], writer, readers, label, route)
        elif by_reference is not None:
            there = in_frames("it stays on its actor until it is fetched")
            self._deploy([value], writer, (EXECUTOR,), label, there, by_reference)
            self._deploy([value], writer, actors, label, route)
        else:
            plain = for_executor(label, route, alone=not actors)
            self._deploy([value], writer, actors, label, route)
            self._deploy([value], writer, (EXECUTOR,), label, plain)

    def _lay_plain(
        self, what: Done | Items | Made, writer: int, label: str, depth: int, reason: str
    ) -> None:
        """Lay an edge to the executor that no hint is about."""
        self.edge_of[what, EXECUTOR] = self._add(
            writer, (EXECUTOR,), label, depth, in_frames(reason)
        )

    def _deploy(
        self,
        values: Sequence[Value],
        writer: int,
        readers: tuple[int, ...],
        label: str,
        route: Route,
        by_reference: tuple[str, bool] | None = None,
    ) -> list[int]:
        """Make the edges on which ``values`` come in one frame, as many as so many readers need."""
        own = route
        parts = [
            readers[first : first + MOST_READERS] for first in range(0, len(readers), MOST_READERS)
        ]
        deployed: list[int] = []
        for number, part in enumerate(parts, 1):
            if len(parts) > 1:
                why = f"{number} of {len(parts)} edges, which have at most {MOST_READERS} readers each"
                route = replace(own, reason=f"{own.reason}; {why}")
            edge = self._add(writer, part, label, self._config.depth, route, by_reference)
            deployed.append(edge)
            self.edge_of.update({(value, reader): edge for value in values for reader in part})
        return deployed

    def _add(
        self,
        writer: int,
        readers: tuple[int, ...],
        label: str,
        depth: int,
        route: Route,
        by_reference: tuple[str, bool] | None = None,
    ) -> int:
        edge = len(self.edges)
        transport = None
        if route.communicator is not None:
            members = [self._flow.actors[actor] for actor in (writer, *readers)]
            transport = self._communicators.transport(label, route, members)
        out_of_band = not route.in_frame
        name = route.name if transport is None else transport.name
        promise = route.promise
        self.edges.append(
            Edge(
                edge,
                writer,
                readers,
                label,
                depth,
                name,
                route.reason,
                out_of_band,
                promise,
                transport,
                route.streams,
                by_reference,
            )
        )
        return edge


def _in_order(value: Made) -> tuple[int, int]:
    """Sort by task; a whole result stands before its elements."""
    return value.task, -1 if value.element is None else value.element
