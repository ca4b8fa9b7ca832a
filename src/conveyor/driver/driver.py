"""The driver's runtime: owns the session's process table, and assembles the parts that run the session.

The parts know each other in one direction: the table of processes, the supervisor that starts them and cleans
up after their deaths, the network of links between them, the deployed graphs, and the dispatcher of the
actors' requests. Each knows only the parts before it. If an earlier part has to tell a later one something,
the callback is handed in here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from conveyor import _core, descriptors
from conveyor.calls.call import start
from conveyor.calls.constructor import keep
from conveyor.calls.links import Link
from conveyor.config import Config
from conveyor.dag import DAGNode, MethodNode
from conveyor.driver.actors import DRIVER_SLOT, PROCESS_TABLE_SLOTS, Actor, ActorRecord, Table
from conveyor.driver.bootstrap import SharedState
from conveyor.driver.broker import DriverBroker
from conveyor.driver.deployments import Deployment, GraphDeployer
from conveyor.driver.groups import DriverCollectives
from conveyor.driver.network import Network
from conveyor.driver.process_engine import DriverCallbacks, ProcessEngine
from conveyor.driver.remote_processes import HERE, RemoteNodes
from conveyor.driver.requests import Connections, Dispatcher, ask_readers
from conveyor.driver.supervisor import DeathCleanup, Step, Supervisor
from conveyor.exceptions import RuntimeStateError
from conveyor.graph.assembly import compiled_graph
from conveyor.graph.compiled import CompiledGraph
from conveyor.graph.edges import task_labels, tasks_by_actor
from conveyor.graph.executor import DeployedChannels, GraphWorker
from conveyor.graph.handles import SharedGraphs
from conveyor.graph.lifecycle import GraphInfo
from conveyor.plan import lower
from conveyor.plan.model import Plan
from conveyor.refs.exports import Exports
from conveyor.refs.ref import Ref
from conveyor.refs.values import with_bound_values
from conveyor.runtime import context, ending, threads
from conveyor.runtime.cleanup import Cleanup
from conveyor.runtime.process import RESULT_BIT, ArenaSize, Process, arena_size
from conveyor.runtime.protocol import ActorId, ActorSpec, Attached, MethodInfo, ProcessOptions
from conveyor.runtime.threads import Background
from conveyor.runtime.uninterrupted import uninterrupted
from conveyor.runtime.waiting import TimeLimit
from conveyor.system_limits import CLOSED, explained
from conveyor.weak import WeakSet
from conveyor.worker.calling import CallingRuntime

#: Seconds that an attached actor may take to leave before it is attached again.
_LEAVES_WITHIN = 10.0


class _Foreign:
    """An attached actor, by its key: holds the lock for attaching it."""

    def __init__(self) -> None:
        # Held while the actor is attached: several threads may ask for it, and it would refuse all but the
        # first. Reentrant, since a signal handler may ask, too.
        self.lock = threading.RLock()


class Attachments:
    """The attached actors of a session."""

    def __init__(self, table: Table, supervisor: Supervisor) -> None:
        self._table, self._supervisor = table, supervisor
        #: By the key of ``Attached``.
        self._foreign: dict[str, _Foreign] = {}

    def attach(self, attached: Attached) -> ActorId:
        """Have that actor take part in the session, until it ends or is killed."""
        with self._foreign.setdefault(attached.key, _Foreign()).lock:
            for record in self._table:
                known = record.actor.options.attached
                if known is not None and known.key == attached.key:
                    if record.alive:
                        return record.id
                    record.cleaned_up.wait(_LEAVES_WITHIN)  # it was killed, or has died
            options = ProcessOptions(None, 0, {}, attached=attached)
            # Nobody counts its handles: the actor was there before them, and outlives them.
            actor = Actor(attached.name, attached.methods, None, options, None, shared=True)
            return self._supervisor.start(actor, lambda link: link.call(start((object,)))).id


logger = logging.getLogger("conveyor")


class LastSteps:
    """Steps that are all taken, in order and once, whatever one of them raises, and however often a signal
    handler interrupts the waiting thread."""

    def __init__(self, *steps: Callable[[], object], hurry: Callable[[], object]) -> None:
        """``hurry()`` is called when the waiting thread is interrupted. Each step can be repeated: if no
        thread can be had for the steps, one that was broken off is begun again."""
        self._steps = deque(steps)
        self._hurry = hurry
        self._lock = threading.RLock()
        self._taking = False
        self._errors: list[Exception] = []

    @property
    def over(self) -> bool:
        return not self._steps

    def take_all(self) -> None:
        """Take the steps that are left, and raise the first error of theirs, or of a signal handler
        meanwhile: the handler's comes first. If one of the steps calls this, or a thread that a step may be
        waiting for, it returns at once."""
        if self._taking and isinstance(threading.current_thread(), Background):
            return
        interrupt: BaseException | None = None
        while self._steps:
            try:
                if interrupt is not None:
                    self._hurry()
                if not uninterrupted(self._take, self._hurry):
                    return
            except BaseException as error:
                if interrupt is None:
                    interrupt = error
        errors, self._errors = self._errors, []
        if interrupt is None and errors:
            interrupt = errors.pop(0)
        for other in errors:
            logger.error("a step of the session's end has failed", exc_info=other)
        try:
            if interrupt is not None:
                raise interrupt
        finally:
            del interrupt  # it refers to this frame

    def _take(self) -> bool:
        with self._lock:  # whoever comes second waits for the first
            if self._taking:
                return False
            self._taking = True
            try:
                while self._steps:
                    try:
                        self._steps[0]()
                    except Exception as error:
                        self._errors.append(error)
                    self._steps.popleft()
            finally:
                self._taking = False
            return True


class Driver(CallingRuntime):
    """The runtime of the process that the user started."""

    def __init__(
        self, engine: ProcessEngine, arena: ArenaSize | None = None, grace: float = 5.0
    ) -> None:
        """``grace``: seconds that actors have for an orderly end."""
        self._eventfd = self._arena_fd = self._garbage_event = self._liveness_event = -1
        self._engine = engine
        try:
            with explained("start a session"):
                uninterrupted(lambda: self._begin(engine, arena, grace))
        except BaseException:  # the system has refused something: nothing is left of the session
            uninterrupted(self._undo)
            raise

    def _undo(self) -> None:
        """Close everything that a failed start has opened."""
        self._engine.close()
        self._close_descriptors()
        if hasattr(self, "cleanup"):
            self.cleanup.waker.close()
        if hasattr(self, "process"):
            self.process.close()
        if context.running() is self:
            context.install(None)

    def _begin(self, engine: ProcessEngine, arena: ArenaSize | None, grace: float) -> None:
        arena = arena or arena_size()
        process_table = _core.ProcessTable.create(PROCESS_TABLE_SLOTS)
        process_table.prepare(DRIVER_SLOT, "driver")
        self._eventfd = descriptors.event()
        self._arena_fd = _core.Arena.create_fd(arena.file)
        self._garbage_event = descriptors.event()
        self._liveness_event = descriptors.event()
        process = Process(process_table, DRIVER_SLOT, self._eventfd, self._arena_fd, arena)
        super().__init__(process, Cleanup(_core.Waker(self._garbage_event), self._wake))
        process_table.alive_unwatched(DRIVER_SLOT)
        _core.outlive_all()
        self.graphs: WeakSet[GraphInfo] = WeakSet()
        self.exports = Exports(
            os.urandom(8).hex(),
            self.inbox,
            process.notify,
            self.watcher,
            self.process.identity,
            process_table.gone,
            self.cleanup,
        )
        self._shared_graphs = SharedGraphs(self.graphs)
        self.places = engine.places
        shared_state = SharedState(
            process,
            self.exports.session,
            self._arena_fd,
            self._eventfd,
            self.label,
            self.pump,
            engine.places,
        )
        self.table = Table(process_table, self.label, engine.on_thread)

        def own_view() -> _core.ArenaView:
            return process.own_view(self._arena_fd)

        self.remote_nodes = RemoteNodes(process, own_view)
        process.name_node = self.remote_nodes.node_name
        process.look_at_remote = lambda slots: self.remote_nodes.status_queries.look_at(
            slots, engine.on_thread()
        )
        self.supervisor = Supervisor(
            self.table,
            shared_state,
            engine,
            self.cleanup,
            grace,
            self._liveness_event,
            self.remote_nodes,
        )
        ask_readers(self.exports.orphans, self.table, self.remote_nodes, process, self.cleanup)
        self._attachments = Attachments(self.table, self.supervisor)
        self.network = Network(self.table, self.cleanup, self.remote_nodes)
        self.deployer = GraphDeployer(
            process, self.table, self.supervisor, self.network, self.cleanup
        )
        self.remote_status, self.remote_later = (
            self.deployer.remote_status,
            self.deployer.remote_later,
        )
        self.comes_back, self.end_unmade = self.deployer.comes_back, self.deployer.end_unmade
        self._connections = Connections(self.exports, self._shared_graphs, process)
        self.broker = DriverBroker(self.table, self.network, own_view)
        self.collectives = DriverCollectives(
            self.table, self.supervisor, self.network, self.remote_nodes, process, own_view
        )
        self.dispatcher = Dispatcher(
            engine,
            self.table,
            self.supervisor,
            self.network,
            self.deployer,
            self._connections,
            self.broker,
            self.collectives,
            self.watcher,
            self.remote_nodes,
        )
        self.supervisor.on_request_socket = self.dispatcher.add
        self.supervisor.on_remote_start = self.dispatcher.close_socket
        self.supervisor.on_start = self._note_link
        self.supervisor.end_waits = self._end_waits
        self.supervisor.death_cleanup = self._death_cleanup()
        self._last_steps = self._shutdown_steps(engine)
        self.at_shutdown: Callable[[], None] = lambda: None
        callbacks = DriverCallbacks(
            self.remote_nodes.open,
            self.dispatcher.heard,
            self.remote_nodes.gone,
            self.remote_nodes.node_of,
            self.remote_nodes.status_queries.remote_stored,
            partial(self.remote_nodes.status_queries.when_come, HERE),
            self.remote_nodes.status_queries.come,
            self.remote_nodes.reached,
            process,
        )
        engine.start(self.supervisor.on_exit, callbacks)
        engine.watch(self._garbage_event, self._on_garbage)
        engine.watch(self._liveness_event, self._on_liveness_futexes)
        context.install(self)  # last: a caller that is interrupted now finds the driver there

    def _shutdown_steps(self, engine: ProcessEngine) -> LastSteps:
        """Return the steps of the session's end, in order."""
        return LastSteps(
            self._begin_end,
            self.process.hang_up,
            self.broker.begin_end,
            self.collectives.begin_end,
            # What they ask the driver for meanwhile is answered.
            self.supervisor.end_all,
            self.pump.close,
            self.process.sweeper.close,
            self.process.releasing.close,
            self._connections.close,
            self.broker.end,
            self.collectives.end,
            self.watcher.close,
            self._end_hearing,
            engine.close,
            self.supervisor.close,
            self.remote_nodes.close,
            self._forget_all,
            self._close_descriptors,
            self.process.close,
            hurry=self.supervisor.hurry,
        )

    def _death_cleanup(self) -> DeathCleanup:
        """Return the steps after the death of a process, in order."""
        supervisor, exports = self.supervisor, self.exports
        return DeathCleanup(
            Step("everybody takes it for dead", supervisor.announce, unborn=True),
            Step("what its slot says of it is kept", ActorRecord.keep_last_snapshot),
            # Before anybody is told that it has ended: errors say whether it comes back.
            Step("whether it is started again is settled", supervisor.decide),
            Step("how it has ended can be said", lambda r: r.cause_known.set(), unborn=True),
            Step("how it has ended is logged", supervisor.log_death),
            # Before its slot is another process's: borrows name their readers by slot.
            Step("no ref waits for it", lambda r: exports.actor_ended(r.reader), unborn=True),
            Step(
                "graphs that it executed are taken down", self.deployer.executor_ended, unborn=True
            ),
            Step("its requests are not served", self.dispatcher.remove, unborn=True),
            Step("the driver's link is let go of", self._forget_link, unborn=True),
            Step("what its process had is closed", supervisor.forget_process, unborn=True),
            Step("who waits for its end is told", lambda r: r.cleaned_up.set(), unborn=True),
            Step("nothing is kept for its channels", self.broker.actor_ended, unborn=True),
            Step("groups of it alone are closed", self.collectives.actor_ended, unborn=True),
            # After `cleaned_up`: whoever lays a link for it just now looks at that.
            Step("its links are nobody's any more", self.network.ended, unborn=True),
            Step("its successor is started", supervisor.succeed),
        )

    # Actors

    def create_actor(self, spec: ActorSpec) -> tuple[ActorId, object]:
        actor = Actor(
            spec.cls.__name__,
            spec.methods,
            spec.name,
            spec.process,
            spec.max_concurrency,
            spec.max_restarts,
            keep(spec.cls, spec.args, spec.kwargs, always=spec.max_restarts != 0),
            handles=1,
        )
        record = self.supervisor.start(
            actor, lambda link: link.call(start((spec.cls, *spec.args), spec.kwargs)), later=True
        )
        return record.id, self._retained(record.id)

    def attach(self, attached: Attached) -> ActorId:
        """Have that actor take part in the session, until it ends or is killed."""
        return self._attachments.attach(attached)

    def find_actor(self, name: str) -> tuple[ActorId, str, Mapping[str, MethodInfo], object]:
        actor, class_name, methods = self.table.find(name)
        return actor, class_name, methods, self._retained(actor)

    def link(self, actor: ActorId) -> Link:
        self.table.check_open()
        return self.supervisor.link(actor)

    def _note_link(self, record: ActorRecord) -> None:
        if record.calls is not None:
            self.links[record.id.index] = record.calls

    def _forget_link(self, record: ActorRecord) -> None:
        with self.table.lock:
            if self.links.get(record.id.index) is record.calls:
                self.links.pop(record.id.index, None)

    def kill(self, actor: ActorId, no_restart: bool = True, graceful: bool = False) -> None:
        self.supervisor.kill(actor, no_restart, graceful)

    def retain(self, actor: ActorId) -> object:
        self.table.retain(actor)
        return self._retained(actor)

    def _retained(self, actor: ActorId) -> object:
        """Return what gives back one handle that is counted."""
        release = partial(self.supervisor.release, actor)
        try:
            return self.cleanup.finalizer(release)
        except BaseException:  # no memory: there will be no handle
            self.cleanup.soon(release)
            raise

    def share(self, actor: ActorId) -> None:
        self.table.share(actor)

    # Graphs

    def compile(
        self, root: DAGNode, config: Config, placement: Mapping[MethodNode, ActorId]
    ) -> CompiledGraph:
        supervisor = self.supervisor
        plan = lower(root, config, placement, supervisor.nodes_of, supervisor.have_gpus)
        with explained(f"lay the channels of {config.name or 'the graph'}"):
            return compiled_graph(self, plan, config, self.graphs)

    def deploy(
        self, plan: Plan, config: Config, begun: Callable[[int], object]
    ) -> DeployedChannels:
        here, labels = self.process.ring_end(RESULT_BIT), task_labels(plan)
        tasks = [with_bound_values(tasks) for tasks in tasks_by_actor(plan)]
        return self._deployed(self.deployer.deploy(here, config, plan, tasks, labels, begun))

    def redeploy(self, number: int, first: int, time_limit: TimeLimit) -> DeployedChannels:
        return self._deployed(self.deployer.redeploy(number, first, time_limit))

    def _deployed(self, deployment: Deployment) -> DeployedChannels:
        return DeployedChannels(
            deployment.channels(), list(deployment.records), deployment.layout.segment
        )

    def undeploy(self, number: int) -> list[tuple[GraphWorker, Ref]]:
        self._shared_graphs.forget(number)
        return self.deployer.undeploy(number)

    def drop(self, number: int) -> None:
        self.cleanup.soon(lambda: self.undeploy(number))

    def label(self, graph: int, node: int) -> str | None:
        """Return the name of a graph's task, for waits on the actor that runs the task."""
        with suppress(RuntimeError):  # another thread compiles just now: then without a name
            for compiled in list(self.graphs):
                label = compiled.lifecycle.label(graph, node)
                if label is not None:
                    return label
        return self.deployer.label(
            graph, node
        )  # another process's, or one that is deployed just now

    def share_graph(self, graph: CompiledGraph, graph_info: object) -> bool:
        return self._shared_graphs.share(graph, graph_info, self.ending)

    def load_graph(
        self, number: int, name: str, whole: bool = False, options: tuple[str, ...] = ()
    ) -> CompiledGraph:
        return self._shared_graphs.load(number, name)

    # What finalizers ask for

    def _wake(self) -> None:
        # Not one of `Cleanup` itself: the descriptor is closed when the session has ended.
        if not self.table.closed:
            os.eventfd_write(self._garbage_event, 1)

    def _on_garbage(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._garbage_event)
        self.cleanup.do()

    def _on_liveness_futexes(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._liveness_event)
        self.supervisor.on_liveness_futexes()

    # The end

    def abandon(self) -> None:
        """Disown the session in a forked child: it is the parent's."""
        self.table.closed = True  # without its lock, which a thread of the parent may have had
        error = RuntimeStateError("this graph belongs to the process that this one was forked from")
        for graph in list(self.graphs):
            graph.lifecycle.orphan(error)

    @property
    def ending(self) -> bool:
        return self.table.closed

    def shutdown(self) -> None:
        if os.getpid() != self.pid:
            return  # a forked child: the session is its parent's
        if self._eventfd >= 0 and descriptors.lost(self._eventfd):
            self._lose()
        # A signal handler may have interrupted a call of this thread's that holds some of them.
        links = (link.lock for link in list(self.links.values()))
        try:
            with threads.lent(
                *self.supervisor.locks,
                self.pump.lock,
                self.exports.lock,
                self.broker.lock,
                *links,
            ):
                self._last_steps.take_all()
        finally:
            if self._last_steps.over:  # else another thread takes them, or the next call will
                self.at_shutdown()

    def _lose(self) -> None:
        """Give the session up: code of this process has closed the session's descriptors. Nothing is heard of
        the session's processes any more, which end by themselves, as if this one had ended."""
        self._eventfd = -1
        _core.skip_descriptors()
        ending.fault = ending.fault or f"code of this process {CLOSED}"
        steps = self._begin_end, self.process.hang_up, self._engine.close
        self._last_steps = LastSteps(*steps, hurry=bool)

    def fail(self, why: str) -> None:
        ending.fault = why
        self._begin_end()  # the rest at shutdown

    def _begin_end(self) -> None:
        self.table.close()
        self.process.ended = True  # before anybody looks again
        error = ending.error()
        for graph in list(self.graphs):
            graph.lifecycle.close(error)
        self.end_links()

    def _end_waits(self) -> None:
        """End the actors' waits: the actors need the rest of the time for their own end."""
        self.collectives.end_waits()
        process_table = self.process.process_table
        process_table.mark_exiting(DRIVER_SLOT)
        for record in self.table:
            if record.alive:
                process_table.notify(record.slot, _core.ATTENTION_BIT)

    def _end_hearing(self) -> None:
        self.cleanup.waker.close()
        self._engine.unwatch(self._garbage_event)
        self._engine.unwatch(self._liveness_event)
        self.dispatcher.close()

    def _forget_all(self) -> None:
        self.deployer.clear()
        self.cleanup.clear()

    def _close_descriptors(self) -> None:
        """Close each descriptor once, however often this is called."""
        for name in ("_eventfd", "_arena_fd", "_garbage_event", "_liveness_event"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)
