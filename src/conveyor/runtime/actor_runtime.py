"""The runtime inside an actor: calls to other actors, over links that the driver lays."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.channel.sealed import seal
from conveyor.config import Config
from conveyor.dag import DAGNode, MethodNode
from conveyor.exceptions import ActorDiedError, RuntimeStateError
from conveyor.plan import lower
from conveyor.plan.model import Plan
from conveyor.runtime.base import CallingRuntime
from conveyor.runtime.exports import ActorExports
from conveyor.runtime.generators import Key
from conveyor.runtime.graph import ProcessGraph
from conveyor.runtime.hosting import Laid, Member, refuse_own
from conveyor.runtime.laying import tasks_by_actor
from conveyor.runtime.links import Link
from conveyor.runtime.process import close_all
from conveyor.runtime.protocol import ActorId, ActorSpec, MethodInfo
from conveyor.runtime.refs import Ref
from conveyor.runtime.requests import LaidMember, Options, RequestClient

if TYPE_CHECKING:
    from conveyor.runtime.worker import Worker


class Peer:
    """An actor of a graph that this actor executes."""

    def __init__(
        self,
        board: _core.Board,
        requests: RequestClient,
        member: LaidMember,
        labels: Mapping[tuple[int, int], str],
    ) -> None:
        self.id = member.id
        self.pid = member.pid
        self.slot = member.slot
        self._incarnation = member.incarnation
        self._board = board
        self._requests = requests
        self._labels = labels

    @property
    def alive(self) -> bool:
        return not self._board.gone(self.slot, self._incarnation)

    def death(self, label: Callable[[int, int], str | None] | None = None) -> ActorDiedError:
        return self._requests.death(self.id, self._labels)


class ActorRuntime(CallingRuntime):
    """What ``conveyor.get``, ``.remote()`` and the rest reach inside an actor."""

    def __init__(self, worker: Worker, requests: socket.socket) -> None:
        super().__init__(worker.process)
        self._worker = worker
        self._requests = RequestClient(requests)
        self._lock = threading.Lock()
        self._garbage: deque[int] = deque()
        self.graphs: weakref.WeakSet[ProcessGraph] = weakref.WeakSet()
        process = worker.process
        self.exports = ActorExports(
            worker.hello.session,
            worker.hello.number,
            process.inbox,
            lambda: process.board.ring(process.slot, _core.ATTENTION_BIT),
            lambda: self.watcher,
            lambda: self._open("refs"),
        )

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

    def is_alive(self, actor: ActorId) -> bool:
        return self.link(actor).is_alive

    def _open(self, what: str, *args: Any) -> socket.socket:
        _, (fd,) = self._requests.ask("open", what, *args)
        return socket.socket(fileno=fd)

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

    # Graphs that this actor executes

    def compile(
        self, root: DAGNode, config: Config, placement: Mapping[MethodNode, ActorId]
    ) -> ProcessGraph:
        plan = lower(root, config, placement)
        own = self._worker.hello
        refuse_own(plan, ActorId(own.number, own.name))
        return ProcessGraph(self, plan, config)

    def lay(self, plan: Plan, config: Config) -> Laid:
        self.tidy()
        # The driver sees no constant of the graph: it may not know their classes.
        skeleton = replace(plan, tasks=(), inputs=(), shape=None)
        sealed = [seal(tasks) for tasks in tasks_by_actor(plan)]
        answer, fds = self._requests.ask("lay", skeleton, config.name, sealed, config.slot_bytes)
        number, members, *rest = answer
        labels = {(number, task.id): task.label for task in plan.tasks}
        try:
            for i, member in enumerate(members):
                self.process.adopt(member.slot, *fds[1 + 2 * i : 3 + 2 * i])
            segment = _core.Segment.attach(fds[0])
        finally:
            close_all(fds)
        peers = [Peer(self.process.board, self._requests, member, labels) for member in members]
        return Laid(number, peers, segment, *rest)

    def unlay(self, number: int) -> list[tuple[Member, Ref]]:
        self._requests.ask("unlay", number, True)
        return []

    def drop_stream(self, actor: ActorId, method: str, key: Key) -> None:
        super().drop_stream(actor, method, key)
        self.process.board.ring(self.process.slot, _core.ATTENTION_BIT)

    def drop(self, number: int) -> None:
        self._garbage.append(number)
        # The main loop calls `tidy` for that.
        self.process.board.ring(self.process.slot, _core.ATTENTION_BIT)

    def tidy(self) -> None:
        """Let go of graphs and streams that have become garbage."""
        self.close_dropped_streams()
        while self._garbage:
            try:
                number = self._garbage.popleft()
            except IndexError:
                return
            self._requests.ask("unlay", number, False)

    # An actor that another actor knows of lives until the session ends: nobody counts its handles.

    def retain(self, actor: ActorId) -> None:
        pass

    def release(self, actor: ActorId) -> None:
        pass

    def share(self, actor: ActorId) -> None:
        pass

    def abandon(self) -> None:
        error = RuntimeStateError("this graph belongs to the process that this one was forked from")
        for graph in list(self.graphs):
            graph.orphan(error)

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
