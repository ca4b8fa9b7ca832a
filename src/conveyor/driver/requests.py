"""The dispatcher of the actors' requests to the driver: other actors, links to them, graphs, refs.

One socketpair for each actor. Requests come on the engine's event thread, which must not block. So each is
answered on a thread of its own, as it may wait for the fork server or for another actor's main loop.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeAlias

from conveyor import descriptors
from conveyor.calls.constructor import StoredConstructor
from conveyor.codec import Reader
from conveyor.driver.actors import DRIVER_SLOT, Actor, ActorRecord, Table
from conveyor.driver.broker import DriverBroker
from conveyor.driver.deployments import Deployment, GraphDeployer, GraphExits
from conveyor.driver.groups import DriverCollectives
from conveyor.driver.network import Network
from conveyor.driver.process_engine import ProcessEngine, RemoteDescriptors
from conveyor.driver.remote_processes import RemoteNodes
from conveyor.driver.supervisor import Supervisor
from conveyor.exceptions import (
    ActorRestartedError,
    ConveyorError,
    RuntimeStateError,
    SystemLimitError,
)
from conveyor.flag import Flag
from conveyor.futures import Future
from conveyor.graph.handles import GraphService, SharedGraphs
from conveyor.pauses import Pauses
from conveyor.refs.exports import Exports, Orphans, Peer
from conveyor.refs.watcher import Watcher
from conveyor.runtime import context, ending, threads
from conveyor.runtime.cleanup import Cleanup
from conveyor.runtime.deadlock import Found
from conveyor.runtime.deadlock_detector import (
    Frames,
    Look,
    LookAtWaits,
    Verdict,
    Waiting,
    WaitsThere,
    detect,
)
from conveyor.runtime.messages import Connection, Message, pickled, receive_message, send_pickled
from conveyor.runtime.process import RESULT_BIT, Process, RingEnd, close_all
from conveyor.runtime.waiting import TimeLimit
from conveyor.system_limits import explained
from conveyor.weak import WeakSet
from conveyor.worker import messages
from conveyor.worker.messages import (
    Done,
    Drain,
    Failed,
    Notice,
    Numbered,
    OpenGraph,
    Opening,
    OpenRefs,
    OpenRemoteMemory,
    Reply,
    Request,
)


class Connections:
    """The open connections of actors to references and graphs."""

    def __init__(self, exports: Exports, graphs: SharedGraphs, process: Process) -> None:
        """``process``: the driver's."""
        self._process = process
        self._exports = exports
        self._graphs = graphs
        self._open: WeakSet[Connection] = WeakSet()

    def open(self, caller: ActorRecord, request: Opening) -> list[int] | RemoteDescriptors:
        """Open a connection of ``caller``'s own and serve it. Return ``caller``'s end, which whoever calls
        this closes, or the substitute that its node gives it."""
        if isinstance(request, OpenRemoteMemory):
            return self._open_remote_memory(caller)
        here, there = descriptors.socket_pair()
        try:
            self._open.add(self._serve(caller, request, here))
        except BaseException:
            here.close()
            there.close()
            raise
        if caller.node is not None:
            return RemoteDescriptors(connection=caller.node.carry(there))
        return [there.detach()]

    def _open_remote_memory(self, caller: ActorRecord) -> list[int] | RemoteDescriptors:
        if caller.node is not None:
            return RemoteDescriptors(memory=True)
        serve = self._process.serve_memory
        if serve is None:
            raise RuntimeStateError("all processes of the session are on one host")
        here, there = descriptors.socket_pair()
        try:
            serve(here)
        except BaseException:
            there.close()
            raise
        return [there.detach()]

    def _serve(
        self, caller: ActorRecord, request: OpenRefs | OpenGraph, here: socket.socket
    ) -> Connection:
        if isinstance(request, OpenRefs):
            return Peer(
                self._exports,
                caller.id.index,
                caller.reader,
                here,
                caller.silence,
                caller.node,
            ).connection
        graph = self._graphs.load(request.number, request.name)
        return GraphService(graph, here, caller.reader).connection

    def close(self) -> None:
        """Close all connections: the session is over."""
        self._graphs.clear()
        for connection in list(self._open):
            connection.close()
        self._exports.close(ending.error())


