"""A pipeline as engines make it by hand: processes, a shared-memory queue that all workers read, gloo
between the stages."""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
import time
from multiprocessing import get_context, shared_memory
from typing import Any

from benchmarks.model import Executor
from benchmarks.stage import HIDDEN, Stage
from benchmarks.systems.base import Path, System

SLOTS = 16
SLOT_BYTES = 8192
_SPIN = 1e-3
_SLEEP = 20e-6


class Queue:
    """One writer, ``readers`` readers that each get all: a ring with a count of each side's. Whoever waits
    yields for a millisecond, and then sleeps for 20 us at a time."""

    def __init__(self, readers: int, memory: shared_memory.SharedMemory | None = None) -> None:
        self._readers = readers
        self._memory = memory or shared_memory.SharedMemory(
            create=True, size=64 * (readers + 1) + SLOTS * SLOT_BYTES
        )
        self._owner = memory is None

    def __getstate__(self) -> tuple[int, str]:
        return self._readers, self._memory.name

    def __setstate__(self, state: tuple[int, str]) -> None:
        readers, name = state
        self.__init__(readers, shared_memory.SharedMemory(name=name))  # type: ignore[misc]

    def _count(self, place: int) -> int:
        count: int = struct.unpack_from("q", self._memory.buf, 64 * place)[0]
        return count

    def _set_count(self, place: int, count: int) -> None:
        struct.pack_into("q", self._memory.buf, 64 * place, count)

    def put(self, value: Any) -> None:
        data = pickle.dumps(value, 5)
        written = self._count(0)
        _wait(lambda: written - min(map(self._count, range(1, self._readers + 1))) < SLOTS)
        at = 64 * (self._readers + 1) + written % SLOTS * SLOT_BYTES
        struct.pack_into("q", self._memory.buf, at, len(data))
        self._memory.buf[at + 8 : at + 8 + len(data)] = data
        self._set_count(0, written + 1)

    def get(self, reader: int) -> Any:
        read = self._count(reader + 1)
        _wait(lambda: self._count(0) > read)
        at = 64 * (self._readers + 1) + read % SLOTS * SLOT_BYTES
        size = struct.unpack_from("q", self._memory.buf, at)[0]
        value = pickle.loads(self._memory.buf[at + 8 : at + 8 + size])
        self._set_count(reader + 1, read + 1)
        return value

    def close(self) -> None:
        self._memory.close()
        if self._owner:
            self._memory.unlink()


def _wait(ready: Any) -> None:
    end = 0.0
    while not ready():
        if not end:
            end = time.perf_counter() + _SPIN
        elif time.perf_counter() > end:
            time.sleep(_SLEEP)
            continue
        os.sched_yield()


def _serve(rank: int, spec: Executor, steps: Queue, tokens: Queue, meeting: str) -> None:
    import torch
    import torch.distributed as dist

    stage = Stage(spec.stage_ms / 1e3)
    stage.join(meeting, rank, spec.stages, spec.ranks)
    first, last = rank < spec.ranks, rank >= (spec.stages - 1) * spec.ranks
    hidden = torch.empty(HIDDEN)
    while (step := steps.get(rank)) is not None:
        if not first:
            dist.recv(hidden, rank - spec.ranks)
        made = stage.step(step, None if first else hidden.numpy())
        if not last:
            dist.send(torch.from_numpy(made), rank + spec.ranks)
        elif rank == (spec.stages - 1) * spec.ranks:
            tokens.put(stage.pick(made))
    dist.destroy_process_group()


class HandmadeSystem(System):
    name = "handmade"
    package = "torch"

    def executor_path(self, spec: Executor) -> Path:
        count = spec.stages * spec.ranks
        steps, tokens = Queue(count), Queue(1)
        folder = tempfile.mkdtemp()
        context = get_context("spawn")
        meeting = os.path.join(folder, "meeting")
        workers = [
            context.Process(target=_serve, args=(rank, spec, steps, tokens, meeting), daemon=True)
            for rank in range(count)
        ]
        for worker in workers:
            worker.start()

        def close() -> None:
            steps.put(None)
            for worker in workers:
                worker.join(10)
                worker.kill()
            steps.close()
            tokens.close()

        def submit(step: Any) -> None:
            steps.put(step)

        def receive(_: Any) -> Any:
            return tokens.get(0)

        def once(step: Any) -> Any:
            submit(step)
            return receive(None)

        return Path(once, submit, receive, close, [worker.pid or 0 for worker in workers])
