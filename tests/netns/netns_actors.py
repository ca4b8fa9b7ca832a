"""What the tests place on the hosts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np

import conveyor

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Seconds that anything may take, on a slow machine too.
WAIT = 120


@conveyor.remote
class Stage:
    def __init__(self, add: int = 0) -> None:
        self.add = add
        self.seen: list[int] = []

    def run(self, x: Any) -> Any:
        return x + self.add

    def note(self, x: int) -> int:
        self.seen.append(x)
        return x

    def noted(self) -> list[int]:
        return self.seen

    def put(self, size: int) -> list[Any]:
        return [conveyor.put(np.arange(size))]

    def total(self, refs: list[Any]) -> list[float]:
        return [float(value.sum()) for value in conveyor.get(refs)]

    def count(self, n: int) -> Iterator[Any]:
        for i in range(n):
            yield np.full(500, i)

    def all_of(self, receiver: Any) -> list[Any]:
        return list(receiver)

    def last(self, size: int) -> Any:
        """What it gives last: it is killed as soon as that is on its way."""
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return np.arange(size)

    def last_of(self, other: Any, size: int) -> Any:
        return conveyor.get(other.last.remote(size)).sum()

    def pid(self) -> int:
        return os.getpid()


def on(host: int, add: int = 0) -> Any:
    """An actor on that host, which is there."""
    actor = Stage.options(resources={f"host{host}": 0.1}).remote(add)
    get(actor.run.remote(0))
    return actor


def get(ref: Any) -> Any:
    return conveyor.get(ref, timeout=WAIT)