#: Descriptors that go with an answer, and are closed when they have been sent, or their substitute for a
#: process of another node.
Given = list[int] | RemoteDescriptors


def let_go(given: Given) -> None:
    """Close the descriptors of an answer: it has been sent, or will not be."""
    if isinstance(given, list):
        close_all(given)


class RequestConnection:
    """Request connection of one actor, over a socket, or by way of its node. Several threads answer."""

    def __init__(self, record: ActorRecord, sock: socket.socket, remote_nodes: RemoteNodes) -> None:
        self.record = record
        #: ``None`` if the process is on another node, and when the connection is closed.
        self.sock: socket.socket | None = sock
        self._remote_nodes = remote_nodes
        # Held for one reply at a time, which may be several datagrams.
        self._sending = threading.Lock()

    def send(self, message: Message, given: Given, time_limit: float) -> None:
        """Send an answer. ``time_limit``: seconds that other replies to this actor may take; -1: any."""
        data = pickled(message)
        if self.record.node is not None:
            remote_descriptors = given if isinstance(given, RemoteDescriptors) else None
            self._remote_nodes.answer(self.record, data, remote_descriptors, wait=time_limit < 0)
            return
        sock = self.sock
        if sock is None:
            raise ConnectionError("its socket is closed")
        assert isinstance(given, list)
        if not self._sending.acquire(timeout=time_limit):
            raise TimeoutError("it does not take the replies before this one")
        try:
            send_pickled(sock, data, given)
        finally:
            self._sending.release()


class RequestConnections:
    """The request connections of all actors, by their processes."""

    def __init__(self, unwatch: Callable[[int], None], remote_nodes: RemoteNodes) -> None:
        """``unwatch(fd)`` is called for a socket, which the caller watches, before it is closed."""
        self._unwatch = unwatch
        self._remote_nodes = remote_nodes
        # Single steps change it, so it needs no lock: each connection is taken out, and closed, once.
        self._all: dict[Reader, RequestConnection] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, record: ActorRecord, sock: socket.socket) -> RequestConnection:
        """Return a new connection of that process, over that socket."""
        connection = self._all[record.reader] = RequestConnection(record, sock, self._remote_nodes)
        return connection

    def of(self, process: Reader) -> RequestConnection | None:
        """Return the connection of a process, or None."""
        return self._all.get(process)

    def close_socket(self, record: ActorRecord) -> None:
        """Close the socket of a process whose requests come by way of its node from now on."""
        connection = self.of(record.reader)
        if connection is not None:
            self._close(connection)

    def remove(self, record: ActorRecord) -> None:
        """Remove the connection of a process that is gone, or cannot be answered. A living process is
        told."""
        connection = self._all.pop(record.reader, None)
        if connection is not None:
            self._close(connection)
            if record.alive:
                self._remote_nodes.cut(record)

    def close(self) -> None:
        """Close all connections: no process is left."""
        for process in list(self._all):
            connection = self._all.pop(process, None)
            if connection is not None:
                self._close(connection)

    def _close(self, connection: RequestConnection) -> None:
        sock, connection.sock = connection.sock, None
        if sock is not None:
            self._unwatch(sock.fileno())
            sock.close()


#: Seconds between two looks at something that changes just now, at first and at most: notes and looks of
#: other nodes, and frames that are on their way there. Pumps could tell of the latter
#: (``HostPump.tell_when_come``), but the rest would have to be asked for again all the same.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.5


