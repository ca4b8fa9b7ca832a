"""``multiprocessing.Pipe`` between forked processes."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

from benchmarks.systems.forked import ForkedSystem, Link, Receive, Send


class PipeLink(Link):
    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)

    def sender(self) -> Send:
        self._reader.close()
        put, dumps = self._writer.send_bytes, pickle.dumps

        # As Connection.send does it, but with plain pickle: torch would replace the value by a
        # handle to memory that both sides then share, which is not sending it.
        def send(value: Any) -> None:
            put(dumps(value, 5))

        return send

    def receiver(self) -> Receive:
        self._writer.close()
        take, loads = self._reader.recv_bytes, pickle.loads

        def receive() -> Any:
            return loads(take())

        return receive

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class PipeSystem(ForkedSystem):
    name = "pipe"

    def link(self) -> Link:
        return PipeLink()
