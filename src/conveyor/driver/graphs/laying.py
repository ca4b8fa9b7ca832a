"""Deployment of a graph: its rings are laid out in one segment, and every actor gets its part. The driver
does it, for itself or for an actor that executes the graph, the first time and again after a death.

A restart takes a fresh segment: no frame of the old channels can ever be seen in it. Its epoch begins when
every actor has acknowledged that it has left the old program and has the new one; only then does the executor
submit to it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from conveyor.codec.frames import Sealed
from conveyor.config import Config
from conveyor.driver.network.network import Network
from conveyor.driver.processes.record import ActorRecord, Life
from conveyor.driver.processes.supervisor import Supervisor
from conveyor.driver.processes.table import Table
from conveyor.exceptions import (
    ActorDiedError,
    ConveyorError,
    GraphError,
    GraphTornDownError,
    SerializationError,
)
from conveyor.graph.edges.beside import Whereabouts, transports_of
from conveyor.graph.edges.layout import Assignment, Layout, Tasks, assign, lay_out
from conveyor.graph.executor import LaidChannels
from conveyor.graph.submission.unsendable import blame_tasks, blame_transports
from conveyor.graph.telemetry.afar import Afar, Question
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.refs.together import get_together
from conveyor.runtime.chores import Chores
from conveyor.runtime.process import Place
from conveyor.runtime.uninterrupted import uninterrupted
from conveyor.runtime.waiting.patience import Patience
from conveyor.worker.orders import Unload

if TYPE_CHECKING:
    from conveyor.refs.ref import Ref


class Laying:
    """A graph's deployment: its channels and programs, from the beginning to the end.

    ``executor`` is the place of the process that executes the graph. Of the plan only the actors, the edges
    and the programs are read; ``labels`` are the names of its tasks.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        table: Table,
        network: Network,
        chores: Chores,
        number: int,
        config: Config,
        plan: Plan,
        tasks: Sequence[Tasks],
        labels: Mapping[int, str],
        executor: Place,
    ) -> None:
        self.number = number
        self.labels = labels
        self.name = config.name or f"graph {number}"
        self.executor = executor
        self._supervisor = supervisor
        self._table = table
        self._network = network
        self._chores = chores
        self._plan = plan
        self._transports = transports_of(plan)
        self._tasks = tasks
        self._config = config
        self._lock = threading.Lock()
        self._over = False
        self.records: list[ActorRecord] = [supervisor.current(info.key) for info in plan.actors]
        self._places: dict[int, Place] = {}
        #: The segment's number on other hosts; 0: it is on none.
        self.shared = 0

    def begin(self) -> None:
        """Deploy the graph the first time. A caller that does not come to the end of this calls
        :meth:`unload`."""
        for record in self.records:
            record.check_alive()
        for record in self.records:
            self._table.retain_for(record.id, self.number)  # a graph keeps its actors
        self.layout, self.shared = self._lay(self.records, self._places, 0)

    @property
    def bits(self) -> tuple[int, ...]:
        """Doorbell bit of each actor's program."""
        return tuple(self._places[actor].bit for actor in range(len(self.records)))

    def _lay(
        self, records: list[ActorRecord], places: dict[int, Place], first: int
    ) -> tuple[Layout, int]:
        """Make new channels, which every actor has acknowledged; return them and the number of their segment
        on other nodes. ``places`` are noted as they are taken. Leaves nothing if it fails."""
        places[EXECUTOR] = self.executor
        shared = 0
        try:
            for actor, record in enumerate(records):
                places[actor] = Place(record.slot, record.incarnation, record.bits.take())
            slot_bytes, fail_fast = self._config.slot_bytes, self._config.fail_fast
            where = self._network.whereabouts([places[actor] for actor in range(len(records))])
            self._check_wires(records, where)
            layout = lay_out(
                self._plan,
                places,
                len(self.labels),
                slot_bytes,
                fail_fast,
                self._transports,
                where,
            )
            shared = self._network.spread(layout.blueprint, layout.segment)
            self._load(records, places, layout, first, shared)
        except BaseException as error:
            uninterrupted(partial(self._leave, records, places))
            uninterrupted(partial(self._network.forget, shared))
            if isinstance(error, ConveyorError):
                for record in records:
                    record.check_alive()  # the first cause: others fail as they cannot meet the dead
            raise
        return layout, shared

    def _check_wires(self, records: list[ActorRecord], where: Whereabouts) -> None:
        """Raise ``GraphError`` if an out-of-band part would go between nodes by a transport that cannot."""
        for edge in self._plan.edges:
            if not edge.beside or not (hosts := where.of(edge).hosts):
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
        places: dict[int, Place],
        layout: Layout,
        first: int,
        shared: int,
    ) -> None:
        assignments = assign(
            self._plan,
            self._config,
            self.number,
            self.name,
            places,
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
            lives = [Life(record) for record in records]
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
        transports = [end.transport for end in assignment.conduits]
        blamed = blame_transports(error, actor, transports)
        tasks = assignment.tasks
        if blamed is not error or isinstance(tasks, Sealed):
            return blamed
        return blame_tasks(error, self.name, tasks.values())

    def _leave(
        self, records: list[ActorRecord], places: dict[int, Place]
    ) -> list[tuple[ActorRecord, Ref]]:
        """Have every living actor leave the graph, and give back the bits, which empties ``places``. Return
        the acknowledgements."""
        acks = []
        for actor in list(places):
            if actor == EXECUTOR:
                continue
            ack = self._unload(records[actor], places, actor)
            if ack is not None:
                acks.append((records[actor], ack))
        return acks

    def _unload(self, record: ActorRecord, places: dict[int, Place], actor: int) -> Ref | None:
        """Have an actor leave the graph, and give its bit back. A caller that is interrupted here calls this
        again: leaving twice does no harm, and the bit is given back by the call that takes the place out. If
        memory is lacking for the order, it is sent with the driver's next cleanup: nobody else could send it
        later."""
        ack = None
        try:
            if record.alive:
                ack = record.order(Unload(self.number), f"the teardown of {self.name}")
        except ActorDiedError:  # just now
            pass
        except Exception as error:
            place = places.pop(actor, None)
            if place is not None:
                left = {actor: place}
                self._chores.again(lambda: self._unload(record, left, actor), error)
            return None
        place = places.pop(actor, None)
        if place is not None:
            record.bits.give_back(place.bit)
        return ack

    def _release(self) -> None:
        for record in self.records:
            self._supervisor.release(record.id, self.number)

    def again(self, first: int, patience: Patience) -> None:
        """Bring dead actors back, as long as ``patience`` lasts, and make new channels, whose first execution
        is number ``first``."""
        records = [self._supervisor.revive(info.key, patience) for info in self._plan.actors]
        survivors = [record for record in records if record in self.records]
        try:
            # Survivors leave the old program first; both orders go over the same ordered link.
            for record in survivors:
                record.order(Unload(self.number))  # and the old bit is given back below
            places: dict[int, Place] = {}
            layout, shared = self._lay(records, places, first)
        except ActorDiedError:
            if all(record.alive for record in survivors):
                raise
            # A survivor has died with the others, and that was not known yet.
            self.again(first, patience)
            return
        with self._lock:
            if not self._over:
                for actor, record in enumerate(self.records):
                    record.bits.give_back(self._places[actor].bit)
                self.records, self.layout, self._places = records, layout, places
                self.shared, shared = shared, self.shared
                self._network.forget(shared)
                return
        self._leave(records, places)
        self._network.forget(shared)
        raise GraphTornDownError(f"{self.name} has been torn down")

    def channels(self) -> LaidChannels:
        """Return the description of the channels that the executor gets."""
        hosts = {}
        if self.shared:
            places = {EXECUTOR: self.executor, **self._places}
            hosts = {actor: self._network.host_name(place.slot) for actor, place in places.items()}
        return LaidChannels.of(self.number, self.records, self.layout, self.bits, hosts)

    def afar(self, question: Question, patience: float) -> Afar:
        """Return the status of the graph's actors on other nodes than the executor's, as these nodes report
        it."""
        if not self.shared:
            return Afar(why="the graph is on one host")
        return self._network.look_afar(
            question, patience, self.shared, self.layout, self.records, self.executor
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
        acks = self._leave(self.records, self._places)
        self.shared, shared = 0, self.shared
        self._network.forget(shared)
        self._release()
        return acks
