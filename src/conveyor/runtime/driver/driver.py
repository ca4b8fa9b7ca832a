"""The driver's runtime: owns the session's board, lays every graph, serves what actors ask for."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from conveyor import _core
from conveyor.config import Config
from conveyor.dag import DAGNode, MethodNode
from conveyor.exceptions import (
    ConveyorError,
    GraphTornDownError,
    RuntimeStateError,
)
from conveyor.plan import lower
from conveyor.plan.model import DRIVER, Plan
from conveyor.runtime import context, ending
from conveyor.runtime.base import CallingRuntime
from conveyor.runtime.calls.constructor import START, keep
from conveyor.runtime.calls.links import Link
from conveyor.runtime.driver.actors import BOARD_SLOTS, Actors
from conveyor.runtime.driver.birth import DRIVER_SLOT
from conveyor.runtime.driver.engine import Engine
from conveyor.runtime.driver.graph_service import GraphService
from conveyor.runtime.driver.last_steps import LastSteps
from conveyor.runtime.driver.laying import Laying
from conveyor.runtime.driver.record import Actor, ActorRecord
from conveyor.runtime.driver.requests import RequestServer
from conveyor.runtime.graph.handle import SharedGraphs
from conveyor.runtime.graph.hosting import Laid, Member
from conveyor.runtime.graph.layout import RESULT_BIT, Place, Tasks, task_labels, tasks_by_actor
from conveyor.runtime.graph.process_graph import ProcessGraph
from conveyor.runtime.process import ArenaSize, Process, arena_size
from conveyor.runtime.protocol import ActorId, ActorSpec, MethodInfo
from conveyor.runtime.refs.exports import Exports, Peer
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.refs.values import with_bound_values
from conveyor.runtime.refs.wire import Wire
from conveyor.runtime.uninterrupted import uninterrupted
from conveyor.system_limits import explained

logger = logging.getLogger("conveyor")


class Driver(CallingRuntime):
    """The runtime of the process that the user started."""

    def __init__(self, engine: Engine, arena: ArenaSize | None = None, grace: float = 5.0) -> None:
        """``grace``: seconds that actors have to end in good order."""
        self._eventfd = self._arena_fd = self._garbage_event = self._life_event = -1
        self._engine = engine
        try:
            with explained("start a session"):
                uninterrupted(lambda: self._begin(engine, arena, grace))
        except BaseException:  # the system has refused something: nothing is left of the session
            uninterrupted(self._undo)
            raise

    def _undo(self) -> None:
        """As if it had not begun."""
        self._engine.close()
        self._close_descriptors()
        if hasattr(self, "waker"):
            self.waker.close()
        if hasattr(self, "process"):
            self.process.close()
        if context.running() is self:
            context.install(None)

    def _begin(self, engine: Engine, arena: ArenaSize | None, grace: float) -> None:
        arena = arena or arena_size()
        board = _core.Board.create(BOARD_SLOTS)
        board.prepare(DRIVER_SLOT, "driver")
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._arena_fd = _core.Arena.create_fd(arena.file)
        self._garbage_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        process = Process(board, DRIVER_SLOT, self._eventfd, self._arena_fd, arena)
        super().__init__(process, _core.Waker(self._garbage_event))
        board.alive_unwatched(DRIVER_SLOT)
        self._graph_numbers = itertools.count(1)
        self._layings: dict[int, Laying] = {}
        self.requests = RequestServer(self, engine)
        self.exports = Exports(
            os.urandom(8).hex(),
            self.inbox,
            lambda: board.ring(DRIVER_SLOT, _core.ATTENTION_BIT),
            self.watcher,
            self.process.reader_at(DRIVER_SLOT),
            board.gone,
            lambda: self._throw_away(self.exports.tidy),
        )
        # Connections that actors have opened.
        self._served: weakref.WeakSet[Wire] = weakref.WeakSet()
        self._life_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.actors = Actors(self, engine, grace, self._life_event)
        # What finalizers ask for: they may run in any thread, in the middle of anything.
        self._garbage: deque[Callable[[], object]] = deque()
        # What could not be said to an actor.
        self._unsaid: deque[Callable[[], object]] = deque()
        self.graphs: weakref.WeakSet[ProcessGraph] = weakref.WeakSet()
        self._shared_graphs = SharedGraphs(self.graphs)
        self._closed = False
        self._last_steps = LastSteps(
            self._begin_end,
            # What they ask the driver for meanwhile is answered.
            self.actors.end_all,
            self.pump.close,
            self.process.sweeper.close,
            self._end_connections,
            self.watcher.close,
            self._end_hearing,
            engine.close,
            self.actors.close,
            self._forget_all,
            self._close_descriptors,
            self.process.close,
            hurry=self.actors.hurry,
        )
        self.at_shutdown: Callable[[], None] = lambda: None
        engine.start(self.actors.on_exit)
        engine.watch(self._garbage_event, self._on_garbage)
        engine.watch(self._life_event, self._on_life_words)
        context.install(self)  # so that whoever is interrupted before he has it finds it

    @property
    def descriptors(self) -> tuple[int, int]:
        """Arena and eventfd: what whoever writes to the driver needs."""
        return self._arena_fd, self._eventfd

    # Actors

    def create_actor(self, spec: ActorSpec) -> ActorId:
        actor = Actor(
            spec.cls.__name__,
            spec.methods,
            spec.name,
            spec.process,
            spec.max_concurrency,
            spec.max_restarts,
            keep(spec.cls, spec.args, spec.kwargs, always=spec.max_restarts != 0),
        )
        record = self.actors.start(
            actor, lambda link: link.call(START, (spec.cls, *spec.args), spec.kwargs)
        )
        return record.id

    def find_actor(self, name: str) -> tuple[ActorId, str, Mapping[str, MethodInfo]]:
        return self.actors.find(name)

    def link(self, actor: ActorId) -> Link:
        self.check_open()
        return self.actors.link(actor)

    def is_alive(self, actor: ActorId) -> bool:
        return self.actors.record(actor).alive

    def kill(self, actor: ActorId, no_restart: bool = True, graceful: bool = False) -> None:
        self.actors.kill(actor, no_restart, graceful)

    def retain(self, actor: ActorId) -> object:
        release = partial(self.actors.release, actor)
        self.actors.retain(actor)
        try:
            return self.will(release)
        except BaseException:  # no memory: there will be no handle
            self._throw_away(release)
            raise

    def share(self, actor: ActorId) -> None:
        self.actors.share(actor)

    def on_death(self, record: ActorRecord) -> None:
        """An actor's process has ended: so has what it alone has held and executed."""
        self.exports.actor_ended(record.reader)
        for number, laying in list(self._layings.items()):
            if laying.executor.slot == record.slot:
                self.drop(number)

    # Graphs

    def compile(
        self, root: DAGNode, config: Config, placement: Mapping[MethodNode, ActorId]
    ) -> ProcessGraph:
        plan = lower(root, config, placement)
        with explained(f"lay the channels of {config.name or 'the graph'}"):
            return ProcessGraph(self, plan, config)

    def lay(self, plan: Plan, config: Config) -> Laid:
        laying = self.lay_for(
            Place(DRIVER_SLOT, RESULT_BIT),
            config,
            plan,
            [with_bound_values(tasks) for tasks in tasks_by_actor(plan)],
            task_labels(plan),
        )
        return self._laid(laying)

    def lay_again(self, number: int, first: int) -> Laid:
        laying = self.laying(number)
        laying.again(first)
        return self._laid(laying)

    def comes_back(self, number: int) -> bool:
        laying = self._layings.get(number)
        return laying is not None and laying.comes_back()

    def laying(self, number: int) -> Laying:
        laying = self._layings.get(number)
        if laying is None:
            raise GraphTornDownError(f"graph {number} has been torn down")
        return laying

    def _laid(self, laying: Laying) -> Laid:
        layout = laying.layout
        return Laid(
            laying.number,
            list(laying.records),
            layout.segment,
            layout.offsets,
            layout.reads.get(DRIVER, ()),
            layout.writes.get(DRIVER, ()),
            layout.limits,
            layout.failures,
            layout.recorders,
            laying.bits,
        )

    def lay_for(
        self,
        executor: Place,
        config: Config,
        plan: Plan,
        tasks: Sequence[Tasks],
        labels: Mapping[int, str],
    ) -> Laying:
        """Lay a graph that the process at ``executor`` will execute."""
        self.check_open()
        self.tidy()
        number = next(self._graph_numbers)
        laying = Laying(self, number, config, plan, tasks, labels, executor)
        self._layings[number] = laying
        return laying

    def unlay(self, number: int) -> list[tuple[Member, Ref]]:
        self._shared_graphs.forget(number)
        self.process.limit_spin(number, None)
        laying = self._layings.pop(number, None)
        return [] if laying is None else [*laying.unload()]

    def drop(self, number: int) -> None:
        self._throw_away(lambda: self.unlay(number))

    def label(self, graph: int, node: int) -> str | None:
        """What a graph's node is called, for who waits for an actor that runs it."""
        with suppress(RuntimeError):  # another thread compiles just now: then without a name
            for compiled in list(self.graphs):
                label = compiled.label(graph, node)
                if label is not None:
                    return label
        laying = self._layings.get(graph)  # another process's, or one that is laid just now
        return None if laying is None else laying.labels.get(node)

    # What actors and finalizers ask for

    def serve(self, caller: ActorRecord, sock: socket.socket, what: str, *args: Any) -> None:
        """Serve a connection that an actor has asked for."""
        if what == "refs":
            peer = Peer(self.exports, caller.id.index, caller.reader, sock, caller.silence)
            self._served.add(peer.wire)
        else:
            self._served.add(GraphService(self.load_graph(*args), sock, caller.reader).wire)

    def share_graph(self, graph: ProcessGraph) -> bool:
        return self._shared_graphs.share(graph, self._closed)

    def load_graph(
        self, number: int, name: str, whole: bool = False, options: tuple[str, ...] = ()
    ) -> ProcessGraph:
        return self._shared_graphs.load(number, name)

    def _throw_away(self, work: Callable[[], object]) -> None:
        # In a finalizer: nothing that takes a lock.
        self._garbage.append(work)
        if not self._closed:
            os.eventfd_write(self._garbage_event, 1)

    def _on_garbage(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._garbage_event)
        self.tidy()

    def _on_life_words(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._life_event)
        self.actors.on_life_words()

    def try_again(self, work: Callable[[], object], error: Exception) -> None:
        """Have ``work``, which has failed with ``error``, done with the next tidying. It sees itself to it
        that it is done once more should it fail again."""
        logger.warning("something could not be said to an actor, and is said later: %s", str(error))
        self._unsaid.append(work)

    def tidy(self) -> None:
        """Do what finalizers have asked for, and what could not be done before."""
        for _ in range(len(self._unsaid)):
            try:
                work = self._unsaid.popleft()
            except IndexError:  # another thread was faster
                break
            work()
        self.carry_out_wills()
        while self._garbage:
            try:
                work = self._garbage.popleft()
            except IndexError:
                return
            with suppress(ConveyorError):  # an actor that is gone needs no goodbye
                work()

    # The end

    def check_open(self) -> None:
        if self._closed:
            raise ending.ended()

    def abandon(self) -> None:
        """This process is a forked child: the session is its parent's."""
        self._closed = True
        error = RuntimeStateError("this graph belongs to the process that this one was forked from")
        for graph in list(self.graphs):
            graph.orphan(error)

    @property
    def ending(self) -> bool:
        return self._closed

    def shutdown(self) -> None:
        if os.getpid() != self.pid:
            return  # a forked child: the session is its parent's
        try:
            self._last_steps.take_all()
        finally:
            if self._last_steps.over:  # else another one is at it, or will be with the next call
                self.at_shutdown()

    def _begin_end(self) -> None:
        with self.actors.lock:
            self._closed = True
        self.process.ended = True  # before anybody looks again
        error = ending.error()
        for graph in list(self.graphs):
            graph.close(error)
        for link in list(self.links.values()):
            link.end()
        self.process.board.ring(self.process.slot, _core.ATTENTION_BIT)

    def _end_connections(self) -> None:
        self._shared_graphs.clear()
        for wire in list(self._served):
            wire.close()
        self.exports.close(ending.error())

    def _end_hearing(self) -> None:
        self.waker.close()
        self._engine.unwatch(self._garbage_event)
        self._engine.unwatch(self._life_event)
        self.requests.close()

    def _forget_all(self) -> None:
        self._layings.clear()
        self._garbage.clear()
        self._unsaid.clear()
        self._wills.clear()

    def _close_descriptors(self) -> None:
        """Each of them once, though it may be called again."""
        for name in ("_eventfd", "_arena_fd", "_garbage_event", "_life_event"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)
