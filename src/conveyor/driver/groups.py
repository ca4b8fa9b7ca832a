"""The collective groups of a session: the driver creates them, and introduces their processes to each
other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from conveyor import _core, descriptors
from conveyor.driver.actors import DRIVER_SLOT, ActorRecord, Table
from conveyor.driver.network import Network
from conveyor.driver.process_engine import RemoteDescriptors
from conveyor.driver.remote_processes import HERE, RemoteNodes
from conveyor.driver.supervisor import Supervisor
from conveyor.exceptions import ConveyorError, RuntimeStateError, SystemLimitError
from conveyor.runtime import threads
from conveyor.runtime.blueprint import nodes_among
from conveyor.runtime.broker import Joined, Membership, doing, enter, group_blueprint
from conveyor.runtime.process import Process, close_all
from conveyor.runtime.protocol import ActorId
from conveyor.system_limits import explained

#: The driver among actors, in words.
_DRIVER = ActorId(-1, "the driver")


class _Group(Struct, frozen=True):
    #: The segment, whose descriptor is open as long as the group; ``None``: no rank is on this node.
    segment: _core.Segment | None
    #: The segment's number on other nodes; 0: all ranks are on this one.
    shared: int
    #: The node of each rank, counted from 0 on.
    nodes: tuple[int, ...]
    records: tuple[ActorRecord, ...]
    #: The actors of all ranks, the driver included.
    actors: tuple[ActorId, ...]
    members: tuple[tuple[int, int], ...]
    #: The driver's rank.
    driver: int | None
    #: The process that alone can destroy it, if that is an actor's.
    creator: ActorRecord | None

    @property
    def forsaken(self) -> bool:
        """Whether no process is left that would use the group, or end it."""
        if self.creator is not None and not self.creator.alive:
            return True
        return self.driver is None and not any(record.alive for record in self.records)


class DriverCollectives:
    """The collective groups of a session. See ``runtime.broker.Collectives``. Each step is one operation of a
    dictionary, so there is no lock."""

    def __init__(
        self,
        table: Table,
        supervisor: Supervisor,
        network: Network,
        remote_nodes: RemoteNodes,
        process: Process,
        own_view: Callable[[], _core.ArenaView],
    ) -> None:
        """``process``: the driver's. ``own_view``: of the driver's arena."""
        self.made: dict[str, Any] = {}
        self.entered: dict[str, Any] = {}
        self._process = process
        self._own_view = own_view
        self._table = table
        self._supervisor = supervisor
        self._network = network
        self._remote_nodes = remote_nodes
        self._numbers = itertools.count(1)
        self._groups: dict[int, _Group] = {}
        self._joined: list[Joined] = []
        #: Frees stuck actors while the session ends.
        self._looking: threading.Thread | None = None
        self._over = False
        self.until: Callable[[], int] | None = None

    def open(
        self,
        actors: Sequence[ActorId],
        driver: int | None = None,
        creator: ActorRecord | None = None,
    ) -> int:
        """Create a group; see ``Collectives``. ``creator``: the process that has asked for it, if that
        is an actor's."""
        self._table.check_open()
        records = tuple([self._supervisor.current(actor) for actor in actors])
        for record in records:
            record.check_alive()
        names, members = [record.id for record in records], [record.reader for record in records]
        if driver is not None:
            names.insert(driver, _DRIVER)
            members.insert(
                driver, (DRIVER_SLOT, self._table.process_table.incarnation(DRIVER_SLOT))
            )
        among = nodes_among(members, self._remote_nodes.node_of)
        nodes = tuple([among.index(self._remote_nodes.node_of(slot)) for slot, _ in members])
        blueprint = group_blueprint(members, nodes)
        with explained(f"create a collective group of {len(members)} ranks"):
            segment = blueprint.make() if HERE in among else None
            try:
                shared = self._remote_nodes.spread(blueprint, segment)
            except ConveyorError:
                for record in records:
                    record.check_alive()  # a death is why a node could not, most often
                raise
        number = next(self._numbers)
        group = _Group(
            segment, shared, nodes, records, tuple(names), tuple(members), driver, creator
        )
        self._groups[number] = group
        # Checked again: the cleanup after a death, or the session's end, may have looked before.
        if group.forsaken or self._table.closed:
            self.close(number)
        return number

    def joined_by(
        self, record: ActorRecord, number: int
    ) -> tuple[Membership, list[int] | RemoteDescriptors]:
        """Return the membership of an actor's process that joins, and the descriptors of the segment and of
        the actors' processes, its own included. The caller closes them. A process of another node gets its
        own of these there."""
        group = self._existing(number)
        if record not in group.records:
            raise RuntimeStateError(
                f"{record.id.name} has another process than when the collective group was created: it was "
                "started again. Create another group"
            )
        rank = group.members.index(record.reader)
        membership = Membership(rank, group.actors, group.members, group.driver, group.nodes)
        if record.node is not None:
            for other in group.records:
                other.check_alive()
            return membership, RemoteDescriptors(
                group.shared, tuple([r.reader for r in group.records])
            )
        assert group.segment is not None, "a rank of it is here"
        fds = self._network.duplicates(group.records)
        try:
            if len(fds) < 2 * len(group.records):
                raise next(other for other in group.records if not other.alive).death()
            fds.insert(0, descriptors.duplicate(group.segment.fd))
            self._existing(number)  # else it has been destroyed meanwhile
        except BaseException:
            close_all(fds)
            raise
        return membership, fds

    def _existing(self, number: int) -> _Group:
        group = self._groups.get(number)
        if group is None:
            raise RuntimeStateError("this collective group has been destroyed")
        return group

    def join(self, number: int) -> Joined:
        group = self._existing(number)
        assert group.driver is not None, "the driver is in the group"
        assert group.segment is not None, "one of its ranks is here"
        arenas = []
        for actor, (slot, incarnation) in zip(group.actors, group.members, strict=True):
            if slot == DRIVER_SLOT:
                arenas.append(self._own_view())
            elif self._table.process_table.gone(slot, incarnation):
                raise self._table.death_of(actor, slot, incarnation)
            else:
                arenas.append(self._process.arena_of(slot, incarnation))
        membership = Membership(
            group.driver, group.actors, group.members, group.driver, group.nodes
        )
        joined = enter(self._process, group.segment, membership, arenas)
        self._joined.append(joined)
        return joined

    def leave(self, joined: Joined) -> None:
        if joined in self._joined:
            self._joined.remove(joined)
        joined.leave()

    def close(self, number: int, session: bool = False) -> None:
        """Destroy a group. ``session``: it ends with the session."""
        group = self._groups.pop(number, None)
        if group is None:
            return
        if group.segment is not None:
            _core.CollectiveGroup.destroy(
                group.segment, self._table.process_table, group.members, session
            )
        self._remote_nodes.break_group(group.shared, group.members, session)
        self._remote_nodes.forget(group.shared)

    def actor_ended(self, _record: ActorRecord) -> None:
        """Close the groups that no process is left for, after the death of an actor's process."""
        for number, group in list(self._groups.items()):
            if group.forsaken:
                self.close(number)

    def begin_end(self) -> None:
        """Begin the end of the session. Running methods may still come to operations, and so finish those
        that others wait in. A process that waits for a rank that cannot come any more is told."""
        for number, group in list(self._groups.items()):
            if group.driver is not None:
                self.close(number, session=True)
            elif group.segment is not None and not group.shared:
                _core.CollectiveGroup.tell_of_waits(group.segment, DRIVER_SLOT)
        self._free_the_stuck()
        if self._groups and self._looking is None:
            with suppress(SystemLimitError):  # then they are told at half of the grace period
                self._looking = threads.serve(self._look, "circles")

    def _look(self) -> None:
        """Free stuck actors until all have ended: whenever one has gone to sleep in an operation, or has
        died, which rings."""
        inbox = self._process.inbox
        while True:
            seen = inbox.count
            if self._over or not self._groups:
                return
            self._free_the_stuck()
            inbox.rest(seen)

    def _free_the_stuck(self) -> None:
        """Close the groups in which actors wait for each other in a cycle, and those of actors that wait for
        these."""
        before = self._waits()
        now = self._waits()
        # A process at the same barrier as before has waited all the time, so all of these wait at once.
        stuck = {process: wait for process, wait in now.items() if before.get(process) == wait}
        while free := [p for p, wait in stuck.items() if stuck.keys().isdisjoint(wait[2])]:
            for process in free:
                del stuck[process]
        for number, _, _ in stuck.values():
            self.close(number, session=True)

    def _waits(self) -> dict[tuple[int, int], tuple[int, int, tuple[tuple[int, int], ...]]]:
        """Return, for each process that waits in an operation, the numbers of the group and the barrier, and
        the processes waited for. Processes that run several calls at a time are left out: they may come to
        another operation meanwhile."""
        return {
            record.reader: (number, barrier, tuple([group.members[rank] for rank in absent]))
            for number, group in list(self._groups.items())
            if group.driver is None and group.segment is not None and not group.shared
            for record, (barrier, absent) in zip(
                group.records, _core.CollectiveGroup.waits(group.segment), strict=True
            )
            if absent and record.alive and record.actor.one_at_a_time
        }

    def end_waits(self) -> None:
        """Close all groups: the actors need the rest of the time for their own end."""
        for number in list(self._groups):
            self.close(number, session=True)

    def end(self) -> None:
        """Leave and forget all groups: the session is over."""
        self.made.clear()
        self.entered.clear()
        self.end_waits()
        self._over = True
        if self._looking is not None:
            self._process.notify()
            self._looking.join()
        for joined in list(self._joined):
            self.leave(joined)

    def doing(self, joined: Joined, ranks: Sequence[int]) -> list[str]:
        return doing(self._process, joined.membership, ranks, self._table.label)

    def death(self, joined: Joined, rank: int) -> ConveyorError:
        actor, (slot, incarnation) = joined.membership.actors[rank], joined.membership.members[rank]
        return self._table.death_of(actor, slot, incarnation)