class Detections:
    """Deadlock detections across nodes. Each is made on the thread that answers the request."""

    def __init__(self, table: Table, remote_nodes: RemoteNodes) -> None:
        self._process_table = table.process_table
        self._remote_nodes = remote_nodes
        self._over = Flag()
        self._lock = threading.Lock()
        # Looks that detections may share: by node the one that is under way, and the one after that.
        self._now: dict[int, Future[WaitsThere]] = {}
        self._next: dict[int, Future[WaitsThere]] = {}
        # Waits that end with an error as soon as their process hears of it: one for each cycle is enough.
        self._doomed: dict[Reader, frozenset[int]] = {}

    def look(self, caller: ActorRecord, waits: Sequence[Waiting]) -> Found | None:
        """Return the cycle that one of these waits of ``caller`` is part of, or None. Waits until that is
        known."""
        process = caller.reader
        with self._lock:
            for reader in [reader for reader in self._doomed if self._process_table.gone(*reader)]:
                del self._doomed[reader]
            # The process asks again about these waits: so it has not heard of the verdict.
            again = self._doomed.pop(process, frozenset()) - {wait.stamp for wait in waits}
            if again:
                self._doomed[process] = again
        while True:
            verdict = self._detect(process, waits)
            if verdict is None:
                return None
            if self._convict(process, verdict):
                return self._found(verdict)

    def close(self) -> None:
        """End all detections: the session is over, and nobody waits for an answer any more."""
        self._over.set()

    def _detect(self, process: Reader, waits: Sequence[Waiting]) -> Verdict | None:
        detection = detect(process, waits, self._remote_nodes.node_of, self._doomed_of)
        pauses = Pauses(_FIRST_PAUSE, _LONGEST_PAUSE)
        try:
            step = next(detection)
            while not self._over.is_set():
                if isinstance(step, Look):
                    answers = {
                        node: self._shared(node) if step.shared else self._own(node, look)
                        for node, look in step.requested.items()
                    }
                    step = detection.send({node: seen.result() for node, seen in answers.items()})
                else:
                    self._over.wait(pauses.next())
                    step = next(detection)
        except StopIteration as over:
            verdict: Verdict | None = over.value
            return verdict
        return None

    def _doomed_of(self, process: Reader) -> Collection[int]:
        return self._doomed.get(process, ())

    def _convict(self, process: Reader, verdict: Verdict) -> bool:
        """Note the waits that a verdict ends. Return False if another wait of the same cycle was found
        meanwhile, and ends."""
        with self._lock:
            for reader, stamp in verdict.waits:
                if stamp in self._doomed.get(reader, ()):
                    return False
            self._doomed[process] = self._doomed.get(process, frozenset()) | verdict.stamps
        return True

    def _found(self, verdict: Verdict) -> Found:
        """Return the cycle of a verdict in words."""
        slots = [slot for slot, _ in verdict.path]
        chain = []
        for (slot, text), to in zip(verdict.path, [*slots[1:], slots[0]], strict=True):
            there = self._remote_nodes.node_of(to) != self._remote_nodes.node_of(slot)
            chain.append(f"{text} (on {self._remote_nodes.node_name(to)})" if there else text)
        return Found(
            verdict.wait.work,
            verdict.wait.stamp,
            tuple(chain),
            tuple(self._process_table.name(slot) for slot in slots),
            verdict.kinds,
        )

    # Looks

    def _own(self, node: int, look: LookAtWaits) -> Future[WaitsThere]:
        return self._remote_nodes.status_queries.look_at_waits(node, look)

    def _shared(self, node: int) -> Future[WaitsThere]:
        """Return a look at that node that begins after this call, for all that ask until then."""
        with self._lock:
            if node in self._now:
                if node not in self._next:
                    self._next[node] = Future()
                return self._next[node]
            answer = self._now[node] = Future()
        self._begin(node, answer)
        return answer

    def _begin(self, node: int, answer: Future[WaitsThere]) -> None:
        def done(seen: Future[WaitsThere]) -> None:
            with self._lock:
                following = self._next.pop(node, None)
                if following is None:
                    del self._now[node]
                else:
                    self._now[node] = following
            if following is not None:
                self._begin(node, following)
            error = seen.exception()
            if error is None:
                answer.set_result(seen.result())
            else:
                answer.set_exception(error)

        self._own(node, LookAtWaits()).add_done_callback(done)


logger = logging.getLogger("conveyor")

#: Seconds that the event thread waits for an actor to take earlier replies.
_TIME_LIMIT = 1.0

#: The answer to a request, and the descriptors that go with it.
_Answer = tuple[Any, Given]


