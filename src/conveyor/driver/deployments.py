"""Deployed graphs of a session, the driver's own and those that actors execute.

To deploy a graph is to lay out its rings in one segment, and to give every actor its part. The driver does
it, for itself or for an actor that executes the graph, the first time and again after a death.

A restart takes a fresh segment: no frame of the old channels can ever be seen in it. Its epoch begins when
every actor has acknowledged that it has left the old program and has the new one; only then does the executor
submit to it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from io import FileIO

from msgspec import Struct, json

from conveyor import _core, descriptors
from conveyor.calls.unsendable import blame_tasks, blame_transports
from conveyor.codec.frames import Sealed
from conveyor.config import Config
from conveyor.driver.actors import ActorRecord, Liveness, Table
from conveyor.driver.network import Network
from conveyor.driver.supervisor import Supervisor
from conveyor.exceptions import (
    ActorDiedError,
    ConveyorError,
    GraphError,
    GraphTornDownError,
    SerializationError,
)
from conveyor.graph.edges import (
    Assignment,
    Layout,
    Tasks,
    Whereabouts,
    assign,
    lay_out,
    transports_of,
)
from conveyor.graph.executor import ChannelsSpec, GraphWorker
from conveyor.graph.telemetry import TIME_LIMIT, Question, RemoteStatus
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.refs.ref import Ref
from conveyor.refs.together import get_together
from conveyor.refs.watcher import Watcher
from conveyor.runtime import threads
from conveyor.runtime.cleanup import Cleanup
from conveyor.runtime.process import Process, RingEnd
from conveyor.runtime.uninterrupted import uninterrupted
from conveyor.runtime.waiting import TimeLimit
from conveyor.worker.messages import Unload


class Deployment:
    """A graph's deployment: its channels and programs, from the beginning to the end.

    ``executor`` is the ring end of the process that executes the graph. Of the plan only the actors, the
    edges and the programs are read; ``labels`` are the names of its tasks.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        table: Table,
        network: Network,
        cleanup: Cleanup,
        number: int,
        config: Config,
        plan: Plan,
        tasks: Sequence[Tasks],
        labels: Mapping[int, str],
        executor: RingEnd,
    ) -> None:
        self.number = number
        self.labels = labels
        self.name = config.name or f"graph {number}"
        self.executor = executor
        self._supervisor = supervisor
        self._table = table
        self._network = network
        self._cleanup = cleanup
        self._plan = plan
        self._transports = transports_of(plan)
        self._tasks = tasks
        self._config = config
        self._lock = threading.Lock()
        self._over = False
        self.records: list[ActorRecord] = [supervisor.current(info.key) for info in plan.actors]
        self._ring_ends: dict[int, RingEnd] = {}
        #: The segment's number on other nodes; 0: it is on none.
        self.shared = 0

    def begin(self) -> None:
        """Deploy the graph the first time. A caller that does not come to the end of this calls
        :meth:`unload`."""
        for record in self.records:
            record.check_alive()
        for record in self.records:
            self._table.retain_for(record.id, self.number)  # a graph keeps its actors
        self.layout, self.shared = self._deploy(self.records, self._ring_ends, 0)

    @property
    def bits(self) -> tuple[int, ...]:
        """Doorbell bit of each actor's program."""
        return tuple(self._ring_ends[actor].bit for actor in range(len(self.records)))

    def _deploy(
        self, records: list[ActorRecord], ring_ends: dict[int, RingEnd], first: int
    ) -> tuple[Layout, int]:
        """Make new channels, which every actor has acknowledged; return them and the number of their segment
        on other nodes. ``ring_ends`` are noted as they are taken. Leaves nothing if it fails."""
        ring_ends[EXECUTOR] = self.executor
        shared = 0
        try:
            for actor, record in enumerate(records):
                ring_ends[actor] = RingEnd(record.slot, record.incarnation, record.bits.take())
            slot_bytes, fail_fast = self._config.slot_bytes, self._config.fail_fast
            where = self._network.whereabouts([ring_ends[actor] for actor in range(len(records))])
            self._check_wires(records, where)
            layout = lay_out(
                self._plan,
                ring_ends,
                len(self.labels),
                slot_bytes,
                fail_fast,
                self._transports,
                where,
            )
            shared = self._network.spread(layout.blueprint, layout.segment)
            self._load(records, ring_ends, layout, first, shared)
        except BaseException as error:
            uninterrupted(partial(self._leave, records, ring_ends))
            uninterrupted(partial(self._network.forget, shared))
            if isinstance(error, ConveyorError):
                for record in records:
                    record.check_alive()  # the first cause: others fail as they cannot meet the dead
            raise
        return layout, shared

    def _check_wires(self, records: list[ActorRecord], where: Whereabouts) -> None:
        """Raise ``GraphError`` if an out-of-band part would go between nodes by a transport that cannot."""
        for edge in self._plan.edges:
            if not edge.out_of_band or not (hosts := where.of(edge).hosts):
                continue
            if self._transports[edge.route].capabilities.between_hosts:
                continue
            ends = [records[actor].id.name for actor in (edge.writer, *edge.readers)]
            other = next(
                end for end, host in zip(ends, hosts, strict=True) if host.number != hosts[0].number
            )
            raise GraphError(
                f"{edge.source} goes by the transport {edge.route!r} from {ends[0]} to {other}, which are "
                f"on different hosts, and that transport does not say that it reaches from host to host "
                f"(Capabilities.between_hosts): name one that does, as 'gloo', 'nixl' and 'nccl' do, have "
                f"the tensors in the frames with 'shm', or place both on one node"
            )

    def _load(
        self,
        records: list[ActorRecord],
        ring_ends: dict[int, RingEnd],
        layout: Layout,
        first: int,
        shared: int,
    ) -> None:
        assignments = assign(
            self._plan,
            self._config,
            self.number,
            self.name,
            ring_ends,
            layout,
            self._tasks,
            first,
        )
        acks = [
            self._tell(record, assignment, layout.segment.fd, shared)
            for record, assignment in zip(records, assignments, strict=True)
        ]
        try:
            # A death, even of an actor that has answered, ends the wait for one that is long in a method.
            lives = [Liveness(record) for record in records]
            get_together([*acks, *lives], lambda: [ack.get() for ack in acks])
        except Exception:
            # Some actors may not have been introduced to their peers: that is repeated next time.
            for record in records:
                record.known_peers.clear()
            raise
        # An actor that has acknowledged may have died since.
        for record in records:
            record.check_alive()

    def _tell(self, record: ActorRecord, assignment: Assignment, fd: int, shared: int) -> Ref:
        try:
            return self._network.load(record, assignment, fd, shared)
        except SerializationError as error:
            raise self._blamed(error, record.id.name, assignment) from error.__cause__

    def _blamed(
        self, error: SerializationError, actor: str, assignment: Assignment
    ) -> SerializationError:
        """Return ``error``, which sending the part of ``actor`` has raised, with the transport or task to
        blame."""
        transports = [end.transport for end in assignment.endpoints]
        blamed = blame_transports(error, actor, transports)
        tasks = assignment.tasks
        if blamed is not error or isinstance(tasks, Sealed):
            return blamed
        return blame_tasks(error, self.name, tasks.values())

    def _leave(
        self, records: list[ActorRecord], ring_ends: dict[int, RingEnd]
    ) -> list[tuple[ActorRecord, Ref]]:
        """Have every living actor leave the graph, and give back the bits, which empties ``ring_ends``.
        Return the acknowledgements."""
        acks = []
        for actor in list(ring_ends):
            if actor == EXECUTOR:
                continue
            ack = self._unload(records[actor], ring_ends, actor)
            if ack is not None:
                acks.append((records[actor], ack))
        return acks

    def _unload(self, record: ActorRecord, ring_ends: dict[int, RingEnd], actor: int) -> Ref | None:
        """Have an actor leave the graph, and give its bit back. A caller that is interrupted here calls this
        again: leaving twice does no harm, and the bit is given back by the call that takes the end out. If
        memory is lacking for the order, it is sent with the driver's next cleanup: nobody else could send it
        later."""
        ack = None
        try:
            if record.alive:
                ack = record.order(Unload(self.number), f"the teardown of {self.name}")
        except ActorDiedError:  # just now
            pass
        except Exception as error:
            end = ring_ends.pop(actor, None)
            if end is not None:
                left = {actor: end}
                self._cleanup.again(lambda: self._unload(record, left, actor), error)
            return None
        end = ring_ends.pop(actor, None)
        if end is not None:
            record.bits.give_back(end.bit)
        return ack

    def _release(self) -> None:
        for record in self.records:
            self._supervisor.release(record.id, self.number)

    def again(self, first: int, time_limit: TimeLimit) -> None:
        """Bring dead actors back, as long as ``time_limit`` lasts, and make new channels, whose first
        execution is number ``first``."""
        records = [self._supervisor.revive(info.key, time_limit) for info in self._plan.actors]
        survivors = [record for record in records if record in self.records]
        try:
            # Survivors leave the old program first; both orders go over the same ordered link.
            for record in survivors:
                record.order(Unload(self.number))  # and the old bit is given back below
            ring_ends: dict[int, RingEnd] = {}
            layout, shared = self._deploy(records, ring_ends, first)
        except ActorDiedError:
            if all(record.alive for record in survivors):
                raise
            # A survivor has died with the others, and that was not known yet.
            self.again(first, time_limit)
            return
        with self._lock:
            if not self._over:
                for actor, record in enumerate(self.records):
                    record.bits.give_back(self._ring_ends[actor].bit)
                self.records, self.layout, self._ring_ends = records, layout, ring_ends
                self.shared, shared = shared, self.shared
                self._network.forget(shared)
                return
        self._leave(records, ring_ends)
        self._network.forget(shared)
        raise GraphTornDownError(f"{self.name} has been torn down")

    def channels(self) -> ChannelsSpec:
        """Return the description of the channels that the executor gets."""
        hosts = {}
        if self.shared:
            ring_ends = {EXECUTOR: self.executor, **self._ring_ends}
            hosts = {actor: self._network.node_name(end.slot) for actor, end in ring_ends.items()}
        return ChannelsSpec.of(self.number, self.records, self.layout, self.bits, hosts)

    def remote_status(self, question: Question, time_limit: float) -> RemoteStatus:
        """Return the status of the graph's actors on other nodes than the executor's, as these nodes report
        it."""
        if not self.shared:
            return RemoteStatus(why="the graph is on one host")
        return self._network.look_at_remote(
            question, time_limit, self.shared, self.layout, self.records, self.executor
        )

    def comes_back(self) -> bool:
        """Whether the driver restarts every dead actor of the graph by itself, or has done so."""
        return all(
            record.alive
            or (record.actor.max_restarts != 0 and (record.restarting or record.may_restart()))
            for record in self.records
        )

    def unload(self) -> list[tuple[ActorRecord, Ref]]:
        """Give back everything that the graph has, however far its deployment has come. Return the
        acknowledgements that are due."""
        with self._lock:
            self._over = True
        acks = self._leave(self.records, self._ring_ends)
        self.shared, shared = 0, self.shared
        self._network.forget(shared)
        self._release()
        return acks


