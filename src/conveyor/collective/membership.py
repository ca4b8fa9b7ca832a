"""The groups that this process is a rank of, by name."""

from __future__ import annotations

import threading

from conveyor.collective.group import Group
from conveyor.exceptions import RuntimeStateError
from conveyor.runtime import context, ending
from conveyor.runtime.protocol import ActorId, Runtime

#: The group of operations that name none.
DEFAULT = "default"


# Methods of an actor may run side by side.
_lock = threading.Lock()


def try_to_join(number: int, name: str, creator: ActorId | None) -> Exception | None:
    """Join, in an actor; return the error if that fails. Raised, it would break the actor's other groups."""
    try:
        join(number, name, creator)
    except Exception as error:
        return error
    return None


def join(number: int, name: str, creator: ActorId | None) -> None:
    """Take the place that this process has in a group.

    ``creator``: the actor that has made the group; ``None``: the driver. It has ended its last group of that
    name, though this process may not have come to ``leave`` yet: this leaves it.
    """
    runtime = context.current()
    groups = _groups(runtime)
    before = groups.get(name)
    if before is not None and before.creator != creator:
        raise RuntimeStateError(
            f"{_own_name(runtime)} is in a collective group named {name!r} already: destroy that first, or "
            "give this one another name"
        )
    group = Group(runtime, name, number, creator, runtime.collectives.join(number))
    with _lock:
        before = groups.get(name)
        if before is not None and before.number > number:  # this one has been ended meanwhile
            before = group
        else:
            groups[name] = group
    if before is not None:
        runtime.collectives.leave(before.joined)


def leave(number: int, name: str, creator: ActorId | None) -> None:
    """Leave a group, or an earlier one of the same name and creator, if this process is in it."""
    runtime = context.current()
    groups = _groups(runtime)
    with _lock:
        group = groups.get(name)
        if (
            group is None or group.creator != creator or group.number > number
        ):  # it is in another one
            return
        del groups[name]
    runtime.collectives.leave(group.joined)


def find(name: str) -> Group:
    """The group of that name that this process is in. ``"default"`` means the only one, too."""
    runtime = context.running()
    groups = {} if runtime is None else _groups(runtime)
    group = groups.get(name)
    if group is not None:
        return group
    if name == DEFAULT and len(groups) == 1:
        return next(iter(groups.values()))
    if runtime is None and context.inherited():
        raise RuntimeStateError(
            "this process was forked from one of a session, whose collective groups belong to that one: call "
            "collective operations there"
        )
    if runtime is None:
        raise RuntimeStateError(
            "there is no session: it has been shut down, or none has begun. Collective operations are called "
            "in methods of actors that are in a group, or in the driver if the group has a driver_rank"
        )
    if runtime.own_actor is None and not groups:
        if runtime.ending:
            raise ending.ended()
        raise RuntimeStateError(
            "collective operations are called in methods of actors that are in a group: the driver is in "
            "none. It is, if the group was created with driver_rank="
        )
    known = ", ".join(map(repr, sorted(groups))) or "none"
    raise ValueError(
        f"{_own_name(runtime)} is in no collective group named {name!r} (it is in: {known}). Create one with "
        "create_collective_group(actors), in the driver"
    )


def _groups(runtime: Runtime) -> dict[str, Group]:
    return runtime.collectives.entered


def _own_name(runtime: Runtime) -> str:
    return "the driver" if runtime.own_actor is None else runtime.own_actor.name
