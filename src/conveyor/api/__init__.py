"""What a user types: actors, references, and the start and end of a session.

Everything here is thin: it checks what it is given, and hands it to this process's runtime.
"""

from __future__ import annotations

from conveyor.api import graphs as _graphs
from conveyor.api.actor_class import ActorClass
from conveyor.api.actor_handle import ActorHandle, ActorMethod, ActorProxy
from conveyor.api.functions import cancel, get, get_actor, kill, put, wait
from conveyor.api.machine import (
    available_resources,
    cluster_resources,
    get_runtime_context,
    nodes,
)
from conveyor.api.method import method
from conveyor.api.remote import actor, remote
from conveyor.api.remote_function import RemoteFunction
from conveyor.api.session import init, is_initialized, shutdown, start_default
from conveyor.runtime import context as _context

# `conveyor.init()` is optional: whatever first needs a runtime starts the default one.
_context.set_default_start(start_default)
_graphs.install()

__all__ = [
    "ActorClass",
    "ActorHandle",
    "ActorMethod",
    "ActorProxy",
    "RemoteFunction",
    "actor",
    "available_resources",
    "cancel",
    "cluster_resources",
    "get",
    "get_actor",
    "get_runtime_context",
    "init",
    "is_initialized",
    "kill",
    "method",
    "nodes",
    "put",
    "remote",
    "shutdown",
    "wait",
]
