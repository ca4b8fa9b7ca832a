"""The runtime of a session without other processes."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from conveyor import _core, descriptors
from conveyor.calls.call import Call, count_of, with_arguments
from conveyor.calls.constructor import keep
from conveyor.calls.pending import take
from conveyor.calls.unsendable import blame_call
from conveyor.config import Config
from conveyor.dag import DAGNode, MethodNode
from conveyor.driver.actors import Actor as Lasting
from conveyor.engines.inline.actor import Actor, CallJob, Outbox, Start
from conveyor.engines.inline.deployment import InlineDeployer
from conveyor.engines.inline.loopback import ArrivalError, Failure, Loopback
from conveyor.engines.inline.threads import (
    DEAD_SLOT,
    DEFAULT_CONCURRENCY,
    ActorThreads,
    CallLock,
    JobQueue,
    Loop,
)
from conveyor.engines.options import session_options
from conveyor.engines.program_end import ProgramEnd
from conveyor.exceptions import (
    ConveyorError,
    RuntimeStateError,
    SerializationError,
    SessionEndedError,
)
from conveyor.graph.compiled import CompiledGraph
from conveyor.graph.executor import refuse_own
from conveyor.plan import lower
from conveyor.refs.exports import Exports
from conveyor.refs.ref import Ref, elements_of
from conveyor.refs.streams import StreamRef
from conveyor.refs.values import RefFailed, lacking, wait_for, wait_for_all, with_values
from conveyor.runtime import context, ending
from conveyor.runtime.broker import ChannelPeer, ClosedWord, Joined, Side, channel_blueprint
from conveyor.runtime.cleanup import Cleanup
from conveyor.runtime.process import CALL_STRIDE, ArenaSize, Process, arena_size, close_all
from conveyor.runtime.protocol import ActorId, ActorSpec, MethodInfo, NameTakenError
from conveyor.weak import WeakSet
from conveyor.worker.calling import CallingRuntime
from conveyor.worker.forked import flush_files


def start(**given: Any) -> InlineRuntime:
    """Start a session in this process, with the options of ``engines.options``.

    ``log_to_driver``, ``env_vars``, ``preload`` and ``raise_descriptor_limit`` have no effect: what actors
    print is printed, their environment and modules are the driver's, and there are no processes that
    descriptors are needed for. The grace period is what an end waits for methods that run, for
    coroutines, and for ``__conveyor_exit__`` where it is one.
    """
    options = session_options("inline", **given)
    runtime = InlineRuntime(options.arena, options.grace)
    runtime.at_shutdown = ProgramEnd(runtime, options.grace, options.handle_sigterm).cancel
    return runtime


class ActorLink:
    """Link to one actor, but not to the actor that is made again after its death."""

    def __init__(self, actor: Actor, caller: JobQueue | None) -> None:
        """``caller``: the actor that calls; ``None`` is the program."""
        self._actor = actor
        self._caller = caller

    @property
    def gone(self) -> bool:
        return not self._actor.alive

    def call(self, call: Call, again: bool = False) -> Any:
        """Start a call. Returns a reference, or a list of them if the call has several results. ``again``: go
        ahead of calls that wait for arguments, which may be the result of this very call."""
        ref = self._start(call, again)
        return elements_of(ref, count_of(call[3]))

    def _start(self, requested: Call, again: bool) -> Ref:
        actor, caller = self._actor, self._caller
        args, kwargs = requested[1], requested[2] or {}
        # A waiting call has its arguments in the outbox, and nowhere else.
        call = CallJob(actor, with_arguments(requested, (), None))
        try:
            ref = call.expect()
            if (again or caller not in actor.outboxes) and lacking(args, kwargs) is None:
                try:
                    actor.check_alive()
                    call.pack(args, kwargs)
                    call.submit()
                except RefFailed as failed:
                    call.resolve(error=failed.error)
                return ref
            try:
                waits, taken = take(requested)
            except SerializationError as error:
                raise blame_call(error, actor.name, requested) from error.__cause__
            with actor.queue.actor_threads.lock:
                outbox = actor.outboxes.get(caller)
                if outbox is None:
                    outbox = actor.outboxes[caller] = Outbox(actor, caller)
                outbox.add(call, (waits[1], waits[2] or {}, taken))
        except BaseException:
            call.withdraw()
            raise
        return ref


class InlineBroker:
    """Broker of channels; see ``runtime.broker.Broker``. Both ends are in this process, so nobody
    waits for the other end, and none dies alone."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        #: The depths of channels that were not used yet, and the peers of those of which one end was.
        self._depths: dict[int, int] = {}
        self._peers: dict[int, ChannelPeer] = {}

    def open(self, depth: int) -> int:
        number = next(self._numbers)
        self._depths[number] = depth
        return number

    def hold(self, number: int, side: Side) -> None:
        """Do nothing: every end is in this process."""

    def meet(self, number: int, side: Side, alone: bool) -> ChannelPeer:
        with self._lock:
            return self._peer(number)

    def awaits(self, number: int, side: Side) -> bool:
        return False  # nobody waits

    def close(self, number: int, side: Side) -> None:
        with self._lock:
            ClosedWord(self._peer(number).segment, side).mark()
        self._process.process_table.notify(self._process.slot, _core.ATTENTION_BIT)

    def _peer(self, number: int) -> ChannelPeer:
        """Return the peer of a channel's end. Each of its two ends asks for it once; the first call makes
        it."""
        depth = self._depths.pop(number, None)
        if depth is None:
            return self._peers.pop(number)
        process = self._process
        segment = channel_blueprint(depth, process.identity, process.identity).make()
        segment.close_fd()
        view = process.arena_of(*process.identity)
        peer = ChannelPeer(segment, *process.identity, None, view)
        self._peers[number] = peer
        return peer

    def death(self, peer: ChannelPeer) -> ConveyorError:
        return SessionEndedError("the session has ended: it has been shut down")


