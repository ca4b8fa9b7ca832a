"""The driver's runtime: owns the board, starts and supervises actors, lays every channel."""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from conveyor import _core
from conveyor.config import Config
from conveyor.dag import DAGNode, MethodNode
from conveyor.exceptions import (
    ActorDiedError,
    ActorRestartedError,
    ActorStartError,
    ConveyorError,
    GraphTornDownError,
    RuntimeStateError,
)
from conveyor.plan import lower
from conveyor.plan.model import DRIVER, Plan
from conveyor.runtime.actor.worker import Caller, Hello
from conveyor.runtime.base import CallingRuntime
from conveyor.runtime.calls.constructor import START, keep
from conveyor.runtime.calls.generators import Key
from conveyor.runtime.calls.links import Link, link_segment
from conveyor.runtime.driver.laying import Laying, Tasks, tasks_by_actor
from conveyor.runtime.driver.record import Actor, ActorRecord, DeathWatches, Spawned
from conveyor.runtime.driver.requests import Options, RequestServer
from conveyor.runtime.driver.restart import Restarts
from conveyor.runtime.graph.handle import GraphService, torn_down
from conveyor.runtime.graph.hosting import Laid, Member
from conveyor.runtime.graph.layout import RESULT_BIT, Assignment, Place
from conveyor.runtime.graph.process_graph import ProcessGraph
from conveyor.runtime.process import ArenaSize, Process, close_all, default_arena_size
from conveyor.runtime.protocol import ActorId, ActorSpec, MethodInfo
from conveyor.runtime.refs.exports import Exports, Peer
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.refs.wire import Wire

#: Processes that one session may have had at the same time.
BOARD_SLOTS = 2048
DRIVER_SLOT = 0


class Engine(Protocol):
    """Who hosts actors. Handed to the driver; knows processes, not channels."""

    def start(self, on_exit: Callable[[int, int], None]) -> None:
        """``on_exit(pid, status)`` is called on a thread of the engine when a process has ended."""
        ...

    def spawn(self, name: str, payload: bytes, fds: Sequence[int], spec: SpawnOptions) -> Spawned:
        """Start a process that runs ``worker.main(payload, fds)``."""
        ...

    def kill(self, pid: int) -> None: ...

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Call back, on a thread of the engine, whenever ``fd`` can be read."""
        ...

    def unwatch(self, fd: int) -> None: ...

    def close(self) -> None:
        """End all processes and wait until they are gone."""
        ...


class SpawnOptions(Protocol):
    """What is asked of an actor's process; see ``ActorSpec``."""

    @property
    def num_cpus(self) -> float | None: ...
    @property
    def num_gpus(self) -> float: ...
    @property
    def env_vars(self) -> dict[str, str]: ...