#: Name of the file among the driver's descriptors.
FILE = "conveyor-graphs"
#: A file with more bytes than this is written anew once it is twice as large as the deployed graphs need.
_SMALL = 1 << 16


class DeployedGraph(Struct, frozen=True):
    """A graph of the session. tasks: their names, by number; ``None``: the graph has been taken down."""

    number: int
    name: str = ""
    tasks: dict[int, str] | None = None


class GraphList:
    """Writer of the file that lists the deployed graphs: one line of JSON for each change."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lines: dict[int, bytes] = {}
        self._file: FileIO | None = (
            None  # an object: what a signal handler breaks off leaves no descriptor
        )
        self._size = 0

    def note(self, number: int, name: str, tasks: Mapping[int, str]) -> None:
        """Add a graph that has been deployed. Raises ``OSError`` if there is no memory or descriptor for the
        file."""
        line = json.encode(DeployedGraph(number, name, dict(tasks))) + b"\n"
        with self._lock:
            self._lines[number] = line
            self._add(line)

    def forget(self, number: int) -> None:
        """Remove a graph that has been taken down. May be called more than once."""
        with self._lock:
            if self._lines.pop(number, None) is None:
                return
            if not self._lines:
                self._replace(None)  # a session has no descriptor more for graphs that it had
                return
            try:
                self._add(json.encode(DeployedGraph(number)) + b"\n")
            except (
                OSError
            ):  # a teardown goes on: tasks have numbers for names until a graph is deployed
                self._replace(None)

    def close(self) -> None:
        """Close the file: the session is over."""
        with self._lock:
            self._lines.clear()
            self._replace(None)

    def _add(self, line: bytes) -> None:
        needed = sum(map(len, self._lines.values()))
        if self._file is None or self._size > max(_SMALL, 2 * needed):
            # A reader finds the one file or the other.
            file = FileIO(FILE, "w", opener=_memory_file)
            line = b"".join(self._lines.values())
            _write(file, line)
            self._replace(file)
            self._size = len(line)
            return
        try:
            _write(self._file, line)
        except BaseException:
            self._replace(None)  # what comes next would be taken for the rest of this line
            raise
        self._size += len(line)

    def _replace(self, file: FileIO | None) -> None:
        former, self._file = self._file, file
        if former is not None:
            former.close()


def _write(file: FileIO, data: bytes) -> None:
    """Write all of ``data``. The kernel may take a part, and report only the next time why it takes no
    more."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _memory_file(name: str, _flags: int) -> int:
    return descriptors.memory_file(name)