class InlineCollectives:
    """Refuses groups; see ``runtime.broker.Collectives``."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.entered: dict[str, Any] = {}
        self.until: Callable[[], int] | None = None

    def open(self, actors: Sequence[ActorId], driver: int | None = None) -> int:
        self._refuse()

    def join(self, number: int) -> Joined:
        self._refuse()

    def leave(self, joined: Joined) -> None:
        self._refuse()

    def close(self, number: int) -> None:
        self._refuse()

    def doing(self, joined: Joined, ranks: Sequence[int]) -> list[str]:
        self._refuse()

    def death(self, joined: Joined, rank: int) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeStateError(
            "the inline engine has no collective groups: it runs one method after the other, and the ranks "
            "of a group wait for each other in theirs. Use conveyor.init(engine='local')"
        )


logger = logging.getLogger("conveyor")

_SLOT = 0


class _Retained:
    """Share of a handle, or of a graph, in keeping its actor alive."""

    __slots__ = ("_actor", "_runtime")

    def __init__(self, runtime: InlineRuntime, actor: ActorId) -> None:
        self._runtime = runtime
        self._actor = actor

    def __del__(self) -> None:
        # Nothing ends in a forked child, nor when the session has ended.
        if context.running() is self._runtime:
            self._runtime.release(self._actor)


class InlineFunctions:
    """Calls of functions of one kind. They run one after the other, but a call that a function makes has a
    worker of its own: the function may wait for it."""

    def __init__(self, runtime: InlineRuntime, start: Callable[[], Any]) -> None:
        self._runtime = runtime
        self._start = start
        self._workers: list[Any] = []

    def call(self, call: Call) -> Any:
        return self._runtime.link(self.least_busy()._id).call(call)

    def least_busy(self) -> Any:
        inside = self._runtime.actor_threads.current().inside
        for worker in list(self._workers):
            actor = self._runtime.actor(worker._id)
            if not actor.alive:
                with suppress(ValueError):  # another thread has seen it as well
                    self._workers.remove(worker)
            elif actor.queue.has_loop or actor.queue not in inside:
                return worker
        worker = self._start()
        self._workers.append(worker)
        return worker


class InlineRuntime(CallingRuntime):
    """Actors and graphs in this process. The program and its actors share the one runtime."""

    def __init__(self, arena: ArenaSize | None = None, grace: float = 5.0) -> None:
        """``grace``: seconds that the session's end waits for event loops."""
        arena = arena or arena_size()
        process_table = _core.ProcessTable.create(DEAD_SLOT + 1)
        process_table.prepare(_SLOT, "driver")
        self._fds = [descriptors.event()]
        self._fds.append(_core.Arena.create_fd(arena.file))
        eventfd, arena_fd = self._fds
        # There is no thread to wake: dropped streams are closed with the next one.
        cleanup = Cleanup(_core.Waker(), lambda: None)
        super().__init__(Process(process_table, _SLOT, eventfd, arena_fd, arena), cleanup)
        # Values come from this very process.
        self.process.adopt(_SLOT, process_table.incarnation(_SLOT), arena_fd, eventfd)
        process_table.alive_unwatched(_SLOT)
        self.broker = InlineBroker(self.process)
        self.collectives = InlineCollectives()
        self.actor_threads = ActorThreads(self.process)
        self.exports = Exports(
            os.urandom(8).hex(),
            self.inbox,
            lambda: process_table.notify(_SLOT, _core.ATTENTION_BIT),
            self.watcher,
            self.process.identity,
            process_table.gone,
            cleanup,
        )
        self._deployer = InlineDeployer(self)
        self.graphs = self._deployer.graph_infos
        self._loopback = Loopback(self.process, CALL_STRIDE)
        self._actors: dict[int, Actor] = {}
        self._names: dict[str, ActorId] = {}
        self._inline_functions: dict[Hashable, InlineFunctions] = {}
        self._loops: WeakSet[Loop] = WeakSet()
        self._of_class: Counter[str] = Counter()
        self._actor_numbers = itertools.count(1)
        # Actors that finalizers have noted: these may run in any thread, in the middle of anything.
        self._released: deque[ActorId] = deque()
        self._tidying = threading.Lock()
        self._closed = False
        self._grace = grace
        self.at_shutdown: Callable[[], None] = lambda: None

    def wait(
        self, refs: Sequence[Any], num_returns: int, timeout: float | None
    ) -> tuple[list[Any], list[Any]]:
        refs = list(refs)
        if self.actor_threads.current().inside and timeout is None and num_returns == len(refs):
            # Waiting for all is waiting for each, and that finds cycles.
            for ref in refs:
                if isinstance(ref, Ref) and not isinstance(ref, StreamRef):
                    wait_for(ref)
        return super().wait(refs, num_returns, timeout)

    @property
    def _inside(self) -> JobQueue | None:
        """Return the actor whose code runs on this thread, if any."""
        inside = self.actor_threads.current().inside
        return inside[-1] if inside else None

    # Actors

    def create_actor(self, spec: ActorSpec) -> tuple[ActorId, object]:
        self._check_open()
        self._tidy()
        lasting = Lasting(
            spec.cls.__name__,
            spec.methods,
            spec.name,
            spec.process,
            spec.max_concurrency,
            spec.max_restarts,
            keep(spec.cls, spec.args, spec.kwargs, always=spec.max_restarts != 0),
            handles=1,
            shared=self._inside is not None,
        )
        actor = self._new_actor(lasting)
        try:
            args, kwargs = self._constructor_arguments(spec, actor)
        except BaseException:
            actor.end("was never started")
            raise
        if actor.start_failure is None:
            actor.start = Start(actor, functools.partial(spec.cls, *args, **kwargs))
        try:
            with self.actor_threads.lock:
                self._enter(actor)
                go_on = actor.enqueue_start()
            go_on()
        except BaseException:
            if actor.start is not None and not actor.start.started:
                actor.end("was never started")
            self.release(actor.id)
            raise
        self._tidy()
        return actor.id, _Retained(self, actor.id)

    def _enter(self, actor: Actor) -> None:
        """Have others find the actor, with the lock held until its constructor is in the queue: that comes
        before what they call."""
        try:
            self._check_name(actor.lasting)
        except NameTakenError:
            actor.end("was never started")
            raise
        self._actors[actor.id.index] = actor
        if actor.lasting.name is not None:
            self._take_name(actor.lasting.name, actor.id)

    def _check_name(self, lasting: Lasting) -> None:
        if lasting.name is not None and self._named(lasting.name) is not None:
            raise NameTakenError(lasting.name)

    def _take_name(self, name: str, identity: ActorId) -> None:
        """Take the name for an actor, with the lock held, also from another one whose constructor has raised.
        The next ``_tidy`` ends the other actor, unless it has handles."""
        before = self._names.get(name)
        self._names[name] = identity
        other = None if before is None else self._actors.get(before.index)
        if other is not None and other.id != identity and other.is_unmade:
            other.lasting.name = None
            other.lasting.handles += 1
            self._released.append(other.id)

    def _new_actor(self, lasting: Lasting) -> Actor:
        with self.actor_threads.lock:
            # Unnamed actors of one class are told apart, so that every message names exactly one.
            self._of_class[lasting.class_name] += 1
            count = self._of_class[lasting.class_name]
            numbered = lasting.class_name if count == 1 else f"{lasting.class_name}#{count}"
            self._check_name(lasting)
            identity = ActorId(next(self._actor_numbers), lasting.name or numbered)
            actor = self._make_actor(identity, lasting)
        if lasting.options.env_vars:
            logger.warning(
                "%s: env_vars have no effect inline, where all actors share one environment",
                actor.name,
            )
        return actor

    def _make_actor(self, identity: ActorId, lasting: Lasting) -> Actor:
        queue: JobQueue
        if any(method.is_async for method in lasting.methods.values()):
            capacity = lasting.max_concurrency or DEFAULT_CONCURRENCY
            queue = Loop(self.actor_threads, identity.name, capacity)
            self._loops.add(queue)
        else:
            queue = CallLock(self.actor_threads, identity.name, lasting.max_concurrency or 1)
        return Actor(identity, lasting, queue, self._loopback)

    def _constructor_arguments(
        self, spec: ActorSpec, actor: Actor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        label = f"{actor.name}.__init__"
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        try:
            # The class as well: it has to be something that can be sent. What arrives is the same
            # class, since this process has it.
            wait_for_all(spec.args, spec.kwargs)
            message = (spec.cls, *with_values(spec.args, spec.kwargs))
            _, args, kwargs = self._loopback.carry(message, shared=False)
        except RefFailed as failed:
            actor.start_failure = Failure(failed.error, actor.name, label, True)
        except ArrivalError as error:
            actor.start_failure = Failure(error.error, actor.name, f"{actor.name}.call", True)
        return args, kwargs

    def actor(self, actor: ActorId) -> Actor:
        """Return the actor that a handle stands for."""
        self._check_open()
        found = self._actors.get(actor.index)
        if found is None:
            raise RuntimeStateError(f"actor {actor.name} belongs to another session")
        return found if found.alive else self._made_again(actor, counted=True)

    def known(self, actor: ActorId) -> Actor:
        """Return the actor that a handle stands for; a dead one is not made again."""
        return self._actors[actor.index]

    def revive(self, actor: ActorId) -> Actor:
        """Return the living actor; a dead one is made again. ``ActorDiedError`` if that cannot be done."""
        found = self.actor(actor)
        return found if found.alive else self._made_again(actor, counted=False)

    def _made_again(self, identity: ActorId, counted: bool) -> Actor:
        """Return the actor, made again unless another thread has done so. ``counted``: as one of
        ``max_restarts``; where none is left the dead actor is returned."""
        with self.actor_threads.lock:
            dead = self._actors[identity.index]
            if dead.alive or (counted and not dead.comes_back):
                return dead
            lasting = dead.lasting
            if lasting.ended or lasting.constructor is None:
                raise dead.death()
            lasting.restarts += counted
            actor = self._make_actor(dead.id, lasting)
            actor.start = Start(actor, lasting.constructor.make)
            self._actors[dead.id.index] = actor
            if lasting.name is not None:
                if self._named(lasting.name) in (None, actor):
                    self._take_name(lasting.name, actor.id)
                else:
                    lasting.name = None  # another actor has taken it meanwhile
            go_on = actor.enqueue_start()
        go_on()
        self._tidy()
        return actor

    def find_actor(self, name: str) -> tuple[ActorId, str, Mapping[str, MethodInfo], object]:
        with self.actor_threads.lock:  # nobody takes its name meanwhile, which may end it
            actor = self._named(name)
            if actor is None:
                known = ", ".join(sorted(filter(self._named, list(self._names)))) or "none"
                raise ValueError(f"there is no actor named {name!r}; named actors: {known}")
            if self._inside is not None:
                actor.lasting.shared = True
            retained = self.retain(actor.id)
        return actor.id, actor.lasting.class_name, actor.lasting.methods, retained

    def _named(self, name: str) -> Actor | None:
        identity = self._names.get(name)
        actor = None if identity is None else self._actors.get(identity.index)
        if actor is None or actor.is_unmade:
            return None
        return actor if actor.alive or actor.comes_back else None

    def kill(self, actor: ActorId, no_restart: bool = True, graceful: bool = False) -> None:
        self._check_open()
        found = self._actors.get(actor.index)
        if found is not None:
            how = "conveyor.kill(graceful=True)" if graceful else "conveyor.kill()"
            verb = "ended" if graceful else "killed"
            text = f"was {verb} by {how}"
            found.end(text, for_good=no_restart, orderly=graceful, finish=graceful)
            if graceful:
                found.queue.join(self._grace)

    def retain(self, actor: ActorId) -> object:
        found = self._actors.get(actor.index)
        if found is not None:
            found.lasting.handles += 1
        return _Retained(self, actor)

    def release(self, actor: ActorId) -> None:
        self._released.append(actor)
        self._tidy()

    def abandon(self) -> None:
        error = RuntimeStateError("this graph belongs to the process that this one was forked from")
        for graph_info in list(self.graphs):
            graph_info.lifecycle.orphan(error)

    def share(self, actor: ActorId) -> None:
        found = self._actors.get(actor.index)
        if found is not None:
            found.lasting.shared = True

    def _tidy(self) -> None:
        """End actors that nobody can reach any more."""
        # Not twice at a time: it may be a finalizer that asks, in the middle of this.
        while self._released and self._tidying.acquire(blocking=False):
            try:
                actor = self._actors.get(self._released.popleft().index)
                if actor is None:
                    continue
                lasting = actor.lasting
                lasting.handles -= 1
                if lasting.handles <= 0 and lasting.name is None and not lasting.shared:
                    actor.retire()
                    if not actor.alive:
                        self._actors.pop(actor.id.index, None)
            finally:
                self._tidying.release()

    # Calls

    def link(self, actor: ActorId) -> ActorLink:
        self.cleanup.do()  # no other thread would
        return ActorLink(self.actor(actor), self._inside)

    def functions(self, kind: Hashable, start: Callable[[], Any]) -> InlineFunctions:
        return self._inline_functions.setdefault(kind, InlineFunctions(self, start))

    # Graphs

    def compile(
        self, root: DAGNode, config: Config, placement: Mapping[MethodNode, ActorId]
    ) -> CompiledGraph:
        self._check_open()
        plan = lower(root, config, placement)
        inside = self._inside
        for actor in self._actors.values():
            if actor.queue is inside:
                refuse_own(plan, actor.id)
        return self._deployer.compile(plan, config)

    def share_graph(self, graph: CompiledGraph, graph_info: object) -> bool:
        return self._deployer.shared.share(graph, graph_info, self._closed)

    def load_graph(
        self, number: int, name: str, whole: bool, options: tuple[str, ...]
    ) -> CompiledGraph:
        return self._deployer.shared.load(number, name)

    # The end

    def _check_open(self) -> None:
        if self._closed:
            raise ending.ended()

    @property
    def ending(self) -> bool:
        return self._closed

    def fail(self, why: str) -> None:
        ending.fault = why
        self.shutdown()

    def shutdown(self) -> None:
        if os.getpid() != self.pid:
            return  # a forked child: the session is its parent's
        # A signal that ends the program is handled inside of the method that the main thread runs.
        if self._inside is not None and not ending.begun_here():
            raise RuntimeStateError("a session is shut down by the driver, not by an actor")
        with self.actor_threads.lock:
            if self._closed:
                return
            self._closed = True
        error = ending.error()
        for graph_info in list(self.graphs):
            graph_info.lifecycle.close(error)
        self._deployer.close()
        try:
            self._end_actors(error)
        finally:
            self._close(error)

    def _end_actors(self, error: SessionEndedError) -> None:
        interrupt: KeyboardInterrupt | None = None
        queues = [actor.queue for actor in self._actors.values() if actor.alive]
        for actor in list(self._actors.values()):
            try:
                actor.end("ended with its session", error=error)
            except KeyboardInterrupt as raised:
                # Of what one does at its end: the others have theirs.
                interrupt = interrupt or raised
        end = _core.monotonic() + self._grace
        queues += [loop for loop in list(self._loops) if loop not in queues]
        late = [x.name for x in queues if not x.join(max(end - _core.monotonic(), 0.0))]
        if late and self._grace > 0:
            logger.warning(
                "not ended within the grace period of %g s: %s", self._grace, ", ".join(late)
            )
        flush_files()  # an instance may be part of a circle, of which a collection closes files in any order
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt  # its traceback has this frame

    def _close(self, error: SessionEndedError) -> None:
        with ExitStack() as steps:  # the last one first, and each whatever another has raised
            steps.callback(self.at_shutdown)
            steps.callback(self.process.close)
            steps.callback(self.process.sweeper.close)
            steps.callback(self.process.releasing.close)
            steps.callback(close_all, (fd for fd in self._fds if not descriptors.lost(fd)))
            steps.callback(self._loopback.close)
            steps.callback(self.watcher.close)
            steps.callback(self.pump.close)
            steps.callback(self.exports.close, error)
