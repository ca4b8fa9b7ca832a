"""Groups of actors: their making and their end, and those that this process is a rank of."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from conveyor import _core
from conveyor.api.actors import ActorHandle, AnyActor
from conveyor.calls.call import FUNCTION
from conveyor.checks import check_name
from conveyor.collective.group import Group
from conveyor.exceptions import ConveyorError, RuntimeStateError
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


#: Ray's names of backends, and our own: all are served by the same means.
_BACKENDS = ("shm", "gloo", "torch_gloo", "nccl")


class CollectiveGroupHandle:
    """A group of actors. ``actors`` are its ranks, in their order, but for the driver's."""

    def __init__(
        self,
        actors: Sequence[ActorHandle[Any]],
        name: str,
        backend: str,
        number: int,
        driver_rank: int | None = None,
    ) -> None:
        """Made by :func:`create_collective_group`."""
        self._actors = tuple(actors)
        self._driver_rank = driver_rank
        self._name = name
        self._backend = backend
        self._number = number

    @property
    def actors(self) -> list[ActorHandle[Any]]:
        """The actors, by rank."""
        return list(self._actors)

    @property
    def name(self) -> str:
        """Name of the group, by which operations find it."""
        return self._name

    @property
    def backend(self) -> str:
        """Backend that was asked for."""
        return self._backend

    def get_rank(self, actor: AnyActor) -> int:
        """Return the rank of an actor, or -1 if it is not in the group."""
        if actor not in self._actors:
            return -1
        rank = self._actors.index(actor)
        return rank if self._driver_rank is None or rank < self._driver_rank else rank + 1

    @property
    def driver_rank(self) -> int | None:
        """The rank of the driver, if it is in the group."""
        return self._driver_rank

    def reset(self) -> None:
        """Make a broken group anew, of the same actors and under the same name.

        Every rank comes to it, after the calls before; ranks that are in an operation are told that this has
        ended. Returns when all have come.

        Raises:
            ActorDiedError: an actor is dead.
            ValueError: the group was destroyed, or another process has created it.
        """
        runtime = context.current()
        if runtime.collectives.made.get(self._name) is not self:
            raise ValueError(
                f"there is no collective group named {self._name!r} here: it was destroyed"
            )
        actors = [actor._id for actor in self._actors]
        number = runtime.collectives.open(actors, self._driver_rank)
        try:
            runtime.collectives.close(self._number)
            self._number = number
            _join(runtime, self)
        except BaseException:
            runtime.collectives.close(number)
            raise

    def __repr__(self) -> str:
        driver = "" if self._driver_rank is None else " and the driver"
        return f"<collective group {self._name!r} of {len(self._actors)} actors{driver}>"


def create_collective_group(
    actors: Sequence[AnyActor],
    backend: str = "shm",
    name: str | None = None,
    *,
    driver_rank: int | None = None,
) -> CollectiveGroupHandle:
    """Make a group of actors, whose methods can then call collective operations.

    Args:
        actors: rank 0 first.
        backend: ``"shm"``. Ray's ``"gloo"``, ``"torch_gloo"`` and ``"nccl"``, in any case, mean the same:
            shared memory where ranks are on one node, and the session's connections between nodes. Operations
            take tensors of the CPU, whatever the name.
        name: what operations call the group. Without one it is an arbitrary one, and operations that name no
            group find it, as long as their actor is in no other.
        driver_rank: the driver is in the group too, with this rank: the actors have the others, in their
            order. It calls the operations itself, after the calls of the actors that meet it there.

    Waits until all actors have joined, each after the calls before. The group is of their present processes:
    it does not outlive any of them.

    Raises:
        ValueError: an actor is listed twice, the name is taken, or there is no such backend; the driver's
            rank is none of the group's, or this is not the driver.
        ActorDiedError: an actor is dead.
        RuntimeStateError: an actor is in a group of that name, made elsewhere.
    """
    runtime = context.current()
    actors = _checked(runtime, actors)
    if driver_rank is not None:
        _check_driver_rank(runtime, driver_rank, len(actors))
    _check_backend(backend)
    if name is not None:
        _check_name(name)
    made = runtime.collectives.made
    if name in made:
        raise ValueError(f"there is a collective group named {name!r} already")
    number = runtime.collectives.open([actor._id for actor in actors], driver_rank)
    # The number is one of the session's: actors may be in groups that other processes have made.
    name = name or f"group {number}"
    handle = CollectiveGroupHandle(actors, name, backend, number, driver_rank)
    try:
        _join(runtime, handle)
    except BaseException:
        _end(runtime, handle)
        raise
    made[name] = handle
    return handle


