"""Executions between two hosts over a bad network whose connections are reset: all, in order, once."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import cloudpickle
from hosts import Hosts

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.runtime.context import running

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Of each hundredth execution.
_PAYLOAD = 20_000
_EVERY = 100
#: Seconds after which an execution hangs.
_HANGS = 60.0


@conveyor.remote
class Counter:
    """Gets numbers, and says which one it was not to get next."""

    def __init__(self) -> None:
        self.next = 0

    @conveyor.method(num_returns=3)
    def take(self, number: int, payload: bytes, digest: bytes) -> tuple[int, bytes, bytes]:
        if number != self.next:
            raise RuntimeError(f"number {number} has come where {self.next} was due")
        if hashlib.sha256(payload).digest() != digest:
            raise RuntimeError(f"the payload of number {number} is another")
        self.next += 1
        return number, payload, digest

    def taken(self) -> int:
        return self.next


@dataclass
class Report:
    executions: int = 0
    resets: int = 0
    connections: int = 0
    seconds: float = 0.0
    #: Seconds from the submission to the result, of each execution.
    times: list[float] = field(default_factory=list)
    #: Of the far host's cable: packets carried, lost, and that another one has overtaken, both ways.
    packets: list[int] = field(default_factory=list)

    def lines(self) -> list[str]:
        times = sorted(self.times)
        return [
            f"{self.executions} executions in {self.seconds:.1f} s, each once and in its order",
            f"{self.resets} connections were reset, and there were {self.connections}",
            f"an execution: p50 {times[len(times) // 2] * 1e3:.0f} ms, "
            f"p99 {times[len(times) * 99 // 100] * 1e3:.0f} ms, longest {times[-1] * 1e3:.0f} ms",
            "packets: {} carried, {} lost, {} overtaken".format(*self.packets),
        ]


def run(
    hosts: Hosts,
    seconds: float,
    executions: int,
    *,
    jitter: float,
    loss: float,
    reset: float,
    in_flight: int,
) -> Report:
    """In the session that runs. Until both the seconds and the executions are over; raises what is wrong."""
    near, far = (Counter.options(resources={f"host{i}": 0.1}).remote() for i in (0, 1))
    with InputNode() as given:
        there = far.take.bind(given[0], given[1], given[2])
        dag = MultiOutputNode(near.take.bind(*there))
    report = Report()
    over = threading.Event()

    def resetting() -> None:
        while not over.wait(reset):
            report.resets += hosts.reset_connections()

    thread = threading.Thread(target=resetting)
    random_bytes = os.urandom(_PAYLOAD)
    digests = {payload: hashlib.sha256(payload).digest() for payload in (b"", random_bytes)}
    under_way: deque[tuple[int, float, conveyor.CompiledRef]] = deque()

    def take_one() -> None:
        number, since, ref = under_way.popleft()
        got, payload, _ = conveyor.get(ref, timeout=_HANGS)
        report.times.append(time.monotonic() - since)
        if got != number or hashlib.sha256(payload).digest() != digests[payload]:
            raise AssertionError(f"the result of execution {number} is that of {got}")

    with dag.compile(depth=in_flight) as graph:
        cable = hosts.wires[1]
        cable.set(jitter=jitter, loss=loss)
        before = _packets(hosts)
        thread.start()
        start = time.monotonic()
        try:
            while report.executions < executions or time.monotonic() - start < seconds:
                if len(under_way) == in_flight:
                    take_one()
                number = report.executions
                payload = b"" if number % _EVERY else random_bytes
                ref = graph.execute(number, payload, digests[payload])
                under_way.append((number, time.monotonic(), ref))
                report.executions += 1
            while under_way:
                take_one()
        finally:
            over.set()
            thread.join()
            cable.set()
        report.seconds = time.monotonic() - start
        report.packets = [now - then for now, then in zip(_packets(hosts), before, strict=True)]
    for actor in (near, far):
        taken = conveyor.get(actor.taken.remote(), timeout=_HANGS)
        if taken != report.executions:
            raise AssertionError(f"{taken} of {report.executions} executions have run")
    report.connections = running().remote_nodes.pump.counts(1)[4]
    return report


def _packets(hosts: Hosts) -> list[int]:
    both = [hosts.wires[1].counts(way) for way in ("in", "out")]
    return [
        sum(counts.carried for counts in both),
        sum(counts.lost for counts in both),
        sum(counts.overtaken or 0 for counts in both),
    ]