def read_graph_list(lines: Iterable[bytes]) -> dict[int, DeployedGraph]:
    """Return the deployed graphs, by number, given the lines of the file."""
    graphs: dict[int, DeployedGraph] = {}
    for line in lines:
        if not line.endswith(b"\n"):
            break  # it is being written
        graph = json.decode(line, type=DeployedGraph)
        if graph.tasks is None:
            graphs.pop(graph.number, None)
        else:
            graphs[graph.number] = graph
    return graphs


class GraphExits:
    """Acknowledgements of actors that leave a graph, for the actors that take graphs down. An actor that
    waits for these has to know for whom it waits, so that it notices a deadlock."""

    def __init__(self, process_table: _core.ProcessTable, watcher: Watcher) -> None:
        self._process_table = process_table
        self._watcher = watcher
        self._awaited: dict[tuple[ActorRecord, int], list[tuple[GraphWorker, Ref]]] = {}

    def expect(self, caller: ActorRecord, number: int, acks: list[tuple[GraphWorker, Ref]]) -> None:
        """Watch the acknowledgements of graph ``number``, which ``caller`` takes down. ``caller`` is rung for
        each."""
        self._awaited[caller, number] = acks
        process_table, slot = self._process_table, caller.slot
        for _, ack in acks:
            self._watcher.watch(ack, lambda: process_table.notify(slot, _core.ATTENTION_BIT))

    def still_deployed(self, caller: ActorRecord, number: int) -> list[int]:
        """Return the slots of the actors that have not left yet. Raises the error that a living actor has met
        in leaving."""
        acks = self._awaited[caller, number]
        still_deployed = [worker.slot for worker, ack in acks if not ack.done()]
        if not still_deployed:
            del self._awaited[caller, number]
            for worker, ack in acks:
                try:
                    ack.get()
                except ConveyorError:
                    if worker.alive:
                        raise
        return still_deployed

    def forget(self, caller: ActorRecord) -> None:
        """Forget all acknowledgements for ``caller``, whose process is gone."""
        for key in [key for key in list(self._awaited) if key[0] is caller]:
            self._awaited.pop(key, None)


