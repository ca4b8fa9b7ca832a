"""The floor: between bare forked processes, pickled values over ``ring.cpp``, and tensors by ``pull.cpp``."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from typing import Any

from benchmarks.making import compute, peek, read, tensors
from benchmarks.model import Direct
from benchmarks.systems.base import DirectPath
from benchmarks.systems.forked import ForkedSystem, Link, Receive, Send, fork
from benchmarks.systems.native import load


class RingLink(Link):
    def __init__(self, link: Any) -> None:
        self._link = link

    def sender(self) -> Send:
        put, dumps = self._link.send, pickle.dumps

        def send(value: Any) -> None:
            put(dumps(value, 5))

        return send

    def receiver(self) -> Receive:
        take, loads = self._link.receive, pickle.loads

        def receive() -> Any:
            return loads(take())

        return receive


class FloorSystem(ForkedSystem):
    name = "floor"

    def link(self) -> Link:
        return RingLink(load("ring").Link())

    def direct_path(self, spec: Direct) -> DirectPath:
        return pulls(spec)


def pulls(spec: Direct) -> DirectPath:
    """A value is used in shared memory, where the maker puts it. ``into``, ``cold`` and ``out_of_band`` have
    it in memory of the reader's."""
    import torch

    torch.set_num_threads(1)  # before the fork: no thread of it is lost
    pull = load("pull").Pull(spec.size, spec.count)
    source, sink = os.pipe()

    def serve() -> None:
        made = tensors(spec)
        os.write(sink, b"!")
        while True:
            pull.serve([tensor.data_ptr() for tensor in made])
            compute(float(os.read(source_until, 64)))

    source_until, sink_until = os.pipe()
    maker = fork(serve)
    os.read(source, 1)
    staged = _cut(torch.frombuffer(pull.staged(), dtype=torch.uint8)[: spec.nbytes], spec)
    target = torch.zeros(spec.nbytes, dtype=torch.uint8)
    cut = _cut(target, spec)
    look = peek if spec.peeks else read
    kept: list[Any] = []

    def make(number: int) -> None:
        if spec.use != "call":
            pull.fill(number)

    def stage(_: Any) -> list[int]:
        pull.stage()
        return [look(staged)]

    def read_it(_: Any) -> list[int]:
        pull.read(target.data_ptr())
        return [look(cut)]

    def read_anew(_: Any) -> list[int]:
        fresh = torch.empty(spec.nbytes, dtype=torch.uint8)
        kept.append(fresh)
        pull.read(fresh.data_ptr())
        return [look(_cut(fresh, spec))]

    def into(_: Any) -> list[int]:
        pull.into(target.data_ptr())
        return []

    def read_into(_: Any) -> list[int]:
        pull.read(target.data_ptr())
        return []

    def have_compute(until: float) -> None:
        pull.pause()
        os.write(sink_until, str(until).encode())

    def close() -> None:
        os.kill(maker, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(maker, 0)

    ways = {
        "call": stage,
        "again": read_it,
        "busy": read_it,
        "used": stage,
        "cold": read_anew,
        "into": into,
    }
    out_of_band = {"used": {"read_us": read_it}, "into": {"read_us": read_into}}
    return DirectPath(
        make,
        ways[spec.use],
        compute=have_compute,
        close=close,
        target=target,
        maker=maker,
        out_of_band=out_of_band.get(spec.use, {}),
    )


def _cut(whole: Any, spec: Direct) -> Any:
    """As the value is: one tensor, or a list of them."""
    return whole if spec.count == 1 else list(whole.view(spec.count, spec.size))