class Dispatcher:
    """The driver's end of the actors' request sockets."""

    def __init__(
        self,
        engine: ProcessEngine,
        table: Table,
        supervisor: Supervisor,
        network: Network,
        deployer: GraphDeployer,
        connections: Connections,
        broker: DriverBroker,
        collectives: DriverCollectives,
        watcher: Watcher,
        remote_nodes: RemoteNodes,
    ) -> None:
        self._engine = engine
        self._table = table
        self._supervisor = supervisor
        self._network = network
        self._deployer = deployer
        self._connections = connections
        self._broker = broker
        self._collectives = collectives
        self._detections = Detections(table, remote_nodes)
        self._request_connections = RequestConnections(engine.unwatch, remote_nodes)
        self._graph_exits = GraphExits(table.process_table, watcher)

    def add(self, record: ActorRecord, sock: socket.socket) -> None:
        """Serve the requests that come over ``sock`` from that process, until it is removed."""
        connection = self._request_connections.add(record, sock)
        self._engine.watch(sock.fileno(), lambda: self._on_message(connection))

    def remove(self, record: ActorRecord) -> None:
        """Forget a process that is gone, or has broken its socket."""
        self._graph_exits.forget(record)
        self._request_connections.remove(record)

    def close_socket(self, record: ActorRecord) -> None:
        """Close the socket of a process on another node, which passes on its requests."""
        self._request_connections.close_socket(record)

    def heard(self, slot: int, incarnation: int, data: bytes) -> None:
        """Take a request of a process on another node. Called by the engine, on its thread."""
        connection = self._request_connections.of((slot, incarnation))
        if connection is not None:
            self._take(connection, pickle.loads(data))

    def close(self) -> None:
        """End all detections and close all sockets: the session is over."""
        self._detections.close()
        self._request_connections.close()

    @property
    def served(self) -> int:
        """Number of processes whose requests are served."""
        return len(self._request_connections)

    def _on_message(self, connection: RequestConnection) -> None:
        sock = connection.sock
        if sock is None:  # just now
            return
        try:
            message, _ = receive_message(sock)
        except OSError:
            self.remove(connection.record)
            return
        self._take(connection, message)

    def _take(self, connection: RequestConnection, message: Message) -> None:
        if isinstance(message, Notice):
            notice = self.notices[type(message)]
            threads.start_or_run(notice, "request", self, connection.record, message)
            return
        assert isinstance(message, Numbered)
        try:
            threads.start(self._answer, "request", connection, message)
        except SystemLimitError as error:
            # Answered on this thread, where everybody else would wait as well.
            self._reply(connection, message.number, Failed(error), time_limit=_TIME_LIMIT)

    def _answer(self, connection: RequestConnection, message: Numbered) -> None:
        reply: Reply
        fds: Given = []
        try:
            request: Request = pickle.loads(message.content)
            what = type(request).__name__.lower()
            with explained(f"do what {connection.record.id.name} asks for ({what})"):
                value, fds = self.answers[type(request)](self, connection.record, request)
            reply = Done(value)
        except Exception as error:
            reply = Failed(error)
        try:
            self._reply(connection, message.number, reply, fds)
        finally:
            let_go(fds)

    def _reply(
        self,
        connection: RequestConnection,
        number: int,
        reply: Reply,
        given: Given | None = None,
        time_limit: float = -1,
    ) -> None:
        """Send a reply. ``time_limit``: seconds that other replies to this actor may take."""
        record = connection.record
        try:
            connection.send(Numbered(number, pickle.dumps(reply)), given or [], time_limit)
        except Exception as error:
            if record.node is not None and isinstance(reply, Done):
                # Its node could not give it the substitute, since a process has ended, say: an error instead.
                self._reply(connection, number, Failed(error))
                return
            # The asking process is gone; or it gets an error now, as it would wait for an answer for ever.
            if record.alive:
                logger.warning("a request of %s cannot be answered: %s", record.id.name, str(error))
            self.remove(record)

    # Actors

    def _connect(self, caller: ActorRecord, request: messages.Connect) -> _Answer:
        # The node of the callee has to be known, since it makes an end of the link.
        find = self._supervisor.current if self._engine.places else self._supervisor.callable
        while True:
            callee = find(request.actor)
            callee.actor.shared = True
            try:
                number, bit, fds = self._network.link(caller, callee)
                break
            except ActorRestartedError:  # it has died just now, and is waited for
                if not caller.alive:
                    raise
        return messages.Connected(number, callee.slot, callee.incarnation, bit), fds

    def _why_refused(self, caller: ActorRecord, request: messages.WhyRefused) -> _Answer:
        return caller.refusals.pop(request.number, None), []

    def _disconnect(self, caller: ActorRecord, notice: messages.Disconnect) -> None:
        self._network.hang_up(caller, notice.number)

    def _refuse(self, callee: ActorRecord, notice: messages.Refuse) -> None:
        self._network.refuse(callee, notice.order_id, notice.error)

    def _create(self, _caller: ActorRecord, request: messages.Create) -> _Answer:
        constructor = request.constructor
        actor = Actor(
            request.class_name,
            request.methods,
            request.name,
            request.options,
            request.max_concurrency,
            request.max_restarts,
            None if constructor is None else StoredConstructor.received(constructor),
        )
        actor.shared = True
        construct = None if constructor is None else constructor.start
        return self._supervisor.start(actor, construct, later=True).id, []

    def _find(self, _caller: ActorRecord, request: messages.Find) -> _Answer:
        return self._table.find(request.name, by_actor=True), []

    def _find_transport(self, _caller: ActorRecord, request: messages.FindTransport) -> _Answer:
        return context.TRANSPORTS.get(request.name), []

    def _add_transport(self, _caller: ActorRecord, request: messages.AddTransport) -> _Answer:
        context.add_transport(request.name, request.registration)
        return None, []

    def _kill(self, caller: ActorRecord, request: messages.Kill) -> _Answer:
        # An actor that ends itself must not wait for that.
        wait = request.actor != caller.id
        self._supervisor.kill(request.actor, request.no_restart, request.graceful, wait)
        return None, []

    def _why_dead(self, _caller: ActorRecord, request: messages.WhyDead) -> _Answer:
        labels = request.labels
        label = (lambda *node: labels.get(node)) if labels else None
        death = self._table.death_of(request.actor, request.slot, request.incarnation, label)
        return death, []

    # Graphs

    def _deploy(self, caller: ActorRecord, request: messages.Deploy) -> _Answer:
        executor = RingEnd(caller.slot, caller.incarnation, RESULT_BIT)
        deployment = self._deployer.deploy(
            executor, request.config, request.plan, request.tasks, request.labels
        )
        return self._deployed(caller, deployment)

    def _redeploy(self, caller: ActorRecord, request: messages.Redeploy) -> _Answer:
        time_limit = TimeLimit(request.timeout, request.left)
        return self._deployed(
            caller, self._deployer.redeploy(request.number, request.first, time_limit)
        )

    def _comes_back(self, _caller: ActorRecord, request: messages.ComesBack) -> _Answer:
        return self._deployer.comes_back(request.number), []

    def _end_unmade(self, _caller: ActorRecord, request: messages.EndUnmade) -> _Answer:
        self._deployer.end_unmade(request.number)
        return None, []

    def _deployed(self, caller: ActorRecord, deployment: Deployment) -> _Answer:
        if caller.node is not None:
            if not caller.alive:
                self._deployer.drop(deployment.number)
                caller.check_alive()
            workers = tuple([record.reader for record in deployment.records])
            deployment.layout.segment.close_fd()
            return deployment.channels(), RemoteDescriptors(deployment.shared, workers)
        fds = self._network.duplicates(deployment.records)
        if not caller.alive or len(fds) < 2 * len(deployment.records):
            close_all(fds)
            self._deployer.drop(deployment.number)
            next((r for r in deployment.records if not r.alive), caller).check_alive()
        segment = deployment.layout.segment
        segment_fd = descriptors.duplicate(segment.fd)
        segment.close_fd()
        return deployment.channels(), [segment_fd, *fds]

    def _undeploy(self, caller: ActorRecord, request: messages.Undeploy) -> _Answer:
        acks = self._deployer.undeploy(request.number)
        if request.wait:
            self._graph_exits.expect(caller, request.number, acks)
        return None, []

    def _look_at_remote(self, _caller: ActorRecord, request: messages.LookAtRemote) -> _Answer:
        return self._deployer.remote_status(
            request.number, request.question, request.time_limit
        ), []

    def _look_for_cycle(self, caller: ActorRecord, request: messages.LookForCycle) -> _Answer:
        return self._detections.look(caller, request.waits), []

    def _still_deployed(self, caller: ActorRecord, request: messages.StillDeployed) -> _Answer:
        return self._graph_exits.still_deployed(caller, request.number), []

    def _open(self, caller: ActorRecord, request: messages.Opening) -> _Answer:
        return None, self._connections.open(caller, request)

    def _introduce(self, caller: ActorRecord, request: messages.Introduce) -> _Answer:
        return self._network.introduce(caller, (request.slot, request.incarnation)), []

    def _remote_stored(self, caller: ActorRecord, _request: messages.RemoteStored) -> _Answer:
        return self._network.remote_stored(caller), []

    # Channels

    def _open_channel(self, caller: ActorRecord, request: messages.OpenChannel) -> _Answer:
        return self._broker.open_for(caller, request.depth), []

    def _meet(self, caller: ActorRecord, request: messages.Meet) -> _Answer:
        found = self._broker.met_by(caller, request.number, request.side, request.alone)
        if found is None:
            return None, []
        party, given, spread = found
        if party is None:
            driver = DRIVER_SLOT, self._table.process_table.incarnation(DRIVER_SLOT)
            return messages.Met(*driver, None, spread), given
        return messages.Met(*party.reader, party.id, spread), given

    def _hold_end(self, caller: ActorRecord, request: messages.HoldEnd) -> _Answer:
        self._broker.held_by(caller, request.number, request.side)
        return None, []

    def _close_end(self, caller: ActorRecord, request: messages.CloseEnd) -> _Answer:
        self._broker.closed_by(caller, request.number, request.side)
        return None, []

    # Collective groups

    def _create_group(self, caller: ActorRecord, request: messages.CreateGroup) -> _Answer:
        return self._collectives.open(request.actors, creator=caller), []

    def _join_group(self, caller: ActorRecord, request: messages.JoinGroup) -> _Answer:
        return self._collectives.joined_by(caller, request.number)

    def _close_group(self, _caller: ActorRecord, request: messages.CloseGroup) -> _Answer:
        self._collectives.close(request.number)
        return None, []

    #: The function that answers each kind of request.
    answers: ClassVar[Mapping[type[Request], Callable[[Dispatcher, ActorRecord, Any], _Answer]]] = {
        messages.Connect: _connect,
        messages.WhyRefused: _why_refused,
        messages.Create: _create,
        messages.Find: _find,
        messages.FindTransport: _find_transport,
        messages.AddTransport: _add_transport,
        messages.Kill: _kill,
        messages.WhyDead: _why_dead,
        messages.NodesOf: lambda self, _, request: (self._supervisor.nodes_of(request.actors), []),
        messages.HaveGpus: lambda self, _, request: (
            self._supervisor.have_gpus(request.actors),
            [],
        ),
        messages.Deploy: _deploy,
        messages.Redeploy: _redeploy,
        messages.ComesBack: _comes_back,
        messages.EndUnmade: _end_unmade,
        messages.Undeploy: _undeploy,
        messages.LookAtRemote: _look_at_remote,
        messages.LookForCycle: _look_for_cycle,
        messages.StillDeployed: _still_deployed,
        messages.Introduce: _introduce,
        messages.RemoteStored: _remote_stored,
        messages.OpenRemoteMemory: _open,
        messages.OpenRefs: _open,
        messages.OpenGraph: _open,
        messages.OpenChannel: _open_channel,
        messages.HoldEnd: _hold_end,
        messages.CloseEnd: _close_end,
        messages.CreateGroup: _create_group,
        messages.JoinGroup: _join_group,
        messages.CloseGroup: _close_group,
        messages.Meet: _meet,
    }
    #: The function for each kind of notice.
    notices: ClassVar[Mapping[type[Notice], Callable[[Dispatcher, ActorRecord, Any], None]]] = {
        messages.Disconnect: _disconnect,
        messages.Refuse: _refuse,
    }


