"""Plain forked processes connected by links: the skeleton of the floor, pipes and zmq."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import traceback
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.model import ARGUMENTS, Topology
from benchmarks.systems.base import Path, System
from benchmarks.worker import Worker

PR_SET_PDEATHSIG = 1

Send = Callable[[Any], None]
Receive = Callable[[], Any]


class Link:
    """One direction between two processes. Each end is opened after the fork, in its process."""

    def sender(self) -> Send:
        raise NotImplementedError

    def receiver(self) -> Receive:
        raise NotImplementedError

    def close(self) -> None:
        """Free what this process holds of it."""


def _serve(inbox: Link, outbox: Link, topology: Topology) -> None:
    receive, send = inbox.receiver(), outbox.sender()
    method = getattr(Worker(), topology.method)
    if topology.kind == "args":
        while True:
            send(method(*receive()))
    while True:
        send(method(receive()))


def fork(work: Callable[[], None]) -> int:
    """A child that does nothing but ``work``, and dies with this process; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        work()
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _fork(inbox: Link, outbox: Link, topology: Topology, unused: list[Link]) -> int:
    def work() -> None:
        for link in unused:
            link.close()
        _serve(inbox, outbox, topology)

    return fork(work)


class ForkedSystem(System):
    """Workers are forks of this process; ``link()`` says what connects them."""

    def link(self) -> Link:
        raise NotImplementedError

    def path(self, topology: Topology) -> Path:
        if topology.kind == "fan":
            pairs = [(self.link(), self.link()) for _ in range(topology.size)]
            heads, tails = [i for i, _ in pairs], [o for _, o in pairs]
        else:
            links = [self.link() for _ in range(topology.hops + 1)]
            pairs = list(pairwise(links))
            heads, tails = links[:1], links[-1:]
        every = list({id(link): link for pair in pairs for link in pair}.values())
        workers = [
            _fork(inbox, outbox, topology, [k for k in every if k not in (inbox, outbox)])
            for inbox, outbox in pairs
        ]
        # Only the far ends of inner links would be left open here, and hide a worker's death.
        for link in every:
            if link not in heads and link not in tails:
                link.close()
        sends = [link.sender() for link in heads]
        receives = [link.receiver() for link in tails]

        def close() -> None:
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            for link in every:
                link.close()

        return _connect(topology, sends, receives, close, workers)


def _connect(
    topology: Topology,
    sends: list[Send],
    receives: list[Receive],
    close: Callable[[], None],
    workers: list[int],
) -> Path:
    send, receive = sends[0], receives[0]

    if topology.kind == "fan":

        def submit(value: Any) -> None:
            for send in sends:
                send(value)

        def collect(_: Any) -> Any:
            return [receive() for receive in receives]

        def once(value: Any) -> Any:
            for send in sends:
                send(value)
            return [receive() for receive in receives]

    elif topology.kind == "args":

        def submit(value: Any) -> None:
            send((value,) * ARGUMENTS)

        def collect(_: Any) -> Any:
            return receive()

        def once(value: Any) -> Any:
            send((value,) * ARGUMENTS)
            return receive()

    else:

        def submit(value: Any) -> None:
            send(value)

        def collect(_: Any) -> Any:
            return receive()

        def once(value: Any) -> Any:
            send(value)
            return receive()

    return Path(once, submit, collect, close, workers)
