"""The runtime inside an actor: calls to other actors, over links that the driver sets up."""

from __future__ import annotations

import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from conveyor import _core
from conveyor.calls.call import start
from conveyor.calls.constructor import StoredConstructor, keep
from conveyor.calls.links import Link
from conveyor.calls.unsendable import blame_tasks
from conveyor.codec import importing
from conveyor.codec.frames import Sealed, seal
from conveyor.config import Config
from conveyor.dag import DAGNode, MethodNode
from conveyor.exceptions import (
    ActorDiedError,
    ConveyorError,
    RuntimeStateError,
    SerializationError,
)
from conveyor.graph.assembly import compiled_graph
from conveyor.graph.compiled import CompiledGraph
from conveyor.graph.edges import task_labels, tasks_by_actor
from conveyor.graph.executor import (
    ChannelsSpec,
    DeployedChannels,
    GraphWorker,
    GraphWorkerSpec,
    refuse_own,
)
from conveyor.graph.handles import graph_handle
from conveyor.graph.lifecycle import GraphInfo
from conveyor.graph.telemetry import TIME_LIMIT, Question, RemoteStatus
from conveyor.plan import lower
from conveyor.plan.model import Plan, Task
from conveyor.refs.actor_exports import ActorExports
from conveyor.refs.ref import Ref
from conveyor.refs.streams import StreamRef
from conveyor.refs.values import with_bound_values
from conveyor.runtime.cleanup import Cleanup
from conveyor.runtime.messages import all_of
from conveyor.runtime.process import RingEnd, close_all
from conveyor.runtime.protocol import ActorId, ActorSpec, MethodInfo
from conveyor.runtime.status import describe_status
from conveyor.runtime.wait_graph import STEPS, Blockers
from conveyor.runtime.waiting import TimeLimit, wait_until
from conveyor.system_limits import explained
from conveyor.weak import WeakSet, WeakValues
from conveyor.worker.calling import CallingRuntime
from conveyor.worker.messages import (
    AddTransport,
    ComesBack,
    Connect,
    Connected,
    Create,
    Deploy,
    Disconnect,
    EndUnmade,
    Find,
    FindTransport,
    HaveGpus,
    Kill,
    LookAtRemote,
    NodesOf,
    OpenGraph,
    OpenRefs,
    Redeploy,
    Refuse,
    Request,
    StillDeployed,
    Undeploy,
)
from conveyor.worker.remote_memory import RemoteMemoryClient
from conveyor.worker.requests import (
    ActorCollectives,
    NotedRequests,
    RequestClient,
    WorkerBroker,
)

if TYPE_CHECKING:
    from conveyor.worker.instance import WorkerState


class PeerWorker:
    """An actor of a graph that this actor executes."""

    def __init__(
        self,
        process_table: _core.ProcessTable,
        requests: RequestClient,
        worker: GraphWorkerSpec,
        labels: Mapping[tuple[int, int], str],
    ) -> None:
        self.id = worker.id
        self.pid = worker.pid
        self.slot = worker.slot
        self.incarnation = worker.incarnation
        self._process_table = process_table
        self._requests = requests
        self._labels = labels

    @property
    def death_number(self) -> int:
        return self._process_table.death_number(self.slot)

    @property
    def alive(self) -> bool:
        return not self._process_table.gone(self.slot, self.incarnation)

    def death(self, label: Callable[[int, int], str | None] | None = None) -> ActorDiedError:
        return self._requests.death(self.id, self.slot, self.incarnation, self._labels)