class Driver(CallingRuntime):
    """The runtime of the process that the user started."""

    def __init__(self, engine: Engine, arena: ArenaSize | None = None) -> None:
        arena = arena or default_arena_size()
        board = _core.Board.create(BOARD_SLOTS)
        board.prepare(DRIVER_SLOT, "driver")
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._arena_fd = _core.Arena.create_fd(arena.file)
        super().__init__(Process(board, DRIVER_SLOT, self._eventfd, self._arena_fd, arena))
        board.alive_unwatched(DRIVER_SLOT)
        self._pid = os.getpid()
        self._engine = engine
        self._lock = threading.RLock()
        self._free_slots = deque(range(DRIVER_SLOT + 1, BOARD_SLOTS))
        self._actor_numbers = itertools.count(1)
        self._graph_numbers = itertools.count(1)
        self._records: dict[int, ActorRecord] = {}
        self._by_pid: dict[int, ActorRecord] = {}
        self._early_exits: dict[int, int] = {}
        self._names: dict[str, ActorId] = {}
        self._of_class: Counter[str] = Counter()
        self._layings: dict[int, Laying] = {}
        self._watches = DeathWatches(board)
        self._requests = RequestServer(self)
        self.exports = Exports(
            os.urandom(8).hex(),
            self.inbox,
            lambda: board.ring(DRIVER_SLOT, _core.ATTENTION_BIT),
            self.watcher,
            lambda: self._throw_away(self.exports.tidy),
        )
        # Graphs that others may have handles of: they live until they are torn down.
        self._shared_graphs: dict[int, ProcessGraph] = {}
        # Connections that actors have opened.
        self._served: weakref.WeakSet[Wire] = weakref.WeakSet()
        self._restarts = Restarts(self)
        # What finalizers ask for: they may run in any thread, in the middle of anything.
        self._garbage: deque[Callable[[], object]] = deque()
        self.graphs: weakref.WeakSet[ProcessGraph] = weakref.WeakSet()
        self._closed = False
        self.at_shutdown: Callable[[], None] = lambda: None
        self._garbage_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        engine.start(self._on_exit)
        engine.watch(self._garbage_event, self._on_garbage)

    # Actors

    def create_actor(self, spec: ActorSpec) -> ActorId:
        actor = Actor(
            spec.cls.__name__,
            spec.methods,
            spec.name,
            Options(spec.num_cpus, spec.num_gpus, spec.env_vars),
            spec.max_concurrency,
            spec.max_restarts,
            keep(spec.cls, spec.args, spec.kwargs, always=spec.max_restarts != 0),
        )
        record = self.start_process(
            actor, lambda link: link.call(START, (spec.cls, *spec.args), spec.kwargs)
        )
        return record.id

    def start_process(
        self,
        actor: Actor,
        start: Callable[[Link], Ref] | None = None,
        replaces: ActorRecord | None = None,
    ) -> ActorRecord:
        """Start an actor's process and lay the driver's links to it. ``start`` sends the constructor's
        call; without it another actor does. ``replaces``: the actor's process that is dead."""
        self._check_open()
        self.tidy()
        board, process = self.process.board, self.process
        with self._lock:
            if replaces is None:
                label = self._new_label(actor)
                identity = ActorId(next(self._actor_numbers), label)
            else:
                identity = replaces.id
                label = identity.name
                assert actor.kept is not None
                start = actor.kept.start
            if actor.name is not None and self._names.get(actor.name, identity) != identity:
                raise ValueError(f"there is an actor named {actor.name!r} already")
            if replaces is not None and replaces.keeps_slot:
                slot = replaces.slot
                replaces.keeps_slot = False
            elif self._free_slots:
                slot = self._free_slots.popleft()
            else:
                raise ActorStartError(f"more than {BOARD_SLOTS - 1} actors at the same time")
            board.prepare(slot, label)
            record = ActorRecord(board, identity, slot, actor)
            if replaces is not None:
                record.previous = replaces
                replaces.previous = None
            if actor.name is not None:
                self._names[actor.name] = identity
            if replaces is None:
                self._records[identity.index] = record
        fds: list[int] = []
        try:
            record.eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            record.arena_fd = _core.Arena.create_fd(process.arena_size.file)
            process.adopt(slot, record.arena_fd, record.eventfd)
            record.control_socket, control = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_SEQPACKET
            )
            request_here, request = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            calls, ctl = link_segment(), link_segment()
            hello = Hello(
                slot=slot,
                name=label,
                number=identity.index,
                session=self.exports.session,
                arena=process.arena_size,
                driver_slot=DRIVER_SLOT,
                mailbox_bit=record.bits.take(),
                control_bit=record.bits.take(),
                max_concurrency=actor.max_concurrency,
                has_async=any(m.is_async for m in actor.methods.values()),
            )
            record.calls = self._link(record, calls, hello.mailbox_bit, _core.KIND_CALL)
            record.control_link = self._link(record, ctl, hello.control_bit, _core.KIND_CONTROL)
            record.known_peers = {s: board.incarnation(s) for s in (DRIVER_SLOT, slot)}
            if start is not None:
                # Before anybody else can call it, and before there is a process: what cannot be
                # sent has started nothing.
                record.start = start(record.calls)
            fds = [control.detach(), request.detach()]
            self._requests.add(record, request_here)
            passed = [board.fd, record.arena_fd, record.eventfd, self._arena_fd, self._eventfd]
            passed += [*fds, calls.fd, ctl.fd]
            self._watches.add(slot)
            record.process = self._engine.spawn(label, pickle.dumps(hello), passed, actor.options)
            calls.close_fd()
            ctl.close_fd()
        except BaseException:
            board.announce_death(slot)
            self._forget(record)
            record.exited.set()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        with self._lock:
            self._records[identity.index] = record
            if record.calls is not None:
                self._links[identity.index] = record.calls
            self._by_pid[record.pid] = record
            early = self._early_exits.pop(record.pid, None)
            if actor.ended:  # while it was started
                record.killed = True
                self._engine.kill(record.pid)
        if early is not None:
            self._on_exit(record.pid, early)
        return record

    def _new_label(self, actor: Actor) -> str:
        # Unnamed actors of one class are told apart, so that every message names exactly one.
        self._of_class[actor.class_name] += 1
        count = self._of_class[actor.class_name]
        return actor.name or (actor.class_name if count == 1 else f"{actor.class_name}#{count}")

    def reserve(self, record: ActorRecord) -> None:
        """Give the actor's next process the same slot, if it is free: who knew the old one then lets
        go of what was the old one's."""
        with self._lock, suppress(ValueError):
            self._free_slots.remove(record.slot)
            record.keeps_slot = True

    def give_up(self, record: ActorRecord) -> None:
        """Let go of what was kept for a process that should replace this one, if there is none."""
        with self._lock:
            if record.keeps_slot:
                record.keeps_slot = False
                self._free_slots.append(record.slot)
            if self._records.get(record.id.index) is record:
                self._forget_name(record)

    def _forget_name(self, record: ActorRecord) -> None:
        name = record.actor.name
        if name is not None and self._names.get(name) == record.id:
            del self._names[name]

    def _link(self, record: ActorRecord, segment: _core.Segment, bit: int, kind: int) -> Link:
        return Link(
            self.process,
            segment,
            record.slot,
            record.id.name,
            bit,
            lambda: record.death(self.label),
            self.pump.add,
            kind,
            label=self.label,
        )

    def current(self, actor: ActorId) -> ActorRecord:
        """The process that the actor has now; waits while the actor is being started again."""
        return self._restarts.current(actor)

    def revive(self, actor: ActorId) -> ActorRecord:
        """The actor's living process; a dead actor is started again. ``ActorDiedError`` if that is
        not possible."""
        return self._restarts.revive(actor)

    def link(self, actor: ActorId) -> Link:
        self._check_open()
        record = self.current(actor)
        link = record.calls
        if link is None or not record.alive:
            raise record.death()
        return link

    def is_alive(self, actor: ActorId) -> bool:
        return self.record(actor).alive

    def record(self, actor: ActorId) -> ActorRecord:
        record = self._records.get(actor.index)
        if record is None:
            raise RuntimeStateError(f"actor {actor.name} belongs to another session")
        return record

    def death_of(
        self,
        actor: ActorId,
        slot: int,
        incarnation: int,
        label: Callable[[int, int], str | None] | None = None,
    ) -> ActorDiedError:
        """The error for who needed the actor's process that was the slot's ``incarnation``-th.
        ``label`` names a (graph, node); default: of the driver's graphs."""
        record: ActorRecord | None = self.record(actor)
        while record is not None and (record.slot, record.incarnation) != (slot, incarnation):
            record = record.previous
        if record is None:
            text = f"actor {actor.name} died and has been started again since"
            return ActorRestartedError(text, actor.name)
        return record.death(label or self.label)

    def label(self, graph: int, node: int) -> str | None:
        """What a graph's node is called, for who waits for an actor that runs it."""
        with suppress(RuntimeError):  # another thread compiles just now: then without a name
            for compiled in list(self.graphs):
                label = compiled.label(graph, node)
                if label is not None:
                    return label
        return None

    def find_actor(self, name: str) -> tuple[ActorId, str, Mapping[str, MethodInfo]]:
        identity = self._names.get(name)
        record = None if identity is None else self.record(identity)
        if record is None or not (record.alive or record.may_restart() or record.under_way):
            known = ", ".join(sorted(self._names)) or "none"
            raise ValueError(f"there is no actor named {name!r}; named actors: {known}")
        return record.id, record.class_name, record.methods

    def kill(self, actor: ActorId) -> None:
        with self._lock:
            record = self.record(actor)
            record.actor.ended = True
            if not record.alive:
                return
            record.killed = True
        self._engine.kill(record.pid)
        # From now on it is dead for everybody, whatever the kernel still has to do.
        self.process.board.announce_death(record.slot)

    def retain(self, actor: ActorId) -> None:
        record = self._records.get(actor.index)
        if record is not None:
            record.actor.handles += 1
            record.actor.held = True

    def release(self, actor: ActorId) -> None:
        self._throw_away(lambda: self.released(actor))

    def share(self, actor: ActorId) -> None:
        record = self._records.get(actor.index)
        if record is not None:
            record.actor.shared = True

    def released(self, actor: ActorId) -> None:
        """One handle, or one graph, less needs the actor; with the last one it ends."""
        with self._lock:
            record = self._records.get(actor.index)
            if record is None:
                return
            known = record.actor
            known.handles -= 1
            self._forget_actor(record)
            if known.handles > 0 or known.name is not None or known.shared or known.stopping:
                return
            known.stopping = True
            if record.calls is None:
                known.ended = True  # should it be on its way back
                return
            calls = record.calls
        calls.when_all_sent(lambda: record.control("stop"))

    def _on_exit(self, pid: int, status: int) -> None:
        with self._lock:
            record = self._by_pid.pop(pid, None)
            if record is None:
                self._early_exits[pid] = status
                return
        self.process.board.announce_death(record.slot)
        record.bury(status)
        self._restarts.decide(record)
        record.keeps_slot = record.restarting
        self.exports.actor_ended(record.id.index)
        self._forget(record)
        for number, laying in list(self._layings.items()):
            if laying.executor.slot == record.slot:
                self.drop(number)
        record.exited.set()
        # Whom it called need not keep room for it.
        self._hang_up(record)
        if record.restarting:
            self._restarts.begin(record)
        else:
            with self._lock:
                self._forget_actor(record)

    def _forget_actor(self, record: ActorRecord) -> None:
        """Nothing is kept of an actor that is dead and that nobody can ask for any more."""
        actor = record.actor
        asked_for = actor.handles > 0 or actor.shared or not actor.held
        if asked_for or not record.exited.is_set() or record.restarting:
            return
        if self._records.get(record.id.index) is record:
            del self._records[record.id.index]

    def _hang_up(self, record: ActorRecord) -> None:
        while record.mailboxes:
            callee, bit = record.mailboxes.pop()
            with suppress(ConveyorError):
                if callee.alive:
                    callee.control("hang_up", bit)
                    callee.bits.give_back(bit)  # what takes it next is told after this

    def _forget(self, record: ActorRecord) -> None:
        """Close what belonged to a process that is gone. The record itself can still be asked."""
        with self._lock:
            self._watches.remove(record.slot)
            self._requests.remove(record)
            if record.control_socket is not None:
                record.control_socket.close()
            for fd in (record.arena_fd, record.eventfd):
                if fd >= 0:
                    os.close(fd)
            record.arena_fd = record.eventfd = -1
            self.process.forget(record.slot)
            if self._links.get(record.id.index) is record.calls:
                self._links.pop(record.id.index, None)
            # Refs keep what they need of these; the record only keeps what can be asked of the dead.
            record.calls = record.control_link = record.start = None
            if not record.restarting:
                self._forget_name(record)
            if not record.keeps_slot:
                self._free_slots.append(record.slot)

    # Graphs

    def compile(
        self, root: DAGNode, config: Config, placement: Mapping[MethodNode, ActorId]
    ) -> ProcessGraph:
        return ProcessGraph(self, lower(root, config, placement), config)

    def lay(self, plan: Plan, config: Config) -> Laid:
        laying = self.lay_for(
            Place(DRIVER_SLOT, RESULT_BIT),
            plan,
            config.name,
            tasks_by_actor(plan),
            config.slot_bytes,
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
            layout.recorders,
            laying.bits,
        )

    def lay_for(
        self, executor: Place, plan: Plan, name: str, tasks: Sequence[Tasks], slot_bytes: int
    ) -> Laying:
        """Lay a graph that the process at ``executor`` will execute."""
        self._check_open()
        self.tidy()
        number = next(self._graph_numbers)
        name = name or f"graph {number}"
        laying = Laying(self, number, name, plan, tasks, slot_bytes, executor)
        self._layings[number] = laying
        return laying

    def unlay(self, number: int) -> list[tuple[Member, Ref]]:
        self._shared_graphs.pop(number, None)
        laying = self._layings.pop(number, None)
        return [] if laying is None else [*laying.unload()]

    def drop_stream(self, actor: ActorId, method: str, key: Key) -> None:
        super().drop_stream(actor, method, key)
        self._throw_away(self.close_dropped_streams)

    def drop(self, number: int) -> None:
        self._throw_away(lambda: self.unlay(number))

    def load(self, record: ActorRecord, assignment: Assignment, segment_fd: int) -> Any:
        """Give an actor its part of a graph; the ref of its acknowledgement."""
        with record.control_lock:
            new, fds = self._new_peers(record, assignment.peers)
            try:
                ticket = record.send_fds([segment_fd, *fds])
                purpose = f"its part of {assignment.name}, which is being compiled"
                ack = record.control("load", assignment, tuple(new), ticket, purpose=purpose)
            finally:
                close_all(fds)
            record.known_peers.update(new)
            return ack

    def introduce(self, caller: ActorRecord, callee: ActorRecord) -> tuple[int, list[int], Any]:
        """Lay a link between two actors: the mailbox bit, the descriptors for the caller (segment,
        and the callee's arena and eventfd), which are the caller's to close, and the ref of the
        callee's acknowledgement."""
        callee.check_alive()
        segment = link_segment()
        with callee.control_lock:
            bit = callee.bits.take()
            new, fds = self._new_peers(callee, (caller.slot,))
            try:
                ticket = callee.send_fds([segment.fd, *fds])
                caller_end = Caller(caller.slot, RESULT_BIT)
                ack = callee.control("accept", caller_end, tuple(new), bit, ticket)
            finally:
                close_all(fds)
            callee.known_peers.update(new)
        caller.mailboxes.append((callee, bit))
        if caller.exited.is_set():  # meanwhile
            self._hang_up(caller)
        own = self.duplicates([callee])
        if not own:
            raise callee.death()
        # Not noted as a peer of the caller: a graph's assignment may overtake the answer.
        return bit, [os.dup(segment.fd), *own], ack

    def _new_peers(
        self, record: ActorRecord, slots: tuple[int, ...]
    ) -> tuple[dict[int, int], list[int]]:
        """Those of ``slots`` whose processes it has not been introduced to, with their incarnations,
        and duplicates of the descriptors that introduce them."""
        with self._lock:
            by_slot = {r.slot: r for r in self._records.values() if r.arena_fd >= 0}
            new = {
                s: by_slot[s].incarnation
                for s in slots
                if s in by_slot and record.known_peers.get(s) != by_slot[s].incarnation
            }
            return new, self.duplicates([by_slot[s] for s in new])

    def duplicates(self, records: Sequence[ActorRecord]) -> list[int]:
        """Arena and eventfd of those who still have them. Duplicates, because an actor may die and
        its descriptors be closed before they are sent: then others may have their numbers."""
        with self._lock:
            alive = [record for record in records if record.arena_fd >= 0]
            return [os.dup(fd) for record in alive for fd in (record.arena_fd, record.eventfd)]

    def serve(self, caller: ActorRecord, sock: socket.socket, what: str, *args: Any) -> None:
        """Serve a connection that an actor has asked for."""
        if what == "refs":
            self._served.add(Peer(self.exports, caller.id.index, sock, caller.death).wire)
        else:
            graph = self.load_graph(*args)
            self._served.add(
                GraphService(graph, sock, self.exports, caller.id.index, lambda: caller.alive).wire
            )

    def share_graph(self, graph: ProcessGraph) -> bool:
        if graph not in self.graphs:
            if graph.is_teardown and not self._closed:
                raise torn_down(graph.name)
            return False
        self._shared_graphs[graph._number] = graph
        return True

    def load_graph(
        self, number: int, name: str, whole: bool = False, options: tuple[str, ...] = ()
    ) -> ProcessGraph:
        graph = self._shared_graphs.get(number)
        if graph is None or graph.is_teardown:
            self._shared_graphs.pop(number, None)
            raise torn_down(name)
        return graph

    def _throw_away(self, work: Callable[[], object]) -> None:
        # In a finalizer: nothing that takes a lock.
        self._garbage.append(work)
        if not self._closed:
            os.eventfd_write(self._garbage_event, 1)

    def _on_garbage(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._garbage_event)
        self.tidy()

    def tidy(self) -> None:
        """Do what finalizers have asked for."""
        while self._garbage:
            try:
                work = self._garbage.popleft()
            except IndexError:
                return
            with suppress(ConveyorError):  # an actor that is gone needs no goodbye
                work()

    # The end

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeStateError("this session has been shut down")

    def abandon(self) -> None:
        """This process is a forked child: the session is its parent's."""
        self._closed = True
        error = RuntimeStateError("this graph belongs to the process that this one was forked from")
        for graph in list(self.graphs):
            graph.orphan(error)

    def shutdown(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: the session is its parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._restarts.close()
        error = RuntimeStateError("the session has been shut down")
        for graph in list(self.graphs):
            graph.close(error)
        for record in list(self._records.values()):
            record.killed = record.actor.ended = True
        self.pump.close()
        self._shared_graphs.clear()
        for wire in list(self._served):
            wire.close()
        self.exports.close(error)
        self.watcher.close()
        self._engine.unwatch(self._garbage_event)
        self._requests.close()
        self._engine.close()
        self._restarts.join()
        self._watches.stop()
        for record in list(self._records.values()):
            record.actor.kept = None  # refs among it hold on to channels
            if record.arena_fd >= 0:
                self.process.board.announce_death(record.slot)
                self._forget(record)
        self._layings.clear()
        self._garbage.clear()
        for fd in (self._eventfd, self._arena_fd, self._garbage_event):
            os.close(fd)
        self.process.close()
        self.at_shutdown()
