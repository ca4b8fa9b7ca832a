"""The runtime inside an actor: calls to other actors, over links that the driver lays."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.config import Config
from conveyor.dag import DAGNode
from conveyor.exceptions import RuntimeStateError
from conveyor.runtime.base import CallingRuntime
from conveyor.runtime.links import Link
from conveyor.runtime.protocol import ActorId, ActorSpec, MethodInfo
from conveyor.runtime.requests import Options, RequestClient

if TYPE_CHECKING:
    from conveyor.runtime.worker import Worker


class ActorRuntime(CallingRuntime):
    """What ``conveyor.get``, ``.remote()`` and the rest reach inside an actor."""

    def __init__(self, worker: Worker, requests: socket.socket) -> None:
        super().__init__(worker.process)
        self._worker = worker
        self._requests = RequestClient(requests)
        self._lock = threading.Lock()

    def link(self, actor: ActorId) -> Link:
        with self._lock:
            link = self._links.get(actor.index)
            if link is not None:
                return link
            (slot, name, bit), fds = self._requests.ask("connect", actor)
            segment_fd, arena_fd, eventfd = fds
            try:
                self.process.adopt(slot, arena_fd, eventfd)
                link = Link(
                    self.process,
                    _core.Segment.attach(segment_fd),
                    slot,
                    name,
                    bit,
                    lambda: self._requests.death(actor),
                    self.pump.add,
                    exclusive=lambda: self._worker.exclusive,
                )
            finally:
                for fd in fds:
                    os.close(fd)
            self._links[actor.index] = link
            return link

    def create_actor(self, spec: ActorSpec) -> ActorId:
        options = Options(spec.num_cpus, spec.num_gpus, spec.env_vars)
        actor, _ = self._requests.ask(
            "create",
            spec.cls.__name__,
            dict(spec.methods),
            spec.name,
            options,
            spec.max_concurrency,
        )
        assert isinstance(actor, ActorId)
        self.link(actor).call("__start__", (spec.cls, *spec.args), spec.kwargs)
        return actor

    def find_actor(self, name: str) -> tuple[ActorId, str, Mapping[str, MethodInfo]]:
        found: Any
        found, _ = self._requests.ask("find", name)
        actor, class_name, methods = found
        return actor, class_name, methods

    def kill(self, actor: ActorId) -> None:
        self._requests.ask("kill", actor)

    def compile(self, root: DAGNode, config: Config) -> Any:
        raise RuntimeStateError(
            "graphs are compiled in the driver; compiling one inside an actor is not supported yet"
        )

    # An actor that another actor knows of lives until the session ends: nobody counts its handles.

    def retain(self, actor: ActorId) -> None:
        pass

    def release(self, actor: ActorId) -> None:
        pass

    def share(self, actor: ActorId) -> None:
        pass

    def abandon(self) -> None:
        pass

    def wait(
        self, refs: Sequence[Any], num_returns: int, timeout: float | None
    ) -> tuple[list[Any], list[Any]]:
        refs = list(refs)
        if self._worker.exclusive and num_returns == len(refs) and timeout is None:
            # Waiting for all is waiting for each, and that takes part in finding deadlocks.
            for ref in refs:
                try:
                    ref.get()
                except Exception:  # its outcome, for who gets it; or a wait that would never end
                    if not ref.done():
                        raise
        return super().wait(refs, num_returns, timeout)

    def shutdown(self) -> None:
        raise RuntimeStateError("a session is shut down by the driver, not by an actor")
