"""Direct objects whose values cannot be fetched, or not yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conveyor.api.actor_handle import ActorHandle, AnyActor
from conveyor.exceptions import RuntimeStateError
from conveyor.runtime import context


@contextmanager
def hold_transfers(actor: AnyActor | None = None) -> Iterator[None]:
    """In the body nobody can fetch what ``actor`` keeps for others (``None``: this process). Who tries waits
    for the end of the body, his own timeout, or the actor's death. The actor takes no part in that.

    Several may hold the same, and all of them must end. What is being read already goes on.

    Raises:
        TypeError: it is no actor.
        RuntimeStateError: nothing is fetched on the inline engine.
        ActorDiedError: it has died already.
    """
    with _changed(actor, 1, 0):
        yield


@contextmanager
def fail_transfers(actor: AnyActor | None = None) -> Iterator[None]:
    """In the body whoever fetches what ``actor`` keeps for others (``None``: this process) gets
    :class:`InjectedFault`. Afterwards it can be fetched.

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
        # A successor in its place begins without.
        if not board.gone(*place):
            board.change_transfers(place[0], -held, -failing)
