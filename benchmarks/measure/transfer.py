"""Payloads: copied in, or made in the channel's memory."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.making import FILLED
from benchmarks.measure.bench import Bench, Figures, sampled, spread
from benchmarks.model import InPlace, Topology, Transfer
from benchmarks.worker import PAGE, sweep

TINY = 64  # sent first, so that the worker has imported numpy or torch
WAKE = 10
COLD = 12  # Ray has ten buffers, each of which is cold once
SECONDS = 0.8
MOST = 5_000


def _payload(device: str, size: int) -> Any:
    if device == "torch":
        import torch

        return torch.ones(size, dtype=torch.uint8)
    import numpy as np

    return np.ones(size, np.uint8)


def transfer(bench: Bench, spec: Transfer) -> Figures:
    """The first executions are the cold figures; the others, of the same value, the warm ones."""
    bench.close_path()  # a cold path, also where the last case had the same topology
    path = bench.path(Topology("chain", 1, "sweep_back" if spec.back else "sweep"))
    once = path.once
    once(_payload(spec.device, TINY))
    payload = _payload(spec.device, spec.size)
    pages = -(-spec.size // PAGE)

    def there_and_back(value: Any) -> int:
        return sweep(once(value))

    step = there_and_back if spec.back else once
    cold: list[int] = []
    for _ in range(COLD):
        start = time.perf_counter_ns()
        pages_seen = step(payload)
        cold.append(time.perf_counter_ns() - start)
        if pages_seen != pages:
            raise ValueError(f"read {pages_seen} pages of {pages}")
    figures = sampled(bench, path, step, payload, SECONDS * bench.effort, MOST, at_least=8)
    figures["first_us"] = cold[0] / 1e3
    figures["first10_us"] = sum(cold[:10]) / 10 / 1e3
    return figures


def in_place(bench: Bench, spec: InPlace) -> Figures:
    """Making (untimed, but given as ``make_us``) and filling come before; then send and reply.

    Filling 64 MB empties the caches, and what comes next pays for that, whatever it is. So for a
    smaller value the rest is filled elsewhere: what differs between the sizes is then the sending.
    """
    path = bench.path(Topology("chain", 1, "peek"))
    submit, receive, empty = path.submit, path.receive, bench.system.empty
    tiny = _payload(spec.device, TINY)
    count = max(10, int(60 * bench.effort))
    is_remote = _payload(spec.device, max(FILLED - spec.size, 1))
    makes: list[int] = []
    sends: list[int] = []
    for _ in range(count + 5):
        start = time.perf_counter_ns()
        holder = [empty(spec.device, spec.size)]
        makes.append(time.perf_counter_ns() - start)
        holder[0][:] = 1
        is_remote[:] = 1
        # The tiny ones wake the worker.
        for _ in range(WAKE):
            path.once(tiny)
        # Popped straight into the library's call: one that a variable still holds is copied.
        start = time.perf_counter_ns()
        answer = receive(submit(holder.pop()))
        sends.append(time.perf_counter_ns() - start)
        if answer != 1:
            raise ValueError(f"wrong first byte {answer!r}")
    figures = spread(sends[5:])
    figures["first_us"] = sends[0] / 1e3
    figures["make_us"] = spread(makes[5:])["p50_us"]
    return figures
