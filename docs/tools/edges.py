"""Tensors from an actor to one on another node: in the frame, over gloo, and over NIXL, which take turns.

`python docs/tools/edges.py` makes the table of docs/scaling.md: two nodes of Ray on this machine, which share
no memory. NIXL's UCX is kept to TCP, as between two machines without RDMA.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

import conveyor
from conveyor.dag import InputNode

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "64 MB": 1 << 26}
WAYS = ("shm", "gloo", "nixl")
ROUNDS = 12
WAIT = 60


@conveyor.remote
class Stage:
    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor] = {}

    def make(self, size: int) -> torch.Tensor:
        if size not in self.made:
            self.made[size] = torch.ones(size // 4)
        return self.made[size]

    def total(self, tensor: torch.Tensor) -> float:
        return float(tensor.sum())


def main() -> None:
    """Measure, and print a table of medians."""
    cluster = Cluster()
    cluster.add_node(num_cpus=2, resources={"first": 1}, include_dashboard=False)
    cluster.add_node(num_cpus=2, resources={"second": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    conveyor.init(engine="ray", shared_memory="node", node_timeout=30)
    try:
        measure()
    finally:
        conveyor.shutdown()
        ray.shutdown()
        cluster.shutdown()


def measure() -> None:
    """All ways in turn, for each size."""
    environment: dict[str, Any] = {"env_vars": {"UCX_TLS": "tcp,self"}}
    a, b = [
        Stage.options(resources={node: 0.1}, runtime_env=environment).remote()
        for node in ("first", "second")
    ]
    graphs = {}
    for way in WAYS:
        with InputNode() as inp:
            made = a.make.bind(inp).with_tensor_transport(way)
            graphs[way] = b.total.bind(made).compile()
    print("| " + " | ".join(["", *WAYS]) + " |")
    print("|---" * (len(WAYS) + 1) + "|")
    for name, size in SIZES.items():
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(ROUNDS):
            for way, graph in graphs.items():
                begin = time.perf_counter()
                graph.execute(size).get(timeout=WAIT)
                if turn > 1:  # memory and connections are there by then
                    times[way].append(time.perf_counter() - begin)
        row = [f"{statistics.median(times[way]) * 1e3:.2f} ms" for way in WAYS]
        print("| " + " | ".join([name, *row]) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