class ActorRuntime(CallingRuntime):
    """The runtime of an actor's process, behind ``conveyor.get``, ``.remote()`` and the rest."""

    def __init__(self, worker_state: WorkerState, requests: socket.socket) -> None:
        process, bootstrap = worker_state.process, worker_state.bootstrap
        # The main loop calls `tidy` for that.
        super().__init__(process, Cleanup(_core.Waker(process.inbox), process.notify))
        self.places = bootstrap.places
        self.own_actor = self._me = ActorId(bootstrap.number, bootstrap.name)
        self.requests = self._requests = RequestClient(requests)
        self._noted = NotedRequests(self._requests, process, bootstrap.driver_slot)
        process.wait_registry.reports.open(self._requests.look_for_cycle)
        self.broker = WorkerBroker(process, self._requests)
        self.collectives = ActorCollectives(process, self._requests, self.label)
        #: Held while the link to an actor is set up, by the actor's index. Each actor has its own: it may be
        #: restarting, which takes long, and others are called meanwhile. Reentrant: a signal handler may call
        #: an actor while its thread waits for the link to one.
        self._call_lock: defaultdict[int, AbstractContextManager[bool]] = defaultdict(
            lambda: threading.RLock()
        )
        #: Ends the process, or only its part in the session where the process is not the session's.
        self.end_at_once: Callable[[], object] = partial(os._exit, 1)
        self._deaths = 0
        # Task names of the graphs that are executed here, by graph.
        self._labels: dict[int, dict[tuple[int, int], str]] = {}
        self.graphs: WeakSet[GraphInfo] = WeakSet()
        # One handle, and so one connection, for each graph.
        self._graphs = WeakValues[int, CompiledGraph]()
        self.exports = ActorExports(
            bootstrap.session,
            bootstrap.number,
            process.inbox,
            process.notify,
            lambda: self.watcher,
            lambda: self._open(OpenRefs()),
            lambda: process.process_table.is_remote(bootstrap.driver_slot),
            process.sources,
        )
        process.remote_memory = (
            RemoteMemoryClient(self._requests.ask, process.slot) if bootstrap.places else None
        )

    def fail(self, why: str) -> None:
        # As if it had been killed: callers have its death as their error, and it may be started again.
        self.end_at_once()

    def link(self, actor: ActorId) -> Link:
        with self._call_lock[actor.index]:
            link = self.links.get(actor.index)
            if link is not None and not link.gone:
                return link
            # A first link, or one to the process that the actor has now.
            with explained(f"call {actor.name}"):
                return self._connect(actor)

    def _connect(self, actor: ActorId) -> Link:
        """Make a new link to ``actor``, and note it in ``links``."""
        deployed, fds = self._noted.ask(
            Connect(actor),
            f"for a way to call {actor.name}",
            lambda deployed: Disconnect(deployed.number),
        )
        assert isinstance(deployed, Connected)
        number, slot, incarnation = deployed.number, deployed.slot, deployed.incarnation
        try:
            segment_fd, arena_fd, eventfd = all_of(fds, 3)
            arena = self.process.adopt(slot, incarnation, arena_fd, eventfd)
            link = Link(
                self.process,
                _core.Segment.attach(segment_fd),
                RingEnd(slot, incarnation, deployed.bit),
                arena,
                actor.name,
                lambda: self._requests.death(actor, slot, incarnation),
                self.pump,
                label=self.label,
                why_refused=lambda: self._requests.refusal(actor, number),
            )
            known = self.links.get(actor.index)
            if known is None or known.gone:
                self.links[actor.index] = link
                return link
            # A signal handler that has interrupted this has called the actor as well.
            self._requests.tell(Disconnect(number))
            return known
        except BaseException:
            self._requests.tell(Disconnect(number))
            raise
        finally:
            close_all(fds)

    def refuse(self, order_id: int, error: Exception) -> None:
        """Tell the driver that the caller which came with ``order_id`` could not be introduced here."""
        if not isinstance(error, ConveyorError):
            text = f"{self._me.name} could not open a way for these calls: {error!r}"
            error = RuntimeStateError(text)
        self._requests.tell(Refuse(order_id, error))

    def _open(self, request: Request) -> socket.socket:
        with explained("open a connection to the driver"):
            _, fds = self._requests.ask(request)
            (fd,) = all_of(fds, 1)
            return socket.socket(fileno=fd)

    def create_actor(self, spec: ActorSpec) -> tuple[ActorId, object]:
        module = importing()
        if module:
            raise RuntimeStateError(
                f"{spec.cls.__name__} was made at the top of the module {module!r}, which actor "
                f"{self._me.name} imports to decode a value: each process that imports it would make one "
                'more. Make it in a function, or under `if __name__ == "__main__":`'
            )
        stored = self._constructor(spec)
        constructor = None if stored is None else stored.constructor
        request = Create(
            spec.cls.__name__,
            dict(spec.methods),
            spec.name,
            spec.process,
            spec.max_concurrency,
            spec.max_restarts,
            constructor,
        )
        actor, _ = self._requests.ask(request, lambda made: Kill(made, True, False))
        assert isinstance(actor, ActorId)
        if stored is None:
            self.link(actor).call(start((spec.cls, *spec.args), spec.kwargs))
        return actor, self.retain(actor)

    def _constructor(self, spec: ActorSpec) -> StoredConstructor | None:
        """Return the constructor call with which the driver can start the actor, now and again. ``None``:
        this process has to. The driver cannot wait for refs of this process, so they go inside; a stream
        cannot, and its items are awaited for an actor that is to be restarted."""
        always = spec.max_restarts != 0
        args, kwargs = spec.args, spec.kwargs
        if any(isinstance(each, StreamRef) for each in (*args, *kwargs.values())):
            if not always:
                return None
            args = tuple([_whole(each) for each in args])
            kwargs = {name: _whole(each) for name, each in kwargs.items()}
        return keep(spec.cls, args, kwargs, always, inside=True)

    def find_actor(self, name: str) -> tuple[ActorId, str, Mapping[str, MethodInfo], object]:
        found: Any
        found, _ = self._requests.ask(Find(name))
        actor, class_name, methods = found
        return actor, class_name, methods, self.retain(actor)

    def kill(self, actor: ActorId, no_restart: bool = True, graceful: bool = False) -> None:
        self._requests.ask(Kill(actor, no_restart, graceful))

    def find_transport(self, name: str) -> bytes | None:
        found: bytes | None
        found, _ = self._requests.ask(FindTransport(name))
        return found

    def add_transport(self, name: str, registration: bytes) -> None:
        self._requests.ask(AddTransport(name, registration))

    # Graphs that this actor executes

    def compile(
        self, root: DAGNode, config: Config, placement: Mapping[MethodNode, ActorId]
    ) -> CompiledGraph:
        plan = lower(root, config, placement, self._nodes_of, self._have_gpus)
        refuse_own(plan, self._me)
        with explained(f"lay the channels of {config.name or 'the graph'}"):
            return compiled_graph(self, plan, config, self.graphs)

    def _nodes_of(self, actors: Sequence[ActorId]) -> Sequence[int]:
        return tuple(self._requests.ask(NodesOf(tuple(actors)))[0])

    def _have_gpus(self, actors: Sequence[ActorId]) -> bool:
        return bool(self._requests.ask(HaveGpus(tuple(actors)))[0])

    def deploy(
        self, plan: Plan, config: Config, begun: Callable[[int], object]
    ) -> DeployedChannels:
        self.tidy()
        # The driver sees no constant of the graph, and no key: it may not know their classes.
        inputs = tuple(replace(bundle, keys=()) for bundle in plan.inputs)
        skeleton = replace(plan, tasks=(), inputs=inputs, shape=None)
        sealed = [
            _seal(with_bound_values(tasks), config.name or "the graph")
            for tasks in tasks_by_actor(plan)
        ]
        labels = task_labels(plan)
        # The plan says how communicators are made, and the driver may not know the class of one.
        config = config.with_options(default_communicator="create")
        request = Deploy(config, skeleton, sealed, labels)
        answer, fds = self._requests.ask(request, lambda deployed: Undeploy(deployed.number, False))
        number = answer.number
        begun(number)
        self._labels[number] = {(number, task): name for task, name in labels.items()}
        try:
            return self._deployed(answer, fds)
        except BaseException:
            self._let_go(number, False)
            raise

    def redeploy(self, number: int, first: int, time_limit: TimeLimit) -> DeployedChannels:
        request = Redeploy(number, first, time_limit.timeout, time_limit.left())
        with explained(f"lay the channels of graph {number} again"):
            return self._deployed(*self._noted.ask(request, f"which brings graph {number} back"))

    def label(self, graph: int, node: int) -> str | None:
        return self._labels.get(graph, {}).get((graph, node))

    def comes_back(self, number: int) -> bool:
        answer, _ = self._requests.ask(ComesBack(number))
        return bool(answer)

    def end_unmade(self, number: int) -> None:
        self._requests.ask(EndUnmade(number))

    def remote_status(self, number: int, question: Question, time_limit: float) -> RemoteStatus:
        answer, _ = self._requests.ask(LookAtRemote(number, question, time_limit))
        assert isinstance(answer, RemoteStatus)
        return answer

    def remote_later(self, number: int, then: Callable[[RemoteStatus | Exception], object]) -> None:
        self._requests.ask_later(LookAtRemote(number, Question(), TIME_LIMIT), then)

    def _deployed(self, channels: ChannelsSpec, fds: list[int]) -> DeployedChannels:
        workers, labels = channels.workers, self._labels[channels.number]
        try:
            all_of(fds, 1 + 2 * len(workers))
            for i, worker in enumerate(workers):
                ends = fds[1 + 2 * i : 3 + 2 * i]
                self.process.adopt(worker.slot, worker.incarnation, *ends)
            segment = _core.Segment.attach(fds[0])
        finally:
            close_all(fds)
        peers = [
            PeerWorker(self.process.process_table, self._requests, worker, labels)
            for worker in workers
        ]
        return DeployedChannels(channels, peers, segment)

    def undeploy(self, number: int) -> list[tuple[GraphWorker, Ref]]:
        self._let_go(number, True)
        return []

    def drop(self, number: int) -> None:
        self.cleanup.soon(lambda: self._let_go(number, False))

    def tidy(self) -> None:
        """Let go of graphs and streams that have become garbage, and of peers that have died."""
        deaths = self.process.process_table.deaths
        if deaths != self._deaths:
            self._deaths = deaths
            self.process.forget_gone()
            for index, link in list(self.links.items()):
                # Refs keep it as long as they need it. Another thread may have made the next one.
                if link.gone and not link.has_pending and self.links.get(index) is link:
                    self.links.pop(index, None)
        self.cleanup.do()

    def _let_go(self, number: int, wait: bool) -> None:
        self.process.limit_spin(number, None)
        self._requests.ask(Undeploy(number, wait))
        if wait:
            self._wait_until_left(number)
        self._labels.pop(number, None)  # until now it names what its actors run

    def _wait_until_left(self, number: int) -> None:
        """Wait until all workers of graph ``number`` have left it: those that run a method do so then."""
        process_table = self.process.process_table
        still_deployed: list[int] = []

        def left() -> bool:
            still_deployed[:], _ = self._requests.ask(StillDeployed(number))
            return not still_deployed

        def who() -> Blockers:
            return tuple(
                (s, STEPS, f"{process_table.name(s)} to leave its graph")
                for s in still_deployed[:1]
            )

        with self.process.wait_registry.waiting(lambda _: who(), True) as wait:
            wait_until(
                self.process.inbox,
                left,
                None,
                lambda: f"all actors to leave graph {number}",
                lambda: "; ".join(
                    f"{process_table.name(s)} {describe_status(process_table, s, self.label)}"
                    for s in still_deployed
                ),
                wait,
            )

    def share_graph(self, graph: CompiledGraph, graph_info: object) -> bool:
        raise RuntimeStateError(f"{graph.name} cannot be passed on by the actor that compiled it")

    def load_graph(
        self, number: int, name: str, whole: bool, options: tuple[str, ...]
    ) -> CompiledGraph:
        handle = self._graphs.get(number)
        if handle is None:
            made = graph_handle(  # which asks for nothing yet: another thread may make one, too
                self.process,
                lambda: self._open(OpenGraph(number, name)),
                self.exports.session,
                number,
                name,
                whole,
                options,
            )
            handle = self._graphs.setdefault(number, made)
        return handle

    # An actor that another actor knows of lives until the session ends: nobody counts its handles.

    def retain(self, actor: ActorId) -> object:
        return None

    def share(self, actor: ActorId) -> None:
        pass

    def abandon(self) -> None:
        error = RuntimeStateError("this graph belongs to the process that this one was forked from")
        for graph in list(self.graphs):
            graph.lifecycle.orphan(error)

    def shutdown(self) -> None:
        raise RuntimeStateError("a session is shut down by the driver, not by an actor")


def _whole(argument: Any) -> Any:
    return argument.get() if isinstance(argument, StreamRef) else argument


def _seal(tasks: dict[int, Task], graph: str) -> Sealed:
    try:
        return seal(tasks)
    except SerializationError as error:
        raise blame_tasks(error, graph, tasks.values()) from error.__cause__
