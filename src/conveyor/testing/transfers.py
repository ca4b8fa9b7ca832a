"""Faults of direct objects: values that cannot be fetched, or not yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conveyor.api.actor_handle import ActorHandle, AnyActor
from conveyor.exceptions import RuntimeStateError
from conveyor.runtime import context


@contextmanager
def hold_transfers(actor: AnyActor | None = None) -> Iterator[None]:
    """Let nobody fetch a value that ``actor`` (``None``: this process) stores for others, within the body. A
    fetch waits for the end of the body, its own timeout, or the actor's death. The actor takes no part in
    this.

    Several contexts may hold the transfers of one actor, which go on when all have ended. A value that is
    being read already is read to the end.

    Raises:
        TypeError: ``actor`` is no actor.
        RuntimeStateError: the engine is the inline one, where nothing is fetched.
        ActorDiedError: the actor has died already.
    """
    with _changed(actor, 1, 0):
        yield


@contextmanager
def fail_transfers(actor: AnyActor | None = None) -> Iterator[None]:
    """Let each fetch of a value that ``actor`` (``None``: this process) stores for others fail
    with :class:`InjectedFault`, within the body. Afterwards the values can be fetched.

    Raises as :func:`hold_transfers`.
    """
    with _changed(actor, 0, 1):
        yield


@contextmanager
def _changed(actor: AnyActor | None, held: int, failing: int) -> Iterator[None]:
    if actor is not None and not isinstance(actor, ActorHandle):
        raise TypeError(f"an actor is needed, not {actor!r}")
    runtime: Any = context.current()
    board = runtime.process.board
    if actor is None:
        place = runtime.process.identity
    else:
        link = runtime._known_link(actor._id)
        if not hasattr(link, "actor_slot"):
            raise RuntimeStateError(
                "on the inline engine all values are in one process, and nothing is fetched"
            )
        place = link.actor_slot, board.incarnation(link.actor_slot)
    board.change_transfers(place[0], held, failing)
    try:
        yield
    finally:
        # A restarted actor in the same slot begins without these faults.
        if not board.gone(*place):
            board.change_transfers(place[0], -held, -failing)
