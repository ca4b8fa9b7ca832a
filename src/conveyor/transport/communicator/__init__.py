"""A communicator of the user's as a transport: it moves tensors among a fixed set of actors."""

from __future__ import annotations

from typing import Any

from conveyor.transport.communicator.abstract import Communicator
from conveyor.transport.communicator.transport import (
    CollectiveTransport,
    CommunicatorTransport,
    ForCollectives,
)

__all__ = [
    "CollectiveTransport",
    "Communicator",
    "CommunicatorTransport",
    "ForCollectives",
    "is_one",
]


def is_one(value: Any) -> bool:
    """Whether ``value`` is a communicator, or stands for one in a hint."""
    return isinstance(value, (Communicator, ForCollectives))