#: The process that is dead, its node, and the number of that of readers.
_Route: TypeAlias = "tuple[Reader, int, int]"


class Arrivals:
    """Knowledge of whether the last frames of dead processes have come to other nodes. From a lost node
    nothing comes any more to those that have given it up. From a living node everything comes in the end: it
    counts the frames that are due, once, and the other node tells when they are there.

    All borrows of a sender are known when that is asked, since everything that it had said was heard. So its
    readers are asked for all of them when the answer is there, and nothing has to be kept after that.
    """

    def __init__(self, orphans: Orphans, remote_nodes: RemoteNodes, cleanup: Cleanup) -> None:
        self._orphans, self._remote_nodes, self._cleanup = orphans, remote_nodes, cleanup
        #: Routes that are being asked about, with the number of the question.
        self._requested: dict[_Route, int] = {}
        #: Routes on which everything has come, while readers are asked because of that.
        self._come: set[_Route] = set()
        self._numbers = itertools.count(1)

    def pending(self, node: int, sender: Reader, reader: Reader) -> bool:
        """Return whether frames may still come; see :data:`conveyor.refs.exports.Arrives`."""
        to = self._remote_nodes.node_of(reader[0])
        route = sender, node, to
        if not self._remote_nodes.comes(node, to) or route in self._come:
            return False
        # If the node is lost, the other one tells when it has given it up.
        if route not in self._requested and not self._remote_nodes.is_lost(node):
            self._requested[route] = number = next(self._numbers)
            self._cleanup.soon(partial(self._ask, route, number))  # the borrows' lock is held here
        return True

    def _ask(self, route: _Route, number: int) -> None:
        _, node, to = route
        due = self._remote_nodes.status_queries.due(node, to)
        due.add_done_callback(partial(self._counted, route, number))

    def _counted(self, route: _Route, number: int, due: Future[Frames]) -> None:
        _, node, to = route
        if due.exception() is not None:
            self._end(number)  # the maker's node is being given up, or the session over
        elif not due.result():
            self.come(number)
        else:
            # `end` is called if the readers' node is being given up, or the session is over.
            come, end = partial(self.come, number), partial(self._end, number)
            self._remote_nodes.status_queries.when_come(to, node, due.result(), come, end)

    def _routes(self, number: int) -> list[_Route]:
        """Return the route that a question is about; empty if it was given up meanwhile."""
        return [route for route, requested in list(self._requested.items()) if requested == number]

    def _end(self, number: int) -> None:
        for route in self._routes(number):
            self._requested.pop(route, None)

    def come(self, number: int) -> None:
        """Have the readers asked: all frames of question ``number`` are there, or do not come any more."""
        for route in self._routes(number):
            self._come.add(route)  # first: else another thread might ask again
            try:
                self._end(number)
                self._orphans.look()
            finally:
                self._come.discard(route)

    def given_up(self) -> None:
        """Give up the questions that nobody answers any more: a node is lost, or another node has given it
        up."""
        for route, number in list(self._requested.items()):
            _, node, to = route
            if self._remote_nodes.is_lost(to) or not self._remote_nodes.comes(node, to):
                self._end(number)
        self._orphans.look()


def ask_readers(
    orphans: Orphans, table: Table, remote_nodes: RemoteNodes, process: Process, cleanup: Cleanup
) -> None:
    """Have readers asked from now on. ``process``: the driver's, which is one of them."""

    def ask(reader: Reader, question: int, writers: tuple[Reader, ...]) -> None:
        if reader == process.identity:
            answered = partial(orphans.answered, question, reader)
            process.sources.when_dry(writers, lambda: cleanup.soon(answered), cleanup)
            return
        for record in table:
            if record.reader == reader:
                with suppress(ConveyorError):  # it is dead, which is told on another way
                    record.order(Drain(question, writers))

    arrivals = Arrivals(orphans, remote_nodes, cleanup)
    orphans.begin(arrivals.pending, ask)
    remote_nodes.on_given_up = arrivals.given_up
