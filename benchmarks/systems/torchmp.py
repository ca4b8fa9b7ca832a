"""``torch.multiprocessing``: a tensor that is sent is moved to shared memory, which is the copy."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing  # has connections send tensors so

from benchmarks.making import read
from benchmarks.model import Direct
from benchmarks.systems.base import DirectPath, System
from benchmarks.systems.spawned import RemoteMaker


def _serve(spec: Direct, line: Connection, made: list[Any]) -> Callable[[], None]:
    torch.multiprocessing.set_sharing_strategy("file_descriptor")

    def answer() -> None:
        line.send(made if spec.count > 1 else made[0])
        made.clear()  # they are shared now: the next ones are private again

    return answer


class TorchMultiprocessingSystem(System):
    name = "torchmp"
    package = "torch"

    def direct_path(self, spec: Direct) -> DirectPath:
        torch.set_num_threads(1)
        maker = RemoteMaker(spec, _serve)
        kept: list[Any] = []

        def pull(_: Any) -> list[int]:
            maker.ask()
            value = maker.line.recv()
            if spec.use == "cold":
                kept.append(value)
            return [read(value)]

        return DirectPath(maker.make, pull, close=maker.close, maker=maker.pid)