def get_collective_groups(
    actors: Sequence[AnyActor] | None = None, backend: str | None = None
) -> list[CollectiveGroupHandle]:
    """Return the groups that this process has created, with all of ``actors`` in them, and of that
    backend."""
    wanted = set(() if actors is None else _handles(actors))
    requested = None if backend is None else backend.lower()
    return [
        handle
        for handle in _made().values()
        if wanted <= set(handle._actors) and requested in (None, handle.backend.lower())
    ]


def destroy_collective_group(group_or_name: CollectiveGroupHandle | str) -> None:
    """End a group that this process has created. Ranks that are in an operation of it are told.

    Raises:
        ValueError: there is no such group here.
    """
    if not isinstance(group_or_name, (str, CollectiveGroupHandle)):
        raise ValueError(f"a group's handle or its name is needed, not {group_or_name!r}")
    made = _made()
    name = group_or_name if isinstance(group_or_name, str) else group_or_name.name
    handle = made.get(name)
    if handle is None or (handle is not group_or_name and group_or_name != name):
        known = ", ".join(map(repr, sorted(made))) or "none"
        raise ValueError(f"there is no collective group named {name!r} here; there are: {known}")
    del made[name]
    _end(context.current(), handle)


def destroy_all_collective_groups() -> None:
    """End all groups that this process has created."""
    for name in list(_made()):
        destroy_collective_group(name)


def _join(runtime: Runtime, handle: CollectiveGroupHandle) -> None:
    args = handle._number, handle._name, runtime.own_actor
    refs = [_call(runtime, actor, try_to_join, *args) for actor in handle._actors]
    if handle._driver_rank is not None:
        join(*args)
    for ref in refs:
        error = runtime.get(ref, None)
        if error is not None:
            raise error


def _end(runtime: Runtime, handle: CollectiveGroupHandle) -> None:
    runtime.collectives.close(handle._number)
    args = handle._number, handle._name, runtime.own_actor
    if handle._driver_rank is not None:
        leave(*args)
    for actor in handle._actors:
        with suppress(ConveyorError):  # it is dead, and its group with it
            _call(runtime, actor, leave, *args)


def _call(runtime: Runtime, actor: ActorHandle[Any], function: Any, *args: Any) -> Any:
    return runtime.call(actor._id, function.__name__, (function, *args), {}, 1, FUNCTION)


def _made() -> dict[str, CollectiveGroupHandle]:
    runtime = context.running()
    return {} if runtime is None else runtime.collectives.made


def _handles(actors: Any) -> list[ActorHandle[Any]]:
    """Return ``actors`` as a list; ``TypeError`` if it is no collection of actors."""
    if isinstance(actors, (str, bytes)) or not isinstance(actors, Collection):
        raise TypeError(f"a list of actors is needed, not {actors!r}")
    for actor in actors:
        if not isinstance(actor, ActorHandle):
            raise TypeError(f"a group is of actors, and {actor!r} is none")
    return list(actors)


def _checked(runtime: Runtime, actors: Any) -> list[ActorHandle[Any]]:
    if not isinstance(actors, Sequence):  # ranks have an order
        raise TypeError(f"a list of actors is needed, not {actors!r}")
    handles = _handles(actors)
    for actor in handles:
        if actor._runtime is not runtime:
            raise ValueError(f"{actor!r} belongs to another session")
    if not handles:
        raise ValueError("a group has one actor at least")
    if len(set(handles)) != len(handles):
        twice = next(actor for i, actor in enumerate(handles) if actor in handles[:i])
        raise ValueError(f"{twice!r} is listed twice: an actor is one rank of a group")
    if len(handles) > _core.MOST_RANKS:
        raise ValueError(f"a group has {_core.MOST_RANKS} actors at most, not {len(handles)}")
    return handles


def _check_driver_rank(runtime: Runtime, rank: Any, actors: int) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"driver_rank must be a rank, not {rank!r}")
    if runtime.own_actor is not None:
        raise ValueError("only the driver itself can create a group that it is in")
    if not 0 <= rank <= actors:
        raise ValueError(f"driver_rank must be a rank of the group, 0 to {actors}, and is {rank}")
    if actors + 1 > _core.MOST_RANKS:
        raise ValueError(f"a group has {_core.MOST_RANKS} ranks at most, not {actors + 1}")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"a group's name must be a text, not {name!r}")
    check_name(name, "a group's name")


def _check_backend(backend: Any) -> None:
    if not isinstance(backend, str) or backend.lower() not in _BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: there are {', '.join(_BACKENDS)}")
