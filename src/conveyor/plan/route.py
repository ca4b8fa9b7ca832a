"""Each edge gets a transport."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from conveyor.dag import TransportHint
from conveyor.exceptions import GraphError


class Route(NamedTuple):
    """How an edge's values travel: the name of the transport, and the reason for it."""

    name: str
    reason: str


def choose(source: str, hints: Iterable[TransportHint]) -> Route:
    """Choose the route for the value ``source`` (a label), given what its readers were told about it.

    Raises:
        GraphError: a hint asks for a transport or a device that nothing here can serve.
    """
    forced = False
    for hint in hints:
        if hint.transport not in ("auto", "shm"):
            raise GraphError(
                f"{source}: {hint} asks for the transport {hint.transport!r}, and there is no "
                f"transport of that name available yet; 'auto' and 'shm' are"
            )
        if hint.device not in ("default", "cpu"):
            raise GraphError(
                f"{source}: {hint} asks for tensors on the device {hint.device!r}, and there is no "
                f"transport to it available yet; 'default' and 'cpu' are"
            )
        forced |= hint.transport == "shm"
    return _FORCED if forced else _SAME_HOST


_FORCED = Route("shm", "asked for by with_tensor_transport")
_SAME_HOST = Route("shm", "same host")
