"""torch.distributed's gloo, between processes that were started for it."""

from __future__ import annotations

import os
import tempfile
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.making import fill, peek, read
from benchmarks.model import AllReduce, Direct
from benchmarks.reducing import Steps
from benchmarks.systems.base import DirectPath, Path, System
from benchmarks.systems.spawned import RemoteMaker


def _serve(rank: int, spec: AllReduce, meeting: str, line: Connection) -> None:
    import torch.distributed as dist

    steps = Steps(rank, spec.size)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=spec.ranks
    )
    while (calls := line.recv()) is not None:
        line.send(steps.time(dist.all_reduce, dist.barrier, calls))
    dist.destroy_process_group()


def _join(meeting: str, rank: int) -> None:
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)


def _serve_tensors(_: Direct, line: Connection, made: list[Any]) -> Any:
    """Orders come over gloo, too: a number to fill the tensors with, or 0 to send them."""
    import torch
    import torch.distributed as dist

    _join(line.recv(), 1)
    word = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(word, 0)
        if number := int(word):
            fill(made, number)
            dist.send(word, 0)
            continue
        for tensor in made:
            dist.send(tensor, 0)


class GlooSystem(System):
    name = "gloo"
    package = "torch"

    def direct_path(self, spec: Direct) -> DirectPath:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        maker = RemoteMaker(spec, _serve_tensors)
        meeting = os.path.join(tempfile.mkdtemp(), "meeting")
        maker.line.send(meeting)
        _join(meeting, 0)
        ask, word = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        target = torch.zeros(spec.nbytes, dtype=torch.uint8)
        cut = list(target.view(spec.count, spec.size))
        look = peek if spec.peeks else read

        def make(number: int) -> None:
            if spec.use != "call":
                word.fill_(number)
                dist.send(word, 1)
                dist.recv(word, 1)

        def pull(_: Any) -> list[int]:
            dist.send(ask, 1)
            for tensor in cut:
                dist.recv(tensor, 1)
            if spec.use == "into":
                return []
            return [look(cut if spec.count > 1 else target)]

        def close() -> None:
            maker.close()
            dist.destroy_process_group()

        return DirectPath(make, pull, close=close, target=target, maker=maker.pid)

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