class GraphDeployer:
    """Deploys graphs and takes them down. Each graph has a number in the session."""

    def __init__(
        self,
        process: Process,
        table: Table,
        supervisor: Supervisor,
        network: Network,
        cleanup: Cleanup,
    ) -> None:
        self._process = process
        self._table = table
        self._supervisor = supervisor
        self._network = network
        self._cleanup = cleanup
        self._numbers = itertools.count(1)
        self._deployments: dict[int, Deployment] = {}
        self._graph_list = GraphList()

    def __len__(self) -> int:
        return len(self._deployments)

    def deploy(
        self,
        executor: RingEnd,
        config: Config,
        plan: Plan,
        tasks: Sequence[Tasks],
        labels: Mapping[int, str],
        begun: Callable[[int], object] | None = None,
    ) -> Deployment:
        """Deploy a graph that the process at ``executor`` will execute. ``begun(number)`` is called first,
        for a caller that may be interrupted before it has the result."""
        self._table.check_open()
        self._cleanup.do()
        number = next(self._numbers)
        if begun is not None:
            begun(number)
        deployment = Deployment(
            self._supervisor,
            self._table,
            self._network,
            self._cleanup,
            number,
            config,
            plan,
            tasks,
            labels,
            executor,
        )
        try:
            deployment.begin()
            self._deployments[number] = deployment
            self._graph_list.note(number, deployment.name, labels)
        except BaseException:
            self._deployments.pop(number, None)
            self._graph_list.forget(number)
            uninterrupted(deployment.unload)
            raise
        return deployment

    def redeploy(self, number: int, first: int, time_limit: TimeLimit) -> Deployment:
        """Bring dead actors of graph ``number`` back, as long as ``time_limit`` lasts, and deploy the graph
        anew, for executions from ``first`` on."""
        deployment = self._deployments.get(number)
        if deployment is None:
            raise GraphTornDownError(f"graph {number} has been torn down")
        deployment.again(first, time_limit)
        return deployment

    def comes_back(self, number: int) -> bool:
        """Whether the dead actors of graph ``number`` are started again without being asked."""
        deployment = self._deployments.get(number)
        return deployment is not None and deployment.comes_back()

    def end_unmade(self, number: int) -> None:
        """End the actors of graph ``number`` whose constructor has raised."""
        deployment = self._deployments.get(number)
        for record in () if deployment is None else deployment.records:
            self._supervisor.end_unmade(record)

    def remote_status(self, number: int, question: Question, time_limit: float) -> RemoteStatus:
        """Return the status of graph ``number``'s actors on other nodes than the executor's, as these nodes
        report it."""
        deployment = self._deployments.get(number)
        if deployment is None:
            return RemoteStatus(why="the graph has been torn down")
        return deployment.remote_status(
            question, 0 if self._table.on_engine_thread() else time_limit
        )

    def remote_later(self, number: int, then: Callable[[RemoteStatus | Exception], object]) -> None:
        """Call ``then`` with the result of :meth:`remote_status`, or with the error, on a thread of its
        own."""
        threads.start(self._look_at_remote, "remote-status", number, then)

    def _look_at_remote(
        self, number: int, then: Callable[[RemoteStatus | Exception], object]
    ) -> None:
        try:
            found = self.remote_status(number, Question(), TIME_LIMIT)
        except Exception as error:
            then(error)
        else:
            then(found)

    def undeploy(self, number: int) -> list[tuple[GraphWorker, Ref]]:
        """Take graph ``number`` down; return the acknowledgements that are still to come."""
        self._process.limit_spin(number, None)
        deployment = self._deployments.get(number)
        if deployment is None:
            return []
        try:
            acks = deployment.unload()
        except BaseException:
            uninterrupted(deployment.unload)  # what is left of it
            raise
        self._graph_list.forget(number)
        self._deployments.pop(number, None)  # last: whoever is interrupted before does it again
        return [*acks]

    def drop(self, number: int) -> None:
        """Have graph ``number`` taken down soon. Takes no lock."""
        self._cleanup.soon(lambda: self.undeploy(number))

    def executor_ended(self, record: ActorRecord) -> None:
        """Drop the graphs that a process has executed, which has ended."""
        for number, deployment in list(self._deployments.items()):
            if deployment.executor.slot == record.slot:
                self.drop(number)

    def label(self, graph: int, node: int) -> str | None:
        """Return the name of a graph's task, also while the graph is being deployed."""
        deployment = self._deployments.get(graph)
        return None if deployment is None else deployment.labels.get(node)

    def clear(self) -> None:
        """Forget all graphs: the session is over."""
        self._deployments.clear()
        self._graph_list.close()
