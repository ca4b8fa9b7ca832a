"""One process of cases: reads what to do from stdin, reports each case on a pipe as it ends.

Events, one JSON object a line: ``begin``, then ``done`` (with figures) or ``failed`` (with a
reason) for each case, and ``end``. ``unavailable`` instead of everything: no such package here.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measure import measure
from benchmarks.measure.bench import Bench
from benchmarks.systems import make
from benchmarks.workloads import workloads

STACK_SIGNAL = signal.SIGUSR2
"""Sent by the runner to a case that hangs, before it is killed: write all stacks to stderr."""


@dataclass(frozen=True)
class Order:
    """What the runner wants of this process."""

    system: str
    cores: list[int]
    cases: list[str]
    split: bool
    effort: float
    tree: int
    events: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def _reason(error: BaseException) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text.strip()}"[:200]


def run(order: Order) -> None:
    def tell(event: str, **details: Any) -> None:
        os.write(order.events, (json.dumps({"event": event} | details) + "\n").encode())

    os.set_inheritable(order.events, False)
    os.sched_setaffinity(0, order.cores)
    try:
        system = make(order.system)
    except ImportError as error:
        tell("unavailable", reason=_reason(error))
        return
    bench = Bench(system, order.effort, order.tree, order.split)
    try:
        system.open()
        for name in order.cases:
            tell("begin", case=name)
            tell("done", case=name, figures=measure(bench, workloads()[name].spec))
        tell("end")
        bench.close_path()
        system.close()
    except Exception as error:
        traceback.print_exc()
        tell("failed", reason=_reason(error))


def main() -> None:
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    run(Order(**json.load(sys.stdin)))


if __name__ == "__main__":
    main()
