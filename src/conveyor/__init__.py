"""Python actors whose values and tensors go straight from process to process, and graphs of them.

``import conveyor as ray`` runs what Ray's Compiled Graph programs say with ``ray``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from conveyor import dag, exceptions
from conveyor.api.actors import ActorClass, ActorHandle, ActorProxy
from conveyor.api.decorators import actor, method, remote
from conveyor.api.functions import cancel, empty, empty_tensor, get, get_actor, kill, put, wait
from conveyor.api.remote_function import RemoteFunction
from conveyor.api.session import (
    available_resources,
    cluster_resources,
    get_runtime_context,
    init,
    is_initialized,
    nodes,
    shutdown,
)
from conveyor.config import Config
from conveyor.later import names_later
from conveyor.refs.ref import Ref as ObjectRef
from conveyor.refs.streams import StreamRef

if TYPE_CHECKING:
    from conveyor import channel, device, experimental, metrics, observe, testing, transport
    from conveyor.api.attach import attach
    from conveyor.direct.listing import KeptObject, objects
    from conveyor.graph.compiled import CompiledGraph
    from conveyor.graph.results import GraphRef

__version__ = "0.1.0"

__all__ = [
    "ActorClass",
    "ActorHandle",
    "ActorProxy",
    "CompiledGraph",
    "Config",
    "GraphRef",
    "KeptObject",
    "ObjectRef",
    "RemoteFunction",
    "StreamRef",
    "actor",
    "attach",
    "available_resources",
    "cancel",
    "channel",
    "cluster_resources",
    "dag",
    "device",
    "empty",
    "empty_tensor",
    "exceptions",
    "experimental",
    "get",
    "get_actor",
    "get_runtime_context",
    "init",
    "is_initialized",
    "kill",
    "method",
    "metrics",
    "nodes",
    "objects",
    "observe",
    "put",
    "remote",
    "shutdown",
    "testing",
    "transport",
    "wait",
]


# Who only imports the package needs none of these, nor does an actor's process.
__getattr__, __dir__ = names_later(
    globals(),
    {
        "CompiledGraph": "conveyor.graph.compiled",
        "GraphRef": "conveyor.graph.results",
        "attach": "conveyor.api.attach",
        "KeptObject": "conveyor.direct.listing",
        "channel": "conveyor.channel",
        "device": "conveyor.device",
        "experimental": "conveyor.experimental",
        "metrics": "conveyor.metrics",
        "objects": "conveyor.direct.listing",
        "observe": "conveyor.observe",
        "testing": "conveyor.testing",
        "transport": "conveyor.transport",
    },
)
