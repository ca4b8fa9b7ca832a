"""Tensors that go beside the frames: by which transport, what goes wrong on the way, and a communicator."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from chaos_graphs import STREAMING, Graph, Out, leaves
from chaos_values import ON_DEVICE, TENSORS, Payload

import accelerator
from conveyor import transport
from conveyor.experimental.channel import Communicator
from conveyor.testing import FaultyTransport
from conveyor.transport.nccl import NcclTransport

#: What takes its time, and ends transfers in another order than they began in.
ROUGH = ("rough", "rough over gloo")
#: Those of the simulated accelerator, which take its tensors and no others beside the frames.
DEVICE = ("sim_ipc", "sim_nccl")
#: Methods whose results can have a transport.
SENDING = ("mix", "amix", "forward")
COMMUNICATOR = "communicator"
GOES_WRONG = "the communicator goes wrong"


@contextmanager
def usable() -> Iterator[tuple[str, ...]]:
    """Those of ours that this machine can run, beside those that are registered meanwhile; none without
    torch."""
    if importlib.util.find_spec("torch") is None:
        yield ()
        return
    importlib.import_module("torch")  # here, too, before anybody looks at this process's memory
    transport.register(FaultyTransport(ROUGH[0], delay=(0, 0.01), reorder=True))
    transport.register(FaultyTransport(ROUGH[1], over="gloo", delay=(0, 0.003)))
    _install_device()
    try:
        yield tuple(name for name in ("shm", "gloo", "nixl", *DEVICE) if _viable(name))
    finally:
        for name in (*ROUGH, DEVICE[1]):
            if transport.get(name) is not None:
                transport.unregister(name)


def _install_device() -> None:
    """Have the simulated accelerator in this process, with all that it keeps."""
    torch = importlib.import_module("torch")
    if accelerator.cannot_simulate() is None:
        device = accelerator.install()
        torch.zeros(1, device="sim").cpu()
        transport.register(NcclTransport(device, accelerator.SimGroup, DEVICE[1]))


def _viable(name: str) -> bool:
    found = transport.get(name)
    return found is not None and found.viable() is None


def routed(rng: Random, graph: Graph, names: Sequence[str]) -> Graph:
    """``graph`` with tensors among its values, and some of them by transports of ``names``."""
    given = {rank.task for task in graph.tasks if task.meeting for rank in task.args}
    tasks, routes = list(graph.tasks), {}
    # A transport is refused where no other actor reads the value.
    read = {
        leaf.task
        for task in tasks
        for leaf in leaves((task.args, dict(task.kwargs)))
        if isinstance(leaf, Out) and tasks[leaf.task].actor != task.actor
    }
    on_device = [name for name in names if name in DEVICE]
    # No other transport would take tensors of a device that a task passes on.
    of_cpu = not on_device or rng.random() < 0.6
    names = [name for name in names if name not in DEVICE] if of_cpu else on_device
    kinds = TENSORS if of_cpu else (*TENSORS, *ON_DEVICE, *ON_DEVICE)
    some = rng.sample(names, rng.randint(1, min(3, len(names))))  # so that edges share one
    for number, task in enumerate(tasks):
        if number in given or task.meeting is not None:
            continue
        if rng.random() < 0.7:
            payload = Payload(rng.choice(kinds), task.step.payload.size)
            task = replace(task, step=replace(task.step, payload=payload))
        if task.method in STREAMING:
            # One that waits for tensors while its graph fails never begins: its runs cannot be counted.
            task = replace(task, step=replace(task.step, counted=False))
        tasks[number] = task
        if number in read and task.method in SENDING and rng.random() < 0.7:
            routes[number] = rng.choice(some)
    return replace(graph, tasks=tuple(tasks), routes=routes)


def broken(rng: Random, graph: Graph, over: Sequence[str], name: str) -> tuple[Graph, list[str]]:
    """``graph`` with some of its routes replaced by one that fails; the names that were registered."""
    numbers = range(graph.executions)

    def some() -> list[int]:
        return rng.sample(numbers, min(len(numbers), rng.choice([0, 0, 1, 3])))

    stuck = some()
    options = {"offers": some(), "sends": some(), "receives": some(), "stuck": stuck}
    transport.register(FaultyTransport(name, over=rng.choice(over), **options))
    replaced = {task for task in graph.routes if rng.random() < 0.6}
    routes = {task: name if task in replaced else at for task, at in graph.routes.items()}
    fails = frozenset(options["offers"] + options["sends"] + options["receives"])
    changed = replace(graph, routes=routes, broken={name: fails}, stuck=frozenset(stuck))
    return changed, [name]


class Sockets(Communicator):
    """Sends each tensor over a connection of its own; a send waits until it has been received. ``fails``:
    after so many calls in one process one of them does."""

    def __init__(self, actors: Sequence[Any], fails: int | None) -> None:
        # In the folder of the run, which takes what is left with it.
        self._folder = tempfile.mkdtemp(dir=os.getcwd(), prefix="c")
        self._actors = list(actors)
        self._left = fails
        self._rank: int | None = None
        self._over = False

    def initialize(self, rank: int) -> None:
        self._rank = rank

    def get_actor_handles(self) -> Sequence[Any]:
        return self._actors

    def get_rank(self, actor: Any) -> int:
        return self._actors.index(actor)

    def get_self_rank(self) -> int | None:
        return self._rank

    def get_transport_name(self) -> str:
        return "chaos"

    def send(self, value: Any, peer_rank: int) -> None:
        import torch

        self._may_fail()
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        while not self._over:
            with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
                connection.settimeout(0.05)
                connection.connect(self._path(self._rank, peer_rank))
                connection.settimeout(None)
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                if connection.recv(1):
                    return
            time.sleep(0.0005)
        raise OSError("destroyed")

    def recv(self, shape: Any, dtype: Any, peer_rank: int, allocator: Any) -> Any:
        import torch

        self._may_fail()
        made = allocator(shape, dtype)
        path = Path(self._path(peer_rank, self._rank))
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(0.01)
            while not self._over:
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                path.unlink(missing_ok=True)
                with connection:
                    data = bytearray()
                    while more := connection.recv(1 << 20):
                        data += more
                    connection.sendall(b"k")
                if data:
                    made.reshape(-1).view(torch.uint8).copy_(
                        torch.frombuffer(data, dtype=torch.uint8)
                    )
                return made
        raise OSError("destroyed")

    def destroy(self) -> None:
        self._over = True

    def _path(self, source: int | None, target: int | None) -> str:
        return f"{self._folder}/{source}-{target}"

    def _may_fail(self) -> None:
        if self._left is None:
            return
        self._left -= 1
        if self._left < 0:
            raise OSError(GOES_WRONG)
