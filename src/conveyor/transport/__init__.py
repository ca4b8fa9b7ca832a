"""How tensors get from one actor to others, beside the frames of a graph.

``with_tensor_transport(transport=...)`` names one; :func:`register` adds one. A transport is a
:class:`Transport` that opens a :class:`Endpoint` at each end of an edge. ``conveyor.testing`` has the checks
that each of them must pass.
"""

from __future__ import annotations

from conveyor.transport.base import (
    Capabilities,
    Endpoint,
    Enqueued,
    Host,
    Sending,
    TensorSpec,
    Transport,
    Wire,
)
from conveyor.transport.registry import get, names, register, unregister

__all__ = [
    "Capabilities",
    "Endpoint",
    "Enqueued",
    "Host",
    "Sending",
    "TensorSpec",
    "Transport",
    "Wire",
    "get",
    "names",
    "register",
    "unregister",
]
