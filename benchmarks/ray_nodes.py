"""A Ray cluster of several nodes on this machine, and measurements with a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

#: Ray's own settings, of which it takes notice as it is imported. With its usual niceness, actors would be
#: measured against everything else that the machine has to do.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
}


@contextmanager
def cluster_of(nodes: Sequence[Mapping[str, float]], *, cpus: int, store: int) -> Iterator[str]:
    """The address of a cluster with a node for each mapping, which is the resources that it has.

    Args:
        nodes: the first one is the driver's.
        cpus: of each node.
        store: bytes of each node's object store.
    """
    os.environ.update(SETTINGS)
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for number, resources in enumerate(nodes):
            first = {} if number else {"include_dashboard": False}
            cluster.add_node(
                num_cpus=cpus, resources=dict(resources), object_store_memory=store, **first
            )
        yield cluster.address
    finally:
        cluster.shutdown()


def measured_apart(module: str, *arguments: str) -> dict[str, Any]:
    """What ``python -m module arguments`` has printed as JSON on its last line.

    Raises:
        SystemExit: it has failed; with what it said.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[2:])} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
