"""torch.distributed's gloo, between processes that were started for it."""

from __future__ import annotations

import os
import tempfile
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.model import AllReduce
from benchmarks.reducing import bind_to_core, time_allreduce
from benchmarks.systems.base import Path, System


def _serve(rank: int, spec: AllReduce, meeting: str, line: Connection) -> None:
    import torch.distributed as dist

    bind_to_core(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=spec.ranks
    )
    while (calls := line.recv()) is not None:
        line.send(time_allreduce(dist.all_reduce, dist.barrier, spec.size, calls))
    dist.destroy_process_group()


class GlooSystem(System):
    name = "gloo"
    package = "torch"

    def allreduce_path(self, spec: AllReduce) -> Path:
        meeting = os.path.join(tempfile.mkdtemp(), "meeting")
        context = get_context("spawn")
        lines = []
        workers = []
        for rank in range(spec.ranks):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, spec, meeting, theirs), daemon=True)
            worker.start()
            lines.append(ours)
            workers.append(worker)

        def once(calls: int) -> Any:
            for line in lines:
                line.send(calls)
            times = [line.recv() for line in lines]
            return times[0]

        def close() -> None:
            for line, worker in zip(lines, workers, strict=True):
                line.send(None)
                worker.join(10)
                worker.kill()

        return Path(once, once, once, close, [worker.pid or 0 for worker in workers])
