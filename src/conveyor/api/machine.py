"""Answers to what Ray programs ask about where they run: the nodes, and the process's place in the session.
With Ray as the engine they are Ray's."""

from __future__ import annotations

import os
from typing import Any

from conveyor.runtime import context


class RuntimeContext:
    """Session, node and actor of the calling code; see ``get_runtime_context``."""

    def get_actor_id(self) -> str | None:
        """Return the actor's identity within the session, as a text; ``None`` in the driver."""
        actor = context.current().own_actor
        return None if actor is None else f"{actor.index:08x}"

    def get_actor_name(self) -> str | None:
        """Return the actor's name in messages: the one that it was given, if any. ``None`` in the driver."""
        actor = context.current().own_actor
        return None if actor is None else actor.name

    def get_job_id(self) -> str:
        """Return the session's identity, as a text."""
        return context.current().exports.session

    def get_node_id(self) -> str:
        """Return this machine's name; with Ray as the engine Ray's number of the node."""
        cluster = context.cluster()
        return os.uname().nodename if cluster is None else cluster.node_id()

    def get_worker_id(self) -> str:
        """This process, as a text."""
        return f"{os.getpid():08x}"

    @property
    def namespace(self) -> str:
        """Names belong to the session: there are no namespaces."""
        return ""


def get_runtime_context() -> RuntimeContext:
    """Return the session, node and actor of the calling code, under Ray's names."""
    return RuntimeContext()


def nodes() -> list[dict[str, Any]]:
    """Return this machine, as Ray lists nodes; with Ray as the engine the nodes of its cluster."""
    cluster = context.cluster()
    if cluster is not None:
        return cluster.nodes()
    host = os.uname().nodename
    return [
        {
            "NodeID": host,
            "Alive": True,
            "NodeManagerHostname": host,
            "NodeManagerAddress": "127.0.0.1",
            "Resources": cluster_resources(),
        }
    ]


def cluster_resources() -> dict[str, float]:
    """Return the cores that this process may use (``"CPU"``), the GPUs that it sees (``"GPU"``) and the
    machine's memory in bytes (``"memory"``). Nothing is reserved, so all of it is always available. With Ray
    as the engine: the resources of all nodes of its cluster."""
    cluster = context.cluster()
    if cluster is not None:
        return cluster.cluster_resources()
    from conveyor.engines.local.resources import visible_gpus  # the engine is slow to import

    resources = {
        "CPU": float(len(os.sched_getaffinity(0))),
        "memory": float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
    }
    gpus = visible_gpus()
    if gpus:
        resources["GPU"] = float(len(gpus))
    return resources


def available_resources() -> dict[str, float]:
    """Return the free resources: those of ``cluster_resources``, since nothing is reserved. With Ray as the
    engine: the resources that are free in its cluster."""
    cluster = context.cluster()
    if cluster is not None:
        return cluster.available_resources()
    return cluster_resources()
