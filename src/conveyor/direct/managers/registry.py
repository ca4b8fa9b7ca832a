"""Transports of the user's own, by name. Whoever meets a name that it does not know asks the driver."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from conveyor.codec import blamed, dumps_by_value, loads
from conveyor.dag.hints import known_transports
from conveyor.direct.managers.manager import TensorTransportManager
from conveyor.direct.managers.route import ManagerRoute
from conveyor.exceptions import ConveyorError, SerializationError
from conveyor.later import import_later
from conveyor.runtime import context

if TYPE_CHECKING:
    from conveyor.codec.pickling.blame import Given

#: Names that mean something else.
_TAKEN = ("object_store",)


class _Registration(NamedTuple):
    """Registration of a transport, as it is sent to a process that asks for it."""

    name: str
    devices: tuple[str, ...]
    manager_class: type[TensorTransportManager]
    data_type: type | None


#: By the name in lower case. ``None``: it is no transport of a user's.
_routes: dict[str, ManagerRoute | None] = {}


def register_tensor_transport(
    name: str,
    devices: Sequence[str],
    manager_class: type[TensorTransportManager],
    data_type: type | None = None,
) -> None:
    """Have ``tensor_transport=name`` be a transport of your own. It is enough to register it in one process
    of the session; actors that live already know it, too.

    Args:
        name: in any case.
        devices: the kinds of device whose tensors it moves: ``["cpu"]``, ``["cuda"]``.
        manager_class: what moves them. It may be a class of ``__main__``.
        data_type: what it moves: values of exactly this type, wherever they are in what a method returns;
            without it, torch tensors.

    Raises:
        TypeError: the name is no text, ``devices`` no list of texts, or ``data_type`` no type.
        ValueError: there is a transport of that name, ``manager_class`` is no ``TensorTransportManager``,
            ``devices`` is empty, or values of ``data_type`` cannot be taken out of others (a list, say).
        SerializationError: ``manager_class`` cannot be sent to other processes.
    """
    given: Any = name, manager_class
    if not isinstance(given[0], str) or not name:
        raise TypeError(f"the name of a transport is a text, not {name!r}")
    key = name.lower()
    import_later("conveyor.transport.registry")  # it knows more names
    taken = {one.lower() for one in known_transports}.union(_TAKEN)
    if key in taken or _routes.get(key) is not None:
        raise ValueError(f"there is a transport {name!r} already")
    if not isinstance(given[1], type) or not issubclass(given[1], TensorTransportManager):
        raise ValueError(f"manager_class is no TensorTransportManager, but {manager_class!r}")
    missing = sorted(getattr(manager_class, "__abstractmethods__", ()))
    if missing:
        raise ValueError(f"{manager_class.__name__} lacks {', '.join(missing)}")
    registration = _Registration(key, _kinds(devices), manager_class, _checked(data_type))
    try:
        pickled = dumps_by_value(registration)
    except SerializationError as error:
        raise blamed(error, _of_class(manager_class)) from error.__cause__
    runtime = context.running()
    if runtime is None:
        context.add_transport(key, pickled)
    else:
        runtime.add_transport(key, pickled)
    _routes[key] = ManagerRoute(*registration)


def _kinds(devices: Any) -> tuple[str, ...]:
    if isinstance(devices, str):
        raise ValueError(f"devices is a list of kinds of device, not the text {devices!r}")
    if not isinstance(devices, Iterable):
        raise TypeError(f"devices is a list of kinds of device, not {devices!r}")
    kinds = tuple(devices)
    if not kinds:
        raise ValueError("devices names no kind of device: ['cpu'], for example")
    for one in kinds:
        if not isinstance(one, str):
            raise TypeError(f"devices has something that names no kind of device: {one!r}")
    return tuple([one.lower() for one in kinds])


def _of_class(manager_class: type) -> Iterator[Given]:
    from conveyor.codec.pickling.blame import Given  # needed for nothing but the error

    yield Given.definition("manager_class", manager_class)


def _checked(data_type: Any) -> type | None:
    """Check the type of the values to be moved. ``None`` stands for torch tensors, for which torch need not
    be imported yet."""
    if data_type is None:
        return None
    if not isinstance(data_type, type):
        raise TypeError(f"data_type is a type, not {data_type!r}")
    if data_type.__module__ == "torch" and data_type.__name__ == "Tensor":
        return None
    if not import_later("conveyor.codec.pickling.objects").can_be_taken_out(data_type):
        raise ValueError(f"values of the type {data_type.__name__} are not taken out of others")
    return data_type


def route(name: str) -> ManagerRoute | None:
    """The transport of that name; ``None``: it is none that a user has registered."""
    key = name.lower()
    try:
        return _routes[key]
    except KeyError:
        pass
    runtime = context.running()
    pickled = context.TRANSPORTS.get(key) if runtime is None else runtime.find_transport(key)
    found = None if pickled is None else ManagerRoute(*loads(pickled))
    if runtime is not None:
        # Of two threads that ask the first gives all others its own.
        found = _routes.setdefault(key, found)
    return found


def is_known(name: str) -> bool:
    """Whether a transport is registered by that name, as far as this process can find out."""
    key = name.lower()
    if _routes.get(key) is not None:
        return True
    # It may have been registered since somebody asked.
    _routes.pop(key, None)
    return route(key) is not None


def route_named(name: str) -> ManagerRoute:
    """The transport of a value that was kept by it.

    Raises:
        ConveyorError: nobody here knows it.
    """
    found = route(name)
    if found is None:
        raise ConveyorError(f"no transport is registered as {name!r} in this process's session")
    return found


def is_two_sided(name: str) -> bool:
    """Whether it is a user's transport in which both ends take part."""
    found = None if name in known_transports else route(name)
    return found is not None and not found.manager.is_one_sided()


def check_has_transport(actor: Any, name: str) -> None:
    """Raise unless an actor can use the transport, which may be any.

    Raises:
        ValueError: it cannot.
    """
    if name in known_transports:
        return
    found = route(name)
    if found is not None and not found.manager.actor_has_tensor_transport(actor):
        raise ValueError(f"{actor!r} does not have tensor transport {name.upper()} available")


def _forget_in_child() -> None:
    """Forget the managers in a forked child, which has its own."""
    for one in _routes.values():
        if one is not None:
            one.forget_manager()


os.register_at_fork(after_in_child=_forget_in_child)
