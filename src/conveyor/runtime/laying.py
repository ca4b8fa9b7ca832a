"""Laying a graph: its rings in one segment, and every actor told its part. The driver does it, for
itself or for an actor that executes the graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from conveyor.channel.sealed import Sealed
from conveyor.exceptions import ActorDiedError, ConveyorError
from conveyor.plan.model import DRIVER, Plan, Task
from conveyor.runtime.layout import Assignment, Place, lay_out

if TYPE_CHECKING:
    from conveyor.runtime.driver import Driver
    from conveyor.runtime.refs import Ref
    from conveyor.runtime.supervisor import ActorRecord

Tasks = dict[int, Task] | Sealed
"""The tasks of one actor, by their number; sealed where the driver may not know their constants."""


def tasks_by_actor(plan: Plan) -> list[dict[int, Task]]:
    """The tasks of each actor of ``plan``."""
    own: list[dict[int, Task]] = [{} for _ in plan.actors]
    for task in plan.tasks:
        own[task.actor][task.id] = task
    return own


class Laying:
    """One graph's channels and programs, from the beginning to the end.

    ``executor`` is the place of whoever executes the graph. Of the plan only the actors, the edges
    and the programs are read.
    """

    def __init__(
        self,
        driver: Driver,
        number: int,
        name: str,
        plan: Plan,
        tasks: Sequence[Tasks],
        slot_bytes: int,
        executor: Place,
    ) -> None:
        self.number = number
        self.executor = executor
        self._driver = driver
        self.records: list[ActorRecord] = [driver.record(info.key) for info in plan.actors]
        for record in self.records:
            record.check_alive()
        self._places = {DRIVER: executor}
        try:
            for actor, record in enumerate(self.records):
                self._places[actor] = Place(record.slot, record.bits.take())
                record.handles += 1  # a graph keeps its actors
            self.layout = lay_out(plan, self._places, slot_bytes)
            self._load(name, plan, tasks)
        except BaseException as error:
            self.unload()
            if isinstance(error, ConveyorError):
                for record in self.records:
                    record.check_alive()  # the first cause: others fail as they cannot meet the dead
            raise

    def _load(self, name: str, plan: Plan, tasks: Sequence[Tasks]) -> None:
        sources = {edge.id: edge.source for edge in plan.edges}
        acks = []
        for program in plan.programs:
            actor = program.actor
            assignment = Assignment(
                self.number,
                name,
                plan.actors[actor].name,
                self._places[actor].bit,
                program,
                tasks[actor],
                self.layout.reads.get(actor, ()),
                self.layout.writes.get(actor, ()),
                self.layout.peers_of(actor, self._places),
                sources,
                self.layout.limits,
                self.layout.recorders[actor],
            )
            acks.append(self._driver.load(self.records[actor], assignment, self.layout.segment.fd))
        for ack in acks:
            ack.get()

    @property
    def bits(self) -> tuple[int, ...]:
        """What rings each actor's program."""
        return tuple(self._places[actor].bit for actor in range(len(self.records)))

    def unload(self) -> list[tuple[ActorRecord, Ref]]:
        """Give back what the graph has; the acknowledgements that are still to come."""
        placed = [
            (self.records[actor], at) for actor, at in self._places.items() if actor != DRIVER
        ]
        acks = []
        for record, place in placed:
            with suppress(ActorDiedError):  # just now
                if record.alive:
                    acks.append((record, record.control("unload", self.number)))
            record.bits.give_back(place.bit)
        for record, _ in placed:
            self._driver.released(record.id)
        return acks
